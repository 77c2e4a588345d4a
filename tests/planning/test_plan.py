"""Plans as values: statistics, fingerprint, JSON, and queries that are left out."""

import json

import numpy as np
import pytest

from tests.planning.layouts import LLAMA
from torchtitan_cad.planning import Plan, PlanError, PlannerConfig, TileAreaCost, TokenLayout, make_plan, validate_plan
from torchtitan_cad.planning.model.tasks import make_tasks

LAYOUT = TokenLayout.from_segments([[(0, 0, 4000)], [(1, 0, 500), (2, 0, 500)], []])
SEGMENTS = [[(0, 0, 8), (0, 8, 8)], [(1, 0, 5), (2, 0, 3)]]
SOME_ATTEND = TokenLayout.from_segments(SEGMENTS, [False, True, True, False])
HOME = PlannerConfig(planner="home", min_shard=4, tile=4)


def test_statistics() -> None:
    plan = make_plan(LAYOUT, LLAMA)
    stats = plan.stats
    assert stats.mean_load == (32 * 33 // 2 + 2 * 4 * 5 // 2) / 3
    assert stats.loads_before.tolist() == [32 * 33 // 2, 2 * 4 * 5 // 2, 0]
    assert stats.max_over_mean_before == stats.loads_before.max() / stats.mean_load
    assert stats.max_over_mean == stats.loads.max() / stats.mean_load
    assert stats.total_bytes == stats.query_rows_moved * LLAMA.query_bytes + stats.kv_rows_moved * LLAMA.kv_bytes
    assert stats.total_bytes == stats.bytes_in.sum() == stats.bytes_out.sum()
    assert stats.mean_rank_bytes == stats.total_bytes / 3
    assert stats.num_tasks == len(plan.tasks)
    assert stats.tasks_moved == (plan.tasks["server"] != np.minimum(plan.tasks["doc"], 1)).sum()
    assert stats.plan_seconds > 0
    nothing = make_plan(TokenLayout.from_segments([[], []]), LLAMA)
    assert (len(nothing.tasks), nothing.stats.max_over_mean) == (0, 1.0)


def test_fingerprint_depends_on_layout_and_tasks_only() -> None:
    plan = make_plan(LAYOUT, LLAMA)
    assert len(plan.fingerprint()) == 16
    assert plan.fingerprint() == make_plan(LAYOUT, LLAMA).fingerprint()
    assert plan.fingerprint() != make_plan(LAYOUT, LLAMA, HOME).fingerprint()
    other_order = TokenLayout.from_segments([[(0, 0, 4000)], [(2, 0, 500), (1, 0, 500)], []])
    assert make_plan(LAYOUT, LLAMA, HOME).fingerprint() != make_plan(other_order, LLAMA, HOME).fingerprint()


def test_fingerprint_is_stable_between_releases() -> None:
    """A change here is a change of the format: raise FINGERPRINT_VERSION."""
    layout = TokenLayout.from_segments([[(0, 0, 4)], []])
    assert make_plan(layout, LLAMA, HOME).fingerprint() == "1998413ba825bee8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": None}, "'tasks' must be a list"),
        ({"tasks": [{"doc": 0}]}, "missing key 'q_start'"),
        ({"stats": {}}, "plan statistics lack max_over_mean"),
        ({"config": {"speed": 1}}, "unknown key 'speed' in 'config'"),
        ({"fingerprint": "0" * 16}, "has fingerprint '0000000000000000'"),
        ({"ranks": [[]]}, "has fingerprint|not in the layout"),
    ],
)
def test_bad_json(change: dict, message: str) -> None:
    data = json.loads(make_plan(LAYOUT, LLAMA).to_json())
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps({**data, **change}))


def test_cost_model_must_fit_min_shard() -> None:
    with pytest.raises(ValueError, match="min_shard = 100: set a multiple of the cost model's 128 tokens"):
        make_plan(LAYOUT, LLAMA, PlannerConfig(min_shard=100), cost=TileAreaCost(128))


@pytest.mark.parametrize(("doc", "server", "message"), [(9, 0, "document 9"), (0, 3, "servers"), (0, -1, "servers")])
def test_tasks_must_fit_the_layout(doc: int, server: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_tasks(LAYOUT, LLAMA, PlannerConfig(), make_tasks([doc], 0, 4, 0, 4, server))


def test_only_attending_runs_have_tasks_and_rows() -> None:
    plan = make_plan(SOME_ATTEND, LLAMA, HOME)
    assert [tuple(task)[:5] for task in plan.tasks.tolist()] == [(0, 8, 16, 0, 16), (1, 0, 5, 0, 5)]
    assert SOME_ATTEND.queries_per_rank.tolist() == [8, 5]
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
    layout = TokenLayout.from_segments(SEGMENTS, attends)
    with pytest.raises(PlanError, match=message):
        validate_plan(Plan.from_tasks(layout, LLAMA, HOME, make_plan(SOME_ATTEND, LLAMA, HOME).tasks))
