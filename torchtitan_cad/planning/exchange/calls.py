# SPDX-License-Identifier: BSD-3-Clause
"""Division of a rank's tasks into kernel calls: two rounds under tensor parallelism, squares, bounded memory."""

from __future__ import annotations

import math
from itertools import chain, pairwise
from typing import NamedTuple

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


class _Lengths(NamedTuple):
    """Numbers of queries and keys of tasks, 1 if they are causal and 0 if not, all [num_tasks], and their window."""

    queries: IntArray
    keys: IntArray
    causal: IntArray
    window: int | None

    @classmethod
    def of_calls(cls, tables: Calls, window: int | None) -> _Lengths:
        """Return the numbers of all tasks of calls."""
        none = np.zeros((3, 0), np.int64)
        columns = [
            (table.q_length, table.k_length, np.full(table.num_tasks, causal))
            for table, causal in tables
        ]
        queries, keys, causal = np.concatenate([none, *columns], axis=1)
        return cls(queries, keys, causal, window=window)

    def of_task(self, task: int) -> _Lengths:
        """Return the numbers of one task."""
        return _Lengths(
            queries=self.queries[task],
            keys=self.keys[task],
            causal=self.causal[task],
            window=self.window,
        )

    def pairs(self, firsts: IntArray) -> IntArray:
        """Return the (query, key) pairs of the ``firsts`` first queries."""
        masked = firsts * (self.queries - firsts) + _triangle(firsts - 1)
        pairs = firsts * self.keys - self.causal * masked
        if self.window is None:
            return pairs
        before = self.keys - self.queries - self.window
        return pairs - _triangle(before + firsts) + _triangle(before)

    def repeated_keys(self, first: int) -> int:
        """Return the keys that both parts of a task need if it is cut at its query ``first``."""
        repeated = int(self.keys - self.causal * (self.queries - first))
        if self.window is None:
            return repeated
        return min(repeated, self.window - 1)


def _middle(tables: Calls, window: int | None) -> tuple[int, int]:
    """Return the number of tasks of the first half, and the number of queries of the next task."""
    lengths = _Lengths.of_calls(tables, window)
    before = exclusive_cumsum(lengths.pairs(lengths.queries))
    total = before[-1]
    # by how much the first half exceeds the second if the cut lies before a task
    excess = 2 * before - total
    cut = int(np.abs(excess).argmin())
    uneven = abs(excess[cut])
    if uneven <= MOST_UNEVEN * total:
        return cut, 0
    task = int(np.searchsorted(excess, 0, side="right")) - 1
    middle = lengths.of_task(task)
    firsts = np.arange(CUT_AT, lengths.queries[task], CUT_AT)
    uneven_inside = np.abs(excess[task] + 2 * middle.pairs(firsts))
    if uneven_inside.min(initial=uneven) >= uneven:
        return cut, 0
    first = int(firsts[uneven_inside.argmin()])
    rows = 2 * lengths.queries + lengths.keys
    if middle.repeated_keys(first) > MOST_REPEATED * rows.sum():
        return cut, 0
    return task, first


def _triangle(rows: IntArray) -> IntArray:
    """Return 1 + 2 + ... + rows, 0 for none: the pairs before the windows of queries up to this one."""
    rows = np.maximum(rows, 0)
    return rows * (rows + 1) // 2


def squares(tables: Calls) -> Calls:
    """Divide each causal task with more keys than queries into a causal square and an unmasked rectangle before it.

    The rectangles and the other unmasked tasks make one call.
    """
    calls: Calls = []
    unmasked = [table for table, causal in tables if not causal]
    for table in [table for table, causal in tables if causal]:
        before = table.k_length - table.q_length
        tasks = np.arange(table.num_tasks)
        square = table.pieces(tasks, before, table.k_length)
        calls.append((square, True))
        longer = np.flatnonzero(before)
        first_keys = np.zeros_like(longer)
        unmasked.append(table.pieces(longer, first_keys, before[longer]))
    joined = CallTable.joined([table for table in unmasked if table.num_tasks])
    if joined.num_tasks:
        calls.append((joined, False))
    return calls


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
    calls = [table for table, _ in chain(*rounds)]
    total = sum(int(weighted_rows(table)[-1]) for table in calls)
    tokens = num_local or sum(len(table.q_rows) for table in calls)
    working = (MOST_ROWS * tokens - total) / WORKING_ROWS
    most = max(working, total / MOST_CALLS)
    while True:
        cut = [_cut(tables, most, split_keys=split_keys) for tables in rounds]
        if sum(map(len, cut)) <= max_calls:
            return cut
        most *= 1.25


