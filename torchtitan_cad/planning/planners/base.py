# SPDX-License-Identifier: BSD-3-Clause
"""The planner protocol and its registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import TaskArray


class Planner(Protocol):
    """Turns a layout into tasks that cover every causal pair exactly once.

    The result must be a function of the arguments alone, to the bit, on every rank: no clocks, no hash order, no
    floating-point sums whose order may vary. ``make_plan`` sorts it. Planners other than ``home`` keep every load
    within ``load_limits(...).guaranteed``.
    """

    def __call__(
        self,
        layout: TokenLayout,
        shape: AttentionShape,
        config: PlannerConfig,
        cost: TileAreaCost,
    ) -> TaskArray: ...


_PLANNERS: dict[str, Planner] = {}


def register_planner(name: str) -> Callable[[Planner], Planner]:
    """Decorate a planner so that ``PlannerConfig(planner=name)`` selects it. Raises ValueError for a name in use."""

    def register(planner: Planner) -> Planner:
        if name in _PLANNERS:
            raise ValueError(
                f"planner {name!r} is already registered: choose another name"
            )
        _PLANNERS[name] = planner
        return planner

    return register


def get_planner(name: str) -> Planner:
    """Return the planner of that name. Raises ValueError naming the known planners."""
    if name not in _PLANNERS:
        raise ValueError(
            f"planner = {name!r}: set one of {', '.join(sorted(_PLANNERS))}"
        )
    return _PLANNERS[name]
