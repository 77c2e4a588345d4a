"""From a tiling to tasks: the pieces of the helpers, and what the owners keep."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit, jit_leaf
from torchtitan_cad.planning.model.tasks import DOC, KV_END, KV_START, Q_END, Q_START, SERVER, TASK_COLUMNS
from torchtitan_cad.planning.planners.local_search.board import copy_task
from torchtitan_cad.planning.planners.tiling.strips import BLOCK, COLUMN, COLUMN_END, HELPER, ROW, ROW_END


@jit_leaf
def _put(home: IntArray, q_start: int, q_end: int, kv_start: int, kv_end: int, task: IntArray) -> None:
    """Write a part of a home task."""
    copy_task(task, home)
    task[Q_START], task[Q_END], task[KV_START], task[KV_END] = q_start, q_end, kv_start, kv_end


@jit_leaf
def _add_cut(cuts: IntArray, num: int, cut: int) -> int:
    """Insert a cut into the ascending ones unless it is among them; returns how many they are now."""
    at = num
    while at > 0 and cuts[at - 1] >= cut:
        at -= 1
    if at < num and cuts[at] == cut:
        return num
    for i in range(num, at, -1):
        cuts[i] = cuts[i - 1]
    cuts[at] = cut
    return num + 1


@jit_leaf
def _by_key(blocks: IntArray, run: IntArray, used: IntArray, home: int, given: IntArray) -> int:
    """List in ``given`` those of the blocks ``used`` that are cut out of a home task, by first key; returns how
    many.
    """
    num = 0
    for i in range(len(used)):
        b, at = used[i], num
        if run[b] != home:
            continue
        while at > 0 and blocks[given[at - 1], KV_START] > blocks[b, KV_START]:
            given[at] = given[at - 1]
            at -= 1
        given[at] = b
        num += 1
    return num


@jit_leaf
def _keep(home: IntArray, blocks: IntArray, given: IntArray, cuts: IntArray, out: IntArray, count: int) -> int:
    """Append what is left of a home task between the cuts that the blocks ``given``, by first key, make; the new count.

    ``cuts`` is scratch for two entries more than twice the blocks.
    """
    num = _add_cut(cuts, _add_cut(cuts, 0, home[Q_START]), home[Q_END])
    for i in range(len(given)):
        num = _add_cut(cuts, _add_cut(cuts, num, blocks[given[i], Q_START]), blocks[given[i], Q_END])
    for c in range(num - 1):
        a, b, at = cuts[c], cuts[c + 1], 0
        for i in range(len(given)):
            g = given[i]
            if blocks[g, Q_START] <= a and b <= blocks[g, Q_END]:
                if at < blocks[g, KV_START]:
                    _put(home, a, b, at, blocks[g, KV_START], out[count])
                    count += 1
                at = blocks[g, KV_END]
        _put(home, a, b, at, b, out[count])
        count += 1
    return count


@jit
def _assemble(home: IntArray, blocks: IntArray, run: IntArray, pieces: IntArray, cell: int, out: IntArray) -> int:
    """Fill ``out`` [capacity, TASK_COLUMNS], see :func:`assemble`; returns how many tasks there are."""
    marks = np.zeros(len(blocks) + len(home), dtype=np.int64)
    in_use, cut = marks[: len(blocks)], marks[len(blocks) :]
    scratch = np.empty(4 * len(pieces) + 2, dtype=np.int64)  # no more blocks than pieces are in use
    num = 0
    for i in range(len(pieces)):
        in_use[pieces[i, BLOCK]] = 1
    for b in range(len(blocks)):
        if in_use[b]:
            scratch[num] = b
            cut[run[b]] = 1
            num += 1
    used, given, cuts = scratch[:num], scratch[num : 2 * num], scratch[2 * num :]
    count = 0
    for r in range(len(home)):
        if cut[r]:
            size = _by_key(blocks, run, used, r, given)
            count = _keep(home[r], blocks, given[:size], cuts, out, count)
    for r in range(len(home)):
        if not cut[r]:
            copy_task(out[count], home[r])
            count += 1
    for i in range(len(pieces)):
        block, task = blocks[pieces[i, BLOCK]], out[count]
        first = block[Q_START] // cell
        task[DOC] = home[run[pieces[i, BLOCK]], DOC]
        task[Q_START] = max((first + pieces[i, ROW]) * cell, block[Q_START])
        task[Q_END] = min((first + pieces[i, ROW_END]) * cell, block[Q_END])
        task[KV_START] = block[KV_START] + pieces[i, COLUMN] * cell
        task[KV_END] = block[KV_START] + pieces[i, COLUMN_END] * cell
        task[SERVER] = pieces[i, HELPER]
        count += 1
    return count


def assemble(home: IntArray, blocks: IntArray, run: IntArray, pieces: IntArray, cell: int) -> IntArray:
    """Return the tasks of a tiling, int64 [n, TASK_COLUMNS].

    Args:
        home: [R, TASK_COLUMNS] tasks of the plan without disaggregation.
        blocks: [B, BLOCK_COLUMNS] table of ``surplus.py``; run [B]: the home task that a block is cut out of.
        pieces: [n, 6] table of ``strips.py``.
    """
    out = np.empty((3 * len(home) + 8 * len(pieces) + 8, TASK_COLUMNS), dtype=np.int64)
    return out[: _assemble(home, blocks, run, pieces, cell, out)]
