"""What each part of the default planner is worth: bytes and time of plans made without it, relative to the whole.

    python -m bench.ablation --pretrain document_lengths.json

plans the workloads and seeds of ``bench/planner.py`` and prints a table for docs/planning.md.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from bench.planner import HUGE, LARGE, LAYOUTS, SHAPE, write
from bench.workloads import SEEDS, WORKLOADS, document_lengths
from torchtitan_cad.planning import Plan, PlannerConfig, TileAreaCost, TokenLayout, get_planner, warm_up
from torchtitan_cad.planning.model.tasks import TaskArray
from torchtitan_cad.planning.planners.local_search.planner import MOVES, MOVES_PER_RANK, search

CONFIG = PlannerConfig()
COST = TileAreaCost(CONFIG.cost_tile)
WHOLE = "all"

Variant = Callable[[TokenLayout], TaskArray]


def local_search(evaluated: float = 1.0) -> Variant:
    """The default planner, which evaluates a multiple of the moves for fewer bytes."""

    def plan(layout: TokenLayout) -> TaskArray:
        return search(layout, SHAPE, CONFIG, COST, int((MOVES + MOVES_PER_RANK * layout.num_ranks) * evaluated))

    return plan


VARIANTS: dict[str, Variant] = {
    "greedy": lambda layout: get_planner("greedy")(layout, SHAPE, CONFIG, COST),
    "within the limits alone": local_search(0.0),
    "ten times the moves": local_search(10.0),
    WHOLE: local_search(),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure and where to put it."""

    ranks: tuple[int, ...] = (8, 64, 512)
    """Numbers of ranks."""
    seeds: tuple[int, ...] = SEEDS
    """One layout per seed; the first two beyond 64 ranks, the first beyond 512."""
    pretrain: Path | None = None
    """JSON list of document lengths for the pretrain workloads, which are left out without it."""
    repeats: int = 3
    """Timed runs per plan; the shortest counts."""
    output: Path = Path("bench/results/ablation.json")
    """Where the results go."""


def measure(variant: str, layout: TokenLayout, repeats: int) -> dict[str, Any]:
    """Bytes of a plan, and the least CPU time that making it took."""
    columns = (layout.seg_rank, layout.seg_doc, layout.seg_start, layout.seg_length)
    seconds = []
    for _ in range(repeats):
        fresh = TokenLayout.from_arrays(layout.num_ranks, *columns)
        begin = time.process_time()
        tasks = VARIANTS[variant](fresh)
        seconds.append(time.process_time() - begin)
    stats = Plan.from_tasks(layout, SHAPE, CONFIG, tasks, COST, time.perf_counter()).stats
    return {"total_bytes": stats.total_bytes, "rank_bytes": stats.max_rank_bytes, "cpu_ms": 1e3 * min(seconds)}


def run(options: Options) -> list[dict[str, Any]]:
    """One record per ranks, layout, workload, seed and variant."""
    warm_up()
    names = [name for name in WORKLOADS if options.pretrain or not name.startswith("pretrain")]
    cases = [
        (ranks, layout, workload, seed)
        for ranks in options.ranks
        for layout in LAYOUTS
        for workload in names
        for seed in (options.seeds if ranks <= LARGE else options.seeds[: 2 if ranks <= HUGE else 1])
    ]
    records = []
    for ranks, layout, workload, seed in tqdm(cases, unit="layout"):
        made = LAYOUTS[layout](document_lengths(workload, ranks, seed, options.pretrain), ranks)
        for variant in VARIANTS:
            case = {"ranks": ranks, "layout": layout, "workload": workload, "seed": seed, "variant": variant}
            records.append({**case, **measure(variant, made, options.repeats)})
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: bytes relative to the whole planner, means over workloads and layouts of sums over seeds."""
    ranks = sorted({r["ranks"] for r in records})
    head = "".join(f" {n}: total | worst rank | CPU ms |" for n in ranks)
    lines = [f"| planner |{head}", "| --- |" + " ---: |" * 3 * len(ranks)]
    for variant in VARIANTS:
        cells = []
        for n in ranks:
            mine = [r for r in records if r["ranks"] == n and r["variant"] == variant]
            whole = [r for r in records if r["ranks"] == n and r["variant"] == WHOLE]
            for figure in ("total_bytes", "rank_bytes"):
                cells.append(f"{100 * (_ratio(mine, whole, figure) - 1):+.1f} %")
            cells.append(f"{statistics.fmean(r['cpu_ms'] for r in mine):.1f}")
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(mine: list[dict[str, Any]], whole: list[dict[str, Any]], figure: str) -> float:
    ratios = []
    for key in sorted({(r["layout"], r["workload"]) for r in mine}):
        sums = [sum(r[figure] for r in rows if (r["layout"], r["workload"]) == key) for rows in (mine, whole)]
        if sums[1]:
            ratios.append(sums[0] / sums[1])
    return statistics.fmean(ratios)


def main(options: Options) -> None:
    """Measure, print, write."""
    records = run(options)
    print(table(records))
    write(options.output, records, options.pretrain, "bench.ablation")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
