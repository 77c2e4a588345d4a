# SPDX-License-Identifier: BSD-3-Clause
"""Systems without CAD: equal chunks, reordered rows, packing with per-document context parallelism, and perfection.

All but the last do one thing after the other, so their times are sums: torchtitan gathers keys before it attends, as
the paper's packing does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.pipeline.one_f_one_b import best_order, one_f_one_b
from torchtitan_cad.tools.simulation.batches import Batch
from torchtitan_cad.tools.simulation.costs import Costs
from torchtitan_cad.tools.simulation.memory import (
    in_flight,
    memory_without_cad,
    states,
    stock_attention,
    token_bytes,
)
from torchtitan_cad.tools.simulation.row_orders import distribute_under_cap, row_orders
from torchtitan_cad.tools.simulation.step import KEPT, Memory, Outcome, Step, both_ways

CAPS = (1.0, 0.98, 0.95, 0.9, 0.8)
"""Shares of the tokens for which packing has memory; many documents in one microbatch take memory, too."""


def _repeated(step: Step, values: FloatArray) -> FloatArray:
    """Add forward to backward, [2, ...], where backward computes whole layers again."""
    if not step.repeats_forward:
        return values
    forward, backward = values
    return np.stack([forward, backward + forward])


@dataclass(frozen=True)
class KeyExchange:
    """Keys and values that ranks of a replica have of each other in the mean layer, and their gradients.

    Attributes:
        seconds: that nothing hides, [2, replicas, microbatches], forward and backward.
        num_bytes: into the mean rank, both ways.
    """

    seconds: FloatArray
    num_bytes: float


def gathers(
    step: Step, tokens: FloatArray, sharing: int | IntArray, keep: bool = False
) -> KeyExchange:
    """Gather keys before attention.

    Args:
        tokens: whose keys the ranks of a replica gather, [replicas, microbatches], for layers that attend in full;
            windows and chunks are taken to need none of other ranks.
        sharing: ranks of a replica that gather.
        keep: backward does not gather them again.
    """
    costs = step.costs
    seconds = both_ways(
        lambda forward: costs.gather_seconds(tokens, sharing, forward, keep)
    )
    num_bytes = both_ways(
        lambda forward: costs.gathered_bytes(tokens, sharing, forward, keep).mean()
    )
    of_both = float(_repeated(step, num_bytes).sum())
    return KeyExchange(step.full_layers * seconds, step.full_layers * of_both)


def ring(
    step: Step, tokens: FloatArray, sharing: IntArray, attention: FloatArray
) -> KeyExchange:
    """Send keys round a ring behind attention, of the mean layer's seconds; the arguments are those of ``gathers``.

    FSDP's traffic is taken not to hold it up, in favour of this system.
    """
    seconds = both_ways(
        lambda forward: step.costs.ring_seconds(tokens, sharing, forward)
    )
    exposed = np.maximum(0.0, step.full_layers * seconds - attention)
    return replace(gathers(step, tokens, sharing), seconds=exposed)


def in_sequence(
    step: Step,
    memory: Memory,
    tokens: FloatArray,
    attention: FloatArray,
    keys: KeyExchange,
    of_ranks: FloatArray | None = None,
) -> Outcome:
    """Return the step's time by parts.

    Args:
        tokens: of the slowest rank of every replica, [replicas, microbatches].
        attention: seconds of the mean layer, [2, replicas, microbatches], forward and backward.
        of_ranks: forward seconds of every rank, [ranks, microbatches]; by default its ranks are as slow as a replica.
    """
    even = step.even("1F1B")
    balanced = _seconds(step, tokens, attention)
    full = _seconds(step, tokens, attention + keys.seconds)
    parts = replace(
        even.unbalanced(balanced - even.total + even.synchronisation),
        exchange=full - balanced,
    )
    exchanges = step.microbatches * step.layers
    exchanged_bytes = keys.num_bytes * step.costs.cluster.ranks * exchanges
    ranks = attention[0] if of_ranks is None else of_ranks
    slowest = ranks.max(axis=0)
    mean = ranks.mean(axis=0)
    # packing may leave a microbatch empty
    ratios = np.ones_like(mean)
    np.divide(slowest, mean, out=ratios, where=mean > 0)
    return Outcome(
        parts,
        memory,
        exchanged_bytes=exchanged_bytes,
        max_over_mean=float(ratios.mean()),
    )


def _seconds(step: Step, tokens: FloatArray, layer: FloatArray) -> float:
    times = step.layers * _repeated(step, layer)
    times += both_ways(
        lambda forward: step.work(forward, 0.0) + step.token_seconds(forward) * tokens
    )
    if step.lockstep:
        slowest = times.sum(axis=0).max(axis=0)
        return float(slowest.sum())
    forward, backward = times
    return one_f_one_b(step.pp, forward.T, backward.T)


def row_gathers(step: Step) -> float:
    """Return the seconds that gathers of whole rows' keys take in a step, between the ranks that share them."""
    cp = step.configuration.cp
    tokens = np.array(step.tokens * cp)
    layer = both_ways(lambda forward: step.costs.gather_seconds(tokens, cp, forward))
    calls = step.layers * step.full_layers * step.microbatches
    return float(calls * _repeated(step, layer).sum())


