# SPDX-License-Identifier: BSD-3-Clause
"""Planners against each other and the lower bound: balance, bytes and time.

    python -m bench.planner --pretrain document_lengths.json --check

plans every workload (tests/lib/workloads.py) for 8 to 4096 ranks at the homes of ``place_and_plan``, prints a table of
means over the seeds, and bytes relative to the default planner's, writes every figure as JSON and draws a plan.
Bytes are those of one layer's forward for 32 query and 8 key heads of 128 in bf16.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from bench.greedy import plan_greedy
from bench.record import Record, conclude, markdown_table
from examples.draw_a_plan import draw_plan
from tests.lib.workloads import (
    SEEDS,
    SHAPE,
    WORKLOADS,
    known_workloads,
    workload_layout,
)
from torchtitan_cad.planning import (
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
    place_and_plan,
    register_planner,
    warm_up,
)

TOLERANCE = 0.02
"""At which the planners are compared and timed."""
TIME_LIMITS = {64: 10.0, 512: 100.0, 4096: 2000.0}
"""Milliseconds by number of ranks, for a plan of the default planner and all tables of one rank, on two cores."""
PLANNERS: dict[str, dict[str, Any]] = {
    "home": {"planner": "home"},
    "greedy": {"planner": "greedy"},
    "local_search, whole keys": {"planner": "local_search", "split_kv": False},
    "local_search": {"planner": "local_search"},
}
"""home: nothing moves. greedy: the paper's (bench/greedy.py). local_search: the default planner; whole keys: with
split_kv = false."""
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
    "tasks": "tasks",
    "plan ms": "plan_ms",
    "tables ms": "tables_ms",
}
"""Columns of the printed table."""


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    workloads: tuple[str, ...] = WORKLOADS
    """Names of workloads, or of corpora of `simulate`; those named pretrain need --pretrain and are left out without
    it."""
    planners: tuple[str, ...] = tuple(PLANNERS)
    """Names of planners, local_search among them."""
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
    """Fail if the default planner takes longer than its limits (TIME_LIMITS)."""


register_planner("greedy")(plan_greedy)


def seeds_for(ranks: int, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Fewer where plans are large."""
    return seeds if ranks <= LARGE else seeds[: 2 if ranks <= HUGE else 1]


def placed_layout(
    workload: str, ranks: int, seed: int, pretrain: Path | None = None
) -> TokenLayout:
    """Documents laid end to end, and then where ``place`` puts them, as training plans them by default."""
    layout = workload_layout(workload, ranks, seed, pretrain)
    plan = place_and_plan(layout, SHAPE, PlannerConfig(tolerance=TOLERANCE))
    return plan.layout


def _plan_anew(layout: TokenLayout, config: PlannerConfig) -> Plan:
    return make_plan(fresh(layout), SHAPE, config)


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
        "guaranteed": stats.guaranteed_over_mean,
        "total_bytes": stats.total_bytes,
        "rank_bytes": stats.max_rank_bytes,
        "bound_bytes": stats.lower_bound_bytes,
        "tasks": stats.num_tasks,
        "plan_ms": statistics.median(t[0] for t in times) * 1e3,
        "tables_ms": statistics.median(t[1] for t in times) * 1e3,
    }


def cases(options: Options) -> Iterator[Record]:
    """Names of all plans to make."""
    for ranks in options.ranks:
        planners = [
            p
            for p in options.planners
            if ranks <= HUGE or p != "local_search, whole keys"
        ]
        workloads, seeds = (
            known_workloads(options.workloads, options.pretrain),
            seeds_for(ranks, options.seeds),
        )
        for workload, planner, seed in product(workloads, planners, seeds):
            yield {
                "ranks": ranks,
                "workload": workload,
                "seed": seed,
                "planner": planner,
            }


def run(options: Options) -> list[Record]:
    """One record per case."""
    warm_up()  # compiles, once per machine
    records = []
    for case in tqdm(list(cases(options)), unit="plan", desc="planning"):
        layout = placed_layout(
            case["workload"], case["ranks"], case["seed"], options.pretrain
        )
        config = PlannerConfig(tolerance=TOLERANCE, **PLANNERS[case["planner"]])
        plan = partial(_plan_anew, layout, config)
        records.append({**case, **measure(plan, options.repeats)})
    return records


