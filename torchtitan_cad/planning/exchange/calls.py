# SPDX-License-Identifier: BSD-3-Clause
"""Division of a rank's tasks into kernel calls: two rounds under tensor parallelism, squares, bounded memory."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from torchtitan_cad.planning.exchange.tables import CallTable
from torchtitan_cad.planning.intervals import IntArray, concat_ranges, exclusive_cumsum

MOST_ROWS = 23
"""Unit: weighted rows, 2 x query rows + key rows. A backward holds at most MOST_ROWS of them per token of the rank:

    sum over all calls + WORKING_ROWS x those of the running call <= MOST_ROWS x tokens

With 16-bit rows and four query heads per key head, a weighted row stands for query heads x head size bytes. The first
term is for results; the second for copies of rows, the surrogate of out, and what FlashAttention-2 allocates (dk and dv
for every query head, dq in fp32). Attention that is not cut takes 11 per token."""
WORKING_ROWS = 5
MOST_CALLS = 6
"""A rank has about this many calls at most; the bound above is exceeded rather than this."""
MAX_CALLS = 15
"""The results of at most this many calls, and those of one chunk, are combined at once, from at most 16 tensors
(runtime/combine.py)."""
MOST_UNCOMBINED = 3
"""Results of more rows than MOST_UNCOMBINED x local rows are combined, in fp32, before other servers' return."""
MOST_REPEATED = 0.25
"""A cut of a task along the keys repeats at most this share of the task's own weighted rows, a cut along the queries
this share of the weighted rows of all tasks."""
MOST_UNEVEN = 0.25
"""If a cut between tasks leaves halves that differ by more than this share of all pairs, the middle task is cut."""
CUT_AT = 128
"""Unit: queries. Tasks are cut at multiples, as kernels compute tiles of 128."""

Calls = list[tuple[CallTable, bool]]
"""tables of kernel calls, each with True if its tasks are causal"""


def halves(tables: Calls, window: int | None = None) -> list[Calls]:
    """Divide the tasks of a rank's calls into two halves of about equally many (query, key) pairs.

    The cut lies between tasks. If that leaves one half much larger, the task in the middle is cut along its queries.
    With a ``window``, all tasks are causal, and have no keys before the window of their first query.
    """
    cut, queries = _middle(tables, window)
    both: list[Calls] = [[], []]
    for table, causal in tables:
        here = min(max(cut, 0), table.num_tasks)
        queries_here = queries if here == cut < table.num_tasks else 0
        pair = table.divided(here, queries_here, causal=causal, window=window)
        for half, call in zip(both, pair, strict=True):
            if call.num_tasks:
                half.append((call, causal))
        cut -= table.num_tasks
    return both


def _middle(tables: Calls, window: int | None) -> tuple[int, int]:
    """Return the number of tasks of the first half, and the number of queries of the next task."""
    none = np.zeros(0, np.int64)
    queries = np.concatenate([none, *(np.diff(table.cu_q) for table, _ in tables)])
    keys = np.concatenate([none, *(np.diff(table.cu_k) for table, _ in tables)])
    causal = np.concatenate(
        [
            none,
            *(np.full(table.num_tasks, int(is_causal)) for table, is_causal in tables),
        ]
    )
    of_tasks = _pairs(queries, queries=queries, keys=keys, causal=causal, window=window)
    before = exclusive_cumsum(of_tasks)
    total = before[-1]
    cut = int(np.abs(2 * before - total).argmin())
    uneven = abs(2 * before[cut] - total)
    if uneven <= MOST_UNEVEN * total:
        return cut, 0
    task = int(np.searchsorted(2 * before, total, side="right")) - 1
    firsts = np.arange(CUT_AT, queries[task], CUT_AT)
    pairs = _pairs(
        firsts,
        queries=queries[task],
        keys=keys[task],
        causal=causal[task],
        window=window,
    )
    left = np.abs(2 * (before[task] + pairs) - total)
    if not len(firsts) or left.min() >= uneven:
        return cut, 0
    first = int(firsts[left.argmin()])
    repeated = keys[task] - causal[task] * (queries[task] - first)
    if window is not None:
        repeated = min(repeated, window - 1)
    return (
        (task, first)
        if repeated <= MOST_REPEATED * (2 * queries + keys).sum()
        else (cut, 0)
    )


def _pairs(
    firsts: IntArray,
    *,
    queries: IntArray,
    keys: IntArray,
    causal: IntArray,
    window: int | None,
) -> IntArray:
    """Return the (query, key) pairs of the ``firsts`` first queries of tasks; ``causal`` is 1 or 0."""
    masked = firsts * (queries - firsts) + firsts * (firsts - 1) // 2
    pairs = firsts * keys - causal * masked
    if window is None:
        return pairs
    return (
        pairs
        - _triangle(keys - queries + firsts - window)
        + _triangle(keys - queries - window)
    )


def _triangle(rows: IntArray) -> IntArray:
    """Return 1 + 2 + ... + rows, 0 for none: the pairs before the windows of queries up to this one."""
    rows = np.maximum(rows, 0)
    return rows * (rows + 1) // 2


