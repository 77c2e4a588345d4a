"""The default planner: what overloaded ranks cannot do, as rectangles of queries and keys on the ranks with room.

Every rank keeps its own work up to the tolerated load; what is over is tiled over the ranks with room and improved by
local search (``tile.py``). The tiling deals out tiles. Where loads are counted otherwise, or rows that a rank may
receive are limited, and local search finds no plan within the limits, both are done again, a few times at most, with
the number of tiles per rank and the price of rows corrected. Ranks in nodes are tiled in two levels (``by_node.py``).

Work that cannot be cut into rectangles of whole cells, as when documents are shorter than ``min_shard``, is left to the
greedy planner. With ``split_kv = false`` the plan is the greedy's. Nothing depends on clocks: how much is tried is
counted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import LARGEST
from torchtitan_cad.planning.model.shape import AttentionShape, Prices, RowPrices
from torchtitan_cad.planning.model.tasks import TaskArray
from torchtitan_cad.planning.planners.base import register_planner
from torchtitan_cad.planning.planners.goal import Candidate, Goal, better, lighter
from torchtitan_cad.planning.planners.greedy import greedy_tasks, plan_greedy
from torchtitan_cad.planning.planners.local_search.improve import LocalGoal
from torchtitan_cad.planning.planners.tiling.by_node import tile_by_node
from torchtitan_cad.planning.planners.tiling.tile import Effort, Problem, tile

MOST_TILINGS = 6
"""Tilings at most, if no plan is found that keeps everything."""

LEVELS = (0, 64, 16, 4, 1)
"""Parts (none, one 64th, ...) of the way from the tolerated loads to the guaranteed ones at which tilings are tried, in
turn, until whole cells can keep them."""

DEARER = 1.5
"""Factor per tiling on the price of rows of which some rank receives too many."""


@register_planner("tiling")
def plan_tiling(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> TaskArray:
    """Plan diagonals and rectangles within the tolerated load, or as the greedy planner where cells are too coarse."""
    if not config.split_kv:
        return plan_greedy(layout, shape, config, cost)
    goal = Goal(layout, shape, config, cost)
    if Candidate(goal, goal.home).tolerable:
        return goal.home
    plan = _tile_once(goal) if goal.in_tiles else None
    if plan is None and not goal.exact:
        plan = _tile_with_feedback(goal)
    if plan is not None and (goal.exact or plan.tolerable):
        return plan.tasks
    greedy = greedy_tasks(goal)
    other = goal.improved(greedy, budget=0) if goal.rows else Candidate(goal, greedy)
    return (other if plan is None else better(plan, other)).tasks


def is_tiled_once(config: PlannerConfig, cost: CostModel) -> bool:
    """Tell whether plans are single tilings: tiles are what loads are counted in, and all that is limited."""
    limited = config.max_recv_queries, config.max_recv_keys, config.ranks_per_node
    is_tiling = config.planner == "tiling" and config.split_kv and isinstance(cost, TileAreaCost)
    return is_tiling and limited == (None, None, None)


def quick_figures(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel
) -> tuple[int, int] | None:
    """Return the bytes of all ranks, and of the worst, of a plan that is quickly made: a few percent more than others.

    For what ``is_tiled_once``; None where whole cells are too coarse for the tolerated loads.
    """
    goal = Goal(layout, shape, config, cost)
    problem, limits = Problem(layout, goal.home, shape, config.min_shard), goal.limits.tolerated
    tasks = tile(problem, limits, cost.granularity, effort=Effort.quick(layout.num_ranks))
    return None if tasks is None else Candidate(goal, tasks).figures


def _tile_once(goal: Goal) -> Candidate | None:
    """Return a plan of at most the tolerated loads, or the least above that whole cells allow; None if they allow none.

    Where rows are limited the tolerated loads alone are tried: if the plan keeps the limits, these change nothing.
    """
    gap = goal.limits.guaranteed - goal.limits.tolerated
    for part in LEVELS if goal.exact and gap.any() else LEVELS[:1]:
        plan = _tile(goal, goal.limits.tolerated + (gap // part if part else 0), goal.shape)
        if plan is not None and not plan.excess:
            return plan
    return None


def _tile_with_feedback(goal: Goal) -> Candidate | None:
    """Return the best plan of a few tilings, the nearest if none keeps everything; None where tiling fails.

    The first plan within the tolerated loads is taken, with limited rows the better of the first two. A tiling is
    corrected by the one before: the tiles of each rank by how far its load is from its limit, and the price of the rows
    of which some rank receives too many.
    """
    best: Candidate | None = None
    limits = goal.limits
    loads, tiles, target = goal.loads(goal.home), goal.tiles(goal.home), limits.tolerated
    per_tile = _load_per_tile(loads, tiles, loads > target)
    factors, tolerable = np.ones(2), 0
    for _ in range(MOST_TILINGS):
        limit = tiles + np.minimum(np.floor((target - loads) / per_tile), LARGEST // 2).astype(np.int64)
        prices = Prices(int(goal.shape.query_bytes * factors[0]), int(goal.shape.kv_bytes * factors[1]))
        plan = _tile(goal, limit, prices, goal.local)
        if plan is None:
            target = (target + limits.guaranteed) // 2
            continue
        best = plan if best is None else better(best, plan)
        tolerable += plan.tolerable
        if tolerable == (2 if goal.rows else 1):
            break
        loads, tiles = plan.use[:, 0], goal.tiles(plan.tasks)
        if goal.rows:
            factors[plan.over_rows.argmax()] *= DEARER
    return best


def _tile(goal: Goal, limit: IntArray, prices: RowPrices, local: LocalGoal | None = None) -> Candidate | None:
    """Take the better of a tiling and, for ranks in nodes, one in two levels; None where cells allow none."""
    problem = Problem(goal.layout, goal.home, prices, goal.config.min_shard)
    granularity = goal.cost.granularity
    flat = tile(problem, limit, granularity, local)
    if flat is None:
        return None
    plan = Candidate(goal, flat)
    if local is not None and flat is goal.home:
        plan = goal.improved(flat, budget=0)
    if goal.node[-1] == 0:
        return plan
    nested = tile_by_node(problem, limit, goal.node, granularity)
    if nested is None:
        return plan
    if local is None:
        return lighter(Candidate(goal, nested), plan)
    return better(goal.improved(nested, budget=0), plan)


def _load_per_tile(loads: IntArray, tiles: IntArray, over: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """[num_ranks] first guess of what a tile costs: on overloaded ranks what it does at home, on others the mean of
    those, for it is their work that moves."""
    source = over if over.any() else np.ones(len(loads), dtype=bool)
    mean = float(loads[source].sum()) / max(1.0, float(tiles[source].sum()))
    return np.where(over, loads / np.maximum(tiles, 1), mean)
