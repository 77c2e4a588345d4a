"""Homes that move little, and the plan for them: which rank should hold which tokens of a batch.

``docs/placement.md`` describes the problem, the algorithm and what each part of it gains.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from torchtitan_cad.planning.compile_once import Report
from torchtitan_cad.planning.jit import is_plain_python
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.home_search import HomeSearch
from torchtitan_cad.planning.plan import Plan, entry_point_callers, make_plan, warm_up
from torchtitan_cad.planning.score import Moved

_logger = logging.getLogger(__name__)

SEARCHES, SEARCHES_NEAR = 32, 64
"""assignments x ranks: how many are planned, at least one, where ranks are few and estimates coarse; and how many more,
each near the best one so far"""


class Placed(NamedTuple):
    """Homes, the plan for them, and the plan for the homes given, which is the same where these are kept."""

    layout: TokenLayout
    plan: Plan
    given: Plan


def place(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig | None = None, cost: CostModel | None = None
) -> TokenLayout:
    """Return the homes of :func:`place_and_plan`."""
    return place_and_plan(layout, shape, config, cost).layout


def place_and_plan(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig | None = None, cost: CostModel | None = None
) -> Placed:
    """Deal the tokens to ranks anew, so that the plan for them loads no rank with many bytes.

    Every rank has as many tokens as in ``layout``, in document order. Equal inputs give equal homes on every rank.
    A layout that leaves queries out keeps its homes, and so does one for which none are found that have a lower
    ``score``. Bytes between nodes count ``inter_node_weight`` times.

    Raises:
        ValueError: as ``make_plan``.
    """
    config = config or PlannerConfig()
    cost = TileAreaCost(config.cost_tile) if cost is None else cost
    given = make_plan(layout, shape, config, cost)
    before = Moved.by(given)
    best, least = given, before
    can_gain = layout.num_ranks > 1 and before.worst and layout.seg_attends.all()
    if can_gain:
        search = HomeSearch(layout, shape, config, cost)
        from_scratch, near = max(1, SEARCHES // layout.num_ranks), None
        for seed in range(from_scratch + SEARCHES_NEAR // layout.num_ranks):
            homes, assignment = search.find(seed, near if seed >= from_scratch else None)
            plan = make_plan(homes, shape, config, cost)
            moved = Moved.by(plan)
            if moved.score(before) < least.score(before):
                best, least, near = plan, moved, assignment
    return Placed(best.layout, best, given)


def warm_up_placement(report: Report = _logger.info) -> None:
    """Load placement's compiled code, and the planner's; has it compiled if no process of this machine has yet.

    Args:
        report: as for ``warm_up``.
    """
    warm_up(report)
    if not is_plain_python():
        place_small_batch()


def place_small_batch() -> None:
    """Call placement's entry point."""
    layout = TokenLayout.from_segments([[(0, 0, 2048)], [(1, 0, 1024), (2, 0, 1024)]])
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype_bytes=2)
    config = PlannerConfig()
    HomeSearch(layout, shape, config, TileAreaCost(config.cost_tile)).find(0)


entry_point_callers.append(place_small_batch)
