"""Load limits of ranks of unequal speed."""

import numpy as np
import pytest

from bench.workloads import workload_layout
from tests.planning.layouts import LLAMA
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan, validate_plan


def times(plan: Plan) -> np.ndarray:
    """[num_ranks] time of every rank over the mean, from the definition."""
    relative = np.array(plan.config.rank_speeds) / np.mean(plan.config.rank_speeds)
    return plan.stats.loads / relative / plan.stats.mean_load


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("planner", ["greedy", "local_search"])
def test_slow_ranks_get_less_and_all_finish_together(num_ranks: int, planner: str) -> None:
    layout = workload_layout("lognormal", num_ranks, 11)
    drawn = tuple(np.random.default_rng(0).choice([0.5, 0.8, 1.0, 1.2], size=num_ranks).tolist())
    plan = make_plan(layout, LLAMA, PlannerConfig(planner=planner, rank_speeds=drawn))
    validate_plan(plan)
    assert plan.stats.max_over_mean == pytest.approx(times(plan).max())
    assert plan.stats.max_over_mean <= 1.02
    assert plan.stats.max_over_mean_before > 1.3
    without = make_plan(layout, LLAMA, PlannerConfig(planner=planner))
    assert (without.stats.loads / (np.array(drawn) / np.mean(drawn))).max() / plan.stats.mean_load > 1.5


def test_equal_speeds_change_nothing() -> None:
    layout = workload_layout("lognormal", 16, 11)
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


@pytest.mark.parametrize("planner", ["home", "greedy", "local_search"])
def test_one_speed_per_rank(planner: str) -> None:
    layout = TokenLayout.from_segments([[(0, 0, 1000)], []])
    with pytest.raises(ValueError, match="rank_speeds has 3 entries for 2 ranks: set one per rank"):
        make_plan(layout, LLAMA, PlannerConfig(planner=planner, rank_speeds=(1.0, 1.0, 1.0)))
