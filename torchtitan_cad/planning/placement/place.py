# SPDX-License-Identifier: BSD-3-Clause
"""Placement: choose which rank holds which tokens of a batch, and plan for that layout (``docs/planning.md``)."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from torchtitan_cad.planning.compile_once import Report
from torchtitan_cad.planning.jit import is_plain_python
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.home_search import WEIGHTS, HomeSearch
from torchtitan_cad.planning.plan import (
    Plan,
    entry_point_callers,
    make_plan,
    moved_by,
    warm_up,
)

_logger = logging.getLogger(__name__)

SEARCHES = 128
"""On n ranks, counted as 8 at least, homes are searched for SEARCHES // n times, at least once, and a plan is made of
each result. Few ranks search more often, as estimates are coarse there."""


def place_and_plan(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig | None = None,
) -> Plan:
    """Choose new homes for the tokens, for which the plan moves fewer bytes, above all on the worst rank.

    Every rank keeps its number of tokens, in document order. Equal inputs give equal homes on every rank. The given
    layout is kept if it leaves queries out, if queries see a window only, whose work is even, or if no layout with a
    lower ``score`` is found. Bytes between nodes count ``BETWEEN_NODES`` times.

    Returns:
        The plan for the chosen homes, which are its ``layout`` and whose search its ``plan_seconds`` count.

    Raises:
        ValueError: as ``make_plan``.
    """
    begin = time.perf_counter()
    config = config or PlannerConfig()
    best = make_plan(layout, shape, config)
    before = moved_by(best)
    all_attend = layout.seg_attends.all()
    if not before.worst or not all_attend or shape.window is not None:
        return best
    num_searches = max(1, SEARCHES // max(8, layout.num_ranks))
    searches = [
        HomeSearch(layout, shape, config, best.cost, weights)
        for weights in WEIGHTS[:num_searches]
    ]
    least_score = before.score(before)
    for seed in range(num_searches):
        homes = searches[seed % len(searches)].find(seed)
        plan = make_plan(homes, shape, config)
        score = moved_by(plan).score(before)
        if score < least_score:
            best = plan
            least_score = score
    return replace(best, plan_seconds=time.perf_counter() - begin)


def warm_up_placement(report: Report = _logger.info) -> None:
    """Load the compiled code of placement and of the planner; ``report`` as for ``warm_up``."""
    warm_up(report)
    if not is_plain_python():
        place_small_batch()


def place_small_batch() -> None:
    """Call the entry points of placement's compiled code."""
    layout = TokenLayout.from_segments([[(0, 0, 2048)], [(1, 0, 1024), (2, 0, 1024)]])
    shape = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, dtype_bytes=2)
    config = PlannerConfig()
    HomeSearch(layout, shape, config, TileAreaCost(config.cost_tile), WEIGHTS[0]).find(
        0
    )


entry_point_callers.append(place_small_batch)
