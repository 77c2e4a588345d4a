# SPDX-License-Identifier: BSD-3-Clause
"""The load that no server may exceed.

Guarantee. Let ``total`` be the cost of the home plan and ``share_r = total * speed_r / sum of speeds`` the load of rank
r if all ranks finish at the same time, without ``rank_speeds`` the mean. Every planner that balances returns loads of
at most

    max((1 + tolerance) * share_r, share_r + shard)

on every layout, where ``shard`` is the cost of the last ``min_shard`` query rows of the longest document against all
their keys (of all its rows if it is shorter). Divided by its speed, no rank takes longer than (1 + tolerance) times the
mean, up to one shard.

Proof. Cut every home task at the multiples of ``min_shard`` (a multiple of the cost model's granularity, so the total
cost stays the same). Every piece lies in at most min_shard / granularity rows of tiles, none lower than the last row of
the longest document, so no piece costs more than ``shard``. The shares sum to the total. So while a server exceeds its
bound, and hence its share, another server is below its share. That server can take one piece and is then at or below
share + shard, within its own bound. Every such move takes a piece from a server above its bound and brings no server
above its bound, so there are finitely many moves.
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
class Speeds:
    """Relative speeds of the ranks, of mean 1; exact, so that every rank finds the same limits to the bit.

    Attributes:
        values: the distinct speeds.
        index: int64 [num_ranks] index into ``values`` of each rank's speed.
    """

    values: tuple[Fraction, ...]
    index: IntArray

    @classmethod
    def of(cls, config: PlannerConfig, num_ranks: int) -> Speeds:
        """Return the speeds of ``config``. Raises ValueError if its ``rank_speeds`` are not one per rank."""
        if config.rank_speeds is None:
            return cls((Fraction(1),), np.zeros(num_ranks, dtype=np.int64))
        if len(config.rank_speeds) != num_ranks:
            raise ValueError(
                f"rank_speeds has {len(config.rank_speeds)} entries for {num_ranks} ranks: set one per rank, or none"
            )
        mean = sum(map(Fraction, config.rank_speeds), Fraction(0)) / num_ranks
        distinct, index = np.unique(
            np.array(config.rank_speeds, dtype=np.float64), return_inverse=True
        )
        return cls(
            tuple(Fraction(speed) / mean for speed in distinct.tolist()),
            index.astype(np.int64),
        )

    def loads(self, time: Fraction, extra: int = 0) -> IntArray:
        """Return int64 [num_ranks] the load that each rank completes in ``time``, plus ``extra``, rounded down."""
        by_speed = [min(LARGEST, int(time * speed + extra)) for speed in self.values]
        return np.array(by_speed, dtype=np.int64)[self.index]

    def slowest(self, loads: IntArray) -> Fraction:
        """Return the time after which all ranks have completed their ``loads`` [num_ranks]."""
        most = [int(loads[self.index == i].max()) for i in range(len(self.values))]
        return max(load / speed for load, speed in zip(most, self.values, strict=True))


@dataclass(frozen=True, eq=False)
class LoadLimits:
    """Load limits in the cost model's units. ``tolerated <= guaranteed``.

    Attributes:
        total: cost of the home plan.
        shard: cost of a shard, see the module's docstring.
        tolerated: int64 [num_ranks] floor((1 + tolerance) * share).
        guaranteed: int64 [num_ranks] floor(max((1 + tolerance) * share, share + shard)).
    """

    total: int
    shard: int
    speeds: Speeds
    tolerated: IntArray
    guaranteed: IntArray

    def over_mean(self, loads: IntArray) -> float:
        """Return the time of the slowest rank with ``loads`` [num_ranks] over the mean; 1.0 without any load."""
        return (
            float(self.speeds.slowest(loads)) / (self.total / len(loads))
            if self.total
            else 1.0
        )

    def with_slowest(self, loads: IntArray) -> IntArray:
        """Return int64 [num_ranks]: the guaranteed load, or the load completed in the slowest rank's time if larger.

        The slowest rank is that of ``loads`` [num_ranks], none of which exceeds the result.
        """
        return np.maximum(
            self.guaranteed, self.speeds.loads(self.speeds.slowest(loads))
        )


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
    """Return the limits for a layout, given the loads [num_ranks] of its home plan.

    Raises:
        ValueError: ``config.rank_speeds`` are not one per rank.
    """
    total = int(loads.sum())
    speeds = Speeds.of(config, layout.num_ranks)
    mean = Fraction(total, layout.num_ranks)
    shard = shard_cost(layout, config, cost)
    tolerated = speeds.loads((1 + Fraction(config.tolerance)) * mean)
    return LoadLimits(
        total,
        shard,
        speeds,
        tolerated,
        np.maximum(tolerated, speeds.loads(mean, shard)),
    )


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
