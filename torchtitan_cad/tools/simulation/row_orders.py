# SPDX-License-Identifier: BSD-3-Clause
"""Reorder whole rows over the ranks and microbatches of an optimizer step, for which nothing is exchanged."""

from __future__ import annotations

import heapq

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray


def row_orders(work: FloatArray, ranks: int, microbatches: int) -> list[IntArray]:
    """Return ways to distribute a step's rows, of which the fastest depends on where ranks wait for each other.

    Ranks and microbatches have equal work; or the heaviest rows go to the first microbatch, then ranks are equal in
    each; or ranks have equal work, then their microbatches.

    Args:
        work: [rows] attention of every row, in any unit; as many rows go to every rank and microbatch.

    Returns:
        Numbers of rows, [ranks, microbatches, rows of each].
    """
    rows = np.arange(len(work))
    heaviest = np.argsort(-work, kind="stable").reshape(microbatches, -1)
    return [
        equal_work(work, rows, ranks * microbatches).reshape(ranks, microbatches, -1),
        np.stack([equal_work(work, each, ranks) for each in heaviest], axis=1),
        np.stack(
            [
                equal_work(work, each, microbatches)
                for each in equal_work(work, rows, ranks)
            ]
        ),
    ]


def equal_work(work: FloatArray, rows: IntArray, parts: int) -> IntArray:
    """Distribute rows to parts, as many to each: the heaviest first, to the part of least work. [parts, rows of each].

    Then the part of most work swaps a row with another part, as long as both have less than it had.
    """
    size = len(rows) // parts
    heap, lists = (
        [(0.0, part) for part in range(parts)],
        [list[int]() for _ in range(parts)],
    )
    for row in rows[np.argsort(-work[rows], kind="stable")].tolist():
        load, part = heapq.heappop(heap)
        lists[part].append(row)
        if len(lists[part]) < size:
            heapq.heappush(heap, (load + float(work[row]), part))
    distributed = np.array(lists, dtype=np.int64)
    for _ in range(len(rows)):
        loads = work[distributed].sum(axis=1)
        heavy = int(loads.argmax())
        # [row of the heaviest part, other part, its row]
        saved = work[distributed[heavy], None, None] - work[distributed]
        most = np.maximum(loads[heavy] - saved, loads[:, None] + saved)
        mine, part, theirs = np.unravel_index(most.argmin(), most.shape)
        if most[mine, part, theirs] >= loads[heavy] * (1 - 1e-9):
            break
        distributed[heavy, mine], distributed[part, theirs] = (
            distributed[part, theirs],
            distributed[heavy, mine],
        )
    return distributed


def distribute_under_cap(
    work: FloatArray, tokens: IntArray, parts: int, cap: float
) -> IntArray | None:
    """Distribute documents to parts of at most ``cap`` tokens: the heaviest first, to the part of least work that has
    capacity.

    Returns int64 [documents], the part of each; None where no part has capacity.
    """
    heap = [(0.0, number) for number in range(parts)]
    capacity = np.full(parts, float(cap))
    distributed = np.zeros(len(work), dtype=np.int64)
    for document in np.argsort(-work, kind="stable").tolist():
        full = []
        while heap and capacity[heap[0][1]] < tokens[document]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number = heapq.heappop(heap)
        distributed[document] = number
        capacity[number] -= tokens[document]
        for entry in (*full, (load + float(work[document]), number)):
            heapq.heappush(heap, entry)
    return distributed