def perfect(step: Step) -> Outcome:
    """Balance everything and exchange nothing for attention; TP and parameters as everywhere."""
    memory = memory_without_cad(step, step.tokens, step.tokens, documents=1)
    return Outcome(step.even("CAD1F1B"), memory)


def packed(step: Step) -> Outcome:
    """Divide tokens into equal chunks, of rows in the order in which they come. Rows that ranks share are divided into
    pairs of an early and a late chunk, as in torchtitan's context parallelism, and their keys gathered.
    """
    return _in_rows(step, step.row_order, _row_seconds(step))


def reorder(step: Step) -> Outcome:
    """Deal whole rows to other ranks and microbatches, with as many rows in each; all else is as in ``packed``.

    The fastest order counts, of the loader's and ``row_orders``, and in pipelines with the ``best_order`` of each.
    """
    seconds = _row_seconds(step)
    work = _repeated(step, seconds.max(axis=2)).sum(axis=0)
    loaded = step.row_order
    orders = [loaded, *_orders(work.tobytes(), loaded.shape, step.pp)]
    outcomes = [_in_rows(step, order, seconds) for order in orders]
    return min(outcomes, key=lambda outcome: outcome.seconds)


@lru_cache(maxsize=KEPT)
def _orders(
    work_bytes: bytes, shape: tuple[int, int, int], pp: int
) -> tuple[IntArray, ...]:
    """Return the orders to try of rows of this work, float64 [rows], besides the loader's, of this ``shape``.

    Kinds of checkpointing lead to the same work.
    """
    work = np.frombuffer(work_bytes)
    orders = row_orders(work, *shape[:2])
    if pp == 1:
        return tuple(orders)
    loaded = np.arange(len(work)).reshape(shape)
    for order in (loaded, *orders):
        of_microbatches = work[order].sum(axis=(0, 2))
        orders.append(order[:, best_order(of_microbatches, pp)])
    return tuple(orders)


def _row_seconds(step: Step) -> FloatArray:
    """[2, rows, cp] seconds of the mean layer's attention of every row on each of its ranks: forward, backward."""
    cp = step.configuration.cp
    return step.mean_layer(lambda kind: _of_ranks(step.costs, step.batch, kind, cp))


