# SPDX-License-Identifier: BSD-3-Clause
"""The load that no server may exceed.

Guarantee. Let ``mean`` be the mean cost of the ranks of the home plan. Every planner that balances returns loads of at
most

    max((1 + tolerance) * mean, mean + shard)

on every layout, where ``shard`` is the cost of the last ``min_shard`` query rows of the longest document against all
their keys (of all its rows if it is shorter).

Proof. Cut every home task at the multiples of ``min_shard`` (a multiple of the cost model's granularity, so the total
cost stays the same). Every piece lies in at most min_shard / granularity rows of tiles, none lower than the last row of
the longest document, so no piece costs more than ``shard``. So while a server exceeds the
bound, and hence the mean, another server is below the mean. That server can take one piece and is then at or below
mean + shard, within the bound. Every such move takes a piece from a server above the bound and brings no server
above it, so there are finitely many moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, sum_by_index
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import LARGEST, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.tasks import TaskArray, make_tasks

MAX_TILE_ROWS = 2**24
"""rows of tiles: maximum of a document, as planners keep an array of their cumulative cost; int64 holds sums of the
costs of layouts of such documents."""


@dataclass(frozen=True, eq=False)
class LoadLimits:
    """Load limits in the cost model's units. ``tolerated <= guaranteed``.

    Attributes:
        mean: of the ranks' loads in the home plan.
        tolerated: floor((1 + tolerance) * mean).
        guaranteed: floor(max((1 + tolerance) * mean, mean + shard)).
    """

    mean: float
    tolerated: int
    guaranteed: int

    def over_mean(self, load: int) -> float:
        """Return the load over the mean; 1.0 without any load."""
        return load / self.mean if self.mean else 1.0


def shard_cost(layout: TokenLayout, config: PlannerConfig, cost: TileAreaCost) -> int:
    """Return the cost of the last min_shard query rows of the longest document with all keys; 0 without tokens."""
    longest = int(layout.doc_lengths.max(initial=0))
    if longest == 0:
        return 0
    rows = make_tasks(
        np.zeros(1), max(0, longest - config.min_shard), longest, 0, longest, 0
    )
    return int(cost.cost(rows)[0])


def load_limits(
    layout: TokenLayout, config: PlannerConfig, cost: TileAreaCost, loads: IntArray
) -> LoadLimits:
    """Return the limits for a layout, given the loads [num_ranks] of its home plan."""
    mean = Fraction(int(loads.sum()), layout.num_ranks)
    tolerated = min(LARGEST, int((1 + Fraction(config.tolerance)) * mean))
    guaranteed = int(mean + shard_cost(layout, config, cost))
    return LoadLimits(float(mean), tolerated, max(tolerated, guaranteed))


def server_loads(tasks: TaskArray, cost: TileAreaCost, num_ranks: int) -> IntArray:
    """Return int64 [num_ranks] cost of the tasks of each server."""
    return sum_by_index(tasks["server"], cost.cost(tasks), num_ranks)


def require_plannable(layout: TokenLayout, cost: TileAreaCost) -> None:
    """Raise ValueError, naming the remedy, for a document of more than ``MAX_TILE_ROWS``."""
    rows = -(-layout.doc_lengths // cost.granularity)
    most = int(rows.max(initial=0))
    if most > MAX_TILE_ROWS:
        longest = int(rows.argmax())
        raise ValueError(
            f"document {layout.docs[longest]}: {layout.doc_lengths[longest]} tokens are {most} rows of tiles of "
            f"{cost.granularity}, more than {MAX_TILE_ROWS}: set min_shard and tile to multiples of a larger number, "
            f"such as 128, or plan shorter documents"
        )
