"""Division of a rank's tasks into kernel calls: two rounds for ping-pong, more calls where rows are many."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from torchtitan_cad.planning.exchange.tables import CallTable
from torchtitan_cad.planning.intervals import IntArray

MOST_ROWS = 25
"""Most weighted rows (key rows plus twice the query rows) in a backward, over the rank's tokens. With 16-bit
rows and four query heads to a key head one stands for Hq x D bytes: the results of all calls take one per weighted row,
and the call that runs ``WORKING_ROWS`` more, for copies of its rows, the surrogate of out, and what FlashAttention-2
allocates (dk and dv for every query head, dq in fp32). Undivided attention takes 11 per token."""
WORKING_ROWS = 5
MOST_CALLS = 6
"""Into how many calls, about, the rows of a rank are cut at most."""

Calls = list[tuple[CallTable, bool]]
"""Tables of kernel calls, and whether their tasks are causal."""


def halves(tables: Calls) -> list[Calls]:
    """Tasks, with whether their call is causal, in two parts that see about equally many pairs of query and key."""
    pairs = [np.zeros(1, np.int64)]
    for table, causal in tables:
        queries, keys = table.cu_q[1:] - table.cu_q[:-1].astype(np.int64), table.cu_k[1:] - table.cu_k[:-1]
        pairs.append(queries * keys - (queries * (queries - 1) // 2 if causal else 0))
    seen = np.cumsum(np.concatenate(pairs))
    cut = int(np.abs(2 * seen - seen[-1]).argmin())
    both: list[Calls] = [[], []]
    for table, causal in tables:
        here = min(max(cut, 0), table.num_tasks)
        for half, begin, end in zip(both, (0, here), (here, table.num_tasks), strict=True):
            if begin < end:
                half.append((table.part(begin, end), causal))
        cut -= table.num_tasks
    return both


def bounded(rounds: list[Calls], num_local: int) -> list[Calls]:
    """The calls of every round, cut between tasks where a backward would hold more than ``MOST_ROWS``."""
    total = sum(int(weighted_rows(table)[-1]) for tables in rounds for table, _ in tables)
    tokens = num_local or sum(len(table.q_rows) for tables in rounds for table, _ in tables)
    most = max((MOST_ROWS * tokens - total) / WORKING_ROWS, total / MOST_CALLS)

    def cut(table: CallTable) -> list[CallTable]:
        rows = weighted_rows(table)
        count = max(1, math.ceil(rows[-1] / most))
        cuts = [int(np.abs(rows - rows[-1] * i / count).argmin()) for i in range(count + 1)]
        return [table.part(begin, end) for begin, end in pairwise(cuts) if begin < end]

    return [[(part, causal) for table, causal in tables for part in cut(table)] for tables in rounds]


def weighted_rows(table: CallTable) -> IntArray:
    """Sum the weighted rows of the tasks before each, and of all; see ``MOST_ROWS``."""
    return 2 * table.cu_q.astype(np.int64) + table.cu_k


def lie_in_order(rows: IntArray) -> bool:
    """Tell whether rows [n] follow one after the other, so that a call can read local ones in place."""
    return bool(rows.size) and np.array_equal(rows, np.arange(rows[0], rows[0] + rows.size))
