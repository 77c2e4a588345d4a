"""What holds for every plan, on drawn layouts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from tests.planning.checks import check_cuts, check_guarantee
from tests.planning.layouts import LLAMA, Case, cases
from tests.planning.reference import check_exchanges, covers_exactly
from torchtitan_cad.planning import PlannerConfig, make_plan, validate_plan


def check_case(case: Case) -> None:
    layout = case.layout()
    plans = [
        make_plan(layout, LLAMA, dataclasses.replace(case.config, planner=planner))
        for planner in ("greedy", "local_search")
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


@given(case=cases)
def test_every_layout(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000)
@given(case=cases)
def test_every_layout_at_length(case: Case) -> None:
    check_case(case)


@given(case=cases)
def test_small_layouts_against_brute_force(case: Case) -> None:
    """Validator, tables and bytes against token-by-token references."""
    small = Case(
        case.family, min(case.num_ranks, 6), 1 + case.tokens % 60, min(case.min_shard, 16), case.tolerance, 8, case.seed
    )
    plan = make_plan(small.layout(), LLAMA, small.config)
    assert covers_exactly(plan.layout, plan.tasks)
    check_exchanges(plan)
