"""From a tiling to tasks: the pieces of the helpers, and what the owners keep."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_inner, jit_leaf
from torchtitan_cad.planning.planners.local_search.board import copy_task
from torchtitan_cad.planning.planners.tiling.strips import BLOCK, COLUMN, COLUMN_END, HELPER, ROW, ROW_END
from torchtitan_cad.planning.planners.tiling.surplus import K0, K1, Q0, Q1

# Columns of the tasks; documents and positions as in the blocks.
TASK_DOC, TASK_Q0, TASK_Q1, TASK_K0, TASK_K1, TASK_SERVER = range(6)


@jit_leaf
def _put(home: IntArray, q_start: int, q_end: int, kv_start: int, kv_end: int, task: IntArray) -> None:
    """Write a part of a home task."""
    copy_task(task, home)
    task[TASK_Q0], task[TASK_Q1], task[TASK_K0], task[TASK_K1] = q_start, q_end, kv_start, kv_end


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
    """The blocks among ``used`` that are cut out of a home task, by first key, into ``given``; returns how many."""
    num = 0
    for i in range(len(used)):
        b, at = used[i], num
        if run[b] != home:
            continue
        while at > 0 and blocks[given[at - 1], K0] > blocks[b, K0]:
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
    num = _add_cut(cuts, _add_cut(cuts, 0, home[TASK_Q0]), home[TASK_Q1])
    for i in range(len(given)):
        num = _add_cut(cuts, _add_cut(cuts, num, blocks[given[i], Q0]), blocks[given[i], Q1])
    for c in range(num - 1):
        a, b, at = cuts[c], cuts[c + 1], 0
        for i in range(len(given)):
            g = given[i]
            if blocks[g, Q0] <= a and b <= blocks[g, Q1]:
                if at < blocks[g, K0]:
                    _put(home, a, b, at, blocks[g, K0], out[count])
                    count += 1
                at = blocks[g, K1]
        _put(home, a, b, at, b, out[count])
        count += 1
    return count


@jit_inner
def assemble(home: IntArray, blocks: IntArray, run: IntArray, pieces: IntArray, cell: int, out: IntArray) -> int:
    """Tasks of a tiling, into ``out`` [capacity, 6]; returns how many.

    Args:
        home: [R, 6] tasks of the plan without disaggregation.
        blocks: [B, 8] table of ``blocks.py``; run [B]: the home task that a block is cut out of.
        pieces: [n, 6] table of ``strips.py``.
    """
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
        first = block[Q0] // cell
        task[TASK_DOC] = home[run[pieces[i, BLOCK]], TASK_DOC]
        task[TASK_Q0] = max((first + pieces[i, ROW]) * cell, block[Q0])
        task[TASK_Q1] = min((first + pieces[i, ROW_END]) * cell, block[Q1])
        task[TASK_K0] = block[K0] + pieces[i, COLUMN] * cell
        task[TASK_K1] = block[K0] + pieces[i, COLUMN_END] * cell
        task[TASK_SERVER] = pieces[i, HELPER]
        count += 1
    return count
