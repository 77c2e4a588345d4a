# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's dynamic context parallelism: a microbatch is divided over as many ranks as its longest document needs."""

from __future__ import annotations

from itertools import product

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.pipeline.one_f_one_b import best_order
from torchtitan_cad.tools.simulation.baselines import (
    add_up,
    gathers,
    packed_documents,
    ring,
    with_documents,
)
from torchtitan_cad.tools.simulation.memory import memory_without_cad
from torchtitan_cad.tools.simulation.row_orders import distribute_under_cap
from torchtitan_cad.tools.simulation.step import Outcome, Step

CAPACITIES = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Tokens that a rank takes at most, over those of the mean rank."""
OF_ONE_DOCUMENT = (0.25, 0.5, 1.0)
"""Tokens of one document that a rank takes at most, over its capacity. Megatron has one limit for both; the pair by
which a step is fastest counts."""
OF_LARGE = ((1.1, 0.5), (2.0, 1.0))
"""The pairs that are tried in large clusters, where each takes long."""


def dynamic_cp(step: Step) -> Outcome | None:
    """Give every long document a group of ranks of its own, and fill all groups with short ones to equal work.

    A group has as many ranks as its longest document needs, a power of two. Its ranks are equal. Keys and values go
    round a ring behind attention, or are gathered before it, whichever is faster, and again in backward. Groups of a
    like size and work run beside each other. None if it does not fit.
    """
    even = memory_without_cad(step, step.tokens, step.tokens, documents=1)
    if even.total > step.costs.cluster.memory:
        return None
    fitting = list[Outcome]()
    limits = list(OF_LARGE)
    if not step.costs.cluster.is_large:
        limits = list(product(CAPACITIES, OF_ONE_DOCUMENT))
    for capacity, share in limits:
        outcome = _with_limits(step, capacity * step.tokens, share)
        if outcome is not None:
            fitting.append(outcome)
    return min(fitting, key=lambda outcome: outcome.seconds, default=None)


def _with_limits(step: Step, capacity: float, share: float) -> Outcome | None:
    """Time the step with at most ``capacity`` tokens a rank, of one document ``share`` of that; None if it does not
    fit.
    """
    lengths = step.batch.lengths
    of_one_document = share * capacity
    sizes = group_sizes(lengths, of_one_document, step.ranks * step.microbatches)
    if sizes[0] > step.ranks:
        return None
    whole = packed_documents(step, 1)[0]
    group_of_document = distribute_under_cap(whole, lengths, sizes, capacity)
    if group_of_document is None:
        return None
    documents = packed_documents(step, sizes[group_of_document])
    of_groups = add_up(documents, group_of_document, len(sizes))
    seconds = of_groups[0]
    placed = side_by_side(sizes, seconds, step.ranks, step.microbatches)
    if placed is None:
        return None
    slowest = seconds[placed].max(axis=0)
    placed = placed[:, best_order(slowest, step.pp)]
    return _fastest_way(step, of_groups[:, placed], sharing=sizes[placed])


def _fastest_way(step: Step, of_ranks: FloatArray, sharing: IntArray) -> Outcome | None:
    """Time the step with keys round a ring, and gathered; None if neither fits.

    Args:
        of_ranks: what ``packed_documents`` of every rank and microbatch add up to, [6, ranks, microbatches].
        sharing: ranks that share documents with each.
    """
    _, tokens, forward, backward, gathered, _ = of_ranks
    attention = np.stack([forward, backward])
    of_others = gathered * (1 - 1 / sharing)
    kv_bytes = step.costs.shape.kv_bytes
    by_ring = with_documents(
        step,
        of_ranks,
        keys=tokens,
        # a ring has the keys of two ranks at a time
        gathered_bytes=2 * (gathered / sharing) * kv_bytes,
        exchange=ring(step, gathered, sharing, attention),
    )
    by_gathers = with_documents(
        step,
        of_ranks,
        keys=tokens + of_others,
        gathered_bytes=gathered * kv_bytes,
        exchange=gathers(step, gathered, sharing),
    )
    fitting = [outcome for outcome in (by_ring, by_gathers) if outcome is not None]
    return min(fitting, key=lambda outcome: outcome.seconds, default=None)


def group_sizes(lengths: IntArray, limit: float, num_ranks: int) -> IntArray:
    """Return the ranks of every group, the largest first: one group for each document above the limit, the longest
    first, as far as there are ranks, ``num_ranks`` in all microbatches; the others are alone.
    """
    long = lengths[lengths > limit]
    longest_first = np.sort(long)[::-1]
    doublings = np.ceil(np.log2(longest_first / limit))
    wanted = 2 ** doublings.astype(np.int64)
    shared = wanted[np.cumsum(wanted) <= num_ranks]
    alone = num_ranks - int(shared.sum())
    ones = np.ones(alone, dtype=np.int64)
    return np.concatenate([shared, ones])


def side_by_side(
    sizes: IntArray, work: FloatArray, ranks: int, microbatches: int
) -> IntArray | None:
    """Lay groups on the ranks of microbatches: the largest first, of one size the busiest, to the first that has room.

    Returns the group of every rank, int64 [ranks, microbatches]; None if one has no room.
    """
    group_of_rank = np.zeros((ranks, microbatches), dtype=np.int64)
    taken = np.zeros(microbatches, dtype=np.int64)
    for group in np.lexsort((-work, -sizes)).tolist():
        size = int(sizes[group])
        has_room = taken + size <= ranks
        if not has_room.any():
            return None
        first = int(has_room.argmax())
        begin = int(taken[first])
        end = begin + size
        group_of_rank[begin:end, first] = group
        taken[first] = end
    return group_of_rank
