"""Ranks in nodes: fewer bytes between them, counted right."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads import document_lengths, spanning_layout
from tests.planning.layouts import LLAMA, Case, cases
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan, validate_plan


def bytes_between(plan: Plan, ranks_per_node: int) -> tuple[np.ndarray, np.ndarray]:
    """[num_ranks] bytes in and out between nodes, from the exchange tables."""
    num_ranks = plan.layout.num_ranks
    into, out = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    for rank in range(num_ranks):
        table = plan.exchange(rank)
        for peer in range(num_ranks):
            if peer // ranks_per_node != rank // ranks_per_node:
                for rows, row_bytes in ((table.queries, LLAMA.query_bytes), (table.keys, LLAMA.kv_bytes)):
                    out[rank] += rows.send_counts[peer] * row_bytes
                    into[rank] += rows.recv_counts[peer] * row_bytes
    return into, out


@given(case=cases, ranks_per_node=st.integers(1, 9), weight=st.sampled_from([1, 1.5, 4.0]))
def test_every_layout(case: Case, ranks_per_node: int, weight: float) -> None:
    config = dataclasses.replace(case.config, ranks_per_node=ranks_per_node, inter_node_weight=weight)
    plan = make_plan(case.layout(), LLAMA, config)
    validate_plan(plan)
    assert plan.stats.loads.max() <= plan.stats.load_limit
    into, out = bytes_between(plan, ranks_per_node)
    assert plan.stats.inter_node_bytes == into.sum() == out.sum()
    assert plan.stats.max_rank_inter_node_bytes == max(into.max(), out.max())
    assert plan.stats.inter_node_bytes <= plan.stats.total_bytes


@pytest.mark.parametrize(("name", "factor"), [("lognormal", 0.85), ("uniform", 0.55)])
def test_fewer_bytes_between_nodes(name: str, factor: float) -> None:
    """64 ranks in nodes of 8, means over seeds: against the plan that knows no nodes, for hardly more bytes in all."""
    figures = []
    for seed in (11, 12, 13):
        layout = spanning_layout(document_lengths(name, 64, seed), 64)
        flat = make_plan(layout, LLAMA)
        plan = make_plan(layout, LLAMA, PlannerConfig(ranks_per_node=8))
        validate_plan(plan)
        assert plan.stats.max_over_mean <= 1.02
        flat_between = int(bytes_between(flat, 8)[0].sum())
        figures.append((plan.stats.inter_node_bytes, flat_between, plan.stats.total_bytes, flat.stats.total_bytes))
    between, flat_between, total, flat_total = np.sum(figures, axis=0)
    assert between <= factor * flat_between
    assert total <= 1.1 * flat_total


def test_nodes_with_room_keep_everything_inside() -> None:
    """In both nodes one rank of two has all the work: nothing needs to cross."""
    layout = TokenLayout.from_segments([[(0, 0, 32768)], [], [(1, 0, 32768)], []])
    stats = make_plan(layout, LLAMA, PlannerConfig(ranks_per_node=2)).stats
    assert stats.max_over_mean <= 1.02
    assert stats.total_bytes > stats.inter_node_bytes == 0


def test_work_left_by_the_exchange_between_nodes_is_shared_inside() -> None:
    """One node has all the work: half of it crosses, and each node's ranks end with equal parts."""
    layout = TokenLayout.from_segments([[(0, 0, 65536)], [], [], []])
    plan = make_plan(layout, LLAMA, PlannerConfig(ranks_per_node=2))
    validate_plan(plan)
    assert plan.stats.max_over_mean <= 1.02
    assert 0 < plan.stats.inter_node_bytes < plan.stats.total_bytes


def test_without_nodes_nothing_crosses() -> None:
    layout = spanning_layout(document_lengths("lognormal", 16, 11), 16)
    plans = [make_plan(layout, LLAMA, PlannerConfig(ranks_per_node=n)) for n in (None, 16, 99)]
    assert len({plan.fingerprint() for plan in plans}) == 1
    assert all(plan.stats.inter_node_bytes == plan.stats.max_rank_inter_node_bytes == 0 for plan in plans)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node = 0: set a positive integer, such as 8"),
        ({"ranks_per_node": 8.0}, "ranks_per_node = 8.0"),
        (
            {"inter_node_weight": 0.5},
            "inter_node_weight = 0.5: set a number of at least 1 and at most 1000",
        ),
        ({"inter_node_weight": float("nan")}, "inter_node_weight = nan"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlannerConfig(**options)
