"""What plans did, summed up between two log lines."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan_cad.integration.batch_planner import PlannedBatch
from torchtitan_cad.planning import PlanPair


@dataclass
class StepStatistics:
    """Collects planned batches as training consumes them.

    Imbalance is max over mean of attention work per rank, averaged over plans, since ranks meet in every one. Bytes
    are those of one layer's forward, per rank, averaged over microbatches (their maximum for the worst rank), tasks
    likewise; those of two nano-batches are added up.
    Seconds of planning are those of one batch. ``bytes_copied`` is what this rank's kernel calls copy in one layer's
    forward, because they need ranges of rows in order. ``ranked_before`` and ``ranked_after`` are the ranks' times over
    the mean, from the busiest of a plan to the least busy, averaged over plans; the first is the imbalance.

    With a profile and a backward that need not follow the forward plan: ``imbalance_backward`` is that of backward's
    predicted times, and ``backward_plans`` the share of microbatches whose backward has a plan of its own.
    """

    _plans: list[PlanPair] = field(default_factory=list)
    _nano_batches: int = 1
    _seconds: list[float] = field(default_factory=list)
    _copied: list[int] = field(default_factory=list)

    def add(self, planned: PlannedBatch) -> None:
        self._plans += planned.plans
        self._nano_batches = planned.nano_batches
        self._seconds.append(planned.seconds)
        self._copied += planned.copied_bytes

    def drain(self) -> dict[str, Any]:
        """Figures of the batches since the last call, and forgets them; empty if there were none."""
        (pairs, self._plans), (seconds, self._seconds) = (self._plans, []), (self._seconds, [])
        copied, self._copied = self._copied, []
        if not pairs:
            return {}
        stats = [pair.forward.stats for pair in pairs]
        nanos = self._nano_batches
        priced = [pair for pair in pairs if pair.backward is not pair.forward]
        backward = {}
        if priced:
            backward["imbalance_backward"] = float(np.mean([pair.backward.stats.max_over_mean for pair in priced]))
            backward["backward_plans"] = float(np.mean([pair.separate for pair in priced]))
        return {
            **backward,
            "imbalance_before": float(np.mean([s.max_over_mean_before for s in stats])),
            "imbalance_after": float(np.mean([s.max_over_mean for s in stats])),
            "ranked_before": np.mean([_ranked(pair, "loads_before") for pair in pairs], axis=0).tolist(),
            "ranked_after": np.mean([_ranked(pair, "loads") for pair in pairs], axis=0).tolist(),
            "loads_before": np.sum([s.loads_before for s in stats], axis=0).tolist(),
            "loads_after": np.sum([s.loads for s in stats], axis=0).tolist(),
            "bytes_per_rank_mean": float(nanos * np.mean([s.mean_rank_bytes for s in stats])),
            "bytes_per_rank_max": float(max(_summed([s.max_rank_bytes for s in stats], nanos))),
            "bytes_copied": float(nanos * np.mean(copied)) if copied else 0.0,
            "tasks": float(nanos * np.mean([s.num_tasks for s in stats])),
            "tasks_moved": float(nanos * np.mean([s.tasks_moved for s in stats])),
            "plan_seconds": float(np.mean(seconds)),
        }


def _ranked(pair: PlanPair, loads: str) -> np.ndarray:
    """[ranks] times over the mean, the longest first: its entry 0 is ``max_over_mean`` of the plan's statistics."""
    stats, speeds = pair.forward.stats, pair.forward.config.rank_speeds
    if not stats.mean_load:
        return np.ones(len(stats.loads))
    relative = getattr(stats, loads) / stats.mean_load
    if speeds is not None:
        relative *= np.mean(speeds) / np.array(speeds)
    return -np.sort(-relative)


def _summed(values: list[int], nano_batches: int) -> list[int]:
    """Sums over the nano-batches of every microbatch."""
    return np.reshape(values, (-1, nano_batches)).sum(axis=1).tolist()