def table(records: list[Record]) -> list[Record]:
    """A line per ranks, workload and planner: means over the seeds, the largest max/mean; GB and milliseconds."""
    keys, rows = ("ranks", "workload", "planner"), []
    for key, group in groupby(records, key=lambda r: tuple(r[k] for k in keys)):
        same, row = list(group), dict(zip(keys, key, strict=True))
        for title, name in COLUMNS.items():
            values = [
                each[name] / (1e9 if name.endswith("bytes") else 1) for each in same
            ]
            row[title] = (
                max(values) if name == "max_over_mean" else statistics.mean(values)
            )
        rows.append(row)
    return rows


def relative(records: list[Record]) -> list[Record]:
    """Bytes relative to the default planner's: means over workloads of means over seeds."""
    rows = []
    for planner in dict.fromkeys(r["planner"] for r in records):
        row: Record = {"planner": planner}
        for ranks in dict.fromkeys(
            r["ranks"] for r in records if r["planner"] == planner
        ):
            some = [r for r in records if r["ranks"] == ranks]
            for title, figure in (
                ("total", "total_bytes"),
                ("worst rank", "rank_bytes"),
            ):
                mine, default = (
                    _by_workload(some, name, figure)
                    for name in (planner, "local_search")
                )
                ratios = [
                    sum(mine[key]) / sum(of_key)
                    for key, of_key in default.items()
                    if sum(of_key)
                ]
                row[f"{ranks}: {title}"] = (
                    f"{100 * (statistics.fmean(ratios) - 1):+.1f} %"
                )
        rows.append(row)
    return rows


def wrong_cases(records: list[Record]) -> list[str]:
    """Plans above their guarantee or below their bound; workloads for which the default planner moves more bytes than
    the greedy one, in total or for the worst rank, on average over the seeds."""
    problems = []
    for record in records:
        name = ", ".join(
            f"{key} {record[key]}" for key in ("ranks", "workload", "seed", "planner")
        )
        if record["planner"] != "home" and record["max_over_mean"] > record[
            "guaranteed"
        ] * (1 + 1e-6):
            problems.append(
                f"{name}: max/mean {record['max_over_mean']} exceeds the guaranteed {record['guaranteed']}"
            )
        total = record["total_bytes"]
        bound = record["bound_bytes"]
        if total < bound:
            problems.append(f"{name}: total_bytes {total} is below bound_bytes {bound}")
    for figure in ("total_bytes", "rank_bytes"):
        ours, greedy = (
            _by_workload(records, planner, figure)
            for planner in ("local_search", "greedy")
        )
        for key in ours.keys() & greedy.keys():
            ratio = statistics.fmean(ours[key]) / max(1, statistics.fmean(greedy[key]))
            if ratio > 1:
                problems.append(
                    f"ranks {key[0]}, workload {key[1]}: {figure} is {ratio:.3f} of the greedy's"
                )
    return problems


def slow_cases(
    records: list[Record], limits: dict[int, float] = TIME_LIMITS
) -> list[str]:
    """Numbers of ranks and workloads whose median time over the seeds exceeds the limit."""
    timed = [
        record | {"ms": record["plan_ms"] + record["tables_ms"]} for record in records
    ]
    return [
        f"{ranks} ranks, {workload}: {statistics.median(values):.1f} ms, limit {limits[ranks]:.0f} ms"
        for (ranks, workload), values in _by_workload(
            timed, "local_search", "ms"
        ).items()
        if ranks in limits and statistics.median(values) > limits[ranks]
    ]


def _by_workload(
    records: list[Record], planner: str, figure: str
) -> dict[tuple[Any, ...], list[float]]:
    """A planner's figure for the seeds of every workload."""
    values: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        if record["planner"] == planner:
            values.setdefault((record["ranks"], record["workload"]), []).append(
                record[figure]
            )
    return values


def main(options: Options) -> int:
    """Returns the exit code."""
    records = run(options)
    if options.plot is not None:
        draw_plan(make_plan(placed_layout(*EXAMPLE), SHAPE), options.plot)
    problems = wrong_cases(records) if options.check else []
    problems += slow_cases(records) if options.check_times else []
    print("\n".join([*markdown_table(relative(records)), ""]))
    return conclude(options.output, "bench.planner", records, table(records), problems)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
