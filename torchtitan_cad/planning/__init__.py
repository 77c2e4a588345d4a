"""Planning core attention disaggregation: pure CPU mathematics.

Imports numpy and numba; no torch, no process groups. ``make_plan`` turns a layout (which rank holds which tokens) into
a plan (which rank attends which queries to which keys) and ``Plan.exchange`` into the tables that carry it out.
"""

from .config import PlannerConfig
from .cost import CostModel, ProfileCost, TileAreaCost
from .exchange import CallTable, RankExchange
from .layout import TokenLayout
from .limits import CapacityError
from .pair import PlanCosts, PlanPair, make_pair
from .placement import place
from .plan import Plan, make_plan, warm_up
from .planners import Planner, get_planner, planner_names, register_planner
from .profile import Profile
from .shape import AttentionShape
from .stats import PlanStats
from .tasks import TASK_DTYPE
from .timed import LayerTimes
from .validate import PlanError, validate_exchanges, validate_plan

__all__ = [
    "TASK_DTYPE",
    "AttentionShape",
    "CallTable",
    "CapacityError",
    "CostModel",
    "LayerTimes",
    "Plan",
    "PlanCosts",
    "PlanError",
    "PlanPair",
    "PlanStats",
    "Planner",
    "PlannerConfig",
    "Profile",
    "ProfileCost",
    "RankExchange",
    "TileAreaCost",
    "TokenLayout",
    "get_planner",
    "make_pair",
    "make_plan",
    "place",
    "planner_names",
    "register_planner",
    "validate_exchanges",
    "validate_plan",
    "warm_up",
]
