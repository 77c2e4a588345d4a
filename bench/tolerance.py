"""What ``tolerance = "auto"`` gains over the default: predicted time of a layer, and bytes.

    python -m bench.tolerance

Plans are real; times are ``planning/timed.py``'s, the ones by which "auto" decides, of a layer of Llama 3 8B at the
simulation's default rates (H100s), forward and backward. Every rank has 32,768 tokens, of documents that lie end to end
over the ranks. With ``nano_batches = 2`` that is one half of a microbatch of twice the tokens.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

from bench.planner import write
from bench.workloads import SEEDS, document_lengths, spanning_layout
from torchtitan_cad.planning import PlannerConfig, TokenLayout, make_plan, warm_up
from torchtitan_cad.planning.timed import make_timed_plan
from torchtitan_cad.simulation import MODELS, Cluster, Costs, Rates

WORKLOADS = ("lognormal", "one big", "uniform")
RANKS = (8, 64)
LINKS = (20e9, 50e9, 200e9)
"""Bytes per second into a rank."""


@dataclass(frozen=True)
class Case:
    """Means over the seeds: seconds of a layer by both tolerances, bytes of its forward, and what "auto" took."""

    ranks: int
    workload: str
    bytes_per_second: float
    nano_batches: int
    fixed_seconds: float
    auto_seconds: float
    fixed_bytes: float
    auto_bytes: float
    tolerances: list[float]

    @property
    def gain(self) -> float:
        return self.fixed_seconds / self.auto_seconds - 1

    @property
    def bytes_saved(self) -> float:
        return 1 - self.auto_bytes / self.fixed_bytes


def measure(ranks: int, workload: str, link: float, nano_batches: int, layouts: list[TokenLayout]) -> Case:
    """One case over some layouts."""
    costs = Costs(MODELS["llama-8b"], Cluster(ranks, net=link, node=link), Rates())
    times = costs.layer_times(ranks, overlaps=nano_batches == 2)
    fixed = [make_plan(layout, costs.shape, PlannerConfig()) for layout in layouts]
    auto = [make_timed_plan(layout, costs.shape, PlannerConfig(), times) for layout in layouts]
    seconds, num_bytes = (
        [[figure(plan) for plan in plans] for plans in (fixed, auto)]
        for figure in (times.layer_seconds, lambda plan: plan.stats.total_bytes)
    )
    mean = statistics.fmean
    return Case(
        ranks, workload, link, nano_batches, *map(mean, seconds), *map(mean, num_bytes),
        tolerances=[plan.config.tolerance for plan in auto],
    )  # fmt: skip


def table(cases: list[Case]) -> str:
    """Markdown; a line has both values of ``nano_batches``, which follow each other in ``cases``."""
    each = "ms by 0.02, by auto | gain | bytes saved | auto took |"
    lines = [
        f"| ranks | documents | GB/s | nano_batches 1: {each} nano_batches 2: {each}",
        "| ---: | --- | ---: |" + " ---: | ---: | ---: | --- |" * 2,
    ]
    for single, halves in zip(cases[::2], cases[1::2], strict=True):
        link = f"{single.bytes_per_second / 1e9:g}"
        lines.append(f"| {single.ranks} | {single.workload} | {link} {_cells(single)}{_cells(halves)}|")
    return "\n".join(lines)


def _cells(case: Case) -> str:
    took = ", ".join(f"{value:g}" for value in sorted(set(case.tolerances)))
    return (
        f"| {1e3 * case.fixed_seconds:.1f}, {1e3 * case.auto_seconds:.1f} | {100 * case.gain:.1f} % "
        f"| {round(100 * case.bytes_saved)} % | {took} "
    )


def main(output: Path = Path("bench/results/tolerance.json"), seeds: int = 3) -> None:
    """Plan every case by 0.02 and by "auto", print a table, write JSON.

    Args:
        output: JSON file of results.
        seeds: Of documents, at most five.
    """
    warm_up()
    cases = []
    with tqdm(total=len(RANKS) * len(WORKLOADS) * len(LINKS) * 2, unit="case", leave=False) as bar:
        for ranks in RANKS:
            for workload in WORKLOADS:
                layouts = [spanning_layout(document_lengths(workload, ranks, s), ranks) for s in SEEDS[:seeds]]
                for link in LINKS:
                    for nano_batches in (1, 2):
                        cases.append(measure(ranks, workload, link, nano_batches, layouts))
                        bar.update()
    print(table(cases))
    found = [{**asdict(case), "gain": case.gain, "bytes_saved": case.bytes_saved} for case in cases]
    write(output, found, module="bench.tolerance")


if __name__ == "__main__":
    tyro.cli(main)
