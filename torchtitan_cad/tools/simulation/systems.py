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
COLUMNS = ("max/mean", "tokens/s/GPU", "mfu", "of perfect", "GB", "configuration")
"""of the table, behind the parts of a step"""


@dataclass(frozen=True)
class Report:
    """The systems of ``SYSTEMS`` on the same batches, in this order; and ``servers``, if the cluster has any."""

    cluster: Cluster
    step_tokens: int
    step_flops: float
    """Model FLOPs of the mean step, by the documents' own pairs."""
    peak_flops: float
    systems: dict[str, Trial]

    def share_of_perfect(self, name: str) -> float:
        """Return perfect's seconds over those of a system that fits."""
        return self.systems["perfect"].seconds / self.systems[name].seconds

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
        if not system.fits:
            return {"fits": False, "reason": system.reason}
        fullest = max(system.outcomes, key=lambda outcome: outcome.memory.total).memory
        exchanged = [outcome.exchanged_bytes for outcome in system.outcomes]
        ranks = self.cluster.ranks
        return {
            "fits": True,
            "seconds_per_step": system.seconds,
            "tokens_per_second_per_gpu": self.step_tokens / system.seconds / ranks,
            "mfu": self.step_flops / system.seconds / ranks / self.peak_flops,
            "share_of_perfect": self.share_of_perfect(name),
            "max_over_mean": system.max_over_mean,
            "parts": {part: system.part(part) for part in PARTS},
            "speedup_over": {
                other: system.over(self.systems[other])
                for other in BASELINES
                if other != name
            },
            "exchanged_bytes_per_step": statistics.fmean(exchanged),
            "configuration": self.configuration(name),
            "memory_bytes": {**asdict(fullest), "total": fullest.total},
        }

    def table(self) -> str:
        """Return a line per system: seconds by part, imbalance, tokens per second and GPU, mfu, memory; speed-ups."""
        systems = self.to_dict()["systems"]
        fitting = [system for system in systems.values() if system["fits"]]
        slowest = max((system["seconds_per_step"] for system in fitting), default=1.0)
        scale, unit = (1.0, "s") if slowest >= 1 else (1e3, "ms")
        header = ["system", f"{unit}/step", *PARTS, *COLUMNS]
        rows = [header]
        for name, system in systems.items():
            if system["fits"]:
                rows.append([name, *_cells(system, scale)])
            else:
                rows.append([name, *["-"] * (len(header) - 2), system["reason"]])
        table = aligned(rows, (0, len(header) - 1))
        lines = [table, *self._speedups(systems["cad"])]
        cad = self.systems["cad"]
        gain = self.systems.get("servers", cad).over(cad)
        if "servers" in self.systems and gain:
            word = "pay" if gain["mean"] >= SERVERS_PAY_FROM else "do not pay"
            ratio = f"{gain['mean']:.3f} times as fast as cad"
            lines.append(f"attention servers {word}: {ratio}")
        return "\n".join(lines)

    def _speedups(self, figures: dict[str, Any]) -> list[str]:
        """Return a line with the speed of ``cad`` over every baseline that fits; none if it does not fit itself."""
        texts = [
            f"{ratio['mean']:.2f} times as fast as {name} ({ratio['min']:.2f} to {ratio['max']:.2f})"
            for name, ratio in figures.get("speedup_over", {}).items()
            if ratio
        ]
        if not texts:
            return []
        steps = [outcome.seconds for outcome in self.systems["cad"].outcomes]
        means = f"means of {len(steps)} steps"
        if len(steps) > 1:
            deviation = statistics.stdev(steps) / statistics.fmean(steps)
            error = 100 * deviation / math.sqrt(len(steps))
            means += f", cad's with a standard error of {error:.2g} %"
        return [f"cad: {', '.join(texts)}; {means}"]


def _cells(system: dict[str, Any], scale: float) -> list[str]:
    """Return the cells of a system that fits, behind its name."""
    times = [
        scale * time for time in (system["seconds_per_step"], *system["parts"].values())
    ]
    chosen = system["configuration"]
    return [
        *(f"{time:z.3f}" if abs(time) < 100 else f"{time:z.1f}" for time in times),
        f"{system['max_over_mean']:.3f}",
        f"{system['tokens_per_second_per_gpu']:,.0f}",
        f"{system['mfu']:.3f}",
        f"{system['share_of_perfect']:.3f}",
        f"{system['memory_bytes']['total'] / 1e9:.0f}",
        " ".join(f"{key} {value}" for key, value in chosen.items()),
    ]


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
    return Report(
        cluster,
        search.batches[0].tokens,
        step_flops=mean_flops(inputs.model, search.batches),
        peak_flops=inputs.rates.peak_flops,
        systems=found,
    )


def mean_flops(model: Model, batches: Sequence[Batch]) -> float:
    """Return the model FLOPs of the mean batch."""
    kinds = model.kinds(1)
    flops = [
        model.flops(batch.tokens, [batch.pairs(kind) for kind in kinds])
        for batch in batches
    ]
    return statistics.fmean(flops)
