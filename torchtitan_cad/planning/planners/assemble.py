"""From a tiling to tasks: the pieces of the helpers, and what the owners keep. Imports numpy and numba."""

from __future__ import annotations

import numpy as np

from ..intervals import IntArray
from ..jit import jit
from .blocks import K0, K1, Q0, Q1
from .strips import BLOCK, COLUMN, COLUMN_END, HELPER, ROW, ROW_END

# Columns of the tasks; documents and positions as in the blocks.
TASK_DOC, TASK_Q0, TASK_Q1, TASK_K0, TASK_K1, TASK_SERVER = range(6)


@jit
def _keep(home: IntArray, given: IntArray, out: IntArray, count: int) -> int:
    """Append what is left of a home task between the cuts that the blocks ``given`` [n, 8] make; the new count."""
    cuts = np.empty(2 * len(given) + 2, dtype=np.int64)
    cuts[0], cuts[1] = home[TASK_Q0], home[TASK_Q1]
    cuts[2::2], cuts[3::2] = given[:, Q0], given[:, Q1]
    cuts = np.unique(cuts)
    by_key = np.argsort(given[:, K0])
    for c in range(len(cuts) - 1):
        a, b, at = cuts[c], cuts[c + 1], 0
        for g in by_key:
            if given[g, Q0] <= a and b <= given[g, Q1]:
                if at < given[g, K0]:
                    out[count] = home
                    out[count, 1], out[count, 2], out[count, 3], out[count, 4] = a, b, at, given[g, K0]
                    count += 1
                at = given[g, K1]
        out[count] = home
        out[count, 1], out[count, 2], out[count, 3], out[count, 4] = a, b, at, b
        count += 1
    return count


@jit
def assemble(home: IntArray, blocks: IntArray, run: IntArray, pieces: IntArray, cell: int, out: IntArray) -> int:
    """Tasks of a tiling, into ``out`` [capacity, 6]; returns how many.

    Args:
        home: [R, 6] tasks of the plan without disaggregation.
        blocks: [B, 8] table of ``blocks.py``; run [B]: the home task that a block is cut out of.
        pieces: [n, 6] table of ``strips.py``.
    """
    used = np.unique(pieces[:, BLOCK])
    cut, count = np.zeros(len(home), dtype=np.bool_), 0
    for r in np.unique(run[used]):
        cut[r] = True
        count = _keep(home[r], blocks[used[run[used] == r]], out, count)
    for r in range(len(home)):
        if not cut[r]:
            out[count] = home[r]
            count += 1
    for i in range(len(pieces)):
        block, task = blocks[pieces[i, BLOCK]], out[count]
        first = block[Q0] // cell
        task[TASK_DOC] = home[run[pieces[i, BLOCK]], TASK_DOC]
        task[TASK_Q0] = max((first + pieces[i, ROW]) * cell, block[Q0])
        task[TASK_Q1] = min((first + pieces[i, ROW_END]) * cell, block[Q1])
        task[TASK_K0] = block[K0] + pieces[i, COLUMN] * cell
        task[TASK_K1] = block[K0] + pieces[i, COLUMN_END] * cell
        task[TASK_SERVER] = pieces[i, HELPER]
        count += 1
    return count
