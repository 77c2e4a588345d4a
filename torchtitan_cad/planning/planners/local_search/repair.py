"""Repair of a plan that is nearly within its limits: slices of tasks move from ranks over a limit to ranks with room.

A slice is some rows or some keys at the edge of a task, whole cells wide. Of all slices and receivers the one that
costs the fewest bytes per unit of excess removed goes first.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit, jit_inner, jit_leaf
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import TASK_FIELDS, TaskArray, make_tasks, merge_queries
from torchtitan_cad.planning.planners.local_search.board import copy_task
from torchtitan_cad.planning.sorting import order_of

# Columns of the task table.
DOC, Q0, Q1, K0, K1, SERVER = range(6)

# Sides of a task from which slices are cut.
FIRST_ROWS, LAST_ROWS, FIRST_KEYS, LAST_KEYS = range(4)

# Entries of the rules.
TILE, CELL, QUERY_BYTES, KV_BYTES, DEBT, SIDES = range(6)

# What a rank can have too much of: the rows of ``spare``.
LOAD, QUERIES, KEYS = range(3)

TURNS = 18
"""Passes over all ranks, by kind in turn."""

ROOMIEST = 8
"""Ranks with the most room for load that are tried even if they have nothing of the document."""

MOVES_PER_RANK = 16
"""Moves altogether, at most, per rank and besides one per task."""


@jit_leaf
def _cost(task: IntArray, sums: IntArray, tile: int) -> int:
    """Cost of a task, 0 without rows; ``sums`` [n + 1] are the running sums of ``row_cost``."""
    if task[Q0] == task[Q1]:
        return 0
    rows, stop = task[Q0] // tile, -(-task[Q1] // tile)
    first = task[K0] // tile
    if task[K1] == task[Q1]:
        return sums[stop - first + 1] - sums[rows - first + 1]
    width = -(-task[K1] // tile) - first
    return (stop - rows) * (sums[width + 1] - sums[width])


@jit_leaf
def _steps(task: IntArray, side: int, cell: int) -> int:
    """Whole cells that can be cut off that side; all of the task as its first rows only."""
    if task[Q0] == task[Q1]:
        return 0
    if side <= LAST_ROWS:
        return -(-task[Q1] // cell) - task[Q0] // cell - (side == LAST_ROWS)
    stop = min(task[K1], task[Q0])  # of a diagonal, only keys before all its rows form a rectangle
    steps = stop // cell - task[K0] // cell
    if task[K1] != task[Q1]:
        return steps - 1
    return steps if side == FIRST_KEYS else 0


@jit_leaf
def _cut(task: IntArray, side: int, steps: int, cell: int, slice_: IntArray, rest: IntArray) -> None:
    """Write what ``steps`` cells at that side and the remainder are, as tasks."""
    copy_task(slice_, task)
    copy_task(rest, task)
    diagonal = task[K1] == task[Q1]
    if side == FIRST_ROWS:
        cut = min(task[Q1], (task[Q0] // cell + steps) * cell)
        slice_[Q1] = rest[Q0] = cut
        if diagonal:
            slice_[K1] = cut
        if cut == task[Q1]:
            rest[K0] = rest[K1]
    elif side == LAST_ROWS:
        cut = (-(-task[Q1] // cell) - steps) * cell
        slice_[Q0] = rest[Q1] = cut
        if diagonal:
            rest[K1] = cut
    elif side == FIRST_KEYS:
        slice_[K1] = rest[K0] = (task[K0] // cell + steps) * cell
    else:
        slice_[K0] = rest[K1] = (-(-task[K1] // cell) - steps) * cell


@jit_leaf
def _lacking(
    start: int, end: int, first: int, table: IntArray, following: IntArray, head: int, doc: int, held: IntArray
) -> int:
    """Tokens of [start, end) of a document that a server neither holds nor has for its tasks.

    ``first`` is the column of the range, Q0 or K0; ``head`` and ``following`` chain the server's tasks in the table;
    ``held`` [n, 3] are the ranges (document, start, end) it is home to.
    """
    lacking = 0
    while start < end:
        reach, next_start = start, end
        for i in range(len(held)):
            if held[i, 0] == doc:
                if held[i, 1] <= start:
                    reach = max(reach, held[i, 2])
                else:
                    next_start = min(next_start, held[i, 1])
        i = head
        while i >= 0:
            if table[i, DOC] == doc:
                if table[i, first] <= start:
                    reach = max(reach, table[i, first + 1])
                else:
                    next_start = min(next_start, table[i, first])
            i = following[i]
        if reach > start:
            start = reach
        else:
            lacking += next_start - start
            start = next_start
    return lacking


@jit_inner
def _find_receivers(
    task: IntArray,
    debt: int,
    table: IntArray,
    count: int,
    held: IntArray,
    holder: IntArray,
    spare: IntArray,
    roomiest: IntArray,
    found: IntArray,
) -> int:
    """List the ranks with room for more load that have rows or keys of the task, and the roomiest; returns how many."""
    seen = np.zeros(spare.shape[1], dtype=np.bool_)
    seen[task[SERVER]] = True
    size = 0
    for i in range(count + len(held) + len(roomiest)):
        if i < count:
            other = table[i, SERVER]
            near = table[i, DOC] == task[DOC] and (
                (table[i, Q0] <= task[Q1] and task[Q0] <= table[i, Q1])
                or (table[i, K0] <= task[K1] and task[K0] <= table[i, K1])
            )
        elif i < count + len(held):
            other = holder[i - count]
            start, end = held[i - count, 1], held[i - count, 2]
            near = held[i - count, 0] == task[DOC] and start < task[K1] and task[K0] < end
        else:
            other, near = roomiest[i - count - len(held)], True
        if near and not seen[other] and spare[LOAD, other] + debt > 0:
            seen[other] = True
            found[size] = other
            size += 1
    return size


@jit_inner
def _best_slice(
    rank: int,
    kind: int,
    debt: int,
    table: IntArray,
    count: int,
    following: IntArray,
    heads: IntArray,
    held: IntArray,
    first_held: IntArray,
    holder: IntArray,
    spare: IntArray,
    sums: IntArray,
    rules: IntArray,
    best: IntArray,
) -> bool:
    """Find the slice of a rank's tasks that lowers its excess of that kind for the fewest bytes; whether there is one.

    Kinds are the rows of ``spare`` [3, num_ranks], what every rank may still take: LOAD, QUERIES, KEYS. The receiver's
    load may be over by ``debt``. ``best`` becomes (task, side, steps, receiver).
    """
    slice_, rest, whole = np.empty(6, np.int64), np.empty(6, np.int64), np.empty(6, np.int64)
    need, price = -spare[kind, rank], np.inf
    mine = held[first_held[rank] : first_held[rank + 1]]
    roomiest = order_of(-spare[LOAD])[:ROOMIEST]
    receivers = np.empty(len(heads), np.int64)
    t = heads[rank]
    while t >= 0:
        copy_task(whole, table[t])
        doc = whole[DOC]
        size = _find_receivers(whole, debt, table, count, held, holder, spare, roomiest, receivers)
        for side in range(rules[SIDES]):
            steps = _steps(whole, side, rules[CELL])
            while steps > 0:
                _cut(whole, side, steps, rules[CELL], slice_, rest)
                copy_task(table[t], rest)
                queries = _lacking(slice_[Q0], slice_[Q1], Q0, table, following, heads[rank], doc, mine)
                keys = _lacking(slice_[K0], slice_[K1], K0, table, following, heads[rank], doc, mine)
                copy_task(table[t], whole)
                work = _cost(slice_, sums, rules[TILE])
                saved = queries if kind == QUERIES else keys
                if kind == LOAD:
                    saved = _cost(whole, sums, rules[TILE]) - _cost(rest, sums, rules[TILE])
                if saved <= 0:
                    break
                for r in range(size):
                    other = receivers[r]
                    if work > spare[LOAD, other] + debt:
                        continue
                    theirs = held[first_held[other] : first_held[other + 1]]
                    new_queries = _lacking(slice_[Q0], slice_[Q1], Q0, table, following, heads[other], doc, theirs)
                    if new_queries > max(0, spare[QUERIES, other]):
                        continue
                    new_keys = _lacking(slice_[K0], slice_[K1], K0, table, following, heads[other], doc, theirs)
                    if new_keys > max(0, spare[KEYS, other]):
                        continue
                    change = rules[QUERY_BYTES] * (new_queries - queries) + rules[KV_BYTES] * (new_keys - keys)
                    value = float(max(change, 1)) / min(need, saved)
                    if value < price:
                        price = value
                        best[0], best[1], best[2], best[3] = t, side, steps, other
                steps = min(steps - 1, max(1, steps * 3 // 4))
        t = following[t]
    return price < np.inf


@jit_inner
def _move(
    choice: IntArray,
    count: int,
    table: IntArray,
    following: IntArray,
    heads: IntArray,
    held: IntArray,
    first_held: IntArray,
    spare: IntArray,
    sums: IntArray,
    rules: IntArray,
) -> None:
    """Give a slice away: append it to the ``count`` tasks of the table and update ``spare``."""
    t, side, steps, other = choice[0], choice[1], choice[2], choice[3]
    slice_, rest = np.empty(6, np.int64), np.empty(6, np.int64)
    _cut(table[t], side, steps, rules[CELL], slice_, rest)
    rank, doc = rest[SERVER], rest[DOC]
    spare[LOAD, rank] += _cost(table[t], sums, rules[TILE]) - _cost(rest, sums, rules[TILE])
    spare[LOAD, other] -= _cost(slice_, sums, rules[TILE])
    copy_task(table[t], rest)
    mine, theirs = held[first_held[rank] : first_held[rank + 1]], held[first_held[other] : first_held[other + 1]]
    for kind in range(QUERIES, KEYS + 1):
        first = Q0 if kind == QUERIES else K0
        start, end = slice_[first], slice_[first + 1]
        spare[kind, rank] += _lacking(start, end, first, table, following, heads[rank], doc, mine)
        spare[kind, other] -= _lacking(start, end, first, table, following, heads[other], doc, theirs)
    slice_[SERVER] = other
    copy_task(table[count], slice_)
    following[count] = heads[other]
    heads[other] = count


@jit_leaf
def _is_over(spare: IntArray) -> bool:
    """Whether any rank has too much of anything."""
    for kind in range(len(spare)):
        for rank in range(spare.shape[1]):
            if spare[kind, rank] < 0:
                return True
    return False


@jit
def _repair(
    table: IntArray,
    count: int,
    held: IntArray,
    first_held: IntArray,
    holder: IntArray,
    spare: IntArray,
    sums: IntArray,
    rules: IntArray,
    heads: IntArray,
    following: IntArray,
) -> int:
    """Move slices until nothing is over or nothing helps; returns the number of tasks.

    ``heads`` [num_ranks] and ``following`` [capacity], both -1, chain the tasks of every server.
    """
    for i in range(count):
        following[i] = heads[table[i, SERVER]]
        heads[table[i, SERVER]] = i
    best = np.empty(4, np.int64)
    before = count
    for turn in range(TURNS):
        kind = turn % 3
        if kind == LOAD:
            if turn > 0 and count == before:
                break
            before = count
        debt = 0 if kind == LOAD else rules[DEBT]
        for rank in order_of(spare[kind]):
            while spare[kind, rank] < 0 and count < len(table):
                if not _best_slice(
                    rank, kind, debt, table, count, following, heads, held, first_held, holder, spare, sums, rules, best
                ):
                    break
                _move(best, count, table, following, heads, held, first_held, spare, sums, rules)
                count += 1
        if not _is_over(spare):
            break
    return count


def repair(
    layout: TokenLayout,
    shape: AttentionShape,
    cost: CostModel,
    cell: int,
    tasks: TaskArray,
    spare: IntArray,
    debt: int,
    split_kv: bool,
) -> TaskArray:
    """The tasks after repair, which may not have sufficed.

    Args:
        cell: tokens; tasks are cut at multiples of it.
        spare: int64 [3, num_ranks] load, query rows and key rows that every rank may still take, negative if over.
        debt: load by which a rank may be over while rows are moved, which makes swaps possible: what it then has too
            much, it gives away in turn.
        split_kv: whether slices of keys may be cut, too.
    """
    table = np.empty((2 * len(tasks) + MOVES_PER_RANK * layout.num_ranks, 6), dtype=np.int64)
    table[: len(tasks)] = np.stack([tasks[name] for name in TASK_FIELDS], axis=1)
    table[: len(tasks), DOC] = layout.doc_index(tasks["doc"])
    held = np.stack([layout.doc_index(layout.seg_doc), layout.seg_start, layout.seg_start + layout.seg_length], axis=1)
    first_held = np.searchsorted(layout.seg_rank, np.arange(layout.num_ranks + 1))
    longest = -(-int(layout.doc_lengths.max()) // cost.granularity)
    sums = np.append(0, np.cumsum(cost.row_cost(np.arange(longest + 1))))
    sides = 4 if split_kv else 2
    rules = np.array([cost.granularity, cell, shape.query_bytes, shape.kv_bytes, debt, sides], dtype=np.int64)
    chains = np.full(layout.num_ranks, -1), np.full(len(table), -1)
    args = (held, first_held, layout.seg_rank, spare.copy(), sums, rules, *chains)
    table = table[: _repair(table, len(tasks), *args)]
    table = table[table[:, Q0] < table[:, Q1]]
    table[:, DOC] = layout.docs[table[:, DOC]]
    return merge_queries(make_tasks(*table.T))
