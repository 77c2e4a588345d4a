# SPDX-License-Identifier: BSD-3-Clause
"""What runs under a sanitizer: two ranks in one process, at a size that a sanitizer can follow.

    python -m bench.gpu.sanitized cuda

ends with an error if they do not compute what undivided attention does. With a further argument ``planted`` it only
gathers a row that lies behind the last one.
"""

import sys

import torch

from bench.gpu.layer import checked_errors
from bench.gpu.loopback import Layer
from tests.lib.two_ranks import two_rank_plan
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.attend import RowSpace

PLANTED = "planted"
ROOM = 2**23
"""bytes of a receive buffer"""


def small_layer(device: torch.device) -> Layer:
    """A layer in which no kernel waits for a later one, as a sanitizer may run kernels one after the other."""
    if device.type == "cpu":
        return Layer(two_rank_plan(16, AttentionShape(2, 1, 8, 4)), device)
    plan = two_rank_plan(1024, AttentionShape(8, 2, 128, 2))
    return Layer(plan, device, kernel="varlen", room=ROOM, puts_off=True)


def read_behind_the_last_row(device: torch.device) -> None:
    """Gather the row after the last of 64."""
    local, received = (torch.zeros(32, 8, 128, device=device) for _ in range(2))
    RowSpace([local], [received]).take(torch.tensor([64], device=device))


if __name__ == "__main__":
    where = torch.device("cuda", 0) if sys.argv[1] == "cuda" else torch.device("cpu")
    if sys.argv[2:] == [PLANTED]:
        read_behind_the_last_row(where)
        sys.exit()
    errors = checked_errors(small_layer(where))
    print(
        "difference to undivided attention:",
        ", ".join(f"{name} {error:.2g}" for name, error in errors.items()),
    )
