"""Ranks in nodes: fewer bytes between them, counted right."""

import numpy as np
import pytest

from bench.workloads import workload_layout
from tests.planning.layouts import LLAMA
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan, validate_plan


@pytest.mark.parametrize(("name", "factor"), [("lognormal", 0.85), ("uniform", 0.55)])
def test_fewer_bytes_between_nodes(name: str, factor: float) -> None:
    """64 ranks in nodes of 8, means over seeds: against the plan that knows no nodes, for hardly more bytes in all."""
    figures = []
    for seed in (11, 12, 13):
        layout = workload_layout(name, 64, seed)
        flat = make_plan(layout, LLAMA)
        plan = make_plan(layout, LLAMA, PlannerConfig(ranks_per_node=8))
        validate_plan(plan)
        assert plan.stats.max_over_mean <= 1.02
        same = Plan.from_tasks(layout, LLAMA, plan.config, flat.tasks)
        figures.append(
            (plan.stats.inter_node_bytes, same.stats.inter_node_bytes, plan.stats.total_bytes, flat.stats.total_bytes)
        )
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
    layout = workload_layout("lognormal", 16, 11)
    plans = [make_plan(layout, LLAMA, PlannerConfig(ranks_per_node=n)) for n in (None, 16, 99)]
    assert len({plan.fingerprint() for plan in plans}) == 1
    assert all(plan.stats.inter_node_bytes == plan.stats.max_rank_inter_node_bytes == 0 for plan in plans)
