"""Planners against each other and the lower bound: balance, bytes and time.

    python -m bench.planner --ranks 8 64 --pretrain document_lengths.json

prints a table of means over the seeds and writes every figure as JSON. Bytes are those of one layer's forward for
32 query and 8 key heads of 128 in bf16. ``--tolerances 0 0.02 0.05 0.1 0.15`` makes the tolerance sweep.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.workloads import SEEDS, WORKLOADS, document_lengths, spanning_layout, whole_layout
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout, make_plan

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
PLANNERS = {
    "home": {"planner": "home"},
    "greedy": {"planner": "greedy"},
    "tiling": {"planner": "tiling"},
    "tiling, no split_kv": {"planner": "tiling", "split_kv": False},
}
COLUMNS = ("max/mean", "total GB", "worst GB", "forced GB", "total/bound", "tasks", "ms")


def measure(layout: TokenLayout, options: dict[str, Any], tolerance: float, repeats: int) -> dict[str, float]:
    """Figures of a plan; ``ms`` is the median time of the plan and all tables of one rank, after one run to warm up."""
    config = PlannerConfig(tolerance=tolerance, **options)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        plan = make_plan(layout, SHAPE, config)
        plan.exchange(layout.num_ranks // 2)
        times.append(time.perf_counter() - begin)
    stats = plan.stats
    return {
        "max/mean": stats.max_over_mean,
        "total GB": stats.total_bytes / 1e9,
        "worst GB": stats.max_rank_bytes / 1e9,
        "forced GB": stats.forced_export_bytes / 1e9,
        "total/bound": stats.total_bytes / stats.lower_bound_bytes if stats.lower_bound_bytes else float("nan"),
        "tasks": stats.num_tasks,
        "ms": float(np.median(times[1:])) * 1e3,
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per layout, planner and tolerance; prints a line per workload, planner and tolerance."""
    records = []
    names = [name for name in options.workloads if options.pretrain or not name.startswith("pretrain")]
    print(f"{'ranks':>5}  {'workload':12} {'planner':20} {'tol':>5}" + "".join(f"{c:>13}" for c in COLUMNS))
    for num_ranks in options.ranks:
        for name in names:
            lengths = [document_lengths(name, num_ranks, seed, options.pretrain) for seed in options.seeds]
            build = whole_layout if options.whole else spanning_layout
            layouts = [build(each, num_ranks) for each in lengths]
            for planner in options.planners:
                for tolerance in options.tolerances:
                    rows = [measure(layout, PLANNERS[planner], tolerance, options.repeats) for layout in layouts]
                    mean = {column: float(np.mean([row[column] for row in rows])) for column in COLUMNS}
                    mean["max/mean"] = max(row["max/mean"] for row in rows)
                    figures = "".join(f"{mean[column]:13.3f}" for column in COLUMNS)
                    print(f"{num_ranks:>5}  {name:12} {planner:20} {tolerance:5.2f}{figures}", flush=True)
                    key = {"ranks": num_ranks, "workload": name, "planner": planner, "tolerance": tolerance}
                    records += [
                        {**key, "whole": options.whole, "seed": seed, **row}
                        for seed, row in zip(options.seeds, rows, strict=True)
                    ]
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--planners", nargs="+", choices=list(PLANNERS), default=list(PLANNERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.02])
    parser.add_argument("--whole", action="store_true", help="no document spans ranks; ranks are unequal")
    parser.add_argument("--pretrain", type=Path, help="JSON list of document lengths for the pretrain workloads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("bench/results/planner.json"))
    options = parser.parse_args()
    records = run(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
