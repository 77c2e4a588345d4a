"""Planners against each other and the lower bound: balance, bytes and time.

    python -m bench.planner --pretrain document_lengths.json --check

plans every workload (``bench/workloads.py``) for 8 to 4096 ranks at the homes that ``place`` chooses, prints a table of
means over the seeds, writes every figure as JSON and draws a plan.
Bytes are those of one layer's forward for 32 query and 8 key heads of 128 in bf16.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby, product
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from bench.planner_checks import TOLERANCE, slow_cases, wrong_cases
from bench.record import Record, conclude
from bench.workloads import SEEDS, SHAPE, WORKLOADS, known_workloads, workload_layout
from torchtitan_cad.cli.plan_plot import draw_plan
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan, place, warm_up

PLANNERS: dict[str, dict[str, Any]] = {
    "home": {"planner": "home"},
    "greedy": {"planner": "greedy"},
    "local_search, whole keys": {"planner": "local_search", "split_kv": False},
    "local_search": {"planner": "local_search"},
}
"""home: nothing moves. greedy: the paper's. local_search: the default planner; whole keys: with split_kv = false."""
LARGE, HUGE = 64, 512
"""Beyond LARGE ranks there are two seeds; beyond HUGE one, and not the planner without split keys, which is slow."""
SLOW = 1.0
"""Seconds after which a plan is not timed again."""
EXAMPLE = ("lognormal", 64, 12)
"""Workload, ranks and seed of the plan that is drawn."""
COLUMNS = {
    "max/mean": "max_over_mean",
    "total GB": "total_bytes",
    "bound GB": "bound_bytes",
    "worst GB": "rank_bytes",
    "its bound": "bound_rank_bytes",
    "tasks": "tasks",
    "plan ms": "plan_ms",
    "tables ms": "tables_ms",
}
"""Columns of the printed table."""


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    workloads: tuple[str, ...] = WORKLOADS
    """Names of workloads; those named pretrain need --pretrain and are left out without it."""
    seeds: tuple[int, ...] = SEEDS
    """One layout per seed; the first two beyond 64 ranks, the first beyond 512."""
    repeats: int = 5
    """Timed runs per plan, after one to warm up; their median is reported. Slow plans have fewer."""
    pretrain: Path | None = None
    """JSON list of document lengths for the pretrain workloads."""
    output: Path = Path("bench/results/planner.json")
    plot: Path | None = Path("docs/images/plan.png")
    """Picture of one plan; None draws none."""
    check: bool = False
    """Fail if a plan breaks its guarantee or its bound, or the default planner moves more bytes than the greedy."""
    check_times: bool = False
    """Fail if the default planner takes longer than its limits (bench/planner_checks.py)."""


def seeds_for(ranks: int, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Fewer where plans are large."""
    return seeds if ranks <= LARGE else seeds[: 2 if ranks <= HUGE else 1]


def placed_layout(workload: str, ranks: int, seed: int, pretrain: Path | None = None) -> TokenLayout:
    """Documents laid end to end, and then where ``place`` puts them, as training plans them by default."""
    return place(workload_layout(workload, ranks, seed, pretrain), SHAPE, PlannerConfig(tolerance=TOLERANCE))


def fresh(layout: TokenLayout) -> TokenLayout:
    """The same layout without what it has computed already, as a training step has it."""
    columns = (layout.seg_rank, layout.seg_doc, layout.seg_start, layout.seg_length)
    return TokenLayout.from_arrays(layout.num_ranks, *columns)


def measure(plan: Callable[[], Plan], repeats: int) -> Record:
    """Figures of a plan and the median milliseconds of planning and of one rank's tables.

    The first of ``repeats`` + 1 runs warms up and counts only where it takes SLOW seconds and is not repeated.
    """
    times: list[tuple[float, float]] = []
    while len(times) <= repeats and sum(sum(t) for t in times) < SLOW:
        begin = time.perf_counter()
        result = plan()
        middle = time.perf_counter()
        result.exchange(result.layout.num_ranks // 2)
        times.append((middle - begin, time.perf_counter() - middle))
    times = times[1:] or times
    stats = result.stats
    return {
        "before": stats.max_over_mean_before,
        "max_over_mean": stats.max_over_mean,
        "guaranteed": stats.load_limit / stats.mean_load,
        "total_bytes": stats.total_bytes,
        "rank_bytes": stats.max_rank_bytes,
        "bound_bytes": stats.lower_bound_bytes,
        "bound_rank_bytes": stats.lower_bound_rank_bytes,
        "forced_export_bytes": stats.forced_export_bytes,
        "tasks": stats.num_tasks,
        "plan_ms": statistics.median(t[0] for t in times) * 1e3,
        "tables_ms": statistics.median(t[1] for t in times) * 1e3,
    }


def cases(options: Options) -> Iterator[Record]:
    """Names of all plans to make."""
    for ranks in options.ranks:
        planners = [p for p in PLANNERS if ranks <= HUGE or p != "local_search, whole keys"]
        workloads, seeds = known_workloads(options.workloads, options.pretrain), seeds_for(ranks, options.seeds)
        for workload, planner, seed in product(workloads, planners, seeds):
            yield {"ranks": ranks, "workload": workload, "seed": seed, "planner": planner}


def run(options: Options) -> list[Record]:
    """One record per case."""
    warm_up()  # compiles, once per machine
    records = []
    for case in tqdm(list(cases(options)), unit="plan", desc="planning"):
        layout = placed_layout(case["workload"], case["ranks"], case["seed"], options.pretrain)
        config = PlannerConfig(tolerance=TOLERANCE, **PLANNERS[case["planner"]])
        plan = lambda layout=layout, config=config: make_plan(fresh(layout), SHAPE, config)  # noqa: E731
        records.append({**case, **measure(plan, options.repeats)})
    return records


def table(records: list[Record]) -> list[Record]:
    """A line per ranks, workload and planner: means over the seeds, the largest max/mean; GB and milliseconds."""
    keys, rows = ("ranks", "workload", "planner"), []
    for key, group in groupby(records, key=lambda r: tuple(r[k] for k in keys)):
        same, row = list(group), dict(zip(keys, key, strict=True))
        for title, name in COLUMNS.items():
            values = [each[name] / (1e9 if name.endswith("bytes") else 1) for each in same]
            row[title] = max(values) if name == "max_over_mean" else statistics.mean(values)
        rows.append(row)
    return rows


def main(options: Options) -> int:
    """Returns the exit code."""
    records = run(options)
    if options.plot is not None:
        draw_plan(make_plan(placed_layout(*EXAMPLE), SHAPE), options.plot)
    problems = wrong_cases(records) if options.check else []
    problems += slow_cases(records) if options.check_times else []
    return conclude(options.output, "bench.planner", records, table(records), problems)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
