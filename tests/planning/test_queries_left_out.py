"""Layouts that leave queries out: a plan covers the pairs of the others, with all their keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.checks import check_cuts, check_guarantee
from tests.planning.layouts import LLAMA, Case, cases
from tests.planning.reference import check_exchanges, covers_exactly
from torchtitan_cad.planning import Plan, PlanError, PlannerConfig, TokenLayout, make_plan, validate_plan

LAYOUT = TokenLayout.from_segments([[(0, 0, 8), (0, 8, 8)], [(1, 0, 5), (2, 0, 3)]], [False, True, True, False])
HOME = PlannerConfig(planner="home", min_shard=4, tile=4)


def some_attend(layout: TokenLayout, share: float, seed: int) -> TokenLayout:
    """The layout with every run cut once, and a share of the runs attending."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, layout.seg_length + 1)
    lengths = np.stack([first, layout.seg_length - first], axis=1).ravel()
    starts = np.stack([layout.seg_start, layout.seg_start + first], axis=1).ravel()
    rank, doc = np.repeat(layout.seg_rank, 2), np.repeat(layout.seg_doc, 2)
    return TokenLayout.from_arrays(layout.num_ranks, rank, doc, starts, lengths, rng.random(len(rank)) < share)


@given(case=cases, share=st.sampled_from([0.0, 0.2, 0.5, 0.9]))
def test_any_subset_is_planned_within_the_guarantee(case: Case, share: float) -> None:
    layout = some_attend(case.layout(), share, case.seed)
    home = make_plan(layout, LLAMA, dataclasses.replace(case.config, planner="home"))
    validate_plan(home)
    for planner in ("greedy", "local_search"):
        plan = make_plan(layout, LLAMA, dataclasses.replace(case.config, planner=planner))
        validate_plan(plan)
        check_guarantee(plan, home)
        check_cuts(plan, home)
        assert plan.stats.max_over_mean <= home.stats.max_over_mean


@given(case=cases, share=st.sampled_from([0.0, 0.5, 0.9]))
def test_small_subsets_against_brute_force(case: Case, share: float) -> None:
    small = dataclasses.replace(
        case, num_ranks=min(case.num_ranks, 6), tokens=1 + case.tokens % 60, min_shard=min(case.min_shard, 16), tile=8
    )
    plan = make_plan(some_attend(small.layout(), share, case.seed), LLAMA, small.config)
    assert covers_exactly(plan.layout, plan.tasks)
    check_exchanges(plan)


def test_only_attending_runs_have_tasks_and_rows() -> None:
    plan = make_plan(LAYOUT, LLAMA, HOME)
    assert [tuple(task)[:5] for task in plan.tasks.tolist()] == [(0, 8, 16, 0, 16), (1, 0, 5, 0, 5)]
    assert LAYOUT.queries_per_rank.tolist() == [8, 5]
    assert plan.exchange(0).causal.q_rows.tolist() == list(range(8))
    assert plan.exchange(0).causal.kv_rows.tolist() == list(range(16))
    assert (plan.stats.lower_bound_bytes, plan.stats.lower_bound_rank_bytes) == (0, 0)


def test_plans_survive_json() -> None:
    plan = make_plan(LAYOUT, LLAMA, HOME)
    again = Plan.from_json(plan.to_json())
    validate_plan(again)
    assert again.layout.seg_attends.tolist() == LAYOUT.seg_attends.tolist()


@pytest.mark.parametrize(
    ("attends", "message"),
    [
        ([True, True, True, False], r"no task has queries \[0, 8\) of document 0"),
        ([False, True, False, False], r"queries \[0, 5\) of document 1 do not attend, but a task has them"),
    ],
)
def test_tasks_of_other_queries_are_found(attends: list[bool], message: str) -> None:
    layout = TokenLayout.from_segments([[(0, 0, 8), (0, 8, 8)], [(1, 0, 5), (2, 0, 3)]], attends)
    with pytest.raises(PlanError, match=message):
        validate_plan(Plan.from_tasks(layout, LLAMA, HOME, make_plan(LAYOUT, LLAMA, HOME).tasks))