def _cut(tables: Calls, most: float, *, split_keys: bool) -> Calls:
    """Return the calls of a round, cut to about ``most`` weighted rows each."""
    if split_keys:
        divided = [_divided(table, causal, most) for table, causal in tables]
        tables = [*chain(*divided)]
    calls: Calls = []
    for table, causal in tables:
        calls += [(call, causal) for call in _split(table, most)]
    return calls


def _split(table: CallTable, most: float) -> list[CallTable]:
    rows = weighted_rows(table)
    count = math.ceil(rows[-1] / most)
    if count <= 1:
        return [table]

    def largest(cuts: list[int]) -> float:
        return max(most, np.diff(rows[cuts]).max())

    # One more call where whole tasks would leave a call too large.
    cuts = min(
        _even_cuts(rows, count),
        _even_cuts(rows, count + 1),
        key=largest,
    )
    ranges = pairwise(cuts)
    return [table.tasks(begin, end) for begin, end in ranges if begin < end]


def _even_cuts(rows: IntArray, count: int) -> list[int]:
    """Return the tasks at which to cut for ``count`` calls of about equal weighted rows; ``rows`` are cumulative."""
    cuts = []
    for i in range(count + 1):
        distance = np.abs(rows - rows[-1] * i / count)
        cuts.append(int(distance.argmin()))
    return cuts


def _divided(table: CallTable, causal: bool, most: float) -> Calls:
    """Return a call with its tasks of more than ``most`` weighted rows cut along their keys.

    Each piece reads all queries of its task again, which may add ``MOST_REPEATED`` of the task's weighted rows. The
    last piece of a causal task has the diagonal. The other pieces are rectangles and make a second call.
    """
    queries = table.q_length
    keys = table.k_length
    count = _num_pieces(queries, keys, most)
    last = -(-keys // count)
    if causal:
        last = np.maximum(last, queries)
    before = keys - last
    if not before.any():
        return [(table, causal)]
    count = np.where(before > 0, count, 1)
    task = np.repeat(np.arange(len(keys)), count)
    number = concat_ranges(np.zeros_like(count), count)
    is_last = number == count[task] - 1
    others = np.maximum(count[task] - 1, 1)
    last_begin = before[task]
    begin = np.where(is_last, last_begin, last_begin * number // others)
    end = np.where(is_last, keys[task], last_begin * (number + 1) // others)
    if not causal:
        return [(table.pieces(task, begin, end), False)]
    diagonal = table.pieces(
        task[is_last],
        begin[is_last],
        end[is_last],
    )
    rectangles = table.pieces(
        task[~is_last],
        begin[~is_last],
        end[~is_last],
    )
    return [(diagonal, True), (rectangles, False)]


def _num_pieces(queries: IntArray, keys: IntArray, most: float) -> IntArray:
    """Return into how many pieces of about ``most`` weighted rows tasks are cut along their keys."""
    query_rows = 2 * queries
    rows = query_rows + keys
    key_rows = np.maximum(most - query_rows, 1)
    wanted = np.ceil(keys / key_rows).astype(np.int64)
    repeated = MOST_REPEATED * rows / query_rows
    allowed = 1 + repeated.astype(np.int64)
    count = np.minimum(wanted, allowed)
    return np.where(rows > most, count, 1)


def weighted_rows(table: CallTable) -> IntArray:
    """Return [num_tasks + 1] the cumulative weighted rows of the tasks, see ``MOST_ROWS``."""
    return 2 * table.cu_q.astype(np.int64) + table.cu_k


def combine_early(num_results: int, num_local: int) -> bool:
    """Tell whether combining the results before others return saves memory worth one more launch."""
    return num_results > MOST_UNCOMBINED * num_local


def lie_in_order(rows: IntArray) -> bool:
    """Tell whether rows [n] are consecutive, so that a call can read local rows in place."""
    return rows.size > 0 and bool((np.diff(rows) == 1).all())
