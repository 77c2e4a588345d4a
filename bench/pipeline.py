# SPDX-License-Identifier: BSD-3-Clause
"""Time of a step with and without a pool of attention over all stages: four schedules, simulated.

    python -m bench.pipeline --pretrain document_lengths.json

Plans are real, made as training makes them by default: those of a stage by predicted time, those of ticks by their
tolerance. Times are a model: a microbatch costs a rank its linear work and the pairs of attention that it computes, and
its exchanges are hidden behind another half of it. Every data-parallel rank has M microbatches of 32,768 tokens; a
microbatch's documents lie end to end over the data-parallel ranks and may span them.

- ``1F1B``: every rank attends for its own tokens.
- ``1F1B + CAD``: the ranks of one stage share the attention of each microbatch.
- ``1F1B + CAD, placed``: the documents of the step are first divided among its microbatches and ranks anew.
- ``CAD1F1B``: all ranks, of all stages, share the attention of each tick (planning/pipeline/ticks.py).

The ideal divides all attention evenly over all ranks and has the bubble of the linear work alone. Equal microbatches
divide it as evenly, but wait in the bubble of 1F1B with it.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from bench.record import Record, conclude
from tests.lib.workloads import SHAPE, TOKENS_PER_RANK, known_workloads, workload_layout
from torchtitan_cad.planning import (
    AttentionKind,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
    plan_step,
)
from torchtitan_cad.planning.model.layout import stack
from torchtitan_cad.planning.pipeline.one_f_one_b import (
    one_f_one_b,
)
from torchtitan_cad.planning.pipeline.ticks import Tick, tick_schedule
from torchtitan_cad.planning.timed import LayerTimes

PAIRS_PER_TOKEN = 26_600
"""Pairs of attention that take as many operations as one token's linear work in a layer of Llama 3 8B: 2 x 218 million
parameters, against 4 x 4096 operations per pair."""
BACKWARD_LINEAR, BACKWARD_ATTENTION = 2.0, 2.5
"""Cost of backward over that of forward."""
TILE = 128
LINK = 0.89e9
"""bytes that a rank sends while it does its linear work of a microbatch in one layer: 40 GB/s, 640 TFLOP/s"""
TIMES = LayerTimes(
    unit=(1 + BACKWARD_ATTENTION) * TILE * TILE / (PAIRS_PER_TOKEN * TOKENS_PER_RANK),
    linear=(1 + BACKWARD_LINEAR) / TOKENS_PER_RANK,
    bytes_per_second=LINK,
    between_hosts=LINK,
    exchange=0.0,
    overlaps=True,
)
"""in units of forward linear work of one microbatch, as all times here"""
SCHEDULES = ("1F1B", "1F1B + CAD", "1F1B + CAD, placed", "CAD1F1B")


@dataclass(frozen=True)
class Options:
    pp: int = 4
    """Pipeline ranks, with one stage each."""
    dp: int = 4
    """Data-parallel ranks."""
    rounds: tuple[int, ...] = (1, 2, 4)
    """Microbatches per step, in multiples of pp."""
    workloads: tuple[str, ...] = (
        "lognormal",
        "one big",
        "uniform",
        "pretrain",
        "pretrain x4",
    )
    """See tests/lib/workloads.py; those named pretrain need --pretrain and are left out without it."""
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

    def loads(self, layout: TokenLayout, planner: str) -> np.ndarray:
        """Attention time of every rank of the layout."""
        return seconds(make_plan(layout, SHAPE, PlannerConfig(planner=planner)))

    def shared_loads(self, place: bool) -> np.ndarray:
        """[microbatches, ranks] attention time where the ranks of a stage share it."""
        given = [
            [replace(each, seg_doc=each.seg_doc + (i << 32))]
            for i, each in enumerate(self.layouts)
        ]
        step = plan_step(
            given,
            [AttentionKind("full", 1, SHAPE)],
            PlannerConfig(),
            TIMES,
            place=place,
            stages=self.pp,
        )
        return np.stack([seconds(microbatch.plans[0][0]) for microbatch in step])

    def ideal(self, attention_waits: bool = False) -> float:
        """All attention divided evenly, and the linear work with its bubble, in which attention may wait, too."""
        attention = sum(
            float(self.loads(layout, "home").mean()) for layout in self.layouts
        )
        bubble = (self.pp - 1) / len(self.layouts)
        linear = len(self.layouts) * (1 + BACKWARD_LINEAR) * (1 + bubble)
        return linear + attention * (1 + BACKWARD_ATTENTION) * (
            1 + bubble * attention_waits
        )


def seconds(plan: Plan) -> np.ndarray:
    """Attention time of every rank."""
    return plan.stats.loads * TILE * TILE / (PAIRS_PER_TOKEN * TOKENS_PER_RANK)


def simulate(step: Step, schedule: str) -> float:
    """Time the step under one of SCHEDULES."""
    if schedule == "CAD1F1B":
        return sum(
            _tick_seconds(step, tick)
            for tick in tick_schedule(step.pp, len(step.layouts))
        )
    if shared := "CAD" in schedule:
        loads = step.shared_loads(place="placed" in schedule)
    else:
        loads = np.stack([step.loads(layout, "home") for layout in step.layouts])
    # The ranks of a stage that share attention wait for each other in every layer.
    together = [shared] * len(loads)
    return one_f_one_b(
        step.pp, 1 + loads, BACKWARD_LINEAR + BACKWARD_ATTENTION * loads, together
    )


def _tick_seconds(step: Step, tick: Tick) -> float:
    live = [step.layouts[work.microbatch] if work else None for work in tick.work]
    linear, attention = (
        (1.0, 1.0) if tick.forward else (BACKWARD_LINEAR, BACKWARD_ATTENTION)
    )
    return linear + attention * float(
        step.loads(stack(live, step.dp), "local_search").max()
    )


def make_step(
    options: Options, workload: str, num_microbatches: int, seed: int
) -> Step:
    """Documents drawn anew for every microbatch."""
    seeds = range(1000 * seed, 1000 * seed + num_microbatches)
    layouts = [
        workload_layout(workload, options.dp, each, options.pretrain) for each in seeds
    ]
    return Step(layouts, options.pp, options.dp)


def run(options: Options) -> list[Record]:
    """One record per workload, number of microbatches, seed and schedule."""
    workloads = known_workloads(options.workloads, options.pretrain)
    cases = [
        (w, r * options.pp, s)
        for w in workloads
        for r in options.rounds
        for s in options.seeds
    ]
    records = []
    for workload, microbatches, seed in tqdm(cases, desc="simulating", unit="step"):
        step = make_step(options, workload, microbatches, seed)
        ideal, equal = step.ideal(), step.ideal(attention_waits=True)
        for schedule in SCHEDULES:
            makespan = simulate(step, schedule)
            case = {
                "workload": workload,
                "microbatches": microbatches,
                "seed": seed,
                "schedule": schedule,
            }
            over = {
                "over_ideal": makespan / ideal,
                "over_equal": makespan / equal,
            }
            records.append(case | {"makespan": makespan} | over)
    return records


def table(records: list[Record]) -> list[Record]:
    """Means over the seeds, one line per workload and number of microbatches."""
    rows = []
    for workload, microbatches in dict.fromkeys(
        (r["workload"], r["microbatches"]) for r in records
    ):
        mine = [
            r
            for r in records
            if (r["workload"], r["microbatches"]) == (workload, microbatches)
        ]
        row: Record = {"documents": workload, "microbatches": microbatches}
        for name in SCHEDULES:
            over, against = (
                ("over_ideal", "ideal")
                if name == "CAD1F1B"
                else ("over_equal", "equal microbatches")
            )
            row[f"{name} / {against}"] = statistics.fmean(
                r[over] for r in mine if r["schedule"] == name
            )
        rows.append(row)
    return rows


def main(options: Options) -> None:
    records = run(options)
    conclude(options.output, "bench.pipeline", records, table(records))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
