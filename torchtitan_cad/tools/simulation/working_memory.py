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
from torchtitan_cad.planning.exchange.messages import Chunks, buffer_bytes
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
        forward, backward = zip(*nanos, strict=True)
        most = max(most, _interleaved(forward), _interleaved(backward))
    return most


@dataclass(frozen=True)
class _RowSizes:
    """Bytes of one row in a pass, by the letters of the module's docstring."""

    query: int
    """of what servers receive and calls copy: Q, or Q + O + 2 L"""
    key: int
    query_result: int
    """O + L, or Q"""
    key_result: int
    """0, or K"""
    query_sum: int
    """results so far: P + L, or A"""
    key_sum: int
    """0, or B"""
    row_sum: int
    """0, or L"""
    query_of_call: int
    key_of_call: int
    task_of_call: int
    """temporary memory of a call, for each of its queries, keys and tasks"""

    def results(self, queries: int, keys: int) -> int:
        """Bytes of what calls return."""
        return queries * self.query_result + keys * self.key_result

    def temporary(self, queries: int, keys: int, tasks: int) -> int:
        """Bytes that a call, or FlashAttention-2 in it, allocates and frees."""
        of_rows = queries * self.query_of_call + keys * self.key_of_call
        return of_rows + tasks * self.task_of_call


def _row_sizes(shape: AttentionShape) -> tuple[_RowSizes, _RowSizes]:
    """Return the sizes of forward and of backward."""
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    rows = RowBytes.of(shape)
    statistic = rows.backward_queries - rows.forward_queries - rows.outputs
    output = rows.outputs - statistic
    fp32 = max(_FP32_BYTES, shape.dtype_bytes)
    query_gradient = heads * shape.head_dim * fp32
    keys_and_values = kv_heads * (shape.key_dim + shape.out_dim) + shape.shared_dim
    joined = repeated = padded = expanded = 0
    if shape.shared_dim:
        joined = kv_heads * shape.head_dim * shape.dtype_bytes
        # what J has more than its parts in K
        repeated = (kv_heads - 1) * shape.shared_dim * shape.dtype_bytes
    if shape.out_dim != shape.head_dim:
        padded = max(shape.head_dim, shape.out_dim) * shape.dtype_bytes
    if heads > kv_heads:
        # dK and dV of every query head
        expanded = rows.forward_queries + output
    forward = _RowSizes(
        query=rows.forward_queries,
        key=rows.keys,
        query_result=rows.outputs,
        key_result=0,
        query_sum=heads * shape.out_dim * fp32 + statistic,
        key_sum=0,
        row_sum=0,
        query_of_call=heads * padded,
        key_of_call=joined + kv_heads * padded,
        task_of_call=0,
    )
    accumulated = query_gradient + statistic
    backward = _RowSizes(
        query=rows.backward_queries,
        key=rows.keys,
        query_result=rows.query_gradients,
        key_result=rows.key_gradients,
        query_sum=query_gradient,
        key_sum=keys_and_values * fp32,
        row_sum=statistic,
        query_of_call=rows.outputs + accumulated + 2 * heads * padded,
        key_of_call=joined + repeated + expanded + 2 * kv_heads * padded,
        task_of_call=_TASK_ROWS * accumulated,
    )
    return forward, backward


class Pass(NamedTuple):
    """Maximum bytes of one pass of a layer on a rank: at any time, and while its results travel."""

    most: int
    travelling: int


def _interleaved(nano_batches: Sequence[Pass]) -> int:
    """Return the maximum bytes while one nano-batch computes and the results of the others travel."""
    travelling = sum(nano_batch.travelling for nano_batch in nano_batches)
    return max(
        nano_batch.most + travelling - nano_batch.travelling
        for nano_batch in nano_batches
    )


