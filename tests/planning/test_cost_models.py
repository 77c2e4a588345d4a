"""Cost models other than tile area: balance and bytes."""

import numpy as np
import pytest

from bench.workloads import workload_layout
from tests.planning.costs import concave_cost, noisy_cost
from tests.planning.layouts import LLAMA
from tests.sets import params
from torchtitan_cad.planning import CostModel, PlannerConfig, TileAreaCost, TokenLayout, make_plan, validate_plan
from torchtitan_cad.planning.model.limits import server_loads
from torchtitan_cad.planning.model.tasks import is_diagonal

MODELS: dict[str, CostModel] = {
    "overhead of 1": concave_cost(1),
    "overhead of 4": concave_cost(4),
    "noisy": noisy_cost(0),
}


@pytest.mark.parametrize("num_ranks", params([8, 64], [8]))
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("name", ["lognormal", "one big", "uniform"])
def test_any_cost_model_is_balanced_for_the_bytes_of_tile_area(name: str, model: str, num_ranks: int) -> None:
    figures = []
    for seed in (11, 12, 13):
        layout = workload_layout(name, num_ranks, seed)
        plan, in_tiles = make_plan(layout, LLAMA, cost=MODELS[model]), make_plan(layout, LLAMA)
        validate_plan(plan)
        assert plan.stats.max_over_mean <= 1.02
        if num_ranks == 64:
            assert (~is_diagonal(plan.tasks)).any()
            assert server_loads(in_tiles.tasks, MODELS[model], num_ranks).max() / plan.stats.mean_load > 1.02
        figures.append((plan.stats.total_bytes, plan.stats.max_rank_bytes))
        figures.append((-in_tiles.stats.total_bytes, -in_tiles.stats.max_rank_bytes))
    ours, theirs = np.sum(figures[::2], axis=0), -np.sum(figures[1::2], axis=0)
    assert (ours <= np.array([1.15, 1.2]) * theirs).all()


def test_tiles_counted_by_a_table_give_the_same_plan() -> None:
    layout = workload_layout("lognormal", 64, 11)
    plans = [make_plan(layout, LLAMA, cost=cost) for cost in (TileAreaCost(128), concave_cost(0))]
    assert plans[0].fingerprint() == make_plan(layout, LLAMA).fingerprint()
    assert plans[0].tasks.tolist() == plans[1].tasks.tolist()


def test_balance_before_bytes_where_rows_cost_most() -> None:
    """Rows that cost 100 times a tile must not be computed in parts: the greedy's whole rows are balanced better."""
    short = [[(i, 0, 1) for i in range(16 * rank - 14, 16 * rank + 2)] for rank in (1, 2)]
    layout, cost = TokenLayout.from_segments([[(0, 0, 8), (1, 0, 8)], *short]), concave_cost(100, tiles=10, tile=1)
    plans = [
        make_plan(layout, LLAMA, PlannerConfig(tolerance=0.0, min_shard=1, tile=1, planner=planner), cost)
        for planner in ("local_search", "greedy")
    ]
    assert plans[0].stats.max_over_mean <= plans[1].stats.max_over_mean < 1.03
