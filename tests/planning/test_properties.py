"""What holds for every plan, on drawn layouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.planning.layouts import LLAMA, Case, cases
from tests.planning.reference import check_exchanges, covers_exactly
from torchtitan_cad.planning import Plan, PlannerConfig, TileAreaCost, make_plan, validate_plan
from torchtitan_cad.planning.model.tasks import make_tasks

BASE = settings(suppress_health_check=[HealthCheck.too_slow], print_blob=True)


def loads_of(plan: Plan) -> np.ndarray:
    cost = TileAreaCost(plan.config.cost_tile)
    loads = np.zeros(plan.layout.num_ranks, dtype=np.int64)
    np.add.at(loads, plan.tasks["server"], cost.cost(plan.tasks))
    return loads


def check_guarantee(plan: Plan, home: Plan) -> None:
    """Every load <= max((1 + tolerance) * mean, mean + cost of the longest document's last min_shard rows)."""
    loads, mean = loads_of(plan), loads_of(home).sum() / plan.layout.num_ranks
    longest = int(plan.layout.doc_lengths.max(initial=0))
    shard = make_tasks([0], max(0, longest - plan.config.min_shard), longest, 0, longest, 0)
    shard_cost = int(TileAreaCost(plan.config.cost_tile).cost(shard)[0]) if longest else 0
    bound = max((1 + plan.config.tolerance) * mean, mean + shard_cost)
    assert loads.max() <= bound * (1 + 1e-12)
    assert loads.max() <= plan.stats.load_limit <= bound * (1 + 1e-12)
    assert plan.stats.loads.tolist() == loads.tolist()
    assert loads.sum() <= loads_of(home).sum()


def check_cuts(plan: Plan, home: Plan) -> None:
    """Documents are cut at multiples of min_shard or where residency cuts them, never elsewhere."""
    tasks, grid = plan.tasks, plan.config.min_shard
    for side in ("q_start", "q_end"):
        given_cuts = set(zip(home.tasks["doc"].tolist(), home.tasks[side].tolist(), strict=True))
        for doc, cut in zip(plan.tasks["doc"].tolist(), plan.tasks[side].tolist(), strict=True):
            assert cut % plan.config.min_shard == 0 or (doc, cut) in given_cuts
    assert (tasks["kv_start"] % grid == 0).all()
    assert ((tasks["kv_end"] == tasks["q_end"]) | (tasks["kv_end"] % grid == 0)).all()
    if plan.config.planner == "greedy" or not plan.config.split_kv:
        assert (tasks["kv_start"] == 0).all()
        assert (tasks["kv_end"] == tasks["q_end"]).all()


def check_case(case: Case) -> None:
    layout = case.layout()
    plans = [
        make_plan(layout, LLAMA, dataclasses.replace(case.config, planner=planner)) for planner in ("greedy", "tiling")
    ]
    home = make_plan(layout, LLAMA, PlannerConfig(planner="home", min_shard=case.min_shard, tile=case.tile))
    for each in (*plans, home):
        validate_plan(each)
        assert each.stats.lower_bound_bytes <= each.stats.total_bytes
        assert each.stats.forced_export_bytes <= each.stats.lower_bound_rank_bytes <= each.stats.max_rank_bytes
    for plan in plans:
        check_guarantee(plan, home)
        check_cuts(plan, home)
        assert plan.stats.max_over_mean <= plan.stats.max_over_mean_before == home.stats.max_over_mean
    assert home.stats.query_rows_moved == home.stats.tasks_moved == 0


@settings(BASE, max_examples=1000)
@given(case=cases)
def test_every_layout(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(BASE, max_examples=10_000)
@given(case=cases)
def test_every_layout_at_length(case: Case) -> None:
    check_case(case)


@settings(BASE, max_examples=500)
@given(case=cases)
def test_small_layouts_against_brute_force(case: Case) -> None:
    """Validator, tables and bytes against token-by-token references."""
    small = Case(
        case.family, min(case.num_ranks, 6), 1 + case.tokens % 60, min(case.min_shard, 16), case.tolerance, 8, case.seed
    )
    plan = make_plan(small.layout(), LLAMA, small.config)
    assert covers_exactly(plan.layout, plan.tasks)
    check_exchanges(plan)
