# SPDX-License-Identifier: BSD-3-Clause
"""Systems without CAD: equal chunks, reordered rows, packing with per-document context parallelism, and perfection.

All but the last do one thing after the other, so their times are sums.
"""

from __future__ import annotations

from dataclasses import replace
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
from torchtitan_cad.tools.simulation.step import KEPT, Memory, Outcome, Step


def _repeated(step: Step, values: FloatArray) -> FloatArray:
    """Add forward to backward, [2, ...], where backward computes whole layers again."""
    return (
        values + np.stack([np.zeros_like(values[0]), values[0]])
        if step.repeats_forward
        else values
    )


def in_sequence(
    step: Step,
    memory: Memory,
    tokens: FloatArray,
    attention: FloatArray,
    gathered: FloatArray,
    keep: bool = False,
) -> Outcome:
    """Return the step's time by parts.

    Args:
        tokens: of the slowest rank of every replica, [replicas, microbatches].
        attention: seconds of the mean layer, [2, replicas, microbatches], forward and backward.
        gathered: tokens whose keys the ranks of a replica gather, [replicas, microbatches], for layers that attend in
            full; windows and chunks are taken to need none of other ranks.
        keep: backward does not gather them again.
    """
    costs, cp = step.costs, step.configuration.cp
    even = step.even("1F1B")
    gathers = step.full_layers * np.stack(
        [costs.gather_seconds(gathered, cp, way, keep) for way in (True, False)]
    )
    balanced, full = (
        _seconds(step, tokens, seconds) for seconds in (attention, attention + gathers)
    )
    parts = replace(
        even.unbalanced(balanced - even.total + even.synchronisation),
        exchange=full - balanced,
    )
    num_bytes = np.array(
        [
            costs.gathered_bytes(gathered.mean(), cp, forward, keep)
            for forward in (True, False)
        ]
    )
    into_rank = step.full_layers * float(_repeated(step, num_bytes).sum())
    exchanged_bytes = into_rank * costs.cluster.ranks * step.microbatches * step.layers
    slowest, mean = attention[0].max(axis=0), attention[0].mean(axis=0)
    # packing may leave a microbatch empty
    ratios = np.divide(slowest, mean, out=np.ones_like(mean), where=mean > 0)
    return Outcome(parts, memory, exchanged_bytes, float(ratios.mean()))


def _seconds(step: Step, tokens: FloatArray, layer: FloatArray) -> float:
    times = step.layers * _repeated(step, layer)
    for direction, forward in enumerate((True, False)):
        # latencies do not grow with tokens
        one, none = (
            step.work(forward, 1.0),
            step.work(forward, 0.0),
        )
        times[direction] += none + (one - none) * tokens
    if step.lockstep:
        return float(times.sum(axis=0).max(axis=0).sum())
    return one_f_one_b(step.pp, times[0].T, times[1].T)


def row_gathers(step: Step) -> float:
    """Return the seconds that gathers of whole rows' keys take in a step, between the ranks that share them."""
    costs, cp = step.costs, step.configuration.cp
    tokens = np.array(step.tokens * cp)
    layer = np.stack(
        [costs.gather_seconds(tokens, cp, forward) for forward in (True, False)]
    )
    return float(
        step.layers
        * step.full_layers
        * step.microbatches
        * _repeated(step, layer).sum()
    )


def perfect(step: Step) -> Outcome:
    """Balance everything and exchange nothing for attention; TP and parameters as everywhere."""
    return Outcome(
        step.even("CAD1F1B"), memory_without_cad(step, step.tokens, step.tokens, 1)
    )


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
    work, loaded = _repeated(step, seconds).sum(axis=0), step.row_order
    orders = [loaded, *_orders(work.tobytes(), loaded.shape, step.pp)]
    return min(
        (_in_rows(step, order, seconds) for order in orders),
        key=lambda outcome: outcome.seconds,
    )


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
    orders = [loaded, *orders]
    return tuple(
        orders[1:]
        + [each[:, best_order(work[each].sum(axis=(0, 2)), pp)] for each in orders]
    )


def _row_seconds(step: Step) -> FloatArray:
    """[2, rows] seconds of the mean layer's attention of every row, of the slowest of its ranks: forward, backward."""
    return step.mean_layer(
        lambda kind: _slowest(step.costs, step.batch, kind, step.configuration.cp)
    )


def _in_rows(step: Step, order: IntArray, row_seconds: FloatArray) -> Outcome:
    """Time the step with the rows in this order, of the shape of ``Step.row_order``."""
    costs, cp, tokens = (
        step.costs,
        step.configuration.cp,
        step.tokens * step.configuration.cp,
    )
    documents = np.array([len(row) for row in step.batch.rows])[order].sum(axis=2).max()
    gathered = tokens * costs.shape.kv_bytes if cp > 1 else 0.0
    memory = memory_without_cad(step, step.tokens, tokens, int(documents), gathered)
    shape, attention = order.shape[:2], row_seconds[:, order].sum(axis=3)
    return in_sequence(
        step, memory, np.full(shape, step.tokens), attention, np.full(shape, tokens)
    )


