# SPDX-License-Identifier: BSD-3-Clause
"""The plan in which every query is served where it lives: without disaggregation, and of attention in windows."""

from __future__ import annotations

from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import TaskArray, home_tasks
from torchtitan_cad.planning.planners.base import register_planner


@register_planner("home")
def plan_home(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig,
    cost: TileAreaCost,
) -> TaskArray:
    """Leave all queries at home; only keys of documents that span ranks move. There is no guarantee."""
    return home_tasks(layout, shape.window)
