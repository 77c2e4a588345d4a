"""Layouts that leave queries out: a plan covers the pairs of the others, with all their keys."""

import pytest

from tests.planning.layouts import LLAMA
from torchtitan_cad.planning import Plan, PlanError, PlannerConfig, TokenLayout, make_plan, validate_plan

LAYOUT = TokenLayout.from_segments([[(0, 0, 8), (0, 8, 8)], [(1, 0, 5), (2, 0, 3)]], [False, True, True, False])
HOME = PlannerConfig(planner="home", min_shard=4, tile=4)


def test_only_attending_runs_have_tasks_and_rows() -> None:
    plan = make_plan(LAYOUT, LLAMA, HOME)
    assert [tuple(task)[:5] for task in plan.tasks.tolist()] == [(0, 8, 16, 0, 16), (1, 0, 5, 0, 5)]
    assert LAYOUT.queries_per_rank.tolist() == [8, 5]
    assert plan.exchange(0).causal.q_rows.tolist() == list(range(8))
    assert plan.exchange(0).causal.kv_rows.tolist() == list(range(16))
    assert (plan.stats.lower_bound_bytes, plan.stats.lower_bound_rank_bytes) == (0, 0)


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
