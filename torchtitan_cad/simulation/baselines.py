"""Systems without CAD: equal chunks, variable-length packing with per-document context parallelism, and perfection.

The first two do one thing after the other, so their times are sums.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.simulation.costs import Costs
from torchtitan_cad.simulation.memory import Memory, in_flight, states, stock_attention, token_bytes
from torchtitan_cad.simulation.pipeline import one_f_one_b
from torchtitan_cad.simulation.step import Outcome, Step


@dataclass(frozen=True, eq=False)
class Microbatches:
    """Seconds of a stage: [replicas, microbatches] each, of the slowest rank of a replica.

    Attributes:
        tokens: of one rank.
        attention: seconds of one layer, [2, replicas, microbatches], forward and backward (with repeats).
        gathers: seconds of one layer's exchange, likewise.
        num_bytes: gathered by all ranks of the stage, in all layers of the step.
    """

    tokens: FloatArray
    attention: FloatArray
    gathers: FloatArray
    num_bytes: float = 0.0


def in_sequence(step: Step, work: Microbatches, memory: Memory, cp: int) -> Outcome:
    """Return the step's time by parts."""
    even = step.even("1F1B", 1.0)
    ideal = even.total - even.synchronisation
    balanced = _seconds(step, work, gathers=False)
    full = _seconds(step, work, gathers=True)
    parts = replace(even.unbalanced(balanced - ideal), exchange=full - balanced)
    num_bytes = work.num_bytes * step.costs.cluster.tp
    return Outcome(parts, step.named(cp), memory, num_bytes, num_bytes / (step.ranks * step.costs.cluster.tp))


def _seconds(step: Step, work: Microbatches, gathers: bool) -> float:
    times = np.zeros((2, *work.tokens.shape))
    for direction, forward in enumerate((True, False)):
        one = step.work(forward, 1.0, 1.0)  # of one token, and of none: latencies do not grow with tokens
        none = step.work(forward, 1.0, 0.0)
        times[direction] = none + (one - none) * work.tokens
    per_layer = work.attention + (work.gathers if gathers else 0.0)
    times += step.layers * per_layer
    if step.lockstep:
        return float(times.sum(axis=0).max(axis=0).sum())
    return max(one_f_one_b(step.pp, *times[:, replica].tolist()) for replica in range(times.shape[1]))


def perfect(step: Step) -> Outcome:
    """Balance everything and exchange nothing for attention; TP and parameters as everywhere."""
    costs, microbatches = step.costs, step.split.microbatches
    memory = Memory(
        states=states(costs, step.ranks, step.pp),
        activations=step.tokens * token_bytes(costs, step.layers, step.pp, min(step.pp, microbatches)),
        attention=stock_attention(costs, step.tokens, step.tokens, 1),
    )
    named = {"pp": step.pp, "microbatches": microbatches, "checkpointing": costs.model.checkpointing}
    return Outcome(step.even("CAD1F1B", step.tp_share(2)), named, memory)


