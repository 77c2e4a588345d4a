# SPDX-License-Identifier: BSD-3-Clause
"""Rates of a machine, by which ``tolerance = "auto"`` chooses plans (``placement/microbatch.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.exchange.traffic import measure_traffic
from torchtitan_cad.planning.intervals import FloatArray
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.planning.plan import Plan
from torchtitan_cad.planning.text import brief, is_number

RATES = ("unit", "linear", "bytes_per_second", "between_hosts", "exchange")
"""attributes of ``LayerTimes`` that are measured"""
EXCHANGES = 4
"""exchanges of a layer whose rows move: there and home, forward and backward"""


@dataclass(frozen=True)
class LayerTimes:
    """Rates of one rank that predict the time of a layer under a plan, forward and backward together.

    Attributes:
        unit: seconds of attention per unit of the cost model.
        linear: seconds of a layer's linear work per token of the rank.
        bytes_per_second: between ranks of one host, into a rank and, at the same time, out of it.
        between_hosts: the same between hosts.
        exchange: seconds of an exchange besides those of its bytes.
        overlaps: True if another, equal nano-batch computes during the exchange.
        hosts: [num_ranks] number of every rank's host; empty for one host.
        kept_bytes: bytes of received rows that servers may keep in a call, which then do not travel again for
            backward; may be infinite.

    Raises:
        ValueError: a rate that is not positive (``linear``, ``exchange``: negative), or not finite; negative
            ``kept_bytes``.
    """

    unit: float
    linear: float
    bytes_per_second: float
    between_hosts: float
    exchange: float
    overlaps: bool
    hosts: tuple[int, ...] = ()
    kept_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in RATES:
            value = getattr(self, name)
            if (
                not is_number(value)
                or value < 0
                or (value == 0 and name not in ("linear", "exchange"))
            ):
                raise ValueError(
                    f"{name} = {brief(value)}: set a positive finite number"
                )
        if not isinstance(self.kept_bytes, (int, float)) or not self.kept_bytes >= 0:
            raise ValueError(
                f"kept_bytes = {brief(self.kept_bytes)}: set 0 or a positive number of bytes"
            )

    def describe(self) -> str:
        """Return the rates in words."""
        attention = f"attention takes {1e6 * self.unit:.3g} us a unit of cost, linear work {1e6 * self.linear:.3g} us"
        link = f"a link of {1e-9 * self.bytes_per_second:.3g} GB/s"
        if len(set(self.hosts)) > 1:
            link += (
                f" inside hosts and {8e-9 * self.between_hosts:.3g} Gbit/s between them"
            )
        return f"{attention} a token of a layer, {link}, {1e6 * self.exchange:.3g} us an exchange"

    def linear_seconds(self, layout: TokenLayout) -> float:
        """Return the seconds of linear work on the mean rank, counting only tokens that attend in this layout."""
        return (
            self.linear
            * int(layout.seg_length[layout.seg_attends].sum())
            / layout.num_ranks
        )

    def attention_seconds(self, plan: Plan) -> float:
        """Return the seconds of the slowest rank's attention."""
        return self.unit * plan.stats.mean_load * plan.stats.max_over_mean

    def exchange_seconds(self, plan: Plan) -> float:
        """Return the seconds in which the busiest rank sends and receives its rows of forward and backward."""
        if not plan.moves_rows:
            return 0.0
        keep = plan.most_rows.are_kept(plan.shape, self.kept_bytes)
        rows = RowBytes.of(plan.shape, keep=keep)
        # Bytes that return count with the row that went there, as in PlanStats.
        query_bytes = (
            rows.forward_queries
            + rows.outputs
            + rows.backward_queries
            + rows.query_gradients
        )
        key_bytes = rows.keys + (0 if keep else rows.keys) + rows.key_gradients
        row_bytes = query_bytes, key_bytes
        seconds = link_seconds(
            plan, row_bytes, self.hosts, self.bytes_per_second, self.between_hosts
        )
        return float(seconds.max()) + EXCHANGES * self.exchange

    def hidden_seconds(self, plan: Plan) -> float:
        """Return the seconds of an exchange that the other nano-batch's linear work and mean attention can hide."""
        return (
            self.linear_seconds(plan.layout) + self.unit * plan.stats.mean_load
            if self.overlaps
            else 0.0
        )

    def exposed_seconds(self, plan: Plan) -> float:
        """Return the seconds of the exchange that nothing hides."""
        return max(0.0, self.exchange_seconds(plan) - self.hidden_seconds(plan))

    def layer_seconds(self, plan: Plan) -> float:
        """Return a layer's seconds: linear work, attention of the slowest rank, and the exposed exchange."""
        compute = self.linear_seconds(plan.layout) + self.attention_seconds(plan)
        return compute + self.exposed_seconds(plan)

    def microbatch_seconds(self, plans: Sequence[Plan]) -> float:
        """Return a layer's seconds for all nano-batches, between which ranks meet only if rows move."""
        if any(plan.moves_rows for plan in plans):
            return sum(self.layer_seconds(plan) for plan in plans)
        loads = np.sum([plan.stats.loads for plan in plans], axis=0)
        return sum(
            self.linear_seconds(plan.layout) for plan in plans
        ) + self.unit * float(loads.max())

    def best_seconds(self, plan: Plan) -> float:
        """Return the seconds of the same layer if its attention were even and no exchange took time."""
        return self.linear_seconds(plan.layout) + self.unit * plan.stats.mean_load


def link_seconds(
    plan: Plan,
    row_bytes: tuple[int, int],
    hosts: Sequence[int],
    inside: float,
    between: float,
) -> FloatArray:
    """Return the seconds, [num_ranks], in which a rank sends or receives its query and key rows, the longer of both.

    Args:
        row_bytes: bytes of a query row and of a key row; 0 for rows that do not travel.
        hosts: [num_ranks] number of every rank's host; empty for one host.
        inside, between: bytes per second inside a host and between hosts, which are used at the same time.
    """
    host = np.asarray(hosts or [0] * plan.layout.num_ranks)
    traffic = measure_traffic(plan.needs, row_bytes, host)
    local = traffic.total - traffic.between
    return np.maximum(traffic.between / between, local / inside).max(axis=0)
