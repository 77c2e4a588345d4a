# SPDX-License-Identifier: BSD-3-Clause
"""Which multiprocessors of a GPU a process gets."""

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


def occupied() -> list[int]:
    """Return the ids of the multiprocessors on which this process's programs run, in order."""
    ids = torch.full((PROGRAMS,), -1, dtype=torch.int32, device="cuda")
    _note_multiprocessor[(PROGRAMS,)](ids, ROUNDS)
    return ids.unique().tolist()
