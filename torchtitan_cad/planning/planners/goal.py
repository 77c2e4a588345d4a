"""Limits that a plan has to keep, of loads and of rows received, and how plans compare."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning.exchange.needs import RowNeeds, key_needs, query_needs
from torchtitan_cad.planning.exchange.traffic import measure_traffic, node_of_ranks
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import LARGEST, load_limits, receive_capacities, server_loads
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import TaskArray, from_table, home_tasks, task_table
from torchtitan_cad.planning.planners.local_search.improve import LocalGoal, LocalSearch


class Goal:
    """Limits that a plan has to keep, for all planners.

    Attributes:
        home: the plan without disaggregation.
        limits: of the loads.
        node: int64 [num_ranks] node of every rank.
        rows: whether any rank's rows are limited.
        local: the goal of local search: the tolerated loads, and where they cannot be kept the guaranteed ones.
    """

    def __init__(self, layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> None:
        self.layout, self.shape, self.config, self.cost = layout, shape, config, cost
        self.home = home_tasks(layout)
        self.limits = load_limits(layout, config, cost, self.home)
        self.node = node_of_ranks(config, layout.num_ranks)
        capacities = receive_capacities(config, layout.num_ranks)
        self.rows = capacities is not None
        rows = np.full((2, layout.num_ranks), LARGEST) if capacities is None else capacities
        loads = (self.limits.tolerated, self.limits.guaranteed)
        self.local = LocalGoal(cost, np.stack([np.stack([each, *rows], axis=1) for each in loads]))

    @property
    def exact(self) -> bool:
        """Whether the tiling itself keeps all there is to keep: loads in tiles."""
        return self.in_tiles and not self.rows

    @property
    def in_tiles(self) -> bool:
        """Whether loads are counted in tiles, as the tiling does."""
        return isinstance(self.cost, TileAreaCost)

    def loads(self, tasks: TaskArray) -> IntArray:
        """Count the load of every rank, int64 [num_ranks]."""
        return server_loads(tasks, self.cost, self.layout.num_ranks)

    def tiles(self, tasks: TaskArray) -> IntArray:
        """Count the load of every rank in tiles, int64 [num_ranks]."""
        return server_loads(tasks, TileAreaCost(self.cost.granularity), self.layout.num_ranks)

    def improved(self, tasks: TaskArray, budget: int, split_kv: bool = True) -> Candidate:
        """Return the plan after local search over all documents with that budget, or as it was if that is no better."""
        local, cell = replace(self.local, split_kv=split_kv), self.config.min_shard
        search = LocalSearch(self.layout, self.shape, cell, local, np.arange(len(self.layout.docs)))
        loads = np.zeros(self.layout.num_ranks, dtype=np.int64)
        found = search.improve([task_table(self.layout, tasks)], loads, budget)
        return better(Candidate(self, from_table(self.layout.docs, found.tasks)), Candidate(self, tasks))


class Candidate:
    """A plan and what it asks of the ranks."""

    def __init__(self, goal: Goal, tasks: TaskArray) -> None:
        self.goal, self.tasks = goal, tasks

    @cached_property
    def use(self) -> IntArray:
        """int64 [num_ranks, 3] load of every rank, and query and key rows it receives, 0 if they are not limited."""
        use = np.zeros((self.goal.layout.num_ranks, 3), dtype=np.int64)
        use[:, 0] = self.goal.loads(self.tasks)
        if self.goal.rows:
            use[:, 1], use[:, 2] = (needs.rows_in() for needs in self._needs)
        return use

    @cached_property
    def _needs(self) -> tuple[RowNeeds, RowNeeds]:
        return query_needs(self.goal.layout, self.tasks), key_needs(self.goal.layout, self.tasks)

    @cached_property
    def figures(self) -> tuple[int, int]:
        """Bytes of all ranks, and of the worst: see ``Traffic.weighted``."""
        traffic = measure_traffic(self.goal.shape, *self._needs, self.goal.node)
        return traffic.weighted(self.goal.config.inter_node_weight)

    @property
    def over_rows(self) -> npt.NDArray[np.float64]:
        """[2] by how much the worst rank exceeds its query and key rows, relative to them; negative if it does not."""
        allowed = self.goal.local.levels[0, :, 1:]
        return np.asarray(((self.use[:, 1:] - allowed) / np.maximum(allowed, 1)).max(axis=0))

    @property
    def tolerable(self) -> bool:
        """Whether it keeps the tolerated loads, and everything else."""
        return self.tolerated_excess == 0

    @cached_property
    def tolerated_excess(self) -> float:
        """Largest excess over the tolerated loads and the rows that may be received, relative to them; 0 if kept."""
        return self._over(0)

    @cached_property
    def excess(self) -> float:
        """Largest excess over what may be received, relative to it; 0 if everything is kept.

        Infinite if it does not keep the guaranteed loads, so that it always loses against the greedy planner's plan.
        """
        if (self.use[:, 0] > self.goal.limits.guaranteed).any():
            return math.inf
        return self._over(-1)

    def _over(self, level: int) -> float:
        """Compute the largest excess over a level of the local goal, relative to it."""
        allowed = self.goal.local.levels[level]
        return max(0.0, float(((self.use - allowed) / np.maximum(allowed, 1)).max()))


def better(one: Candidate, other: Candidate) -> Candidate:
    """Return the plan that exceeds what it has to keep less, then the tolerated loads less, then moves fewer bytes."""
    excesses = [(plan.excess, plan.tolerated_excess) for plan in (one, other)]
    if excesses[0] != excesses[1]:
        return one if excesses[0] < excesses[1] else other
    return lighter(one, other)


def lighter(one: Candidate, other: Candidate) -> Candidate:
    """Return the plan that moves fewer bytes, those of all ranks and of the worst weighing the same."""
    (total, worst), (other_total, other_worst) = one.figures, other.figures
    # total / other_total + worst / other_worst <= 2, without division
    return one if total * other_worst + worst * other_total <= 2 * other_total * other_worst else other
