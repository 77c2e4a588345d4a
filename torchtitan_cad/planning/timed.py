"""``tolerance = "auto"``: choose the tolerance by predicted layer time.

A plan of lower tolerance balances better and moves more bytes. Which plan is faster depends on the batch and on the
machine: the exchange costs only the time by which it exceeds the work that hides it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.plan import Plan, make_plan
from torchtitan_cad.planning.text import brief, is_number

TOLERANCES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.25, 0.5)
"""tolerances tried in this order, until the exchange is fully hidden"""


@dataclass(frozen=True)
class LayerTimes:
    """Rates of one rank that predict the time of a layer under a plan, forward and backward together.

    Attributes:
        unit: seconds of attention per unit of the cost model.
        linear: seconds of a layer's linear work per token of the rank.
        bytes_per_second: into a rank and, at the same time, out of it.
        overlaps: True if another, equal nano-batch computes during the exchange.

    Raises:
        ValueError: a number that is not positive (``linear``: negative), or not finite.
    """

    unit: float
    linear: float
    bytes_per_second: float
    overlaps: bool

    def __post_init__(self) -> None:
        for field in fields(self)[:3]:
            value = getattr(self, field.name)
            if not is_number(value) or value < 0 or (value == 0 and field.name != "linear"):
                raise ValueError(f"{field.name} = {brief(value)}: set a positive finite number")

    def linear_seconds(self, layout: TokenLayout) -> float:
        """Return the seconds of linear work on the mean rank, counting only tokens that attend in this layout."""
        return self.linear * int(layout.seg_length[layout.seg_attends].sum()) / layout.num_ranks

    def exchange_seconds(self, plan: Plan) -> float:
        """Return the seconds in which the busiest rank sends and receives its rows of forward and backward."""
        backward = plan.shape.for_backward()
        row_bytes = plan.shape.query_bytes + backward.query_bytes, plan.shape.kv_bytes + backward.kv_bytes
        needs = plan.query_needs, plan.key_needs
        directions = ([need.rows_in for need in needs], [need.rows_out for need in needs])
        # Bytes that return count with the row that went there, as in PlanStats.
        most = max(int((queries * row_bytes[0] + keys * row_bytes[1]).max()) for queries, keys in directions)
        return most / self.bytes_per_second

    def exposed_seconds(self, plan: Plan) -> float:
        """Return the seconds of the exchange beyond the other nano-batch's linear work and mean attention."""
        hidden = self.linear_seconds(plan.layout) + self.unit * plan.stats.mean_load
        return max(0.0, self.exchange_seconds(plan) - (hidden if self.overlaps else 0.0))

    def layer_seconds(self, plan: Plan) -> float:
        """Return a layer's seconds: linear work, attention of the slowest rank and exposed exchange."""
        attention = self.unit * plan.stats.mean_load * plan.stats.max_over_mean
        return self.linear_seconds(plan.layout) + attention + self.exposed_seconds(plan)


def make_timed_plan(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, times: LayerTimes, cost: CostModel | None = None
) -> Plan:
    """Return the plan of lowest predicted layer time over ``TOLERANCES``, and of those the one with the fewest bytes.

    No larger tolerance is tried once the exchange is hidden, as a less even plan can then only be slower. Equal inputs
    give equal plans on every rank. ``plan.config.tolerance`` is the chosen tolerance.

    Raises:
        ValueError: as ``make_plan``.
    """
    plans = []
    for tolerance in TOLERANCES:
        plans.append(make_plan(layout, shape, replace(config, tolerance=tolerance), cost))
        if not times.exposed_seconds(plans[-1]):
            break
    return min(plans, key=lambda plan: (times.layer_seconds(plan), plan.stats.total_bytes))
