"""The load no server may exceed. Imports numpy only.

Guarantee. Every planner that balances returns loads of at most

    max((1 + tolerance) * mean, mean + shard)

on every layout, where ``mean`` is the total cost of the home plan over the number of ranks and ``shard`` the cost of
the last ``min_shard`` query rows of the longest document against all their keys (of all its rows if it is shorter).

Why it can be kept. Cut every home task at the multiples of ``min_shard`` (a multiple of the cost model's granularity,
so the total stays that of the home plan). Every piece lies in at most min_shard / granularity rows of tiles, none lower
than the last of the longest document, so none costs more than ``shard``. While a server exceeds the bound some other is
below the mean, and taking one piece leaves that one at or below mean + shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .config import PlannerConfig
from .cost import CostModel
from .intervals import sum_by_index
from .layout import TokenLayout
from .tasks import TaskArray, make_tasks


@dataclass(frozen=True)
class LoadLimits:
    """Integer load limits in the cost model's units. ``tolerated <= guaranteed``."""

    total: int
    shard: int
    tolerated: int
    """floor((1 + tolerance) * mean)."""
    guaranteed: int
    """floor(max((1 + tolerance) * mean, mean + shard))."""


def shard_cost(layout: TokenLayout, config: PlannerConfig, cost: CostModel) -> int:
    """Cost of the last min_shard query rows of the longest document against all their keys; 0 without tokens."""
    longest = int(layout.doc_lengths.max(initial=0))
    if longest == 0:
        return 0
    rows = make_tasks(np.zeros(1), max(0, longest - config.min_shard), longest, 0, longest, 0)
    return int(cost.cost(rows)[0])


def load_limits(layout: TokenLayout, config: PlannerConfig, cost: CostModel, home: TaskArray) -> LoadLimits:
    """Limits for a layout, given its home plan."""
    total = int(cost.cost(home).sum())
    mean = Fraction(total, layout.num_ranks)
    shard = shard_cost(layout, config, cost)
    tolerated = int((1 + Fraction(config.tolerance)) * mean)
    return LoadLimits(total, shard, tolerated, max(tolerated, int(mean + shard)))


def server_loads(tasks: TaskArray, cost: CostModel, num_ranks: int) -> np.ndarray:
    """int64 [num_ranks] cost of the tasks of each server."""
    return sum_by_index(tasks["server"], cost.cost(tasks), num_ranks)
