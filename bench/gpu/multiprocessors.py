# SPDX-License-Identifier: BSD-3-Clause
"""How many multiprocessors of a GPU a process gets."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import smid

PROGRAMS = 8192
"""Programs, many for every multiprocessor."""
ROUNDS = 2000
"""additions of a program, so that programs have to spread"""


@triton.jit
def _note_multiprocessor(ids, rounds):
    program = tl.program_id(0)
    total = program
    for _ in range(rounds):
        total = (total * 5 + 1) % 1021
    # The sum is never negative; the comparison keeps it from being dropped.
    tl.store(ids + program, tl.where(total < 0, -1, smid()))


def occupied() -> int:
    """Return the number of multiprocessors on which this process's programs run.

    Their ids do not tell the shares of processes apart: under the Multi-Process Service each share counts from 0.
    """
    ids = torch.full((PROGRAMS,), -1, dtype=torch.int32, device="cuda")
    _note_multiprocessor[(PROGRAMS,)](ids, ROUNDS)
    return len(ids.unique())
