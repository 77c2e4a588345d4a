"""Planners against each other and the lower bound: balance, bytes and time.

    python -m bench.planner --pretrain document_lengths.json --check

plans every workload (``bench/workloads.py``) for 8 to 4096 ranks, prints a table of means over the seeds, writes every
figure as JSON and draws the pictures of docs/images. Bytes are those of one layer's forward for 32 query and 8 key
heads of 128 in bf16.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from bench.planner_checks import TOLERANCE, slow_cases, wrong_cases
from bench.results_head import results_head
from bench.workloads import SEEDS, WORKLOADS, document_lengths, spanning_layout
from torchtitan_cad.cli.plan_plot import draw_plan
from torchtitan_cad.planning import AttentionShape, Plan, PlannerConfig, TokenLayout, make_plan, place, warm_up

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
PLANNERS: dict[str, dict[str, Any]] = {
    "home": {"planner": "home"},
    "greedy": {"planner": "greedy"},
    "local_search, whole keys": {"planner": "local_search", "split_kv": False},
    "local_search": {"planner": "local_search"},
}


def placed_layout(lengths: list[int], num_ranks: int) -> TokenLayout:
    """Documents laid end to end, and then where ``place`` puts them, as training plans them by default."""
    return place(spanning_layout(lengths, num_ranks), SHAPE, PlannerConfig(tolerance=TOLERANCE))


LAYOUTS: dict[str, Callable[[list[int], int], TokenLayout]] = {"placed": placed_layout}
SWEEP = (0.0, 0.02, 0.05, 0.1, 0.15)
SWEEP_RANKS = 64
LARGE, HUGE = 64, 512
"""Beyond LARGE ranks there are two seeds; beyond HUGE one, and not the planner without split keys, which is slow."""
SLOW = 1.0
"""Seconds after which a plan is not timed again."""
PLOTS = Path("docs/images")
EXAMPLE = ("lognormal", 64, 12)
"""Workload, ranks and seed of the plan drawn in docs/images/plan.png."""

Record = dict[str, Any]
"""Figures of one plan: ``ranks, workload, layout, seed, planner, tolerance`` name it, the rest is its result."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure and where to put it."""

    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    """Numbers of ranks."""
    workloads: tuple[str, ...] = WORKLOADS
    """Names of workloads; those named pretrain need --pretrain and are left out without it."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """placed: where ``place`` puts documents that were laid end to end over equal ranks."""
    planners: tuple[str, ...] = tuple(PLANNERS)
    """home: nothing moves. greedy: the paper's. local_search: the default planner; whole keys: with split_kv = false,
    up to 512 ranks."""
    seeds: tuple[int, ...] = SEEDS
    """One layout per seed; the first two beyond 64 ranks, the first beyond 512."""
    repeats: int = 5
    """Timed runs per plan, after one to warm up; their median is reported. Slow plans have fewer."""
    sweep: bool = True
    """Also plan 64 ranks at several tolerances."""
    pretrain: Path | None = None
    """JSON list of document lengths for the pretrain workloads."""
    output: Path = Path("bench/results/planner.json")
    """Where the results go."""
    plots: Path | None = PLOTS
    """Directory for the pictures; None draws none."""
    redraw: bool = False
    """Measure nothing: check and draw what --output holds."""
    check: bool = False
    """Fail if a plan breaks its guarantee or its bound, or the default planner moves more bytes than the greedy."""
    check_times: bool = False
    """Fail if the default planner takes longer than its limits (bench/planner_checks.py)."""


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
    """What names each plan to make: the comparison of planners first, then the tolerance sweep."""
    names = [name for name in options.workloads if options.pretrain or not name.startswith("pretrain")]
    for ranks in options.ranks:
        seeds = options.seeds if ranks <= LARGE else options.seeds[: 2 if ranks <= HUGE else 1]
        planners = [p for p in options.planners if ranks <= HUGE or p != "local_search, whole keys"]
        for layout in options.layouts:
            for workload in names:
                for planner in planners:
                    for seed in seeds:
                        yield _case(ranks, workload, layout, seed, planner, TOLERANCE)
    if not options.sweep:
        return
    for workload in names:
        for planner in ("greedy", "local_search"):
            for tolerance in SWEEP:
                for seed in options.seeds:
                    if tolerance != TOLERANCE or SWEEP_RANKS not in options.ranks:
                        yield _case(SWEEP_RANKS, workload, "placed", seed, planner, tolerance)


def _case(ranks: int, workload: str, layout: str, seed: int, planner: str, tolerance: float) -> Record:
    return {
        "ranks": ranks,
        "workload": workload,
        "layout": layout,
        "seed": seed,
        "planner": planner,
        "tolerance": tolerance,
    }


def run(options: Options) -> list[Record]:
    """One record per case."""
    warm_up()  # compiles, once per machine
    records = []
    for case in tqdm(list(cases(options)), unit="plan", desc="planning"):
        lengths = document_lengths(case["workload"], case["ranks"], case["seed"], options.pretrain)
        layout = LAYOUTS[case["layout"]](lengths, case["ranks"])
        config = PlannerConfig(tolerance=case["tolerance"], **PLANNERS[case["planner"]])
        plan = lambda layout=layout, config=config: make_plan(_copy(layout), SHAPE, config)  # noqa: E731
        records.append({**case, **measure(plan, options.repeats)})
    return records


def _copy(layout: TokenLayout) -> TokenLayout:
    """The same layout without what it has computed already, as a training step has it."""
    columns = (layout.seg_rank, layout.seg_doc, layout.seg_start, layout.seg_length)
    return TokenLayout.from_arrays(layout.num_ranks, *columns)


def table(records: list[Record]) -> str:
    """A line per ranks, layout, workload, planner and tolerance: means over the seeds, the largest max/mean."""
    keys = ("ranks", "layout", "workload", "planner", "tolerance")
    head = ("before", "max/mean", "total GB", "/bound", "worst GB", "/bound", "forced GB", "tasks", "ms", "tables")
    widths = (7, 9, 10, 7, 10, 7, 10, 7, 9, 7)
    lines = [
        f"{'ranks':>5} {'layout':8} {'workload':11} {'planner':18} {'tol':>4}"
        + "".join(f"{name:>{width}}" for name, width in zip(head, widths, strict=True))
    ]
    for key, group in groupby(records, key=lambda r: tuple(r[k] for k in keys)):
        rows = list(group)
        means = {name: statistics.mean(r[name] for r in rows) for name in rows[0] if name not in (*keys, "seed")}
        total, worst = means["total_bytes"], means["rank_bytes"]
        cells = (
            f"{means['before']:.2f}",
            f"{max(r['max_over_mean'] for r in rows):.4f}",
            f"{total / 1e9:.3f}",
            _ratio(total, means["bound_bytes"], key[3]),
            f"{worst / 1e9:.3f}",
            _ratio(worst, means["bound_rank_bytes"], key[3]),
            f"{means['forced_export_bytes'] / 1e9:.3f}",
            f"{means['tasks']:.0f}",
            f"{statistics.median(r['plan_ms'] + r['tables_ms'] for r in rows):.2f}",
            f"{statistics.median(r['tables_ms'] for r in rows):.2f}",
        )
        lines.append(
            f"{key[0]:>5} {key[1]:8} {key[2]:11} {key[3]:18} {key[4]:4.2f}"
            + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        )
    return "\n".join(lines)


def _ratio(value: float, bound: float, planner: str) -> str:
    """A plan that does not balance has no bound worth naming."""
    return "-" if planner == "home" or not bound else f"{value / bound:.2f}"


def write(path: Path, records: list[Record], pretrain: Path | None = None, module: str = "bench.planner") -> None:
    """Records as JSON, one line each, with what is needed to repeat them; of ``pretrain`` only the name is kept."""
    columns = list(records[0])
    head = {
        **results_head(module, ("numpy", "numba", "torchtitan_cad"), (pretrain,)),
        "attention": dataclasses.asdict(SHAPE),
        "columns": columns,
    }
    rows = [json.dumps([_short(record[name]) for name in columns]) for record in records]
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(path: Path) -> list[Record]:
    """Records that :func:`write` wrote."""
    data = json.loads(path.read_text())
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def _short(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def main(options: Options) -> int:
    """Measure, print, write, draw, check; returns the exit code."""
    if options.redraw:
        records = read(options.output)
    else:
        records = run(options)
        write(options.output, records, options.pretrain)
    print(table(records))
    if options.plots is not None:
        from bench.planner_plots import draw_all

        for path in draw_all(records, options.plots):
            print(f"drew {path}")
        draw_plan(make_plan(placed_layout(document_lengths(*EXAMPLE), EXAMPLE[1]), SHAPE), options.plots / "plan.png")
    problems = wrong_cases(records) if options.check else []
    problems += slow_cases(records) if options.check_times else []
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