def squares(tables: Calls) -> Calls:
    """Divide each causal task with more keys than queries into a causal square and an unmasked rectangle before it.

    The rectangles and the other unmasked tasks make one call.
    """
    square: Calls = []
    unmasked = [table for table, causal in tables if not causal]
    for table in (table for table, causal in tables if causal):
        queries, keys = (
            np.diff(table.cu_q).astype(np.int64),
            np.diff(table.cu_k).astype(np.int64),
        )
        before = keys - queries
        square.append((table.pieces(np.arange(table.num_tasks), before, keys), True))
        longer = np.flatnonzero(before)
        unmasked.append(table.pieces(longer, np.zeros_like(longer), before[longer]))
    rest = CallTable.joined([table for table in unmasked if table.num_tasks])
    return [*square, (rest, False)] if rest.num_tasks else square


def bounded(
    rounds: list[Calls],
    num_local: int,
    *,
    split_keys: bool,
    max_calls: int = MAX_CALLS,
) -> list[Calls]:
    """Return the calls of every round, cut where a backward would hold more than ``MOST_ROWS`` allows.

    Cuts lie between tasks and, with ``split_keys``, along the keys of a task that is too large by itself.
    """
    total = sum(
        int(weighted_rows(table)[-1]) for tables in rounds for table, _ in tables
    )
    tokens = num_local or sum(
        len(table.q_rows) for tables in rounds for table, _ in tables
    )
    most = max((MOST_ROWS * tokens - total) / WORKING_ROWS, total / MOST_CALLS)

    while True:
        cut = [_cut(tables, most, split_keys=split_keys) for tables in rounds]
        if sum(map(len, cut)) <= max_calls:
            return cut
        most *= 1.25


def _cut(tables: Calls, most: float, *, split_keys: bool) -> Calls:
    """Return the calls of a round, cut to about ``most`` weighted rows each."""
    if split_keys:
        tables = [
            call for table, causal in tables for call in _divided(table, causal, most)
        ]
    return [(call, causal) for table, causal in tables for call in _split(table, most)]


def _split(table: CallTable, most: float) -> list[CallTable]:
    rows = weighted_rows(table)
    count = math.ceil(rows[-1] / most)
    if count <= 1:
        return [table]
    # One more call where whole tasks would leave a call too large.
    cuts = min(
        (_even_cuts(rows, n) for n in (count, count + 1)),
        key=lambda cuts: max(most, np.diff(rows[cuts]).max()),
    )
    return [table.tasks(begin, end) for begin, end in pairwise(cuts) if begin < end]


def _even_cuts(rows: IntArray, count: int) -> list[int]:
    """Return the tasks at which to cut for ``count`` calls of about equal weighted rows; ``rows`` are cumulative."""
    return [int(np.abs(rows - rows[-1] * i / count).argmin()) for i in range(count + 1)]


def _divided(table: CallTable, causal: bool, most: float) -> Calls:
    """Return a call with its tasks of more than ``most`` weighted rows cut along their keys.

    Each piece reads all queries of its task again, which may add ``MOST_REPEATED`` of the task's weighted rows. The
    last piece of a causal task has the diagonal. The other pieces are rectangles and make a second call.
    """
    queries = np.diff(table.cu_q).astype(np.int64)
    keys = np.diff(table.cu_k).astype(np.int64)
    count = _num_pieces(queries, keys, most)
    last = -(-keys // count)
    before = keys - (np.maximum(last, queries) if causal else last)
    if not before.any():
        return [(table, causal)]
    count = np.where(before > 0, count, 1)
    task = np.repeat(np.arange(len(keys)), count)
    number = concat_ranges(np.zeros_like(count), count)
    is_last = number == count[task] - 1
    others = np.maximum(count[task] - 1, 1)
    begin = np.where(is_last, before[task], before[task] * number // others)
    end = np.where(is_last, keys[task], before[task] * (number + 1) // others)
    if not causal:
        return [(table.pieces(task, begin, end), False)]
    diagonal = table.pieces(task[is_last], begin[is_last], end[is_last])
    rectangles = table.pieces(task[~is_last], begin[~is_last], end[~is_last])
    return [(diagonal, True), (rectangles, False)]


def _num_pieces(queries: IntArray, keys: IntArray, most: float) -> IntArray:
    """Return into how many pieces of about ``most`` weighted rows tasks are cut along their keys."""
    rows = 2 * queries + keys
    wanted = np.ceil(keys / np.maximum(most - 2 * queries, 1)).astype(np.int64)
    allowed = 1 + (MOST_REPEATED * rows / (2 * queries)).astype(np.int64)
    return np.where(rows > most, np.minimum(wanted, allowed), 1)


def weighted_rows(table: CallTable) -> IntArray:
    """Return [num_tasks + 1] the cumulative weighted rows of the tasks, see ``MOST_ROWS``."""
    return 2 * table.cu_q.astype(np.int64) + table.cu_k


def combine_early(num_results: int, num_local: int) -> bool:
    """Tell whether combining the results before others return saves memory worth one more launch."""
    return num_results > MOST_UNCOMBINED * num_local


def lie_in_order(rows: IntArray) -> bool:
    """Tell whether rows [n] are consecutive, so that a call can read local rows in place."""
    return bool(rows.size) and np.array_equal(
        rows, np.arange(rows[0], rows[0] + rows.size)
    )