def _in_rows(step: Step, order: IntArray, row_seconds: FloatArray) -> Outcome:
    """Time the step with the rows in this order, of the shape of ``Step.row_order``."""
    cp = step.configuration.cp
    shared_tokens = step.tokens * cp
    gathered = shared_tokens * step.costs.shape.kv_bytes if cp > 1 else 0.0
    of_rows = np.array([len(row) for row in step.batch.rows])
    documents = of_rows[order].sum(axis=2)
    memory = memory_without_cad(
        step,
        tokens=step.tokens,
        keys=shared_tokens,
        documents=int(documents.max()),
        gathered=gathered,
    )
    shape = order.shape[:2]
    # a rank attends to its chunks of all rows of a microbatch
    of_ranks = row_seconds[:, order].sum(axis=3)
    forward = of_ranks[0]
    return in_sequence(
        step,
        memory,
        tokens=np.full(shape, step.tokens),
        attention=of_ranks.max(axis=3),
        keys=gathers(step, np.full(shape, shared_tokens), cp),
        of_ranks=forward.transpose(0, 2, 1).reshape(-1, step.microbatches),
    )


@lru_cache(maxsize=KEPT)
def _of_ranks(costs: Costs, batch: Batch, kind: AttentionKind, cp: int) -> FloatArray:
    """[2, rows, cp] seconds of one layer's attention of every row on each of ``cp`` ranks: forward, backward.

    Rows begin behind each other, and a rank has an early and a late one of a row's ``2 * cp`` chunks.
    """
    lengths = batch.pieces(kind)
    window = kind.shape.window
    ends = np.cumsum(lengths)
    size = batch.row_tokens // (2 * cp)
    chunk_ends = size * np.arange(1, batch.tokens // size + 1)
    cuts = np.sort(np.concatenate([ends, chunk_ends]), kind="stable")
    # as np.union1d, which is slower for sorted arrays
    cuts = cuts[np.diff(cuts, prepend=0) > 0]
    begin = np.append(0, cuts[:-1])
    row, chunk = np.divmod(begin // size, 2 * cp)
    rank = row * cp + np.minimum(chunk, 2 * cp - 1 - chunk)
    starts = ends - lengths
    document = np.searchsorted(ends, begin, side="right")
    first = starts[document]

    def of_ranks(forward: bool) -> FloatArray:
        until = costs.document_seconds(cuts - first, forward, window)
        before = costs.document_seconds(begin - first, forward, window)
        num_ranks = len(batch.rows) * cp
        seconds = np.bincount(rank, weights=until - before, minlength=num_ranks)
        return seconds.astype(np.float64).reshape(-1, cp)

    return both_ways(of_ranks)


def packing_cp(step: Step) -> Outcome | None:
    """Deal documents to microbatches of equal work under a cap on tokens, and divide each over ``cp`` ranks.

    Every rank gets an early and a late part of a document, so the ranks of a replica are equal; documents too short
    for parts of a tile stay whole and are taken to spread evenly, both in favour of this system. Keys and values are
    gathered again in backward, or with ``backward = "keep"`` kept by all layers. None if it does not fit: no cap within
    the memory leaves room for all documents.
    """
    documents = packed_documents(step, step.configuration.cp)
    most = _packed_cap(step)
    for share in CAPS:
        bins = _packed_bins(step, documents, share * most)
        if bins is None:
            return None
        outcome = _packed_outcome(step, bins)
        if outcome is not None:
            return outcome
    return None


def _packed_bins(step: Step, documents: FloatArray, cap: float) -> FloatArray | None:
    """Return what the documents of every microbatch and replica add up to, [6, microbatches, replicas].

    The rows are those of ``packed_documents``. None if no replica has room for some document.
    """
    replicas = step.ranks // step.configuration.cp
    num_bins = replicas * step.microbatches
    sizes = np.ones(num_bins, dtype=np.int64)
    bins = distribute_under_cap(documents[0], step.batch.lengths, sizes, cap)
    if bins is None:
        return None
    sums = add_up(documents, bins, num_bins)
    order = np.argsort(-sums[0], kind="stable")
    heaviest_first = sums[:, order]
    # equal ones side by side
    distributed = heaviest_first.reshape(-1, step.microbatches, replicas)
    # and heavier ones to each replica in turn
    distributed[:, 1::2] = distributed[:, 1::2, ::-1]
    return distributed


def _packed_outcome(step: Step, distributed: FloatArray) -> Outcome | None:
    """Time the step with these bins, as of ``_packed_bins``; None if it does not fit."""
    cp = step.configuration.cp
    seconds = distributed[0].sum(axis=1)
    ordered = distributed[:, best_order(seconds, step.pp)]
    of_replicas = ordered.transpose(0, 2, 1)
    tokens = of_replicas[1]
    gathered = of_replicas[4]
    keep = step.configuration.backward == "keep"
    return with_documents(
        step,
        of_replicas,
        keys=tokens + gathered * (1 - 1 / cp),
        gathered_bytes=gathered * _packed_key_bytes(step),
        exchange=gathers(step, gathered, cp, keep),
    )


def with_documents(
    step: Step,
    documents: FloatArray,
    *,
    keys: FloatArray,
    gathered_bytes: FloatArray,
    exchange: KeyExchange,
) -> Outcome | None:
    """Time the step with documents dealt to replicas or ranks and microbatches; None if it does not fit.

    Args:
        documents: what ``packed_documents`` add up to in each, [6, replicas, microbatches].
        keys: for which each has queries, [replicas, microbatches].
        gathered_bytes: of keys that each has of others, [replicas, microbatches].
    """
    _, tokens, forward, backward, _, counts = documents
    memory = memory_without_cad(
        step,
        tokens=float(tokens.max()),
        keys=float(keys.max()),
        documents=math.ceil(counts.max()),
        gathered=float(gathered_bytes.max()),
    )
    if memory.total > step.costs.cluster.memory:
        return None
    attention = np.stack([forward, backward])
    return in_sequence(step, memory, tokens, attention=attention, keys=exchange)


def add_up(documents: FloatArray, parts: IntArray, num_parts: int) -> FloatArray:
    """Add up what documents, [figures, documents], add to each of some parts, [figures, parts]."""
    rows = [np.bincount(parts, row, num_parts) for row in documents]
    return np.stack(rows)


def _packed_key_bytes(step: Step) -> float:
    """Return the bytes that packing holds per gathered token: of one layer, or of all that keep them."""
    keeps = step.configuration.backward == "keep" and not step.repeats_forward
    layers = step.layers * step.full_layers * in_flight(step) if keeps else 1
    return step.costs.shape.kv_bytes * layers


def _packed_cap(step: Step) -> float:
    """Return the tokens of a microbatch and replica for which packing has memory, less what many documents take."""
    cp = step.configuration.cp
    gathered = _packed_key_bytes(step) * cp if cp > 1 else 0.0
    activations = token_bytes(step, in_flight(step))
    per_token = activations + gathered + stock_attention(step, 1, cp, 0)
    free = step.costs.cluster.memory - states(step)
    return free / per_token * cp


def packed_documents(step: Step, cp: int | IntArray) -> FloatArray:
    """Return what a document adds to a microbatch of packing, [6, documents], on each of its ``cp`` ranks.

    The rows are seconds in all, tokens, seconds of the mean layer's attention forward and backward, tokens whose keys
    are gathered, and how many of its parts a rank has: two of a document that is divided, and of others its share.
    """
    lengths = step.batch.lengths
    tile = step.costs.cost.granularity
    parts = 2 * cp
    of_parts = parts * tile
    shared = np.asarray(cp) > 1
    divided = (lengths >= of_parts) & shared
    tiles = np.ceil(lengths / tile)
    tiles_of_part = np.ceil(lengths / of_parts)
    padded = np.where(divided, parts * tiles_of_part, tiles)
    padding = padded / tiles
    attention = both_ways(step.document_attention) * padding / cp
    token_seconds = both_ways(step.token_seconds).sum()
    seconds = step.layers * _repeated(step, attention).sum(axis=0)
    seconds += token_seconds * lengths / cp
    return np.stack(
        [
            seconds,
            lengths / cp,
            *attention,
            divided * lengths,
            np.where(divided, 2.0, 1 / np.asarray(cp)),
        ]
    )
