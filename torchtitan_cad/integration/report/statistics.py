# SPDX-License-Identifier: BSD-3-Clause
"""What plans did between two log lines."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from torchtitan_cad.integration.loading.batch_planner import PlannedBatch
from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.model.work import layout_pairs

OF_MICROBATCH = {
    "bytes_per_rank_mean": "mean_rank_bytes",
    "bytes_between_hosts": "inter_node_bytes",
    "tasks": "num_tasks",
    "tasks_moved": "tasks_moved",
}
"""Figures that add up a number of the ``PlanStats`` of a microbatch's plans."""
LOADS = {
    "before": "loads_before",
    "after": "loads",
}
"""The ranks' work, at home and as planned, in ``PlanStats``."""


class StepStatistics:
    """Adds up planned batches as training consumes them, and keeps numbers alone, no plan.

    Imbalance is max over mean of attention work per rank, averaged over plans, since ranks meet in every one; where
    layers differ in their kinds of attention, averaged over their work. Bytes are those of the mean layer's forward,
    per rank, averaged over microbatches (their maximum for the worst rank), tasks likewise; those of two nano-batches
    are added up. ``tolerance`` is the mean of what the plans were made with. Seconds of planning are those of one
    batch, ``loads_before`` and ``loads_after`` the work of every rank in one. ``ranked_before`` and ``ranked_after``
    are the ranks' times over the mean, from the busiest of a plan to the least busy, averaged over plans; the first is
    the imbalance.

    ``pairs_per_token`` are the keys that the mean query attends to, in a layer of every kind.
    ``served_share`` is the part of attention that joined servers compute, averaged over plans and layers, if there are
    any. ``bytes_between_hosts`` are those of all ranks together, where plans know that several share a host.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []

    def add(self, planned: PlannedBatch) -> None:
        """Add a batch's plans, of which numbers alone are kept."""
        self._batches.append(_figures_of(planned))

    def drain(self) -> dict[str, Any]:
        """Return the mean figures of the batches since the last call and forget them; empty if there were none."""
        batches = self._batches
        self._batches = []
        figures = {}
        names = dict.fromkeys(chain.from_iterable(batches))
        for name in names:
            values = [batch.get(name, 0.0) for batch in batches]
            combine: Any = np.mean
            if name == "bytes_per_rank_max":
                combine = np.max
            combined = combine(values, axis=0)
            figures[name] = combined.tolist()
        return figures


def _figures_of(planned: PlannedBatch) -> dict[str, Any]:
    """Return the figures of a batch, without those that it has not."""
    by_kind = list(planned.by_key.values())
    layers = planned.layers
    first_kind = planned.plans
    tolerances = [plan.config.tolerance for plan in first_kind]
    most_bytes = _of_mean_layer(planned, "max_rank_bytes")
    figures: dict[str, Any] = {
        "plan_seconds": planned.seconds,
        "tolerance": np.mean(tolerances),
        "bytes_per_rank_max": most_bytes.sum(axis=1).max(),
    }
    for figure, name in OF_MICROBATCH.items():
        of_nano_batches = _of_mean_layer(planned, name)
        figures[figure] = of_nano_batches.sum(axis=1).mean()
    if first_kind[0].config.ranks_per_node is None:
        del figures["bytes_between_hosts"]
    for when, loads in LOADS.items():
        ranked = [_ranked(plans, layers, loads) for plans in by_kind]
        mean_ranked = np.mean(ranked, axis=0)
        figures[f"ranked_{when}"] = mean_ranked
        figures[f"imbalance_{when}"] = mean_ranked[0]
        of_plans = _of_mean_layer(planned, loads)
        figures[f"loads_{when}"] = of_plans.sum(axis=(0, 1))
    queries = sum(plan.layout.queries_per_rank.sum() for plan in first_kind)
    pairs = [
        [layout_pairs(plan.layout, plan.shape.window) for plan in plans]
        for plans in by_kind
    ]
    figures["pairs_per_token"] = np.sum(pairs, axis=0) / queries
    if any(plan.stand_ins for plan in first_kind):
        shares = [list(map(_served_share, plans)) for plans in by_kind]
        of_mean_layer = np.average(shares, axis=1, weights=layers)
        figures["served_share"] = of_mean_layer.mean()
    return figures


def _of_mean_layer(planned: PlannedBatch, name: str) -> np.ndarray:
    """[microbatches, nano-batches, ...] numbers of the plans' statistics."""
    stats = []
    for plans in planned.by_key.values():
        of_kinds = [getattr(plan.stats, name) for plan in plans]
        mean = np.average(of_kinds, axis=0, weights=planned.layers)
        stats.append(mean)
    numbers = np.array(stats)
    return numbers.reshape(-1, planned.nano_batches, *numbers.shape[1:])


def _served_share(plan: Plan) -> float:
    return plan.stand_ins.share if plan.stand_ins else 0.0


def _ranked(plans: Sequence[Plan], layers: Sequence[int], loads: str) -> np.ndarray:
    """[ranks] times over the mean, the longest first: its entry 0 is ``max_over_mean`` of the plans' statistics.

    ``plans`` are those of layers of every kind; the result is the mean over the layers' work.
    """
    work = np.zeros(plans[0].layout.num_ranks)
    mean = 0.0
    for plan, count in zip(plans, layers, strict=True):
        ascending = np.sort(getattr(plan.stats, loads))
        work += count * ascending[::-1]
        mean += count * plan.stats.mean_load
    return work / mean if mean else np.ones_like(work)
