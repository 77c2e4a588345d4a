# SPDX-License-Identifier: BSD-3-Clause
"""Reorder whole rows over the ranks and microbatches of an optimizer step, for which nothing is exchanged."""

import heapq

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray

LEAST_SAVED = 1e-9
"""share of a load by which a swap must lower it"""


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
    of_parts = equal_work(work, rows, ranks * microbatches)
    all_equal = of_parts.reshape(ranks, microbatches, -1)
    by_work = heaviest_first(work).reshape(microbatches, -1)
    of_microbatches = [equal_work(work, group, ranks) for group in by_work]
    rows_of_ranks = equal_work(work, rows, ranks)
    of_ranks = [equal_work(work, group, microbatches) for group in rows_of_ranks]
    return [
        all_equal,
        np.stack(of_microbatches, axis=1),
        np.stack(of_ranks),
    ]


def heaviest_first(work: FloatArray) -> IntArray:
    """Return the order by descending work, of equal ones as they come."""
    return np.argsort(-work, kind="stable")


def equal_work(work: FloatArray, rows: IntArray, parts: int) -> IntArray:
    """Distribute rows to parts, as many to each: the heaviest first, to the part of least work. [parts, rows of each].

    Then the part of most work swaps a row with another part, as long as both have less than it had.
    """
    size = len(rows) // parts
    heap = [(0.0, part) for part in range(parts)]
    lists = [list[int]() for _ in heap]
    order = heaviest_first(work[rows])
    for row in rows[order].tolist():
        load, part = heapq.heappop(heap)
        lists[part].append(row)
        if len(lists[part]) < size:
            load += float(work[row])
            heapq.heappush(heap, (load, part))
    distributed = np.array(lists, dtype=np.int64)
    for _ in range(len(rows)):
        swap = _best_swap(work[distributed])
        if swap is None:
            break
        heavy, heavy_row, part, part_row = swap
        row = distributed[heavy, heavy_row]
        distributed[heavy, heavy_row] = distributed[part, part_row]
        distributed[part, part_row] = row
    return distributed


def _best_swap(work: FloatArray) -> tuple[int, int, int, int] | None:
    """Return the part of most work, its row to give, and the part and its row to take; None if no swap helps.

    ``work`` is that of every row, [parts, rows of each].
    """
    loads = work.sum(axis=1)
    heavy = int(loads.argmax())
    # [row of the heaviest part, other part, its row]
    saved = work[heavy, :, None, None] - work
    gives = loads[heavy] - saved
    takes = loads[:, None] + saved
    most = np.maximum(gives, takes)
    least = loads[heavy] * (1 - LEAST_SAVED)
    if most.min() >= least:
        return None
    best = np.unravel_index(most.argmin(), most.shape)
    heavy_row, part, part_row = map(int, best)
    return heavy, heavy_row, part, part_row


def distribute_under_cap(
    work: FloatArray, tokens: IntArray, sizes: IntArray, cap: float
) -> IntArray | None:
    """Distribute documents to parts of at most ``cap`` tokens a rank: the heaviest first, to the part of least work a
    rank that has capacity. ``sizes`` are the ranks that share a part, int64 [parts].

    Returns int64 [documents], the part of each; None where no part has capacity.
    """
    heap = [(0.0, part) for part in range(len(sizes))]
    capacity = sizes * float(cap)
    distributed = np.zeros(len(work), dtype=np.int64)
    for document in heaviest_first(work).tolist():
        full = []
        while heap:
            number = heap[0][1]
            if capacity[number] >= tokens[document]:
                break
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number = heapq.heappop(heap)
        distributed[document] = number
        capacity[number] -= tokens[document]
        load += float(work[document] / sizes[number])
        full.append((load, number))
        for entry in full:
            heapq.heappush(heap, entry)
    return distributed
