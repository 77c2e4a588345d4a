# SPDX-License-Identifier: BSD-3-Clause
"""Device memory of a layer's core attention under a plan, on the rank that needs most.

Working memory is what one pass allocates and frees. It includes the results and excludes the inputs, which stock
attention has too. The formulas hold for torch's FlashAttention-2:

    Q, O, K  bytes of a row of queries, of outputs, and of keys with values
    A, P, B  the same in fp32
    J        bytes of a row of keys joined with what all heads share; 0 if they share nothing
    L        bytes of a row's log-sum-exp
    n, m     local queries and keys of the rank
    r, s     received queries and keys
    q, k     query and key rows of a kernel call
    c, d     those of q and k that the call cannot read in place
    t        tasks of the call

    copies       forward c Q + d K + k J    backward c (Q + O + 2 L) + d K + k J
    results      forward q (O + L)          backward q Q + k K
    temporary    forward 0                  backward q (O + L) + (q + 128 t) (A + L) + k x bytes of query heads

Temporary memory holds the surrogate of O with its statistics, dQ in fp32 with its row sums and, if query heads share
keys, dK and dV of every query head. Kernels return dJ, which has more bytes than its parts in dK. Where heads of values
are narrower than those of keys, FlashAttention-2 computes with V and O as wide as K and Q, copied before and after:
their bytes are temporary, too.

1. Rows to serve that come in several chunks are copied out of the receive buffers and held until the last call has its
   copies: forward r Q + s K, backward r (Q + O + 2 L) + s K.
2. Calls run, the largest first (``calls.py``). A pass holds the results so far and the copies and temporary memory of
   one call; backward also holds the row sums n L until the last call has copies of them.
3. If the calls have many results (``combine_early``), these become n (P + L), in backward n A and m B.
4. Results go home, r (O + L), in backward r Q and s K, and are combined with the home's own results into n (O + L),
   in backward n Q and then m K. If they return in several chunks, P, A and B replace O, Q and K until the last chunk.

Rows that servers keep for backward come on top. A single call over all local rows in place has nothing to combine.
All-to-alls add their messages; symmetric memory adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_cad.planning.exchange.calls import (
    bounded,
    combine_early,
    lie_in_order,
    weighted_rows,
)
from torchtitan_cad.planning.exchange.messages import (
    Chunks,
    buffer_bytes,
)
from torchtitan_cad.planning.exchange.tables import CallTable, RankExchange
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.shape import AttentionShape, RowBytes
from torchtitan_cad.planning.plan import Plan

_FP32_BYTES = 4
_TASK_ROWS = 128
"""rows that FlashAttention-2 adds to every task in its fp32 dQ"""


def attention_bytes(
    plans: Sequence[Plan], receive_buffer_gb: float | None, ranks: Iterable[int]
) -> int:
    """Return the bytes of working memory of one layer on that of these ranks that needs most.

    While one of two nano-batches computes, the results of the other travel; the memory of both adds up.

    Args:
        plans: one for each nano-batch of a microbatch.
        receive_buffer_gb: see ``messages.buffer_bytes``.
        ranks: the ranks to compare.

    Raises:
        ValueError: a rank has more rows than its tables may have, see ``Plan.exchange``.
    """
    num_bytes = buffer_bytes(receive_buffer_gb, len(plans))
    most = 0
    for rank in ranks:
        nanos = [working_memory(plan, rank, num_bytes) for plan in plans]
        forward = _interleaved([passes.forward for passes in nanos])
        backward = _interleaved([passes.backward for passes in nanos])
        most = max(most, forward, backward)
    return most


@dataclass(frozen=True)
class _Bytes:
    """Bytes of one row, by the letters of the module's docstring."""

    q: int
    o: int
    k: int
    a: int
    p: int
    b: int
    j: int
    repeated: int
    """what J has more than its parts in K"""
    lse: int
    expanded: int
    """dK and dV of every query head"""
    wide_o: int
    wide_v: int
    """rows of O and V as wide as those of Q and K; 0 if they are"""

    @classmethod
    def of(cls, shape: AttentionShape) -> _Bytes:
        heads = shape.num_heads
        kv_heads = shape.num_kv_heads
        fp32 = max(_FP32_BYTES, shape.dtype_bytes)
        rows = RowBytes.of(shape, keep=True)
        statistic = rows.backward_queries - rows.outputs
        output = rows.outputs - statistic
        query = rows.forward_queries
        wide = (
            max(shape.head_dim, shape.out_dim) * shape.dtype_bytes
            if shape.out_dim != shape.head_dim
            else 0
        )
        return cls(
            q=query,
            o=output,
            k=rows.keys,
            a=heads * shape.head_dim * fp32,
            p=heads * shape.out_dim * fp32,
            b=(kv_heads * (shape.key_dim + shape.out_dim) + shape.shared_dim) * fp32,
            j=kv_heads * shape.head_dim * shape.dtype_bytes if shape.shared_dim else 0,
            repeated=(kv_heads - 1) * shape.shared_dim * shape.dtype_bytes,
            lse=statistic,
            expanded=query + output if heads > kv_heads else 0,
            wide_o=heads * wide,
            wide_v=kv_heads * wide,
        )

    def surrogate(self, queries: int) -> int:
        return queries * (self.o + self.lse)

    def padding(self, queries: int, keys: int) -> int:
        """Bytes that FlashAttention-2 allocates and frees in a forward call."""
        return queries * self.wide_o + keys * self.wide_v

    def temporary(self, queries: int, keys: int, tasks: int) -> int:
        """Bytes that FlashAttention-2 allocates and frees in a backward call."""
        accumulated = (queries + _TASK_ROWS * tasks) * (self.a + self.lse)
        return accumulated + keys * self.expanded + 2 * self.padding(queries, keys)