@lru_cache(maxsize=KEPT)
def _slowest(costs: Costs, batch: Batch, kind: AttentionKind, cp: int) -> FloatArray:
    """[2, rows] seconds of one layer's attention of every row, of the slowest of ``cp`` ranks: forward, backward.

    Rows begin behind each other, and a rank has an early and a late one of a row's ``2 * cp`` chunks.
    """
    lengths, window = batch.pieces(kind), kind.shape.window
    ends = np.cumsum(lengths)
    if cp == 1:
        return _of_whole_rows(costs, batch, kind)
    size = batch.row_tokens // (2 * cp)
    cuts = np.sort(
        np.concatenate([ends, size * np.arange(1, batch.tokens // size + 1)]),
        kind="stable",
    )
    # as np.union1d, which is slower for sorted arrays
    cuts = cuts[np.diff(cuts, prepend=0) > 0]
    begin = np.append(0, cuts[:-1])
    doc = np.searchsorted(ends, begin, side="right")
    row, chunk = np.divmod(begin // size, 2 * cp)
    rank = row * cp + np.minimum(chunk, 2 * cp - 1 - chunk)
    first = (ends - lengths)[doc]

    def slowest(forward: bool) -> FloatArray:
        until = costs.document_seconds(cuts - first, forward, window)
        before = costs.document_seconds(begin - first, forward, window)
        of_ranks = np.bincount(
            rank, weights=until - before, minlength=len(batch.rows) * cp
        )
        return of_ranks.reshape(-1, cp).max(axis=1)

    return np.stack([slowest(True), slowest(False)])


def _of_whole_rows(costs: Costs, batch: Batch, kind: AttentionKind) -> FloatArray:
    """[2, rows] seconds of one layer's attention of rows that no ranks share."""
    lengths = batch.pieces(kind)
    seconds = np.stack(
        [
            costs.document_seconds(lengths, forward, kind.shape.window)
            for forward in (True, False)
        ]
    )
    row_ends = batch.row_tokens * np.arange(1, len(batch.rows))
    rows = np.searchsorted(np.cumsum(lengths), row_ends, side="right")
    return np.stack(
        [part.sum(axis=1) for part in np.split(seconds, rows, axis=1)], axis=1
    )


def packing_cp(step: Step) -> Outcome | None:
    """Deal documents to microbatches of equal work under a cap on tokens, and divide each over ``cp`` ranks.

    Every rank gets an early and a late part of a document, so the ranks of a replica are equal; documents too short
    for parts of a tile stay whole and are taken to spread evenly, both in favour of this system. Keys and values are
    gathered again in backward, or with ``backward = "keep"`` kept by all layers. None if it does not fit: no cap within
    the memory leaves room for all documents.
    """
    cp = step.configuration.cp
    replicas = step.ranks // cp
    num_bins = replicas * step.microbatches
    key_bytes = _packed_key_bytes(step)
    documents = _packed_documents(step)
    cap = _packed_cap(step, key_bytes)
    bins = distribute_under_cap(documents[0], step.batch.lengths, num_bins, cap)
    if bins is None:
        return None
    sums: FloatArray = np.stack(
        [np.bincount(bins, weights=row, minlength=num_bins) for row in documents]
    )
    heaviest_first = sums[:, np.argsort(-sums[0], kind="stable")]
    # equal ones side by side
    distributed = heaviest_first.reshape(-1, step.microbatches, replicas)
    # and heavier ones to each replica in turn
    distributed[:, 1::2] = distributed[:, 1::2, ::-1]
    ordered = distributed[:, best_order(distributed[0].sum(axis=1), step.pp)]
    _, tokens, forward, backward, gathered, counts = ordered.transpose(0, 2, 1)
    most_keys = (tokens + gathered * (1 - 1 / cp)).max()
    memory = memory_without_cad(
        step,
        tokens=float(tokens.max()),
        keys=most_keys,
        documents=int(counts.max()),
        gathered=float(gathered.max()) * key_bytes,
    )
    if memory.total > step.costs.cluster.memory:
        return None
    keep = step.configuration.backward == "keep"
    return in_sequence(
        step,
        memory,
        tokens,
        attention=np.stack([forward, backward]),
        gathered=gathered,
        keep=keep,
    )


def _packed_key_bytes(step: Step) -> float:
    """Return the bytes that packing holds per gathered token: of one layer, or of all that keep them."""
    keeps = step.configuration.backward == "keep" and not step.repeats_forward
    layers = step.layers * step.full_layers * in_flight(step) if keeps else 1
    return step.costs.shape.kv_bytes * layers


def _packed_cap(step: Step, key_bytes: float) -> float:
    """Return the tokens of a microbatch and replica for which packing has memory."""
    cp = step.configuration.cp
    gathered = key_bytes * cp if cp > 1 else 0.0
    per_token = (
        token_bytes(step, in_flight(step)) + gathered + stock_attention(step, 1, cp, 0)
    )
    return (step.costs.cluster.memory - states(step)) / per_token * cp


def _packed_documents(step: Step) -> FloatArray:
    """Return what a document adds to a microbatch of packing, [6, documents], on each of ``cp`` ranks.

    The rows are seconds in all, tokens, seconds of the mean layer's attention forward and backward, tokens whose keys
    are gathered, and 1.
    """
    cp, lengths = step.configuration.cp, step.batch.lengths
    tile = step.costs.models[0].granularity
    divided = (lengths >= 2 * cp * tile) & (cp > 1)
    tiles = np.ceil(lengths / tile)
    padded = np.where(divided, 2 * cp * np.ceil(lengths / (2 * cp * tile)), tiles)
    padding = padded / tiles
    attention = np.stack(
        [step.document_attention(forward) * padding / cp for forward in (True, False)]
    )
    token_seconds = sum(
        step.work(forward, 1.0) - step.work(forward, 0.0) for forward in (True, False)
    )
    seconds = (
        step.layers * _repeated(step, attention).sum(axis=0)
        + token_seconds * lengths / cp
    )
    return np.stack(
        [seconds, lengths / cp, *attention, divided * lengths, np.ones(len(lengths))]
    )