def working_memory(plan: Plan, rank: int, buffer_bytes: int) -> list[Pass]:
    """Return the bytes of forward and of backward on one rank, with receive buffers of ``buffer_bytes``.

    Raises ValueError as ``Plan.exchange``.
    """
    exchange = plan.exchange(rank)
    chunks = exchange.most.chunks(RowBytes.of(plan.shape), buffer_bytes)
    calls = _calls(exchange)
    passes = []
    for sizes in _row_sizes(plan.shape):
        running = _while_calls_run(calls, exchange, sizes, chunks)
        if _nothing_combines(plan, exchange, calls):
            queries = exchange.queries.num_local
            results = sizes.results(queries, exchange.keys.num_local)
            passes.append(Pass(running, results))
        else:
            most, travelling = _while_results_combine(
                calls, exchange, sizes, chunks, moves_rows=plan.moves_rows
            )
            passes.append(Pass(max(running, most), travelling))
    return passes


def _while_calls_run(
    calls: Sequence[CallTable],
    exchange: RankExchange,
    sizes: _RowSizes,
    chunks: Chunks,
) -> int:
    """Return the maximum bytes in step 2 of the module's docstring."""
    received = 0
    if len(chunks.queries_out) > 1 or len(chunks.keys_out) > 1:
        received = exchange.queries.num_received * sizes.query
        received += exchange.keys.num_received * sizes.key
    row_sums = exchange.queries.num_local * sizes.row_sum
    results = 0
    most = 0
    for table in calls:
        queries = len(table.q_rows)
        keys = len(table.kv_rows)
        copied_queries = _num_copied(table.q_rows, exchange.queries.num_local)
        copied_keys = _num_copied(table.kv_rows, exchange.keys.num_local)
        copied = copied_queries * sizes.query + copied_keys * sizes.key
        most = max(most, row_sums + results + received + copied)
        if table is calls[-1]:  # no later call reads the rows that are copied
            received = 0
            row_sums = 0 if copied_queries else row_sums
        results += sizes.results(queries, keys)
        temporary = sizes.temporary(queries, keys, table.num_tasks)
        most = max(most, row_sums + results + received + copied + temporary)
    return most


def _nothing_combines(
    plan: Plan, exchange: RankExchange, calls: Sequence[CallTable]
) -> bool:
    """Tell whether nothing moves, and a single call is over all local rows."""
    if plan.moves_rows or len(calls) != 1:
        return False
    has_queries = len(calls[0].q_rows) == exchange.queries.num_local
    return has_queries and len(calls[0].kv_rows) == exchange.keys.num_local


def _while_results_combine(
    calls: Sequence[CallTable],
    exchange: RankExchange,
    sizes: _RowSizes,
    chunks: Chunks,
    *,
    moves_rows: bool,
) -> Pass:
    """Return the maximum bytes in steps 3 and 4 of the module's docstring, and while results travel."""
    num_queries = exchange.queries.num_local
    num_keys = exchange.keys.num_local
    result_queries = sum(len(table.q_rows) for table in calls)
    result_keys = sum(len(table.kv_rows) for table in calls)
    queries = result_queries * sizes.query_result
    keys = result_keys * sizes.key_result
    served_queries = exchange.queries.num_received * sizes.query_result
    served_keys = exchange.keys.num_received * sizes.key_result
    most = 0
    if moves_rows and combine_early(result_queries, num_queries):
        summed = num_queries * sizes.query_sum
        most = queries + keys + served_queries + summed
        queries = summed
    if moves_rows and combine_early(result_keys, num_keys):
        summed = num_keys * sizes.key_sum
        most = max(most, queries + keys + served_queries + served_keys + summed)
        keys = summed
    q_chunks = len(chunks.queries_home)
    k_chunks = len(chunks.keys_home)
    served = served_queries + served_keys
    combined = _combined(
        queries, num_queries, sizes.query_result, wide=sizes.query_sum, chunks=q_chunks
    )
    with_queries = served + keys + combined
    combined = _combined(
        keys, num_keys, sizes.key_result, wide=sizes.key_sum, chunks=k_chunks
    )
    with_keys = served_keys + num_queries * sizes.query_result + combined
    queries_so_far = _so_far(queries, num_queries, sizes.query_sum, q_chunks)
    keys_so_far = _so_far(keys, num_keys, sizes.key_sum, k_chunks)
    return Pass(
        max(most, with_queries, with_keys), served + queries_so_far + keys_so_far
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