def packed(step: Step) -> Outcome:
    """Divide tokens into equal chunks. Rows that ranks share are dealt out in pairs of an early and a late chunk, as in
    torchtitan's context parallelism, and their keys gathered.
    """
    costs, split = step.costs, step.split
    shape = (split.ranks // split.cp, split.microbatches)
    attention, gathers = np.zeros((2, *shape)), np.zeros((2, *shape))
    tokens = step.tokens * split.cp
    for microbatch in range(split.microbatches):
        for replica, rows in enumerate(split.rows(step.batch, microbatch)):
            attention[:, replica, microbatch] = sum(_slowest(costs, row, split.cp) for row in rows)
    for direction, forward in enumerate((True, False)):
        gathers[direction] = costs.gather_seconds(np.full(shape, tokens), split.cp, forward)
    if costs.repeats_forward:
        attention[1] += attention[0]
        gathers[1] += gathers[0]
    flying = in_flight("1F1B", step.pp, split.microbatches)
    memory = Memory(
        states=states(costs, step.ranks, step.pp),
        activations=step.tokens * token_bytes(costs, step.layers, step.pp, flying),
        gathered=tokens * costs.shape.kv_bytes if split.cp > 1 else 0.0,
        attention=stock_attention(costs, step.tokens, tokens, _most_documents(step)),
    )
    work = Microbatches(np.full(shape, step.tokens), attention, gathers, _gathered_bytes(step, tokens, split.cp))
    return in_sequence(step, work, memory, split.cp)


def _most_documents(step: Step) -> int:
    """Count the documents of the rows that a group of ranks shares in a microbatch, at most."""
    every = (step.split.rows(step.batch, microbatch) for microbatch in range(step.split.microbatches))
    return max(sum(map(len, rows)) for groups in every for rows in groups)


def _slowest(costs: Costs, lengths: IntArray, cp: int) -> FloatArray:
    """[2] seconds of one layer's attention of a row, of the slowest of ``cp`` ranks: forward, backward."""
    if cp == 1:
        return np.array([costs.document_seconds(lengths, forward).sum() for forward in (True, False)])
    ends = np.cumsum(lengths)
    cuts = np.union1d(ends, np.arange(1, 2 * cp + 1) * (int(ends[-1]) // (2 * cp)))
    begin = np.append(0, cuts[:-1])
    doc = np.searchsorted(ends, begin, side="right")
    chunk = begin // (int(ends[-1]) // (2 * cp))
    rank = np.minimum(chunk, 2 * cp - 1 - chunk)
    first = (ends - lengths)[doc]
    slowest = []
    for forward in (True, False):
        until, before = (costs.document_seconds(at - first, forward) for at in (cuts, begin))
        slowest.append(np.bincount(rank, weights=until - before, minlength=cp).max())
    return np.array(slowest)


def _gathered_bytes(step: Step, tokens: float, cp: int, keep: bool = False) -> float:
    """Count the bytes of a stage's ranks, in all layers of the step, where groups of ``cp`` gather ``tokens`` each."""
    costs, repeats = step.costs, 2 if step.costs.repeats_forward else 1
    into_rank = repeats * costs.gathered_bytes(tokens, cp, True) + costs.gathered_bytes(tokens, cp, False, keep)
    return step.ranks * step.split.microbatches * into_rank * step.layers * step.pp


def packing_cp(step: Step) -> Outcome | None:
    """Deal documents to microbatches of equal work under a cap on tokens, and divide each over ``cp`` ranks.

    Every rank gets an early and a late part of a document, so the ranks of a replica are equal; documents too short
    for parts of a tile stay whole and are taken to spread evenly, both in favour of this system. Keys and values are
    gathered again in backward, or with ``backward = "keep"`` kept by all layers. None if it does not fit: no cap within
    the memory leaves room for all documents.
    """
    costs, pp, ranks, cp, microbatches = step.costs, step.pp, step.ranks, step.split.cp, step.split.microbatches
    flying = in_flight("1F1B", pp, microbatches)
    fixed = states(costs, ranks, pp)
    keep = costs.settings.backward == "keep"
    key_bytes = costs.shape.kv_bytes * (step.layers * flying if keep and not costs.repeats_forward else 1)
    per_token = token_bytes(costs, step.layers, pp, flying) + (key_bytes * cp if cp > 1 else 0.0)
    per_token += stock_attention(costs, 1, cp, 0)
    cap = (costs.cluster.memory - fixed) / per_token * cp
    lengths = step.batch.lengths
    replicas = ranks // cp
    divided, tile = lengths >= 2 * cp * costs.models[0].granularity, costs.models[0].granularity
    rows = np.where(divided & (cp > 1), 2 * cp * np.ceil(lengths / (2 * cp * tile)), np.ceil(lengths / tile))
    padding = rows / np.ceil(lengths / tile)
    attention = np.stack([costs.document_seconds(lengths, f) * padding / cp for f in (True, False)])
    if costs.repeats_forward:
        attention[1] += attention[0]
    gather = (divided & (cp > 1)) * lengths
    one = sum(step.work(f, 1.0, 1.0) - step.work(f, 1.0, 0.0) for f in (True, False))
    bins = _deal(step.layers * attention.sum(axis=0) + one * lengths / cp, lengths, replicas * microbatches, cap)
    if bins is None:
        return None
    columns = np.stack([lengths / cp, *attention, gather, np.ones(len(lengths))])
    sums: FloatArray = np.stack(
        [np.bincount(bins, weights=column, minlength=replicas * microbatches) for column in columns]
    )
    sums = sums[:, np.argsort(-(one * sums[0] + step.layers * (sums[1] + sums[2])), kind="stable")]
    dealt = sums.reshape(5, microbatches, replicas)  # equal ones side by side
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]  # and heavier ones to each replica in turn
    tokens, forward, backward, gathered, documents = dealt.transpose(0, 2, 1)
    gathers = np.stack([costs.gather_seconds(gathered, cp, f, keep) for f in (True, False)])
    if costs.repeats_forward:
        gathers[1] += gathers[0]
    most = float(tokens.max())
    memory = Memory(
        states=fixed,
        activations=most * token_bytes(costs, step.layers, pp, flying),
        gathered=float(gathered.max()) * key_bytes,
        attention=stock_attention(costs, most, (tokens + gathered * (1 - 1 / cp)).max(), int(documents.max())),
    )
    if memory.total > costs.cluster.memory:
        return None
    num_bytes = _gathered_bytes(step, float(gathered.mean()), cp, keep)
    work = Microbatches(tokens, np.stack([forward, backward]), gathers, num_bytes)
    outcome = in_sequence(step, work, memory, cp)
    if keep:
        outcome.configuration["backward"] = "keep"
    return outcome


def _deal(work: FloatArray, tokens: IntArray, bins: int, cap: float) -> IntArray | None:
    """int64 [documents]: the bin of each, heaviest first to the bin with the least work that has room."""
    heap = [(0.0, number) for number in range(bins)]
    room = np.full(bins, float(cap))
    dealt = np.zeros(len(work), dtype=np.int64)
    for document in np.argsort(-work, kind="stable").tolist():
        full = []
        while heap and room[heap[0][1]] < tokens[document]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number = heapq.heappop(heap)
        dealt[document] = number
        room[number] -= tokens[document]
        for entry in (*full, (load + float(work[document]), number)):
            heapq.heappush(heap, entry)
    return dealt
