"""Device memory that core attention of a layer takes by a plan, on the rank that needs most.

Working memory is what one pass allocates and frees, its results included, its inputs (which stock attention has too)
not. With FlashAttention-2 as torch ships it, in bytes of rows: Q and K of one query and one key row (K stands for V as
well), A and B the same in fp32, L the log-sum-exp. Of a rank, n and m are the local queries and keys, r and s the
received ones. Of a kernel call q and k are the rows, c and d those of them that do not lie in place, t the tasks:

    copies       forward c Q + 2 d K      backward c (2 Q + 2 L) + 2 d K
    results      forward q (Q + L)        backward q Q + 2 k K
    temporary    forward 0                backward q (Q + L) + (q + 128 t) (A + L) + 2 k x query heads x head size

The last are the surrogate of O with its statistics, dQ in fp32 with its row sums and, if query heads share keys, dK
and dV of every query head. While calls run, the largest first (``calls.py``), a pass holds the results so far and the
copies and temporary memory of one call; backward also the row sums n L, until the last call has copies of them. Then
results are sent home, r (Q + L), or r Q and 2 s K, and combined at home with those of all calls into n (Q + L), or n Q
and then 2 m K. If they return in several trips, A and B take the place of Q and K there until the last. If calls have
many results (``combine_early``), these become n (A + L), or n A and 2 m B, before any return. With ``keep`` the
received Q, K and V, r Q + 2 s K, are there in both passes. One call over all local rows as they lie has nothing to
combine. Stock attention has the results and the temporary memory of one call, but no surrogate. Exchanges take no other
memory with symmetric memory; with all-to-alls the messages come on top. Rows to serve that come in several trips are
copied out of the receive buffers and held until the last call has its copies: forward r Q + 2 s K, backward
r (2 Q + 2 L) + 2 s K.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.exchange.calls import bounded, combine_early, lie_in_order, weighted_rows
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, Trips, buffer_bytes
from torchtitan_cad.planning.exchange.tables import CallTable, RankExchange
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.shape import AttentionShape, RowBytes
from torchtitan_cad.planning.plan import Plan

_FP32_BYTES = 4
_TASK_ROWS = 128
"""Rows that FlashAttention-2 adds to every task in its fp32 dQ."""


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes: of all receive buffers in symmetric memory, and of the working memory of a layer's passes.

    ``stock_...`` are those of varlen attention, without CAD, over the tokens of the rank that has the most, of all
    nano-batches at once: without CAD a microbatch is not divided.
    """

    buffers: int
    forward: int
    backward: int
    stock_forward: int
    stock_backward: int


def attention_memory(
    plans: Sequence[Plan],
    *,
    keep: bool = False,
    receive_buffer_gb: float | None = None,
    ranks: Iterable[int] | None = None,
) -> AttentionMemory:
    """Estimate the memory of the rank that needs most, with ``plans`` of a microbatch's nano-batches.

    Passes are those of one layer. Of two nano-batches one computes while what the other has computed travels, which
    comes on top.

    Args:
        keep: servers keep received Q, K and V for backward.
        receive_buffer_gb: see ``messages.buffer_bytes``.
        ranks: to look at; by default all.

    Raises:
        ValueError: a rank has more rows than its tables may have, see ``Plan.exchange``.
    """
    stock_forward, stock_backward = _stock(plans)
    each = buffer_bytes(receive_buffer_gb, len(plans))
    looked_at = range(plans[0].layout.num_ranks) if ranks is None else ranks
    found = [[working_memory(plan, rank, each, keep=keep) for plan in plans] for rank in looked_at]
    return AttentionMemory(
        buffers=len(plans) * BUFFERS_PER_CALL * each,
        forward=max(_taking_turns([passes.forward for passes in nanos]) for nanos in found),
        backward=max(_taking_turns([passes.backward for passes in nanos]) for nanos in found),
        stock_forward=stock_forward,
        stock_backward=stock_backward,
    )


