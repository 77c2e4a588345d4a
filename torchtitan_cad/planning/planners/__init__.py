# SPDX-License-Identifier: BSD-3-Clause
"""Planners by name. A planner is pure, deterministic and free of global state: every rank runs it for itself."""

from torchtitan_cad.planning.planners.base import (
    Planner,
    get_planner,
    register_planner,
)
from torchtitan_cad.planning.planners.home import plan_home
from torchtitan_cad.planning.planners.local_search.planner import plan_local_search

__all__ = [
    "Planner",
    "get_planner",
    "plan_home",
    "plan_local_search",
    "register_planner",
]
