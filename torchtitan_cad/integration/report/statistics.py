# SPDX-License-Identifier: BSD-3-Clause
"""Sums of what plans did between two log lines."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan_cad.integration.loading.batch_planner import PlannedBatch
from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.model.work import layout_pairs
from torchtitan_cad.planning.stats import PlanStats, mean_stats

PER = {
    "plans": (
        "imbalance_before",
        "imbalance_after",
        "tolerance",
        "ranked_before",
        "ranked_after",
        "served_share",
    ),
    "microbatches": (
        "bytes_per_rank_mean",
        "bytes_between_hosts",
        "tasks",
        "tasks_moved",
    ),
    "batches": ("plan_seconds",),
    "queries": ("pairs_per_token",),
}
"""The counts over which figures are means; a figure that no batch has is left out."""
SUMMED = {
    "imbalance_before": "max_over_mean_before",
    "imbalance_after": "max_over_mean",
    "bytes_per_rank_mean": "mean_rank_bytes",
    "tasks": "num_tasks",
    "tasks_moved": "tasks_moved",
    "loads_before": "loads_before",
    "loads_after": "loads",
}
"""Figures that add up a number of every plan's ``PlanStats``."""


class StepStatistics:
    """Adds up planned batches as training consumes them, and keeps no plan: its size does not depend on their number.

    Imbalance is max over mean of attention work per rank, averaged over plans, since ranks meet in every one; where
    layers differ in their kinds of attention, averaged over their work. Bytes are those of the mean layer's forward,
    per rank, averaged over microbatches (their maximum for the worst rank), tasks likewise; those of two nano-batches
    are added up. ``tolerance`` is the mean of what the plans were made with. Seconds of planning are those of one
    batch. ``ranked_before`` and ``ranked_after`` are the ranks' times over the mean, from the busiest of a plan
    to the least busy, averaged over plans; the first is the imbalance.

    ``pairs_per_token`` are the keys that the mean query attends to, in a layer of every kind.

    ``served_share`` is the part of attention that joined servers compute, averaged over plans and layers, if there are
    any. ``bytes_between_hosts`` are those of all ranks together, where plans know that several share a host.
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, Any] = defaultdict(float)
        self._most_bytes = 0.0

    def add(self, planned: PlannedBatch) -> None:
        """Add a batch's plans, of which numbers alone are kept."""
        by_kind = planned.by_kind
        layers = planned.layers
        nanos = planned.nano_batches
        first_kind = planned.plans
        stats = [
            mean_stats([plan.stats for plan in plans], layers) for plans in by_kind
        ]
        sums: dict[str, Any] = {
            figure: sum(getattr(of_plan, name) for of_plan in stats)
            for figure, name in SUMMED.items()
        }
        sums |= _attended(by_kind)
        sums["batches"] = 1
        sums["microbatches"] = len(stats) // nanos
        sums["plans"] = len(stats)
        sums["plan_seconds"] = planned.seconds
        sums["tolerance"] = sum(plan.config.tolerance for plan in first_kind)
        for when, loads in (("before", "loads_before"), ("after", "loads")):
            ranked = [_ranked(plans, layers, loads) for plans in by_kind]
            sums[f"ranked_{when}"] = sum(ranked)
        if any(plan.stand_ins for plan in first_kind):
            shares = [_served_share(plans, layers) for plans in by_kind]
            sums["served_share"] = sum(shares)
        if first_kind[0].config.ranks_per_node is not None:
            sums["bytes_between_hosts"] = sum(
                of_plan.inter_node_bytes for of_plan in stats
            )
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value
        self._most_bytes = max(self._most_bytes, *_worst_rank_bytes(stats, nanos))

    def drain(self) -> dict[str, Any]:
        """Return the figures of the batches since the last call and forget them; empty if there were none."""
        sums = self._sums
        if not sums["plans"]:
            return {}
        figures = {name: sums[name] for name in ("loads_before", "loads_after")}
        figures["bytes_per_rank_max"] = float(self._most_bytes)
        for per, names in PER.items():
            known = [name for name in names if name in sums]
            figures |= {name: sums[name] / sums[per] for name in known}
        self._sums = defaultdict(float)
        self._most_bytes = 0.0
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in figures.items()
        }


def _worst_rank_bytes(stats: Sequence[PlanStats], nanos: int) -> list[float]:
    """Return the bytes of the worst rank of every microbatch, which has ``nanos`` plans."""
    of_plans = np.array([of_plan.max_rank_bytes for of_plan in stats])
    return of_plans.reshape(-1, nanos).sum(axis=1).tolist()


def _served_share(kinds: Sequence[Plan], layers: Sequence[int]) -> float:
    shares = [0.0 if plan.stand_ins is None else plan.stand_ins.share for plan in kinds]
    return float(np.average(shares, weights=layers))


def _attended(by_kind: Sequence[Sequence[Plan]]) -> dict[str, Any]:
    """Count queries, and their pairs in a layer of every kind."""
    layouts = [kinds[0].layout for kinds in by_kind]
    queries = sum(int(layout.queries_per_rank.sum()) for layout in layouts)
    pairs = [
        [layout_pairs(plan.layout, plan.shape.window) for plan in kinds]
        for kinds in by_kind
    ]
    return {"queries": queries, "pairs_per_token": np.sum(pairs, axis=0)}


def _ranked(kinds: Sequence[Plan], layers: Sequence[int], loads: str) -> np.ndarray:
    """[ranks] times over the mean, the longest first: its entry 0 is ``max_over_mean`` of the plans' statistics.

    ``kinds`` are the plans of layers of every kind; the result is the mean over the layers' work.
    """
    work = [
        count * plan.stats.mean_load for plan, count in zip(kinds, layers, strict=True)
    ]
    if not any(work):
        return np.ones(len(kinds[0].stats.loads))
    ranked = np.zeros(len(kinds[0].stats.loads))
    for plan, of_kind in zip(kinds, work, strict=True):
        relative = getattr(plan.stats, loads) / (plan.stats.mean_load or 1)
        ranked += of_kind / sum(work) * -np.sort(-relative)
    return ranked
