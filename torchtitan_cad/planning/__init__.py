# SPDX-License-Identifier: BSD-3-Clause
"""Planning core attention disaggregation: pure CPU mathematics.

``make_plan`` turns a layout (which rank holds which tokens) into a plan (which rank attends which queries to which
keys) and ``Plan.exchange`` into the tables that carry it out.
"""

from torchtitan_cad.planning.exchange.tables import CallTable, RankExchange
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import TASK_DTYPE
from torchtitan_cad.planning.placement.place import place_and_plan
from torchtitan_cad.planning.placement.step import PlannedMicrobatch, plan_step
from torchtitan_cad.planning.plan import Plan, make_plan, warm_up
from torchtitan_cad.planning.planners import (
    Planner,
    get_planner,
    register_planner,
)
from torchtitan_cad.planning.stats import PlanStats
from torchtitan_cad.planning.timed import LayerTimes

__all__ = [
    "TASK_DTYPE",
    "AttentionKind",
    "AttentionShape",
    "CallTable",
    "LayerTimes",
    "Plan",
    "PlanStats",
    "PlannedMicrobatch",
    "Planner",
    "PlannerConfig",
    "RankExchange",
    "TileAreaCost",
    "TokenLayout",
    "get_planner",
    "make_plan",
    "place_and_plan",
    "plan_step",
    "register_planner",
    "warm_up",
]
