# SPDX-License-Identifier: BSD-3-Clause
"""Division of a rank's tasks into kernel calls: squares, bounded memory."""

from __future__ import annotations

import math
from itertools import chain, pairwise

import numpy as np

from torchtitan_cad.planning.exchange.tables import CallTable
from torchtitan_cad.planning.intervals import IntArray, concat_ranges

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
"""A cut of a task along the keys repeats at most this share of the task's own weighted rows."""

Calls = list[tuple[CallTable, bool]]
"""tables of kernel calls, each with True if its tasks are causal"""


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
    unmasked = [table for table in unmasked if table.num_tasks]
    if unmasked:
        calls.append((CallTable.joined(unmasked), False))
    return calls


def bounded(
    tables: Calls,
    num_local: int,
    *,
    split_keys: bool,
    max_calls: int = MAX_CALLS,
) -> Calls:
    """Return the calls, cut where a backward would hold more than ``MOST_ROWS`` allows.

    Cuts lie between tasks and, with ``split_keys``, along the keys of a task that is too large by itself.
    """
    total = sum(int(weighted_rows(table)[-1]) for table, _ in tables)
    tokens = num_local or sum(len(table.q_rows) for table, _ in tables)
    working = (MOST_ROWS * tokens - total) / WORKING_ROWS
    most = max(working, total / MOST_CALLS)
    while True:
        calls = _cut(tables, most, split_keys=split_keys)
        if len(calls) <= max_calls:
            return calls
        most *= 1.25


def _cut(tables: Calls, most: float, *, split_keys: bool) -> Calls:
    """Return the calls, cut to about ``most`` weighted rows each."""
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
