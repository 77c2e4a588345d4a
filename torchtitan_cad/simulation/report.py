"""Results of a simulation: figures, a table, JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from torchtitan_cad.planning.text import aligned
from torchtitan_cad.simulation.inputs import Cluster
from torchtitan_cad.simulation.search import Trial
from torchtitan_cad.simulation.step import Parts

SYSTEMS = ("packed", "packing_cp", "greedy", "cad", "cad_placed", "perfect")
"""``cad_placed`` is ``cad`` with placement, where the settings leave it out."""
BASELINES = ("packed", "packing_cp", "greedy")
PARTS = tuple(Parts.__annotations__)
HIDDEN = 0.98
"""Share of perfect that CAD reaches where nothing but the tolerance is lost."""
LEAST_SHOWN = 0.0005
"""Share of a step, for a part of what is lost to be named."""


@dataclass(frozen=True)
class Report:
    """The systems of ``SYSTEMS`` on the same batches, in this order."""

    cluster: Cluster
    step_tokens: int
    systems: dict[str, Trial]

    def share_of_perfect(self, name: str) -> float:
        """Return perfect's seconds over the system's; 0 for one that does not fit."""
        return self.systems["perfect"].seconds / self.systems[name].seconds if self.systems[name].fits else 0.0

    def lost_to_perfect(self, name: str) -> dict[str, float]:
        """By part, the share of a step that it takes longer than perfect's; with the share of perfect they add up to 1.

        Below 0 for what another configuration spares, such as recomputation for a larger bubble.
        """
        system, perfect = self.systems[name], self.systems["perfect"]
        return {part: (system.part(part) - perfect.part(part)) / system.seconds for part in PARTS}

    def to_dict(self) -> dict[str, Any]:
        """Turn the report into values that JSON can hold."""
        return {
            "step_tokens": self.step_tokens,
            "systems": {name: self._system(name) for name in self.systems},
        }

    def _system(self, name: str) -> dict[str, Any]:
        system = self.systems[name]
        if not system.fits:
            none = dict.fromkeys(("seconds_per_step", "tokens_per_second", "share_of_perfect"))
            return {**none, "fits": False, "reason": system.reason}
        mean = lambda key: statistics.fmean(getattr(o, key) for o in system.outcomes)  # noqa: E731
        fullest = max(system.outcomes, key=lambda outcome: outcome.memory.total)
        return {
            "seconds_per_step": system.seconds,
            "tokens_per_second": self.step_tokens / system.seconds,
            "share_of_perfect": self.share_of_perfect(name),
            "fits": True,
            "lost_to_perfect": self.lost_to_perfect(name),
            "parts": {part: system.part(part) for part in PARTS},
            "speedup_over": {other: system.over(self.systems[other]) for other in BASELINES if other != name},
            "exchanged_bytes_per_step": mean("exchanged_bytes"),
            "busiest_rank_bytes_per_step": mean("most_bytes"),
            "configuration": system.outcomes[0].configuration,
            "memory_bytes": {**asdict(fullest.memory), "total": fullest.memory.total},
            "seconds_per_batch": [outcome.seconds for outcome in system.outcomes],
        }


def table(report: Report) -> str:
    """Return a line per system: seconds by part, tokens per second, share of perfect, speed-up over packing_cp."""
    slowest = max((system.seconds for system in report.systems.values() if system.fits), default=1.0)
    scale, unit = (1.0, "s") if slowest >= 1 else (1e3, "ms")
    head = [
        "system",
        f"{unit}/step",
        *PARTS,
        "tokens/s",
        "of perfect",
        "over packing_cp (min mean max)",
        "GB",
        "configuration",
    ]
    rows = [head]
    for name, system in report.systems.items():
        if not system.fits:
            rows.append([name, "-", *["-"] * len(PARTS), "-", "-", "-", "-", system.reason])
            continue
        ratio = system.over(report.systems["packing_cp"])
        chosen = system.outcomes[0].configuration
        rows.append(
            [
                name,
                _short(scale * system.seconds),
                *(_short(scale * system.part(part)) for part in PARTS),
                f"{report.step_tokens / system.seconds:,.0f}",
                f"{report.share_of_perfect(name):.3f}",
                f"{ratio['min']:.2f} {ratio['mean']:.2f} {ratio['max']:.2f}" if ratio else "-",
                f"{max(o.memory.total for o in system.outcomes) / 1e9:.0f}",
                " ".join(f"{key} {value}" for key, value in chosen.items()),
            ]
        )
    return aligned(rows, (0, len(head) - 1))


def speedups(report: Report) -> str:
    """Return a line with the speed of ``cad`` over every baseline that fits; empty if it does not fit itself."""
    system = report.systems["cad"]
    ratios = {name: system.over(report.systems[name]) for name in BASELINES}
    parts = [f"{ratio['mean']:.2f} times as fast as {name}" for name, ratio in ratios.items() if ratio]
    return f"cad: {', '.join(parts)} (means of {len(system.outcomes)} steps)" if parts else ""


def losses(report: Report) -> str:
    """Return a line for every kind of CAD that is below ``HIDDEN`` of perfect: what part loses how much of the step."""
    lines = []
    for name in ("cad", "cad_placed"):
        if name in report.systems and 0 < report.share_of_perfect(name) < HIDDEN:
            lost = sorted(report.lost_to_perfect(name).items(), key=lambda item: -abs(item[1]))
            parts = ", ".join(f"{part} {100 * share:.1f}" for part, share in lost if abs(share) >= LEAST_SHOWN)
            lines.append(f"{name}: {100 * (1 - report.share_of_perfect(name)):.1f} % of a step over perfect: {parts}")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
