# SPDX-License-Identifier: BSD-3-Clause
"""NVSHMEM on one CUDA device: two ranks that take each other for another node exchange rows at random.

NVSHMEM may end the process whose set-up fails, so the ranks are started by a process of its own.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from bench.gpu import mps
from bench.gpu.parts import Skip
from bench.gpu.process import _wait
from tests.gpu.test_transport_gpu import share_one_device
from tests.lib.device import ON_GPU
from tests.lib.exchanges import exchange_at_random
from tests.lib.processes import run_processes, values
from tests.lib.sets import needs_triton
from torchtitan_cad.runtime.triton.nvshmem_library import find_device_library

pytestmark = [*ON_GPU, needs_triton]

LIMIT_S = 75
"""Linking three kernels with NVSHMEM's library of 31 MB takes a third of it."""
EXCHANGES = 60
SHOWN = 1600
"""Characters of the output that a failure shows: its end."""
VARIABLES = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "NVSHMEM_SYMMETRIC_SIZE": "4G",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_DEBUG": "WARN",
}
START_RANKS = "from tests.gpu.test_nvshmem_gpu import main; main()"


class OwnMemory(NamedTuple):
    """A rendezvous after which no peer's memory can be addressed, as between nodes; keeps the real one."""

    buffer_ptrs: Sequence[int]
    handle: object


def exchange_with_a_far_peer(group: dist.ProcessGroup) -> str:
    """Rows that this rank has received, and the memory over which they came."""
    device = share_one_device()
    rank = group.rank()
    rendezvous = symm_mem.rendezvous

    def rendezvous_of_far_peers(
        tensor: Tensor, memory_group: dist.ProcessGroup
    ) -> OwnMemory:
        handle = rendezvous(tensor, memory_group)
        addresses = [
            address if peer == rank else 0
            for peer, address in enumerate(handle.buffer_ptrs)
        ]
        return OwnMemory(addresses, handle)

    symm_mem.rendezvous = rendezvous_of_far_peers
    received = exchange_at_random(
        group, "nvshmem", 2, EXCHANGES, 0.002, "cuda:0", hosts=[0, 1]
    )
    torch.cuda.synchronize(device)
    return f"{received} rows over {symm_mem.get_backend(device)}"


def main() -> None:
    """Prints what each rank has received; raises unless both have received rows."""
    results = values(run_processes(2, exchange_with_a_far_peer, timeout_s=LIMIT_S - 10))
    print(results)
    for result in results:
        assert isinstance(result, str), f"a rank ended with exit code {result}"
        received, transport = result.split(" rows over ")
        assert int(received) > EXCHANGES
        assert transport == "NVSHMEM"


def run_apart(
    command: Sequence[str],
    log: Path,
    limit_s: float,
    share: dict[str, str] | None = None,
) -> int | None:
    """Exit code of a command whose output goes to ``log``; None if it had to be ended, with all that it has started.

    ``share`` holds the variables of a client of the Multi-Process Service.
    """
    environment = {
        **os.environ,
        **VARIABLES,
        **(share or {}),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _wait(process, limit_s)


def test_two_ranks_on_one_device_exchange_rows_as_two_nodes_do(tmp_path):
    if not symm_mem.is_nvshmem_available():
        pytest.skip("this torch has no NVSHMEM")
    try:
        find_device_library(torch.cuda.get_device_capability())
    except RuntimeError as error:
        pytest.skip(str(error))
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        try:
            running = stack.enter_context(mps.service())
        except Skip as reason:
            pytest.skip(
                f"NVSHMEM makes teams of processes of one GPU under the Multi-Process Service only: {reason}"
            )
        code = run_apart(
            [sys.executable, "-u", "-c", START_RANKS], log, LIMIT_S, running.share(50)
        )
    ended = f"ended after {LIMIT_S} s" if code is None else f"exit code {code}"
    assert code == 0, (
        f"{ended}; its last output:\n{log.read_text(errors='replace')[-SHOWN:]}"
    )
