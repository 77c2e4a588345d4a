"""Rounds of tiling, for what the tiling itself does not know: cost models other than tile area, and capacities.

The tiling deals out tiles. Every round asks it for a plan within a number of tiles per rank, measures that plan,
repairs what is still over (``repair.py``), and corrects the next round: the tiles of each rank by how far its true load
is from its limit, and the price of those rows of which some rank receives too many, so that pieces have fewer of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning.exchange.needs import Needs, key_needs, query_needs
from torchtitan_cad.planning.exchange.traffic import measure_traffic, node_of_ranks
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import LARGEST, load_limits, receive_capacities, server_loads
from torchtitan_cad.planning.model.shape import AttentionShape, Prices, RowPrices
from torchtitan_cad.planning.model.tasks import TaskArray
from torchtitan_cad.planning.planners.local_search.repair import repair

ROUNDS = 6
"""Rounds at most, if no plan is found that keeps everything."""

LEVELS = (0, 64, 16, 4, 1)
"""Where loads are counted in tiles and the tolerated ones cannot be kept in whole cells, rounds go on at these parts
(one 64th, ...) of the way from them to the guaranteed ones."""

DEARER = 1.5
"""Factor per round on the price of rows of which some rank receives too many."""

DEBTS = (0.05, 0.2)
"""By how many mean loads repair may overload a rank for the time being, tried in this order."""


class Goal:
    """What a plan has to keep: loads, and rows received.

    Attributes:
        limits: of the loads.
        node: int64 [num_ranks] node of every rank.
        rows: whether any rank's rows are limited.
        tolerated, guaranteed: int64 [1 or 3, num_ranks] what every rank may have of each kind in ``Candidate.use``;
            they differ in the loads only.
    """

    def __init__(
        self, layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel, home: TaskArray
    ) -> None:
        self.layout, self.shape, self.config, self.cost = layout, shape, config, cost
        self.limits = load_limits(layout, config, cost, home)
        self.node = node_of_ranks(config, layout.num_ranks)
        capacities = receive_capacities(config, layout.num_ranks)
        self.rows = capacities is not None
        allowed = np.empty((0, layout.num_ranks), dtype=np.int64) if capacities is None else capacities
        self.tolerated = np.concatenate([self.limits.tolerated[None], allowed])
        self.guaranteed = np.concatenate([self.limits.guaranteed[None], allowed])

    @property
    def exact(self) -> bool:
        """Whether the tiling itself keeps all there is to keep."""
        return self.in_tiles and not self.rows

    @property
    def in_tiles(self) -> bool:
        """Whether loads are counted in tiles, as the tiling does."""
        return isinstance(self.cost, TileAreaCost)

    def loads(self, tasks: TaskArray) -> IntArray:
        """int64 [num_ranks]."""
        return server_loads(tasks, self.cost, self.layout.num_ranks)

    def tiles(self, tasks: TaskArray) -> IntArray:
        """int64 [num_ranks] the same in tiles."""
        return server_loads(tasks, TileAreaCost(self.cost.granularity), self.layout.num_ranks)


class Candidate:
    """A plan and what it asks of the ranks."""

    def __init__(self, goal: Goal, tasks: TaskArray) -> None:
        self.goal, self.tasks = goal, tasks

    @cached_property
    def use(self) -> IntArray:
        """int64 [1 or 3, num_ranks] load of every rank and, if they are limited, query and key rows it receives."""
        loads = self.goal.loads(self.tasks)[None]
        return (
            np.concatenate([loads, self._needs[0].rows_in()[None], self._needs[1].rows_in()[None]])
            if self.goal.rows
            else loads
        )

    @cached_property
    def _needs(self) -> tuple[Needs, Needs]:
        return query_needs(self.goal.layout, self.tasks), key_needs(self.goal.layout, self.tasks)

    @cached_property
    def figures(self) -> tuple[int, int]:
        """Bytes of all ranks, and of the worst, in or out; weighted by ``inter_node_weight``, in integers."""
        traffic = measure_traffic(self.goal.shape, *self._needs, self.goal.node)
        weight = Fraction(self.goal.config.inter_node_weight).limit_denominator(1000)
        local, extra = weight.denominator, weight.numerator - weight.denominator
        into = local * traffic.bytes_in + extra * traffic.inter_in
        out = local * traffic.bytes_out + extra * traffic.inter_out
        return int(into.sum()), int(max(into.max(), out.max()))

    @cached_property
    def tolerable(self) -> bool:
        """Whether it keeps the tolerated loads, and everything else."""
        return bool((self.use <= self.goal.tolerated).all())

    @cached_property
    def _overload(self) -> float:
        """By how much its loads exceed the tolerated ones, relative to those, at worst; 0 if they do not."""
        allowed = self.goal.tolerated[0]
        return max(0.0, float(((self.use[0] - allowed) / np.maximum(allowed, 1)).max()))

    @cached_property
    def excess(self) -> float:
        """By how much it exceeds what may be received, relative to that, at worst; 0 if it keeps everything.

        Infinite if it does not keep the guaranteed loads, so that it always loses against the greedy planner's plan.
        """
        allowed = self.goal.guaranteed
        if (self.use[0] > allowed[0]).any():
            return math.inf
        return max(0.0, float(((self.use - allowed) / np.maximum(allowed, 1)).max()))

    def or_better(self, other: Candidate) -> Candidate:
        """The plan that exceeds what it has to keep less, then the tolerated loads less, then moves fewer bytes."""
        ours, theirs = (self.excess, self._overload), (other.excess, other._overload)
        if ours != theirs:
            return self if ours < theirs else other
        return self.or_lighter(other)

    def or_lighter(self, other: Candidate) -> Candidate:
        """The plan that moves fewer bytes, those of all ranks and of the worst weighing the same."""
        (total, worst), (other_total, other_worst) = self.figures, other.figures
        # total / other_total + worst / other_worst <= 2, without division
        return self if total * other_worst + worst * other_total <= 2 * other_total * other_worst else other

    def repaired(self, split_kv: bool) -> Candidate:
        """The plan brought within the tolerated, else the guaranteed loads; as near as was found if within neither."""
        nearest, goal = self, self.goal
        for allowed in (goal.tolerated, goal.guaranteed):
            for debt in DEBTS if goal.rows else DEBTS[:1]:
                spare = np.full((3, goal.layout.num_ranks), LARGEST)
                spare[: len(allowed)] = allowed - self.use
                load = int(debt * goal.limits.total / goal.layout.num_ranks)
                cell = goal.config.min_shard
                found = Candidate(
                    goal, repair(goal.layout, goal.shape, goal.cost, cell, self.tasks, spare, load, split_kv)
                )
                if (found.use <= allowed).all():
                    return found
                nearest = nearest.or_better(found)
        return nearest


def plan_in_rounds(
    goal: Goal, home: TaskArray, tile: Callable[[IntArray, RowPrices], TaskArray | None]
) -> Candidate | None:
    """The best plan of all rounds, the nearest if none keeps everything; None where tiling fails.

    ``tile`` makes tasks of at most so many tiles per rank, int64 [num_ranks], at given prices of rows.
    """
    if goal.exact:
        gap = goal.limits.guaranteed - goal.limits.tolerated
        for part in LEVELS if gap.any() else LEVELS[:1]:
            tasks = tile(goal.limits.tolerated + (gap // part if part else 0), goal.shape)
            if tasks is not None and not (candidate := Candidate(goal, tasks)).excess:
                return candidate
        return None
    best: Candidate | None = None
    tolerable = 0
    loads, tiles, target = goal.loads(home), goal.tiles(home), goal.limits.tolerated
    per_tile = _load_per_tile(loads, tiles, loads > target)
    factors = np.ones(2)
    for number in range(ROUNDS):
        limit = tiles + np.minimum(np.floor((target - loads) / per_tile), LARGEST // 2).astype(np.int64)
        prices = Prices(int(goal.shape.query_bytes * factors[0]), int(goal.shape.kv_bytes * factors[1]))
        tasks = tile(limit, prices)
        if tasks is None:
            target = (target + goal.limits.guaranteed) // 2
            continue
        candidate = Candidate(goal, tasks)
        loads, tiles = candidate.use[0], goal.tiles(tasks)
        if goal.rows:
            over = (candidate.use[1:] - goal.tolerated[1:]) / np.maximum(goal.tolerated[1:], 1)
            factors[over.max(axis=1).argmax()] *= DEARER
        if candidate.tolerable:
            return candidate if best is None else best.or_better(candidate)
        if number == 0 and not goal.in_tiles:
            continue  # a first guess of what tiles cost
        candidate = candidate.repaired(split_kv=True)
        tolerable += candidate.tolerable
        best = candidate if best is None else best.or_better(candidate)
        if tolerable == (2 if goal.rows else 1):
            break
    return best


def _load_per_tile(loads: IntArray, tiles: IntArray, over: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """[num_ranks] first guess of what a tile costs: on overloaded ranks what it does at home, on others the mean of
    those, for it is their work that moves."""
    source = over if over.any() else np.ones(len(loads), dtype=bool)
    mean = float(loads[source].sum()) / max(1.0, float(tiles[source].sum()))
    return np.where(over, loads / np.maximum(tiles, 1), mean)
