"""The exchange of a step that nothing hides, with the loader's homes and with balanced ones.

    python -m bench.placed_steps

Simulates steps of Llama 3 8B, 32,768 tokens and 50 GB/s a rank, on ranks without TP or pipelines: documents of
``bench/workloads.py`` laid end to end over all ranks, which share one sequence, or cut at a rank's tokens ("whole").
Means over the seeds.
"""

import dataclasses
import statistics
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tyro
from tqdm import tqdm

from bench.memory import make_layout
from bench.record import conclude
from bench.workloads import TOKENS_PER_RANK, document_lengths
from torchtitan_cad.simulation import MODELS, Batch, Cluster, Configuration, Costs, Rates
from torchtitan_cad.simulation.disaggregated import Disaggregated
from torchtitan_cad.simulation.step import Step

WHOLE = "whole"
"""Name of the workload of documents cut at a rank's tokens."""
PLACEMENTS: tuple[Literal["loader"], Literal["balanced"]] = ("loader", "balanced")


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = (8, 64)
    workloads: tuple[str, ...] = (WHOLE, "lognormal", "one big", "uniform")
    seeds: tuple[int, ...] = (11, 12, 13)
    net: float = 50e9
    """Bytes per second of a rank, each way."""
    output: Path | None = None
    """JSON file for the figures."""


class Figures(NamedTuple):
    """Seconds of a step, and of its exchange that nothing hides."""

    exposed: float
    step: float


def simulate_step(
    workload: str,
    ranks: int,
    seed: int,
    nano_batches: Literal[1, 2],
    placement: Literal["loader", "balanced"],
    net: float,
) -> Figures:
    """Simulate one step of one microbatch."""
    rows = [document_lengths(workload, ranks, seed)] if workload != WHOLE else []
    for segments in make_layout("whole documents", ranks, seed).segments() if workload == WHOLE else ():
        rows.append([length for _, _, length in segments])
    cp = ranks // len(rows)
    batch = Batch(tuple(map(np.array, rows)), cp * TOKENS_PER_RANK)
    costs = Costs(MODELS["llama-8b"], Cluster(ranks, ranks_per_node=1, net=net, fsdp=False), Rates())
    configuration = Configuration(cp=cp, nano_batches=nano_batches, placement=placement, tolerance=0.02)
    parts = Disaggregated(Step(costs, batch, configuration)).outcome().parts
    return Figures(parts.exchange, parts.total)


def main(options: Options) -> None:
    """The table has the loader's homes before balanced ones, the file the figures of every seed."""
    records, rows = [], []
    cases = list(product(options.workloads, options.ranks, (1, 2)))
    for workload, ranks, nano_batches in tqdm(cases, unit="case", desc="simulating"):
        means = []
        for placement in PLACEMENTS:
            each = [simulate_step(workload, ranks, s, nano_batches, placement, options.net) for s in options.seeds]
            about = {"workload": workload, "ranks": ranks, "nano_batches": nano_batches, "placement": placement}
            pairs = zip(options.seeds, each, strict=True)
            records += [about | {"seed": seed} | figures._asdict() for seed, figures in pairs]
            means.append(Figures(*map(statistics.fmean, zip(*each, strict=True))))
        old, new = means
        row = {"documents": workload, "ranks": ranks, "nano-batches": nano_batches}
        row["exposed exchange, ms"] = f"{old.exposed * 1e3:.0f} → {new.exposed * 1e3:.0f}"
        rows.append(row | {"step, ms": f"{old.step * 1e3:.0f} → {new.step * 1e3:.0f}"})
    conclude(options.output, "bench.placed_steps", records, rows)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
