"""Division of a rank's tasks into kernel calls: two rounds for ping-pong, squares, more calls where rows are many."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from torchtitan_cad.planning.exchange.tables import CallTable
from torchtitan_cad.planning.intervals import IntArray, concat_ranges, exclusive_cumsum

MOST_ROWS = 25
"""Most weighted rows (key rows plus twice the query rows) in a backward, over the rank's tokens. With 16-bit
rows and four query heads to a key head one stands for Hq x D bytes: the results of all calls take one per weighted row,
and the call that runs ``WORKING_ROWS`` more, for copies of its rows, the surrogate of out, and what FlashAttention-2
allocates (dk and dv for every query head, dq in fp32). Undivided attention takes 11 per token."""
WORKING_ROWS = 5
MOST_CALLS = 6
"""Into how many calls, about, the rows of a rank are cut at most."""
MAX_CALLS = 15
"""Their results, and those of one trip, are combined at once, from 16 tensors at most (runtime/combine.py)."""
MOST_UNCOMBINED = 3
"""Rows of the results of all calls, over this rank's own, above which they are combined before others' return: what is
left while these travel are its own rows, in fp32."""
MOST_REPEATED = 0.25
"""Weighted rows that a cut of a task may add: along its keys over its own, along its queries over those of all."""
MOST_UNEVEN = 0.25
"""By how much of all pairs two halves of whole tasks may differ."""
CUT_AT = 128
"""Halves are cut inside a task at multiples of so many queries, as kernels compute tiles of them."""

Calls = list[tuple[CallTable, bool]]
"""Tables of kernel calls, and whether their tasks are causal."""


def halves(tables: Calls) -> list[Calls]:
    """Divide tasks, with whether their call is causal, into two parts of about equally many (query, key) pairs.

    They are divided between tasks. Where that leaves one part much larger, the task in the middle is cut along its
    queries.
    """
    cut, queries = _middle(tables)
    both: list[Calls] = [[], []]
    for table, causal in tables:
        here = min(max(cut, 0), table.num_tasks)
        parts = table.divided(here, queries if here == cut < table.num_tasks else 0, causal=causal)
        for half, part in zip(both, parts, strict=True):
            if part.num_tasks:
                half.append((part, causal))
        cut -= table.num_tasks
    return both


def _middle(tables: Calls) -> tuple[int, int]:
    """Return how many tasks the first half has, and how many queries of the next one."""
    none = np.zeros(0, np.int64)
    queries = np.concatenate([none, *(np.diff(table.cu_q) for table, _ in tables)])
    keys = np.concatenate([none, *(np.diff(table.cu_k) for table, _ in tables)])
    causal = np.concatenate([none, *(np.full(table.num_tasks, int(is_causal)) for table, is_causal in tables)])

    def pairs(first: IntArray, q: IntArray, k: IntArray, is_causal: IntArray) -> IntArray:
        return first * k - is_causal * (first * (q - first) + first * (first - 1) // 2)

    seen = exclusive_cumsum(pairs(queries, queries, keys, causal))
    cut = int(np.abs(2 * seen - seen[-1]).argmin())
    uneven = abs(2 * seen[cut] - seen[-1])
    if uneven <= MOST_UNEVEN * seen[-1]:
        return cut, 0
    task = int(np.searchsorted(2 * seen, seen[-1], side="right")) - 1
    of_task = queries[task], keys[task], causal[task]
    firsts = np.arange(CUT_AT, queries[task], CUT_AT)
    left = np.abs(2 * (seen[task] + pairs(firsts, *of_task)) - seen[-1])
    if not len(firsts) or left.min() >= uneven:
        return cut, 0
    first = int(firsts[left.argmin()])
    repeated = keys[task] - causal[task] * (queries[task] - first)
    return (task, first) if repeated <= MOST_REPEATED * (2 * queries + keys).sum() else (cut, 0)


def squares(tables: Calls) -> Calls:
    """Divide each causal task that has more keys than queries into a square, causal, and what is before it, unmasked.

    The latter joins the tasks that are unmasked anyway.
    """
    square: Calls = []
    unmasked = [table for table, causal in tables if not causal]
    for table in (table for table, causal in tables if causal):
        queries, keys = np.diff(table.cu_q).astype(np.int64), np.diff(table.cu_k).astype(np.int64)
        before = keys - queries
        square.append((table.pieces(np.arange(table.num_tasks), before, keys), True))
        longer = np.flatnonzero(before)
        unmasked.append(table.pieces(longer, np.zeros_like(longer), before[longer]))
    rest = CallTable.joined([table for table in unmasked if table.num_tasks])
    return [*square, (rest, False)] if rest.num_tasks else square


def bounded(rounds: list[Calls], num_local: int, *, split_keys: bool) -> list[Calls]:
    """Return the calls of every round, cut where a backward would hold more than ``MOST_ROWS``.

    They are cut between tasks, and with ``split_keys`` a task that is too large by itself along its keys.
    """
    total = sum(int(weighted_rows(table)[-1]) for tables in rounds for table, _ in tables)
    tokens = num_local or sum(len(table.q_rows) for tables in rounds for table, _ in tables)
    most = max((MOST_ROWS * tokens - total) / WORKING_ROWS, total / MOST_CALLS)

    while True:
        cut = [_cut(tables, most, split_keys=split_keys) for tables in rounds]
        if sum(map(len, cut)) <= MAX_CALLS:
            return cut
        most *= 1.25


def _cut(tables: Calls, most: float, *, split_keys: bool) -> Calls:
    """Return the calls of a round, cut to about ``most`` weighted rows each."""
    if split_keys:
        tables = [call for table, causal in tables for call in _divided(table, causal, most)]
    return [(part, causal) for table, causal in tables for part in _parts(table, most)]


def _parts(table: CallTable, most: float) -> list[CallTable]:
    rows = weighted_rows(table)
    count = math.ceil(rows[-1] / most)
    if count <= 1:
        return [table]
    # One call more than rows alone ask for, where whole tasks would leave one too large.
    cuts = min((_even_cuts(rows, n) for n in (count, count + 1)), key=lambda cuts: max(most, np.diff(rows[cuts]).max()))
    return [table.part(begin, end) for begin, end in pairwise(cuts) if begin < end]


def _even_cuts(rows: IntArray, count: int) -> list[int]:
    """Return the tasks at which to cut for ``count`` parts of about equal ``rows`` (sums, as ``weighted_rows``)."""
    return [int(np.abs(rows - rows[-1] * i / count).argmin()) for i in range(count + 1)]


def _divided(table: CallTable, causal: bool, most: float) -> Calls:
    """Return the tasks of a call, those of more than ``most`` weighted rows cut along their keys.

    Each piece reads all queries of its task again, which may add ``MOST_REPEATED`` of the task's weighted rows. The
    last piece of a causal task has the diagonal; the others are rectangles, and make another call.
    """
    queries, keys = np.diff(table.cu_q).astype(np.int64), np.diff(table.cu_k).astype(np.int64)
    rows = 2 * queries + keys
    wanted = np.ceil(keys / np.maximum(most - 2 * queries, 1)).astype(np.int64)
    count = np.where(rows > most, np.minimum(wanted, 1 + (MOST_REPEATED * rows / (2 * queries)).astype(np.int64)), 1)
    last = -(-keys // count)
    before = keys - (np.maximum(last, queries) if causal else last)
    if not before.any():
        return [(table, causal)]
    count = np.where(before > 0, count, 1)
    task = np.repeat(np.arange(len(keys)), count)
    number, before = concat_ranges(np.zeros_like(count), count), before[task]
    is_last, others = number == count[task] - 1, np.maximum(count[task] - 1, 1)
    begin = np.where(is_last, before, before * number // others)
    end = np.where(is_last, keys[task], before * (number + 1) // others)
    if not causal:
        return [(table.pieces(task, begin, end), False)]
    return [
        (table.pieces(task[kind], begin[kind], end[kind]), diagonal)
        for kind, diagonal in ((is_last, True), (~is_last, False))
    ]


def weighted_rows(table: CallTable) -> IntArray:
    """Sum the weighted rows of the tasks before each, and of all; see ``MOST_ROWS``."""
    return 2 * table.cu_q.astype(np.int64) + table.cu_k


def combine_early(num_results: int, num_local: int) -> bool:
    """Tell whether results are so many that holding less of them is worth one more launch."""
    return num_results > MOST_UNCOMBINED * num_local


def lie_in_order(rows: IntArray) -> bool:
    """Tell whether rows [n] follow one after the other, so that a call can read local ones in place."""
    return bool(rows.size) and np.array_equal(rows, np.arange(rows[0], rows[0] + rows.size))
