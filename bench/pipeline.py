"""Time of a step with and without a pool of attention over all stages: three schedules, simulated.

    python -m bench.pipeline --pretrain document_lengths.json

Plans are real, made by the default planner; times are a model: a microbatch costs a rank its linear work and the pairs
of attention that it computes, exchanges are hidden. Every data-parallel rank has M microbatches of 32,768 tokens; a
microbatch's documents lie end to end over the data-parallel ranks and may span them.

- ``1F1B``: every rank attends for its own tokens.
- ``1F1B + CAD``: the ranks of one stage share the attention of each microbatch.
- ``CAD1F1B``: all ranks, of all stages, share the attention of each tick (planning/pipeline/ticks.py).

The ideal divides all attention evenly over all ranks and has the bubble of the linear work alone.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro
from tqdm import tqdm

from bench.record import Record, conclude
from bench.workloads import SHAPE, TOKENS_PER_RANK, known_workloads, workload_layout
from torchtitan_cad.planning import PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.model.layout import stack
from torchtitan_cad.planning.pipeline.ticks import tick_schedule
from torchtitan_cad.simulation.streams import one_f_one_b

PAIRS_PER_TOKEN = 26_600
"""Pairs of attention that take as many operations as one token's linear work in a layer of Llama 3 8B: 2 x 218 million
parameters, against 4 x 4096 operations per pair."""
BACKWARD_LINEAR, BACKWARD_ATTENTION = 2.0, 2.5
"""Cost of backward over that of forward."""
TILE = 128
SCHEDULES = ("1F1B", "1F1B + CAD", "CAD1F1B")


@dataclass(frozen=True)
class Options:
    pp: int = 4
    """Pipeline ranks, with one stage each."""
    dp: int = 4
    """Data-parallel ranks."""
    rounds: tuple[int, ...] = (1, 2, 4)
    """Microbatches per step, in multiples of pp."""
    workloads: tuple[str, ...] = ("lognormal", "one big", "uniform", "pretrain", "pretrain x4")
    """See bench/workloads.py; those named pretrain need --pretrain and are left out without it."""
    seeds: tuple[int, ...] = (11, 12, 13)
    pretrain: Path | None = None
    """JSON list of document lengths."""
    output: Path = Path("bench/results/pipeline.json")


@dataclass(frozen=True)
class Step:
    """Documents of one step: one layout over the dp ranks per microbatch. Times are in units of forward linear work of
    one microbatch on one rank."""

    layouts: list[TokenLayout]
    pp: int
    dp: int
    tolerance: float = PlannerConfig.tolerance

    def loads(self, layout: TokenLayout, planner: str) -> np.ndarray:
        """Attention time of every rank of the layout."""
        plan = make_plan(layout, SHAPE, PlannerConfig(tolerance=self.tolerance, planner=planner))
        return plan.stats.loads * TILE * TILE / (PAIRS_PER_TOKEN * TOKENS_PER_RANK)

    def ideal(self) -> float:
        """All attention divided evenly, and the linear work with its bubble."""
        attention = sum(float(self.loads(layout, "home").sum()) for layout in self.layouts) * self.pp
        ticks = len(self.layouts) + self.pp - 1
        return ticks * (1 + BACKWARD_LINEAR) + attention * (1 + BACKWARD_ATTENTION) / (self.pp * self.dp)


class Figures(NamedTuple):
    """Time of a step, and the largest load over the mean of all ranks in a tick; 0 without ticks."""

    makespan: float
    worst_tick: float = 0.0


def simulate(step: Step, schedule: str) -> Figures:
    """Time the step under one of SCHEDULES."""
    if schedule == "CAD1F1B":
        return _in_ticks(step)
    shared = schedule == "1F1B + CAD"
    loads = np.stack([step.loads(layout, "local_search" if shared else "home") for layout in step.layouts])
    # The ranks of a stage that share attention wait for each other in every layer.
    ranks = [loads.max(axis=1)] if shared else list(loads.T)
    forward = [1 + rank for rank in ranks]
    backward = [BACKWARD_LINEAR + BACKWARD_ATTENTION * rank for rank in ranks]
    return Figures(max(one_f_one_b(step.pp, f.tolist(), b.tolist()) for f, b in zip(forward, backward, strict=True)))


def _in_ticks(step: Step) -> Figures:
    makespan = worst = 0.0
    for tick in tick_schedule(step.pp, len(step.layouts)):
        live = [step.layouts[work.microbatch] if work else None for work in tick.work]
        loads = step.loads(stack(live, step.dp), "local_search")
        linear, attention = (1.0, 1.0) if tick.forward else (BACKWARD_LINEAR, BACKWARD_ATTENTION)
        makespan += linear + attention * float(loads.max())
        worst = max(worst, float(loads.max() / loads.mean()))
    return Figures(makespan, worst)


def make_step(options: Options, workload: str, num_microbatches: int, seed: int) -> Step:
    """Documents drawn anew for every microbatch."""
    seeds = range(1000 * seed, 1000 * seed + num_microbatches)
    layouts = [workload_layout(workload, options.dp, each, options.pretrain) for each in seeds]
    return Step(layouts, options.pp, options.dp)


def run(options: Options) -> list[Record]:
    """One record per workload, number of microbatches, seed and schedule."""
    workloads = known_workloads(options.workloads, options.pretrain)
    cases = [(w, r * options.pp, s) for w in workloads for r in options.rounds for s in options.seeds]
    records = []
    for workload, microbatches, seed in tqdm(cases, desc="simulating", unit="step"):
        step = make_step(options, workload, microbatches, seed)
        ideal = step.ideal()
        for schedule in SCHEDULES:
            makespan, worst_tick = simulate(step, schedule)
            case = {"workload": workload, "microbatches": microbatches, "seed": seed, "schedule": schedule}
            figures = {"over_ideal": makespan / ideal, "worst_tick_max_over_mean": worst_tick}
            records.append(case | {"makespan": makespan} | figures)
    return records


def table(records: list[Record]) -> list[Record]:
    """Means over the seeds, one line per workload and number of microbatches."""
    rows = []
    for workload, microbatches in dict.fromkeys((r["workload"], r["microbatches"]) for r in records):
        mine = [r for r in records if (r["workload"], r["microbatches"]) == (workload, microbatches)]
        row: Record = {"documents": workload, "microbatches": microbatches}
        for name in SCHEDULES:
            row[f"{name} / ideal"] = statistics.fmean(r["over_ideal"] for r in mine if r["schedule"] == name)
        row["worst tick, max over mean"] = max(r["worst_tick_max_over_mean"] for r in mine)
        rows.append(row)
    return rows


def main(options: Options) -> None:
    records = run(options)
    conclude(options.output, "bench.pipeline", records, table(records))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
