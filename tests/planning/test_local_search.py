"""Local search: what the board adds up to is what the plan costs, and limits are kept."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.costs import concave_cost, noisy_cost
from tests.planning.layouts import LLAMA, Case, cases
from torchtitan_cad.planning import CostModel, Plan, TileAreaCost, TokenLayout, validate_plan
from torchtitan_cad.planning.model.limits import LARGEST, server_loads
from torchtitan_cad.planning.model.tasks import from_table, home_tasks, is_diagonal, make_tasks, task_table
from torchtitan_cad.planning.planners.local_search.improve import LocalGoal, LocalSearch


def cost_of(kind: str, seed: int, tile: int) -> CostModel:
    tiles = 60_000 // tile + 2
    return {
        "tiles": TileAreaCost(tile),
        "concave": concave_cost(seed % 8, tiles, tile),
        "noisy": noisy_cost(seed % 1000, tiles, tile),
    }[kind]


@given(
    case=cases,
    kind=st.sampled_from(["tiles", "concave", "noisy"]),
    load=st.floats(1.0, 1.5),
    rows=st.sampled_from([0, 100, 1000, LARGEST]),
    split_kv=st.booleans(),
)
def test_figures_are_those_of_the_plan(case: Case, kind: str, load: float, rows: int, split_kv: bool) -> None:
    """From the home plan, whatever the limits: the tasks cover the layout, and cost what was reported."""
    case = dataclasses.replace(case, tile=64, min_shard=128)
    layout, home = case.layout(), home_tasks(case.layout())
    cost = cost_of(kind, case.seed, case.config.cost_tile)
    mean = cost.cost(home).sum() / layout.num_ranks
    levels = np.full((1, layout.num_ranks, 3), rows)
    levels[0, :, 0] = int(load * mean)
    search = LocalSearch(layout, LLAMA, case.min_shard, LocalGoal(cost, levels, split_kv), np.arange(len(layout.docs)))
    loads = np.zeros(layout.num_ranks, dtype=np.int64)
    found = search.improve([task_table(layout, home)], loads, 500)
    tasks = from_table(layout.docs, found.tasks)
    plan = Plan.from_tasks(layout, LLAMA, case.config, tasks)
    validate_plan(dataclasses.replace(plan, config=dataclasses.replace(plan.config, tolerance=1e9)))
    assert (found.total, found.worst) == (plan.stats.total_bytes, plan.stats.max_rank_bytes)
    use = np.stack([server_loads(tasks, cost, layout.num_ranks), *plan.rows_in], axis=1)
    assert found.level == 1 or (use <= levels[0]).all()
    if not split_kv:
        assert is_diagonal(tasks).all()


@pytest.mark.parametrize("kind", ["tiles", "concave", "noisy"])
def test_the_second_level_where_the_first_cannot_be_kept(kind: str) -> None:
    layout = TokenLayout.from_segments([[(0, 0, 4096)], []])
    cost, home = cost_of(kind, 3, 128), home_tasks(layout)
    total = int(cost.cost(home).sum())
    levels = np.full((2, 2, 3), LARGEST)
    levels[0, :, 0], levels[1, :, 0] = total // 2 - 1, 0.6 * total
    search = LocalSearch(layout, LLAMA, 128, LocalGoal(cost, levels), np.arange(1))
    found = search.improve([task_table(layout, home)], np.zeros(2, dtype=np.int64), 100)
    assert found.level == 1
    assert server_loads(from_table(layout.docs, found.tasks), cost, 2).max() <= 0.6 * total


def test_the_better_of_two_starts() -> None:
    """Two documents served by each other's home move everything for nothing."""
    layout = TokenLayout.from_segments([[(0, 0, 1024)], [(1, 0, 1024)]])
    crossed = make_tasks(np.arange(2), 0, 1024, 0, 1024, np.array([1, 0]))
    goal = LocalGoal.of_tiles(np.full(2, 36), 128)
    search = LocalSearch(layout, LLAMA, 128, goal, np.arange(2))
    starts = [task_table(layout, tasks) for tasks in (crossed, home_tasks(layout))]
    found = search.improve(starts, np.zeros(2, dtype=np.int64), 0)
    assert (found.level, found.total) == (0, 0)
    assert search.improve(starts[:1], np.zeros(2, dtype=np.int64), 0).total > 0
    assert search.improve(starts[:1], np.zeros(2, dtype=np.int64), 100).total == 0  # by a swap