class Pass(NamedTuple):
    """Maximum bytes of one pass of a layer on a rank: at any time, and while its results travel."""

    most: int
    travelling: int


class Passes(NamedTuple):
    """The passes of one nano-batch."""

    forward: Pass
    backward: Pass


def _interleaved(nano_batches: list[Pass]) -> int:
    """Return the maximum bytes while one nano-batch computes and the results of the others travel."""
    travelling = sum(nano_batch.travelling for nano_batch in nano_batches)
    return max(
        nano_batch.most + travelling - nano_batch.travelling
        for nano_batch in nano_batches
    )


def working_memory(plan: Plan, rank: int, buffer_bytes: int) -> Passes:
    """Return the bytes of forward and of backward on one rank, with receive buffers of ``buffer_bytes``.

    Raises ValueError as ``Plan.exchange``.
    """
    exchange = plan.exchange(rank)
    size = _Bytes.of(plan.shape)
    row_bytes = RowBytes.of(plan.shape)
    chunks = exchange.most.chunks(row_bytes, buffer_bytes)
    received_queries = exchange.queries.num_received
    received_keys = exchange.keys.num_received
    in_place = len(chunks.queries_out) == 1 and len(chunks.keys_out) == 1
    copied_out_forward = received_queries * size.q + received_keys * size.k
    copied_out_backward = (
        received_queries * row_bytes.backward_queries + received_keys * size.k
    )
    calls = _calls(exchange)
    forward, backward = _while_calls_run(
        calls,
        exchange,
        size,
        0 if in_place else copied_out_forward,
        0 if in_place else copied_out_backward,
    )
    combined = _while_results_combine(plan, exchange, calls, size, chunks)
    return Passes(
        Pass(max(forward, combined.forward.most), combined.forward.travelling),
        Pass(max(backward, combined.backward.most), combined.backward.travelling),
    )


def _while_calls_run(
    calls: Sequence[CallTable],
    exchange: RankExchange,
    size: _Bytes,
    copied_out_forward: int,
    copied_out_backward: int,
) -> tuple[int, int]:
    """Return the maximum bytes of forward and of backward in step 2 of the module's docstring."""
    forward = 0
    backward = 0
    result_queries = 0
    result_keys = 0
    row_sums = exchange.queries.num_local * size.lse
    for table in calls:
        queries = len(table.q_rows)
        keys = len(table.kv_rows)
        copied_queries = _num_copied(table.q_rows, exchange.queries.num_local)
        copied_forward = (
            copied_queries * size.q
            + _num_copied(table.kv_rows, exchange.keys.num_local) * size.k
        )
        copied_backward = copied_forward + copied_queries * (size.o + 2 * size.lse)
        outs = result_queries * (size.o + size.lse)
        gradients = result_queries * size.q + result_keys * size.k
        forward = max(forward, outs + copied_out_forward + copied_forward)
        backward = max(
            backward, row_sums + gradients + copied_out_backward + copied_backward
        )
        if table is calls[-1]:  # no later call reads the rows that are copied
            copied_out_forward = 0
            copied_out_backward = 0
            row_sums = 0 if copied_queries else row_sums
        result_queries += queries
        result_keys += keys
        outs = result_queries * (size.o + size.lse)
        gradients = result_queries * size.q + result_keys * size.k
        joined = keys * size.j
        padding = size.padding(queries, keys)
        temporary = (
            size.surrogate(queries)
            + size.temporary(queries, keys, table.num_tasks)
            + keys * size.repeated
        )
        forward = max(
            forward, outs + copied_out_forward + copied_forward + joined + padding
        )
        backward = max(
            backward,
            row_sums
            + gradients
            + copied_out_backward
            + copied_backward
            + joined
            + temporary,
        )
    return forward, backward


