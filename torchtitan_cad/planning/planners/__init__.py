"""Planners by name. A planner is pure, deterministic and free of global state: every rank runs it for itself."""

from .base import Planner, get_planner, planner_names, register_planner
from .greedy import plan_greedy
from .home import home_tasks, plan_home
from .tiling import plan_tiling

__all__ = [
    "Planner",
    "get_planner",
    "home_tasks",
    "plan_greedy",
    "plan_home",
    "plan_tiling",
    "planner_names",
    "register_planner",
]
