"""Local search: what the board adds up to is what the plan costs, and limits are kept."""

import dataclasses
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.costs import cost_of
from tests.planning.layouts import LLAMA, Case, cases
from torchtitan_cad.planning import Plan, PlannerConfig, TileAreaCost, TokenLayout, validate_plan
from torchtitan_cad.planning.model.limits import load_limits, server_loads
from torchtitan_cad.planning.model.tasks import from_table, home_tasks, is_diagonal, make_tasks, task_table
from torchtitan_cad.planning.plan import moved_by
from torchtitan_cad.planning.planners.local_search.improve import LocalSearch


@given(
    case=cases,
    kind=st.sampled_from(["tiles", "concave", "noisy"]),
    load=st.floats(1.0, 1.5),
    split_kv=st.booleans(),
    ranks_per_node=st.sampled_from([None, 2]),
)
def test_any_plan_it_returns_covers_the_layout_within_the_loads(
    case: Case, kind: str, load: float, split_kv: bool, ranks_per_node: int | None
) -> None:
    """From the home plan, whatever the limits."""
    case = dataclasses.replace(case, tile=64, min_shard=128)
    layout, home = case.layout(), home_tasks(case.layout())
    config = dataclasses.replace(case.config, ranks_per_node=ranks_per_node)
    cost = cost_of(kind, case.seed, config.cost_tile)
    limits = np.full(layout.num_ranks, int(load * cost.cost(home).sum() / layout.num_ranks))
    config = dataclasses.replace(config, split_kv=split_kv)
    search = LocalSearch(layout, LLAMA, config, cost, np.arange(len(layout.docs)))
    found = search.improve(task_table(layout, home), np.zeros_like(limits), limits, limits + limits // 10, 500)
    if found is None:
        return
    table, moved = found
    tasks = from_table(layout.docs, table)
    plan = Plan.from_tasks(layout, LLAMA, config, tasks)
    assert moved == moved_by(plan)
    validate_plan(dataclasses.replace(plan, config=dataclasses.replace(plan.config, tolerance=1e9)))
    assert (server_loads(tasks, cost, layout.num_ranks) <= 1.1 * limits).all()
    if not split_kv:
        assert is_diagonal(tasks).all()


@pytest.mark.parametrize("kind", ["tiles", "concave", "noisy"])
def test_as_little_more_as_is_found_where_the_limits_cannot_be_kept(kind: str) -> None:
    layout = TokenLayout.from_segments([[(0, 0, 4096)], []])
    cost, home = cost_of(kind, 3, 128), home_tasks(layout)
    total = int(cost.cost(home).sum())
    search = LocalSearch(layout, LLAMA, PlannerConfig(), cost, np.arange(1))
    limits, guaranteed = np.full(2, total // 2 - 1), np.full(2, int(0.6 * total))
    found = search.improve(task_table(layout, home), np.zeros(2, dtype=np.int64), limits, guaranteed, 100)
    assert found is not None
    assert server_loads(from_table(layout.docs, found[0]), cost, 2).max() <= 0.6 * total


def test_documents_served_by_each_others_home_are_swapped_back() -> None:
    layout = TokenLayout.from_segments([[(0, 0, 1024)], [(1, 0, 1024)]])
    crossed = make_tasks(np.arange(2), 0, 1024, 0, 1024, np.array([1, 0]))
    search = LocalSearch(layout, LLAMA, PlannerConfig(), TileAreaCost(128), np.arange(2))
    start, limits = task_table(layout, crossed), np.full(2, 36)
    found = [search.improve(start, np.zeros(2, dtype=np.int64), limits, limits, budget) for budget in (0, 100)]
    tasks = [from_table(layout.docs, each[0]) for each in found if each is not None]
    assert [Plan.from_tasks(layout, LLAMA, PlannerConfig(), each).moves_rows for each in tasks] == [True, False]


def test_a_rank_that_holds_the_document_is_offered_a_part_however_little_room_it_has() -> None:
    """Rank 0 has the most room, but less than a sixteenth of its load, and holds keys of what rank 1 gives away."""
    short = iter((number, 0, 512) for number in range(5, 1000))
    layout = TokenLayout.from_segments(
        [
            [*islice(short, 107), (0, 32384, 10496), (3, 0, 256)],
            [*islice(short, 109), (0, 42880, 9344), (3, 256, 256), (4, 0, 128)],
            [*islice(short, 95), (0, 15744, 16640), (4, 128, 256)],
            [(1, 0, 11776), *islice(short, 34), (0, 0, 15744), (2, 0, 20480), (4, 384, 128)],
        ]
    )
    config, cost, home = PlannerConfig(split_kv=False), TileAreaCost(128), home_tasks(layout)
    limits = load_limits(layout, config, cost, server_loads(home, cost, 4)).guaranteed
    search = LocalSearch(layout, LLAMA, config, cost, np.arange(len(layout.docs)))
    assert search.improve(task_table(layout, home), np.zeros_like(limits), limits, limits, 0) is not None
