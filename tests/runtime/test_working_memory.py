"""Working memory of a backward on CUDA, computed from plans: what is alive in it, and what undivided attention needs.

Inputs and exchange buffers are not counted. FlashAttention-2 allocates dk and dv for every query head, and dq in fp32
with 128 rows of padding per task (flash_api.cpp, mha_varlen_bwd).
"""

import numpy as np
import pytest
import torch

from bench.workloads import TOKENS_PER_RANK, document_lengths, spanning_layout
from torchtitan_cad.planning import AttentionShape, PlannerConfig, RankExchange, TokenLayout, make_plan
from torchtitan_cad.runtime.tables import Call, PlanTables

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
QUERY = SHAPE.num_heads * SHAPE.head_dim * 2
KEY = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2
STATISTIC = 4 * SHAPE.num_heads
PADDING = 128


def undivided_bytes(tokens: int, documents: int) -> int:
    """Gradients of q, k and v, and what FlashAttention-2 allocates beside them."""
    return tokens * (QUERY + KEY) + kernel_bytes(tokens, tokens, documents)


def kernel_bytes(queries: int, keys: int, tasks: int) -> int:
    return (queries + PADDING * tasks) * (2 * QUERY + STATISTIC) + keys * 2 * QUERY


def backward_bytes(exchange: RankExchange) -> int:
    """The most that is alive at a time: in one of the calls, while results are sent, or when they are added up."""
    tables = PlanTables.from_exchange(exchange, True, torch.device("cpu"), 1.0)
    most = results = 0
    for call in sorted(tables.calls, key=lambda call: -call.weighted_rows):
        queries, keys = int(call.args.cu_q_host[-1]), int(call.args.cu_k_host[-1])
        results += queries * QUERY + keys * KEY
        copies = copied_rows(call, tables)
        gathered = copies[0] * 2 * (QUERY + STATISTIC) + copies[1] * KEY
        surrogate = queries * (QUERY + STATISTIC)
        most = max(most, results + gathered + surrogate + kernel_bytes(queries, keys, call.args.num_tasks))
    sent = tables.q_out.num_received * QUERY + tables.kv_out.num_received * KEY
    return max(most, results + max(sent, tables.num_queries * QUERY + tables.num_local * KEY))


def copied_rows(call: Call, tables: PlanTables) -> tuple[int, ...]:
    sides = (call.q_rows, tables.num_q, tables.num_queries), (call.kv_rows, tables.num_kv, tables.num_local)
    return tuple(
        len(rows) if isinstance(rows, torch.Tensor) else total if rows is None and total > local else 0
        for rows, total, local in sides
    )


def layout_of(workload: str, num_ranks: int) -> TokenLayout:
    if workload != "whole lognormal":
        return spanning_layout(document_lengths(workload, num_ranks, 11), num_ranks)
    rng, ranks, doc = np.random.default_rng(11), [], 0
    for _ in range(num_ranks):
        segments, left = [], TOKENS_PER_RANK
        while left:
            length = min(left, 1 + int(rng.lognormal(np.log(4096), 1.5)))
            segments.append((doc, 0, length))
            doc, left = doc + 1, left - length
        ranks.append(segments)
    return TokenLayout.from_segments(ranks)


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("workload", ["whole lognormal", "lognormal", "one big", "uniform"])
def test_backward_holds_at_most_two_and_a_half_times_what_undivided_attention_does(
    workload: str, num_ranks: int
) -> None:
    plan = make_plan(layout_of(workload, num_ranks), SHAPE, PlannerConfig(tolerance=0.02))
    exchanges = [plan.exchange(rank) for rank in range(num_ranks)]
    exchanges.sort(key=lambda exchange: -sum(len(call.kv_rows) for call in (exchange.causal, exchange.full)))
    worst = max(backward_bytes(exchange) for exchange in exchanges[:8])
    assert worst <= 2.5 * undivided_bytes(TOKENS_PER_RANK, 8), f"{worst / undivided_bytes(TOKENS_PER_RANK, 8):.2f}"
