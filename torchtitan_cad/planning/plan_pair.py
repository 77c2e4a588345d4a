"""A plan for forward and, where it pays, another for backward.

Backward has other costs (its kernel reads and writes more, so a row of tiles does not take a fixed multiple of its
forward time) and other bytes per row. A plan that balances forward may therefore leave backward unbalanced. As backward
starts from rows that are at home again, it can follow a plan of its own, unless servers keep what forward brought them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import CapacityError
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.plan import Plan, make_plan
from torchtitan_cad.planning.timed import LayerTimes, make_timed_plan

BACKWARD_MARGIN = 0.02


@dataclass(frozen=True)
class PlanCosts:
    """Cost models of forward and backward.

    Attributes:
        backward: None if backward has to follow the forward plan.
        margin: of max over mean predicted backward load, by how much a plan of its own has to be better.
    """

    forward: CostModel
    backward: CostModel | None = None
    margin: float = BACKWARD_MARGIN


@dataclass(frozen=True, eq=False)
class PlanPair:
    """The plans of one batch.

    Attributes:
        backward: in the prices and costs of backward if these are known; its tasks are those of ``forward`` unless
            ``separate``.
    """

    forward: Plan
    backward: Plan
    separate: bool

    def fingerprint(self) -> str:
        """Hash the layout and all tasks to 64 bits (16 hex digits); as ``forward`` if there are no others."""
        prints = self.forward.fingerprint()
        if not self.separate:
            return prints
        return hashlib.blake2b((prints + self.backward.fingerprint()).encode(), digest_size=8).hexdigest()


def make_pair(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig | None = None,
    costs: PlanCosts | None = None,
    times: LayerTimes | None = None,
) -> PlanPair:
    """Plan a batch forward, and backward apart if that lowers its predicted max over mean by more than the margin.

    Without ``costs`` forward costs tile area and backward follows it. With ``times`` the tolerance is the one by which
    a layer takes the least time, whatever ``config`` says. Raises ValueError as ``make_plan``.
    """
    cost = costs.forward if costs else None
    if times is None:
        forward = make_plan(layout, shape, config, cost)
    else:
        forward = make_timed_plan(layout, shape, config or PlannerConfig(), times, cost)
    if costs is None or costs.backward is None:
        return PlanPair(forward, forward, separate=False)
    prices = shape.for_backward()
    followed = Plan.from_tasks(layout, prices, forward.config, forward.tasks, costs.backward)
    if followed.stats.max_over_mean <= 1 + costs.margin:  # no plan does better than the mean
        return PlanPair(forward, followed, separate=False)
    try:
        own = make_plan(layout, prices, forward.config, costs.backward)
    except CapacityError:  # which the forward plan keeps
        return PlanPair(forward, followed, separate=False)
    separate = followed.stats.max_over_mean - own.stats.max_over_mean > costs.margin
    return PlanPair(forward, own if separate else followed, separate)
