"""Bytes and time of plans made without each part of the default planner, relative to the whole planner.

    python -m bench.ablation --pretrain document_lengths.json

plans the workloads and seeds of ``bench/planner.py`` and prints a table for docs/planning.md.
"""

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import tyro
from tqdm import tqdm

from bench.planner import fresh, placed_layout, seeds_for
from bench.record import Record, conclude
from bench.workloads import SEEDS, SHAPE, WORKLOADS, known_workloads
from torchtitan_cad.planning import Plan, PlannerConfig, TileAreaCost, TokenLayout, get_planner, warm_up
from torchtitan_cad.planning.model.tasks import TaskArray
from torchtitan_cad.planning.planners.local_search.planner import search

CONFIG = PlannerConfig()
COST = TileAreaCost(CONFIG.cost_tile)
WHOLE = "all"

Variant = Callable[[TokenLayout], TaskArray]


def local_search(evaluated: float = 1.0) -> Variant:
    """The default planner, which evaluates a multiple of the moves for fewer bytes."""

    def plan(layout: TokenLayout) -> TaskArray:
        return search(layout, SHAPE, CONFIG, COST, evaluated)[1]()

    return plan


VARIANTS: dict[str, Variant] = {
    "greedy": lambda layout: get_planner("greedy")(layout, SHAPE, CONFIG, COST),
    "within the limits alone": local_search(0.0),
    "ten times the moves": local_search(10.0),
    WHOLE: local_search(),
}


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = (8, 64, 512)
    seeds: tuple[int, ...] = SEEDS
    """One layout per seed; the first two beyond 64 ranks, the first beyond 512."""
    pretrain: Path | None = None
    """JSON list of document lengths for the pretrain workloads, which are left out without it."""
    repeats: int = 3
    """Timed runs per plan; the shortest counts."""
    output: Path = Path("bench/results/ablation.json")


def measure(variant: str, layout: TokenLayout, repeats: int) -> Record:
    """Bytes of a plan, and the least CPU time that making it took."""
    seconds = []
    for _ in range(repeats):
        again = fresh(layout)
        begin = time.process_time()
        tasks = VARIANTS[variant](again)
        seconds.append(time.process_time() - begin)
    stats = Plan.from_tasks(layout, SHAPE, CONFIG, tasks, COST, time.perf_counter()).stats
    return {"total_bytes": stats.total_bytes, "rank_bytes": stats.max_rank_bytes, "cpu_ms": 1e3 * min(seconds)}


def run(options: Options) -> list[Record]:
    """One record per ranks, workload, seed and variant."""
    warm_up()
    names = known_workloads(WORKLOADS, options.pretrain)
    cases = [
        (ranks, name, seed) for ranks in options.ranks for name in names for seed in seeds_for(ranks, options.seeds)
    ]
    records = []
    for ranks, workload, seed in tqdm(cases, unit="layout"):
        layout = placed_layout(workload, ranks, seed, options.pretrain)
        for variant in VARIANTS:
            case = {"ranks": ranks, "workload": workload, "seed": seed, "variant": variant}
            records.append({**case, **measure(variant, layout, options.repeats)})
    return records


def table(records: list[Record]) -> list[Record]:
    """Bytes relative to the whole planner, means over workloads of sums over seeds."""
    rows = []
    for variant in VARIANTS:
        row: Record = {"planner": variant}
        for n in sorted({r["ranks"] for r in records}):
            mine, whole = ([r for r in records if (r["ranks"], r["variant"]) == (n, v)] for v in (variant, WHOLE))
            for title, figure in (("total", "total_bytes"), ("worst rank", "rank_bytes")):
                sums, whole_sums = _sums(mine, figure), _sums(whole, figure)
                ratio = statistics.fmean(sums[name] / whole_sums[name] for name in sums if whole_sums[name])
                row[f"{n}: {title}"] = f"{100 * (ratio - 1):+.1f} %"
            row[f"{n}: CPU ms"] = statistics.fmean(r["cpu_ms"] for r in mine)
        rows.append(row)
    return rows


def _sums(records: list[Record], figure: str) -> Counter[str]:
    sums: Counter[str] = Counter()
    for record in records:
        sums[record["workload"]] += record[figure]
    return sums


def main(options: Options) -> None:
    records = run(options)
    conclude(options.output, "bench.ablation", records, table(records))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
