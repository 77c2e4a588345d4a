"""Device memory that core attention of a layer takes by a plan, on the busiest rank. Imports planning only.

Working memory is what one pass allocates and frees, its results included, its inputs (which stock attention has too)
not. With FlashAttention-2 as torch ships it, in bytes of rows: Q and K of one query and one key row (K stands for V as
well), A and B the same in fp32, L the log-sum-exp. Of a rank, n and m are the local queries and keys, r and s the
received ones; of each of its two kernel calls, q and k are the rows and t the tasks:

    accumulators   forward (n + r)(A + L)             backward (n + r) A + 2 (m + s) B
    gathered       forward q Q + 2 k K                backward q (2 Q + 2 L) + 2 k K
    results        forward q (Q + L)                  backward q Q + 2 k K
    temporary      forward 0                          backward q (Q + L) + (q + 128 t) A + 2 k x query heads x head size

The last are the surrogate of O, its row sums, dQ in fp32 and, if query heads share keys, dK and dV of every query head.
A pass holds the accumulators, what is gathered for both calls, and the results of the calls so far with the temporary
memory of one; later, instead of all but the accumulators, what is sent home, r (Q) or r Q + 2 s K, and the results for
local rows. Rows that are read in place are counted as gathered, as tables alone say which. With ``keep`` the received
Q, K and V, r Q + 2 s K, are there in both passes. Stock attention of the same tokens has the results and the temporary
memory of one call. Exchanges take no other memory with symmetric memory; with all-to-alls the messages come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .intervals import IntArray, sum_by_index
from .messages import EXCHANGES_PER_CALL, HEADROOM, RowBytes
from .plan import Plan
from .shape import LSE_BYTES, AttentionShape
from .tasks import is_diagonal

_FP32_BYTES = 4
_TASK_ROWS = 128
"""Rows that FlashAttention-2 adds to every task in its fp32 dQ."""


@dataclass(frozen=True)
class AttentionMemory:
    """Bytes: of all receive buffers in symmetric memory, and of the working memory of a layer's passes.

    ``stock_...`` are those of varlen attention, without CAD, over the tokens of the rank that has the most.
    """

    buffers: int
    forward: int
    backward: int
    stock_forward: int
    stock_backward: int


def attention_memory(plans: Sequence[Plan], *, keep: bool = False) -> AttentionMemory:
    """Of the rank that needs most, with ``plans`` of the nano-batches of a step, one layer of one at a time.

    Args:
        keep: servers keep received Q, K and V for backward.
    """
    stock = [_stock(plan) for plan in plans]
    return AttentionMemory(
        buffers=buffer_bytes(plans, keep=keep),
        forward=max(int(_forward(plan, keep=keep).max(initial=0)) for plan in plans),
        backward=max(int(_backward(plan, keep=keep).max(initial=0)) for plan in plans),
        stock_forward=max(forward for forward, _ in stock),
        stock_backward=max(backward for _, backward in stock),
    )


def buffer_bytes(plans: Sequence[Plan], *, keep: bool = False) -> int:
    """Receive buffers for nano-batches with these plans, with the headroom that they are first made with."""
    most = 0
    for plan in plans:
        row_bytes = RowBytes.of(plan.shape, keep=keep)
        most = max(most, plan.most_rows.exchange_bytes(row_bytes, plan.most_rows.trips(row_bytes)))
    return int(EXCHANGES_PER_CALL * len(plans) * most * HEADROOM)


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
        fp32, size = max(_FP32_BYTES, shape.dtype_bytes), shape.dtype_bytes
        expanded = 2 * queries * size if shape.num_heads > shape.num_kv_heads else 0
        statistic = shape.num_heads * max(LSE_BYTES, size)
        return cls(queries * size, keys * size, queries * fp32, keys * fp32, statistic, expanded)

    def temporary(self, queries: IntArray, keys: IntArray, tasks: IntArray) -> IntArray:
        """Of a backward call."""
        return queries * (self.q + self.lse) + (queries + _TASK_ROWS * tasks) * self.a + keys * self.expanded


def _calls(plan: Plan) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Per kernel call query rows, key rows and tasks of every rank, each int64 [num_ranks]."""
    calls = []
    diagonal = is_diagonal(plan.tasks)
    for tasks in (plan.tasks[diagonal], plan.tasks[~diagonal]):
        columns = (
            tasks["q_end"] - tasks["q_start"],
            tasks["kv_end"] - tasks["kv_start"],
            np.ones_like(tasks["server"]),
        )
        sums = [sum_by_index(tasks["server"], column, plan.layout.num_ranks) for column in columns]
        calls.append((sums[0], sums[1], sums[2]))
    return calls


def _forward(plan: Plan, *, keep: bool) -> IntArray:
    """int64 [num_ranks]"""
    size, (received_q, received_k) = _Bytes.of(plan.shape), plan.rows_in
    local = plan.layout.queries_per_rank
    kept = keep * (received_q * size.q + 2 * received_k * size.k)
    if not plan.moves_rows:
        return local * (size.q + size.lse)
    accumulators = (local + received_q) * (size.a + size.lse)
    computing = sum(queries * (2 * size.q + size.lse) + 2 * keys * size.k for queries, keys, _ in _calls(plan))
    finishing = received_q * size.q + local * (size.q + size.lse)
    return accumulators + np.maximum(computing, finishing) + kept


def _backward(plan: Plan, *, keep: bool) -> IntArray:
    """int64 [num_ranks]"""
    size, (received_q, received_k) = _Bytes.of(plan.shape), plan.rows_in
    local_q, local_k = plan.layout.queries_per_rank, plan.layout.tokens_per_rank
    kept = keep * (received_q * size.q + 2 * received_k * size.k)
    accumulators = (local_q + received_q) * size.a + 2 * (local_k + received_k) * size.b + local_q * size.lse
    gathered = computing = results = np.zeros(plan.layout.num_ranks, dtype=np.int64)
    for queries, keys, tasks in _calls(plan):
        gathered = gathered + queries * (2 * size.q + 2 * size.lse) + 2 * keys * size.k
        results = results + queries * size.q + 2 * keys * size.k
        computing = np.maximum(computing, results + size.temporary(queries, keys, tasks) * (queries > 0))
    if not plan.moves_rows:
        return computing
    finishing = (received_q + local_q) * size.q + 2 * (received_k + local_k) * size.k
    return accumulators + np.maximum(gathered + computing, finishing) + kept


def _stock(plan: Plan) -> tuple[int, int]:
    """Forward and backward over the tokens of the rank that has the most."""
    size, layout = _Bytes.of(plan.shape), plan.layout
    tokens, documents = layout.tokens_per_rank, np.bincount(layout.seg_rank, minlength=layout.num_ranks)
    backward = tokens * (size.q + 2 * size.k) + size.temporary(tokens, tokens, documents)
    rank = int(tokens.argmax())
    return int(tokens[rank] * (size.q + size.lse)), int(backward[rank])