@dataclass(frozen=True)
class _Bytes:
    """Of one row: see the module's docstring."""

    q: int
    k: int
    a: int
    b: int
    lse: int
    expanded: int

    @classmethod
    def of(cls, shape: AttentionShape) -> _Bytes:
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        fp32, rows = max(_FP32_BYTES, shape.dtype_bytes), RowBytes.of(shape)
        expanded = 2 * rows.forward_queries if shape.num_heads > shape.num_kv_heads else 0
        statistic = rows.outputs - rows.forward_queries
        return cls(rows.forward_queries, rows.keys // 2, queries * fp32, keys * fp32, statistic, expanded)

    def surrogate(self, queries: int) -> int:
        return queries * (self.q + self.lse)

    def temporary(self, queries: int, keys: int, tasks: int) -> int:
        """Bytes that FlashAttention-2 allocates and frees in a backward call."""
        return (queries + _TASK_ROWS * tasks) * (self.a + self.lse) + keys * self.expanded


class Pass(NamedTuple):
    """Bytes of one pass of a layer on a rank: at most, and, at most, while what is computed travels."""

    most: int
    travelling: int


class Passes(NamedTuple):
    """Those of one nano-batch."""

    forward: Pass
    backward: Pass


def _taking_turns(nano_batches: list[Pass]) -> int:
    """Return the bytes, at most, while each computes and what the others have computed travels."""
    travelling = sum(each.travelling for each in nano_batches)
    return max(each.most + travelling - each.travelling for each in nano_batches)


def working_memory(plan: Plan, rank: int, buffer_bytes: int, *, keep: bool = False) -> Passes:
    """Return the bytes of forward and of backward on one rank, with receive buffers of ``buffer_bytes``.

    Raises ValueError as ``Plan.exchange``.
    """
    exchange, size = plan.exchange(rank), _Bytes.of(plan.shape)
    n, m = exchange.queries.num_local, exchange.keys.num_local
    r, s = exchange.queries.num_received, exchange.keys.num_received
    row_bytes = RowBytes.of(plan.shape, keep=keep)
    trips = exchange.most.trips(row_bytes, buffer_bytes)
    q_trips, k_trips = len(trips.queries_home), len(trips.keys_home)
    landed_forward, landed_backward = _landed(row_bytes, r, s, trips, keep=keep)
    calls = _calls(exchange)
    forward = backward = outs = dq = dkv = q_rows = kv_rows = 0
    for table in calls:
        q, k = len(table.q_rows), len(table.kv_rows)
        c, d = _num_copied(table.q_rows, n), _num_copied(table.kv_rows, m)
        copied, copied_backward = c * size.q + 2 * d * size.k, 2 * c * (size.q + size.lse) + 2 * d * size.k
        row_sums = n * size.lse
        forward = max(forward, outs + landed_forward + copied)
        backward = max(backward, row_sums + dq + dkv + landed_backward + copied_backward)
        if table is calls[-1]:  # nothing reads the rows any more that are copied
            landed_forward = landed_backward = 0
            row_sums = 0 if c else row_sums
        q_rows, kv_rows = q_rows + q, kv_rows + k
        outs, dq, dkv = q_rows * (size.q + size.lse), q_rows * size.q, 2 * kv_rows * size.k
        forward = max(forward, outs + landed_forward + copied)
        temporary = size.surrogate(q) + size.temporary(q, k, table.num_tasks)
        backward = max(backward, row_sums + dq + dkv + landed_backward + copied_backward + temporary)
    travel_forward, travel_backward = outs, dq + dkv
    is_plain = not plan.moves_rows and [(len(x.q_rows), len(x.kv_rows)) for x in calls] == [(n, m)]
    if not is_plain:
        served_q, served_kv = r * size.q, 2 * s * size.k
        if plan.moves_rows and combine_early(q_rows, n):
            forward = max(forward, outs + served_q + r * size.lse + n * (size.a + size.lse))
            backward = max(backward, dq + dkv + served_q + n * size.a)
            outs, dq = n * (size.a + size.lse), n * size.a
        if plan.moves_rows and combine_early(kv_rows, m):
            backward = max(backward, dq + dkv + served_q + served_kv + 2 * m * size.b)
            dkv = 2 * m * size.b
        out = _combined(outs, n, size.q + size.lse, size.a + size.lse, q_trips)
        forward = max(forward, served_q + r * size.lse + out)
        queries = _combined(dq, n, size.q, size.a, q_trips)
        keys = _combined(dkv, m, 2 * size.k, 2 * size.b, k_trips)
        backward = max(backward, served_q + served_kv + dkv + queries, served_kv + n * size.q + keys)
        travel_forward = served_q + r * size.lse + _so_far(outs, n, size.a + size.lse, q_trips)
        travel_backward = served_q + _so_far(dq, n, size.a, q_trips)
        travel_backward += served_kv + _so_far(dkv, m, 2 * size.b, k_trips)
    kept = keep * (r * size.q + 2 * s * size.k)
    return Passes(Pass(forward + kept, travel_forward + kept), Pass(backward + kept, travel_backward + kept))


def _landed(row_bytes: RowBytes, queries: int, keys: int, trips: Trips, *, keep: bool) -> tuple[int, int]:
    """Bytes of received rows that are copied out of the receive buffers, forward and backward: those of several trips.

    What servers keep counts by itself.
    """
    is_single = len(trips.queries_out) == len(trips.keys_out) == 1
    forward = 0 if is_single or keep else queries * row_bytes.forward_queries + keys * row_bytes.keys
    if keep:
        return 0, (len(trips.queries_out) > 1) * queries * row_bytes.backward_queries
    return forward, 0 if is_single else queries * row_bytes.backward_queries + keys * row_bytes.keys


def _calls(exchange: RankExchange) -> list[CallTable]:
    """Tables of the kernel calls, in the order in which they run."""
    used = [(exchange.causal, True), (exchange.full, False)]
    used = [call for call in used if call[0].num_tasks]
    ((*calls,),) = bounded([used], exchange.keys.num_local, split_keys=exchange.split_keys)
    return sorted((table for table, _ in calls), key=lambda table: -int(weighted_rows(table)[-1]))


def _num_copied(rows: IntArray, num_local: int) -> int:
    return 0 if lie_in_order(rows) and rows[-1] < num_local else len(rows)


def _so_far(results: int, num_rows: int, wide: int, trips: int) -> int:
    """Return the bytes of results so far, at most, before the last trip."""
    return results if trips == 1 else max(results, num_rows * wide)


def _combined(results: int, num_rows: int, narrow: int, wide: int, trips: int) -> int:
    """Bytes of results so far and of what they are combined into, for ``num_rows`` local rows, in the worst trip."""
    if trips == 1:
        return results + num_rows * narrow
    return max(results, num_rows * (narrow if trips == 2 else wide)) + num_rows * wide


def _stock(plans: Sequence[Plan]) -> tuple[int, int]:
    """Forward and backward over all nano-batches' tokens of the rank that has the most."""
    layouts = [plan.layout for plan in plans]
    tokens_per_rank = np.sum([layout.tokens_per_rank for layout in layouts], axis=0)
    rank = int(tokens_per_rank.argmax())
    tokens = int(tokens_per_rank[rank])
    documents = sum(int(np.count_nonzero(layout.seg_rank == rank)) for layout in layouts)
    return stock_memory(plans[0].shape, tokens, tokens, documents)


def stock_memory(shape: AttentionShape, queries: int, keys: int, tasks: int) -> tuple[int, int]:
    """Return the bytes of varlen attention's forward and backward in one call, without CAD."""
    size = _Bytes.of(shape)
    backward = queries * size.q + 2 * keys * size.k + size.temporary(queries, keys, tasks)
    return queries * (size.q + size.lse), backward
