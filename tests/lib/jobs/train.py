# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan_cad.train`` where ``cad.transport = "symm_mem"`` is for the CPU ranks of a node."""

from tests.lib.cpu_memory import install
from torchtitan_cad.train import start

if __name__ == "__main__":
    install()
    start()
