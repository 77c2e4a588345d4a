# SPDX-License-Identifier: BSD-3-Clause
"""The predicted time of a training step under several systems, on the same batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchtitan_cad.planning.text import aligned
from torchtitan_cad.tools.simulation.batches import Batch
from torchtitan_cad.tools.simulation.inputs import DIVISION, Cluster, Inputs, Model
from torchtitan_cad.tools.simulation.search import Progress, Search, Trial
from torchtitan_cad.tools.simulation.step import Parts

SYSTEMS = {
    "packed": DIVISION,
    "reorder": DIVISION,
    "packing_cp": (*DIVISION, "backward"),
    "dynamic_cp": ("pp", "microbatches", "checkpointing"),
    "cad": (*DIVISION, "nano_batches", "schedule", "placement"),
    "perfect": ("pp", "microbatches", "checkpointing"),
}
"""Systems, with the fields of a configuration that each chooses."""
BASELINES = ("packed", "reorder", "packing_cp", "dynamic_cp")
SERVERS_PAY_FROM = 1.01
"""speed with attention servers over that without, from which they pay"""
PARTS = tuple(Parts.__annotations__)


@dataclass(frozen=True)
class Report:
    """The systems of ``SYSTEMS`` on the same batches, in this order; ``servers`` if the cluster has any."""

    cluster: Cluster
    step_tokens: int
    step_flops: float
    """Model FLOPs of the mean step, by the documents' own pairs."""
    peak_flops: float
    systems: dict[str, Trial]

    def speed(self, name: str) -> float:
        """Return tokens per second and GPU."""
        return self.step_tokens / self.systems[name].seconds / self.cluster.ranks

    def mfu(self, name: str) -> float:
        """Return the share of the GPUs' peak in model FLOPs."""
        of_gpu = self.step_flops / self.systems[name].seconds / self.cluster.ranks
        return of_gpu / self.peak_flops

    def share_of_perfect(self, name: str) -> float:
        """Return perfect's seconds over the system's; 0 for one that does not fit."""
        return (
            self.systems["perfect"].seconds / self.systems[name].seconds
            if self.systems[name].fits
            else 0.0
        )

    def configuration(self, name: str) -> dict[str, Any]:
        """Return what a system chose."""
        chosen = self.systems[name].configuration
        return {
            key: getattr(chosen, key)
            for key in SYSTEMS["cad" if name == "servers" else name]
            if key != "schedule" or chosen.pp > 1
        }

    def to_dict(self) -> dict[str, Any]:
        """Turn the report into values that JSON can hold."""
        return {
            "step_tokens": self.step_tokens,
            "systems": {name: self._system(name) for name in self.systems},
        }

    def _system(self, name: str) -> dict[str, Any]:
        system = self.systems[name]
        perfect = self.systems["perfect"]
        if not system.fits:
            none = dict.fromkeys(
                (
                    "seconds_per_step",
                    "tokens_per_second",
                    "tokens_per_second_per_gpu",
                    "mfu",
                    "share_of_perfect",
                )
            )
            return {**none, "fits": False, "reason": system.reason}
        fullest = max(system.outcomes, key=lambda outcome: outcome.memory.total).memory
        return {
            "seconds_per_step": system.seconds,
            "tokens_per_second": self.step_tokens / system.seconds,
            "tokens_per_second_per_gpu": self.speed(name),
            "mfu": self.mfu(name),
            "share_of_perfect": self.share_of_perfect(name),
            "fits": True,
            "max_over_mean": system.max_over_mean,
            "parts": {part: system.part(part) for part in PARTS},
            "lost_to_perfect": {
                part: (system.part(part) - perfect.part(part)) / system.seconds
                for part in PARTS
            },
            "speedup_over": {
                other: system.over(self.systems[other])
                for other in BASELINES
                if other != name
            },
            "exchanged_bytes_per_step": statistics.fmean(
                outcome.exchanged_bytes for outcome in system.outcomes
            ),
            "configuration": self.configuration(name),
            "memory_bytes": {**asdict(fullest), "total": fullest.total},
            "seconds_per_batch": [outcome.seconds for outcome in system.outcomes],
        }

    def table(self) -> str:
        """Return a line per system: seconds by part, imbalance, tokens per second and GPU, mfu, memory; speed-ups."""
        slowest = max(
            (system.seconds for system in self.systems.values() if system.fits),
            default=1.0,
        )
        scale, unit = (1.0, "s") if slowest >= 1 else (1e3, "ms")
        rows = [
            [
                "system",
                f"{unit}/step",
                *PARTS,
                "max/mean",
                "tokens/s/GPU",
                "mfu",
                "of perfect",
                "GB",
                "configuration",
            ]
        ]
        for name, system in self.systems.items():
            if not system.fits:
                rows.append([name, *["-"] * (len(rows[0]) - 2), system.reason])
                continue
            seconds = [
                scale * time for time in (system.seconds, *map(system.part, PARTS))
            ]
            rows.append(
                [
                    name,
                    *(
                        f"{time:z.3f}" if abs(time) < 100 else f"{time:z.1f}"
                        for time in seconds
                    ),
                    f"{system.max_over_mean:.3f}",
                    f"{self.speed(name):,.0f}",
                    f"{self.mfu(name):.3f}",
                    f"{self.share_of_perfect(name):.3f}",
                    f"{system.memory / 1e9:.0f}",
                    " ".join(
                        f"{key} {value}"
                        for key, value in self.configuration(name).items()
                    ),
                ]
            )
        return "\n".join([aligned(rows, (0, len(rows[0]) - 1)), *self._speedups()])

    def _speedups(self) -> list[str]:
        """Return a line with the speed of ``cad`` over every baseline that fits; none if it does not fit itself."""
        system = self.systems["cad"]
        ratios = {name: system.over(self.systems[name]) for name in BASELINES}
        texts = [
            f"{ratio['mean']:.2f} times as fast as {name} ({ratio['min']:.2f} to {ratio['max']:.2f})"
            for name, ratio in ratios.items()
            if ratio
        ]
        steps = [outcome.seconds for outcome in system.outcomes]
        means = f"means of {len(steps)} steps"
        if len(steps) > 1:
            error = (
                statistics.stdev(steps)
                / math.sqrt(len(steps))
                / statistics.fmean(steps)
            )
            means += f", cad's with a standard error of {100 * error:.2g} %"
        lines = [f"cad: {', '.join(texts)}; {means}"] if texts else []
        return lines + self._gain_of_servers()

    def _gain_of_servers(self) -> list[str]:
        """Return a line with what attention servers gain beside ``cad``; none without servers."""
        if "servers" not in self.systems:
            return []
        ratio = self.systems["servers"].over(self.systems["cad"])
        if ratio is None:
            return []
        cluster = self.cluster
        servers = (
            f"{cluster.servers} attention servers, each {cluster.server_speed:g} of a GPU at "
            f"{cluster.server_net / 1e9:g} GB/s"
        )
        word = "pay" if ratio["mean"] >= SERVERS_PAY_FROM else "do not pay"
        return [f"{servers}, {word}: {ratio['mean']:.3f} times as fast as cad alone"]


