"""Load limits of ranks of unequal speed."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads import document_lengths, spanning_layout
from tests.planning.layouts import LLAMA, Case, cases
from torchtitan_cad.planning import Plan, PlannerConfig, TileAreaCost, TokenLayout, make_plan, validate_plan
from torchtitan_cad.planning.model.tasks import make_tasks

speeds = st.sampled_from([1.0, 1.0, 0.9, 0.5, 2, 1e-3])


def times(plan: Plan) -> np.ndarray:
    """[num_ranks] time of every rank over the mean, from the definition."""
    relative = np.array(plan.config.rank_speeds) / np.mean(plan.config.rank_speeds)
    return plan.stats.loads / relative / plan.stats.mean_load


def check_guarantee(plan: Plan) -> None:
    """Every load <= max((1 + tolerance) share, share + shard), with fractions."""
    layout, config, cost = plan.layout, plan.config, TileAreaCost(plan.config.cost_tile)
    longest = int(layout.doc_lengths.max(initial=0))
    shard = make_tasks([0], max(0, longest - config.min_shard), longest, 0, longest, 0)
    shard_cost = int(cost.cost(shard)[0]) if longest else 0
    total = sum(plan.stats.loads_before.tolist())
    assert config.rank_speeds is not None
    whole = sum(Fraction(speed) for speed in config.rank_speeds)
    for rank, speed in enumerate(config.rank_speeds):
        share = total * Fraction(speed) / whole
        bound = int(max((1 + Fraction(config.tolerance)) * share, share + shard_cost))
        assert plan.stats.load_limits[rank] == bound
        assert plan.stats.loads[rank] <= bound


@given(case=cases, planner=st.sampled_from(["greedy", "local_search"]), data=st.data())
def test_guarantee_holds_for_any_speeds(case: Case, planner: str, data: st.DataObject) -> None:
    layout = case.layout()
    drawn = tuple(data.draw(st.lists(speeds, min_size=layout.num_ranks, max_size=layout.num_ranks)))
    plan = make_plan(layout, LLAMA, dataclasses.replace(case.config, planner=planner, rank_speeds=drawn))
    validate_plan(plan)
    check_guarantee(plan)
    assert plan.stats.lower_bound_bytes <= plan.stats.total_bytes
    assert plan.stats.forced_export_bytes <= plan.stats.lower_bound_rank_bytes <= plan.stats.max_rank_bytes


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("planner", ["greedy", "local_search"])
def test_slow_ranks_get_less_and_all_finish_together(num_ranks: int, planner: str) -> None:
    layout = spanning_layout(document_lengths("lognormal", num_ranks, 11), num_ranks)
    drawn = tuple(np.random.default_rng(0).choice([0.5, 0.8, 1.0, 1.2], size=num_ranks).tolist())
    plan = make_plan(layout, LLAMA, PlannerConfig(planner=planner, rank_speeds=drawn))
    validate_plan(plan)
    assert plan.stats.max_over_mean == pytest.approx(times(plan).max())
    assert plan.stats.max_over_mean <= 1.02
    assert plan.stats.max_over_mean_before > 1.3
    without = make_plan(layout, LLAMA, PlannerConfig(planner=planner))
    assert (without.stats.loads / (np.array(drawn) / np.mean(drawn))).max() / plan.stats.mean_load > 1.5


def test_equal_speeds_change_nothing() -> None:
    layout = spanning_layout(document_lengths("lognormal", 16, 11), 16)
    plans = [make_plan(layout, LLAMA, PlannerConfig(rank_speeds=each)) for each in (None, (1.0,) * 16, (0.3,) * 16)]
    assert len({plan.fingerprint() for plan in plans}) == 1
    assert len({plan.stats.max_over_mean for plan in plans}) == 1


def test_limits_are_exact() -> None:
    """Shares of 10 to 1: fractions of binary numbers, not rounded ones."""
    layout = TokenLayout.from_segments([[(i, 0, 100) for i in range(11)], []])
    config = PlannerConfig(tolerance=0.0, rank_speeds=(10.0, 1.0), planner="greedy")
    plan = make_plan(layout, LLAMA, config)
    assert plan.stats.loads.tolist() == [10, 1]
    assert plan.stats.max_over_mean == 1.0
    assert Plan.from_json(plan.to_json()).config == config


def test_any_tolerance_is_an_integer_limit() -> None:
    layout = TokenLayout.from_segments([[(0, 0, 1000)], []])
    assert make_plan(layout, LLAMA, PlannerConfig(tolerance=1e300)).stats.tasks_moved == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, r"rank_speeds = 1.0: set one positive number per rank"),
        ((1.0, 0.0), r"rank_speeds\[1\] = 0.0: set a positive finite number"),
        ((1.0, -2), r"rank_speeds\[1\] = -2"),
        ((float("inf"), 1.0), r"rank_speeds\[0\] = inf"),
        ((True, 1.0), r"rank_speeds\[0\] = True"),
        (("fast", 1.0), r"rank_speeds\[0\] = 'fast'"),
    ],
)
def test_bad_speeds(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlannerConfig(rank_speeds=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", ["home", "greedy", "local_search"])
def test_one_speed_per_rank(planner: str) -> None:
    layout = TokenLayout.from_segments([[(0, 0, 1000)], []])
    with pytest.raises(ValueError, match="rank_speeds has 3 entries for 2 ranks: set one per rank"):
        make_plan(layout, LLAMA, PlannerConfig(planner=planner, rank_speeds=(1.0, 1.0, 1.0)))
