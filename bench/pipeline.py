"""What a pool of attention over all stages is worth: the time of a step under three schedules, simulated.

    python -m bench.pipeline --pretrain document_lengths.json

Plans are real, made by the default planner; times are a model: a microbatch costs a rank its linear work and the pairs
of attention that it computes, exchanges are hidden. Every data-parallel rank has M microbatches of 32,768 tokens; a
microbatch's documents lie end to end over the data-parallel ranks and may span them.

- ``1F1B``: every rank attends for its own tokens.
- ``1F1B + CAD``: the ranks of one stage share the attention of each microbatch.
- ``CAD1F1B``: all ranks, of all stages, share the attention of each tick (planning/pipeline/ticks.py).

The ideal divides all attention evenly over all ranks and has the bubble of the linear work alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from bench.record import Record, markdown_table, save_records
from bench.workloads import SHAPE, TOKENS_PER_RANK, document_lengths, known_workloads, spanning_layout
from torchtitan_cad.planning import PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.pipeline.ticks import tick_schedule

PAIRS_PER_TOKEN = 26_600
"""Pairs of attention that take as many operations as one token's linear work in a layer of Llama 3 8B: 2 x 218 million
parameters, against 4 x 4096 operations per pair."""
BACKWARD_LINEAR, BACKWARD_ATTENTION = 2.0, 2.5
"""Cost of backward over that of forward."""
TILE = 128
FORWARD, BACKWARD, SERVE = "forward", "backward", "serve"
COLORS = {FORWARD: "#6baed6", BACKWARD: "#31a354", SERVE: "#fdae6b"}
SCHEDULES = ("1F1B", "1F1B + CAD", "CAD1F1B")


@dataclass(frozen=True)
class Options:
    """What to simulate and where to put it."""

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
    plot: Path | None = Path("docs/images/pipeline.png")
    """Timelines of one step; the seed is the first, the workload the last."""


@dataclass
class Timeline:
    """What every rank does when: ``spans`` [(rank, start, end, kind, microbatch)], rank = stage x dp + dp rank."""

    spans: list[tuple[int, float, float, str, int]] = field(default_factory=list)
    attention: list[Sequence[float]] = field(default_factory=list)  # per tick, of every rank

    @property
    def makespan(self) -> float:
        return max(end for _, _, end, _, _ in self.spans)


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


def simulate(step: Step, schedule: str) -> Timeline:
    """The step under one of SCHEDULES."""
    if schedule == "CAD1F1B":
        return _in_ticks(step)
    shared = schedule == "1F1B + CAD"
    loads = [step.loads(layout, "local_search" if shared else "home") for layout in step.layouts]
    timeline = Timeline()
    for rank in range(step.dp):
        # The ranks of a stage that share attention wait for each other in every layer.
        spans = _one_f_one_b(step.pp, [float(load.max() if shared else load[rank]) for load in loads])
        timeline.spans += [(stage * step.dp + rank, *span) for stage, *span in spans]
    return timeline


def _one_f_one_b(pp: int, attention: Sequence[float]) -> list[tuple[int, float, float, str, int]]:
    """Spans (stage, start, end, kind, microbatch) of stock 1F1B, for forward attention times per microbatch."""
    num, ready, free = len(attention), {}, [0.0] * pp
    orders = []
    for stage in range(pp):
        ahead = min(num, pp - stage)
        order = [(FORWARD, m) for m in range(ahead)]
        for m in range(num):
            order.append((BACKWARD, m))
            if ahead + m < num:
                order.append((FORWARD, ahead + m))
        orders.append(order)
    spans, at = [], [0] * pp
    while any(at[stage] < len(orders[stage]) for stage in range(pp)):
        for stage in range(pp):
            while at[stage] < len(orders[stage]):
                kind, m = orders[stage][at[stage]]
                before = (kind, stage - 1, m) if kind == FORWARD else (kind, stage + 1, m)
                if 0 <= before[1] < pp and before not in ready:
                    break
                start = max(free[stage], ready.get(before, 0.0))
                length = 1 + attention[m] if kind == FORWARD else BACKWARD_LINEAR + BACKWARD_ATTENTION * attention[m]
                free[stage] = ready[kind, stage, m] = start + length
                spans.append((stage, start, start + length, kind, m))
                at[stage] += 1
    return spans


def _in_ticks(step: Step) -> Timeline:
    timeline, now = Timeline(), 0.0
    for tick in tick_schedule(step.pp, len(step.layouts)):
        live = [work.microbatch if work else None for work in tick.work]
        loads = step.loads(_pool(step, live), "local_search")
        linear, attention = (1.0, 1.0) if tick.forward else (BACKWARD_LINEAR, BACKWARD_ATTENTION)
        length = linear + attention * float(loads.max())
        for stage, microbatch in enumerate(live):
            kind = SERVE if microbatch is None else FORWARD if tick.forward else BACKWARD
            number = -1 if microbatch is None else microbatch
            timeline.spans += [(stage * step.dp + rank, now, now + length, kind, number) for rank in range(step.dp)]
        timeline.attention.append(loads.tolist())
        now += length
    return timeline


def _pool(step: Step, live: Sequence[int | None]) -> TokenLayout:
    """The live microbatches of a tick on the ranks of their stages; ranks without one hold nothing."""
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(step.pp * step.dp)]
    first_doc = 0
    for stage, microbatch in enumerate(live):
        if microbatch is None:
            continue
        layout = step.layouts[microbatch]
        for rank, held in enumerate(layout.segments()):
            segments[stage * step.dp + rank] += [(first_doc + doc, start, length) for doc, start, length in held]
        first_doc += int(layout.seg_doc.max()) + 1
    return TokenLayout.from_segments(segments)


def make_step(options: Options, workload: str, num_microbatches: int, seed: int) -> Step:
    """Documents drawn anew for every microbatch."""
    seeds = range(1000 * seed, 1000 * seed + num_microbatches)
    drawn = [document_lengths(workload, options.dp, each, options.pretrain) for each in seeds]
    layouts = [spanning_layout(lengths, options.dp) for lengths in drawn]
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
            timeline = simulate(step, schedule)
            worst = [max(loads) / np.mean(loads) for loads in timeline.attention]
            busy = sum(end - start for _, start, end, kind, _ in timeline.spans if kind != SERVE)
            records.append(
                {
                    "workload": workload,
                    "microbatches": microbatches,
                    "seed": seed,
                    "schedule": schedule,
                    "makespan": timeline.makespan,
                    "over_ideal": timeline.makespan / ideal,
                    "idle_share": 1 - busy / (timeline.makespan * options.pp * options.dp),
                    "worst_tick_max_over_mean": float(max(worst, default=0.0)),
                }
            )
    return records


def table(records: list[Record]) -> str:
    """Means over the seeds, one line per workload and number of microbatches."""
    rows = []
    for workload, microbatches in dict.fromkeys((r["workload"], r["microbatches"]) for r in records):
        mine = [r for r in records if (r["workload"], r["microbatches"]) == (workload, microbatches)]
        row: Record = {"documents": workload, "microbatches": microbatches}
        for name in SCHEDULES:
            row[f"{name} / ideal"] = statistics.fmean(r["over_ideal"] for r in mine if r["schedule"] == name)
        row["worst tick, max over mean"] = max(r["worst_tick_max_over_mean"] for r in mine)
        rows.append(row)
    return "\n".join(markdown_table(rows))


def draw_timelines(timelines: dict[str, Timeline], dp: int, workload: str, path: Path) -> None:
    """One timeline per schedule, ranks down, time across, the same scale."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    longest = max(timeline.makespan for timeline in timelines.values())
    figure, axes = plt.subplots(len(timelines), 1, figsize=(14, 3 * len(timelines)), sharex=True, layout="constrained")
    for ax, (name, timeline) in zip(axes, timelines.items(), strict=True):
        for rank, start, end, kind, microbatch in timeline.spans:
            ax.barh(rank, end - start, left=start, height=0.92, color=COLORS[kind], edgecolor="white", linewidth=0.6)
            if microbatch >= 0 and end - start > longest / 60:
                ax.text((start + end) / 2, rank, str(microbatch), ha="center", va="center", fontsize=6)
        ranks = 1 + max(span[0] for span in timeline.spans)
        ax.set_title(f"{name}: {timeline.makespan:.1f}", loc="left", fontsize=11)
        ax.set_yticks([dp * (stage + 0.5) - 0.5 for stage in range(ranks // dp)])
        ax.set_yticklabels([f"stage {stage}" for stage in range(ranks // dp)])
        ax.set_ylim(ranks - 0.5, -0.5)
        ax.set_xlim(0, longest * 1.01)
        for stage in range(1, ranks // dp):
            ax.axhline(dp * stage - 0.5, color="black", linewidth=0.8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[-1].set_xlabel("time, in units of one microbatch's forward linear work on one rank")
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
    figure.suptitle(
        f"One step of {workload} documents, {dp} data-parallel ranks per stage; numbers are microbatches, white is idle"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(options: Options) -> None:
    """Simulate, print, write, draw."""
    records = run(options)
    save_records(options.output, "bench.pipeline", records)
    print(table(records))
    if options.plot is not None:
        workload = records[-1]["workload"]
        step = make_step(options, workload, max(options.rounds[:2]) * options.pp, options.seeds[0])
        draw_timelines({s: simulate(step, s) for s in SCHEDULES}, options.dp, workload, options.plot)
        print(f"drew {options.plot}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