def simulate(inputs: Inputs, progress: Progress = lambda text: None) -> Report:
    """Return the times of a step under every system of ``SYSTEMS``.

    Each takes its configuration that fits the memory and is fastest, see ``Search.fastest``. In a large cluster ``cad``
    takes the configuration that is best with the loader's homes.

    Raises ValueError for inputs that do not fit each other, or documents that no configuration can divide.
    """
    asked = inputs.configuration
    cluster = inputs.cluster
    documents = inputs.documents
    search = Search(inputs, progress=progress)
    if not search.candidates("packed"):
        raise ValueError(
            f"documents step_tokens = {documents.step_tokens} in rows of {documents.row_tokens} cannot be divided over "
            f"{cluster.ranks} ranks with tp = {cluster.tp}: set a multiple of ranks / (tp x pp x cp) rows, and rows "
            "that 2 x cp divides"
        )
    found = {name: search.fastest(name, search.candidates(name)) for name in BASELINES}
    candidates = search.candidates("cad", asked.placement)
    if cluster.is_large:
        at_home = search.fastest("cad", search.candidates("cad"))
        best = replace(at_home.configuration, placement=asked.placement)
        candidates = [best] if at_home.fits else candidates
    found["cad"] = search.placed(candidates)
    if cluster.servers:
        found["servers"] = search.run("servers", found["cad"].configuration)
    found["perfect"] = search.fastest("perfect", search.candidates("perfect"))
    flops = mean_flops(inputs.model, search.batches)
    tokens = search.batches[0].tokens
    return Report(cluster, tokens, flops, inputs.rates.peak_flops, found)


def mean_flops(model: Model, batches: Sequence[Batch]) -> float:
    """Return the model FLOPs of the mean batch."""
    kinds = model.kinds(1)
    every = [
        model.flops(batch.tokens, [batch.pairs(kind) for kind in kinds])
        for batch in batches
    ]
    return statistics.fmean(every)