def _while_results_combine(
    plan: Plan,
    exchange: RankExchange,
    calls: Sequence[CallTable],
    size: _Bytes,
    chunks: Chunks,
) -> Passes:
    """Return the maximum bytes of both passes in steps 3 and 4 of the module's docstring, and while results travel."""
    queries = sum(len(table.q_rows) for table in calls)
    keys = sum(len(table.kv_rows) for table in calls)
    local_rows = [(exchange.queries.num_local, exchange.keys.num_local)]
    if (
        not plan.moves_rows
        and [(len(table.q_rows), len(table.kv_rows)) for table in calls] == local_rows
    ):
        # A single call over all local rows has nothing to combine.
        return Passes(
            Pass(0, queries * (size.o + size.lse)),
            Pass(0, queries * size.q + keys * size.k),
        )
    early_queries = plan.moves_rows and combine_early(
        queries, exchange.queries.num_local
    )
    early_keys = plan.moves_rows and combine_early(keys, exchange.keys.num_local)
    forward = _while_outs_combine(
        exchange, size, queries, len(chunks.queries_home), early=early_queries
    )
    backward = _while_gradients_combine(
        exchange, size, queries, keys, chunks, early_queries, early_keys
    )
    return Passes(forward, backward)


def _while_outs_combine(
    exchange: RankExchange,
    size: _Bytes,
    result_rows: int,
    num_chunks: int,
    *,
    early: bool,
) -> Pass:
    rows = exchange.queries.num_local
    narrow = size.o + size.lse
    wide = size.p + size.lse
    served = exchange.queries.num_received * narrow
    outs = result_rows * narrow
    most = 0
    if early:
        most = outs + served + rows * wide
        outs = rows * wide
    most = max(most, served + _combined(outs, rows, narrow, wide, num_chunks))
    return Pass(most, served + _so_far(outs, rows, wide, num_chunks))


def _while_gradients_combine(
    exchange: RankExchange,
    size: _Bytes,
    result_queries: int,
    result_keys: int,
    chunks: Chunks,
    early_queries: bool,
    early_keys: bool,
) -> Pass:
    queries = exchange.queries.num_local
    keys = exchange.keys.num_local
    served_dq = exchange.queries.num_received * size.q
    served_dkv = exchange.keys.num_received * size.k
    dq = result_queries * size.q
    dkv = result_keys * size.k
    most = 0
    if early_queries:
        most = dq + dkv + served_dq + queries * size.a
        dq = queries * size.a
    if early_keys:
        most = max(most, dq + dkv + served_dq + served_dkv + keys * size.b)
        dkv = keys * size.b
    q_chunks = len(chunks.queries_home)
    k_chunks = len(chunks.keys_home)
    with_dq = (
        served_dq + served_dkv + dkv + _combined(dq, queries, size.q, size.a, q_chunks)
    )
    with_dkv = (
        served_dkv + queries * size.q + _combined(dkv, keys, size.k, size.b, k_chunks)
    )
    dq_so_far = _so_far(dq, queries, size.a, q_chunks)
    dkv_so_far = _so_far(dkv, keys, size.b, k_chunks)
    return Pass(
        max(most, with_dq, with_dkv), served_dq + dq_so_far + served_dkv + dkv_so_far
    )


def _calls(exchange: RankExchange) -> list[CallTable]:
    """Return the tables of the kernel calls, in the order in which they run."""
    pairs = [(exchange.causal, True), (exchange.full, False)]
    used = [(table, causal) for table, causal in pairs if table.num_tasks]
    calls = bounded(used, exchange.keys.num_local, split_keys=exchange.split_keys)
    return sorted(
        (table for table, _ in calls), key=lambda table: -int(weighted_rows(table)[-1])
    )


def _num_copied(rows: IntArray, num_local: int) -> int:
    return 0 if lie_in_order(rows) and rows[-1] < num_local else len(rows)


def _so_far(results: int, num_rows: int, wide: int, chunks: int) -> int:
    """Return the maximum bytes of the results so far before the last chunk."""
    return results if chunks == 1 else max(results, num_rows * wide)


def _combined(results: int, num_rows: int, narrow: int, wide: int, chunks: int) -> int:
    """Bytes, in the worst chunk, of the results so far and of the ``num_rows`` rows that they are combined into."""
    if chunks == 1:
        return results + num_rows * narrow
    return max(results, num_rows * (narrow if chunks == 2 else wide)) + num_rows * wide
