# SPDX-License-Identifier: BSD-3-Clause
"""Homes distributed anew against homes as the loader gives them: bytes, balance and time.

    python -m bench.placement --pretrain document_lengths.json --check

lays the documents of every workload (tests/lib/workloads.py) end to end over the ranks, plans, distributes tokens anew
by ``place_and_plan``, and prints ratios of bytes, means over the seeds. Bytes are those of one layer's forward for 32
query and 8 key heads of 128 in bf16.
"""

import dataclasses
import statistics
import sys
import time
from itertools import groupby
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from bench.planner import TOLERANCE, fresh
from bench.record import Record, conclude
from tests.lib.workloads import SEEDS, SHAPE, known_workloads, workload_layout
from torchtitan_cad.planning import (
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
    place_and_plan,
)
from torchtitan_cad.planning.placement.place import warm_up_placement

WORKLOADS = ("lognormal", "pretrain", "pretrain x4", "one big")
LIMITS = {8: (0.67, 0.39), 64: (0.90, 0.38), 512: (0.97, 0.42)}
"""Ratios of bytes, in total and of the worst rank, at most, by number of ranks, on average."""
CASE_LIMITS = (1.06, 0.8)
"""The same for a single case. The worst rank counts twice in the score by which homes are chosen."""
HUGE = 512
"""ranks: beyond them there is one seed"""


@dataclasses.dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    workloads: tuple[str, ...] = WORKLOADS
    """Names of workloads; those named pretrain need --pretrain and are left out without it."""
    seeds: tuple[int, ...] = SEEDS
    """One layout per seed; the first only beyond 512 ranks."""
    pretrain: Path | None = None
    """JSON list of document lengths for the pretrain workloads."""
    output: Path = Path("bench/results/placement.json")
    check: bool = False
    """Fail if a ratio exceeds its limit, or a plan its guaranteed load."""


TOKEN_BYTES = 16
"""An id and a label."""


def dealt(layout: TokenLayout, homes: TokenLayout) -> tuple[float, int]:
    """(part of the tokens that change ranks, bytes of ids and labels that the busiest rank sends or receives)."""
    cuts = np.union1d(layout.run_start, homes.run_start)
    lengths = np.diff(cuts, append=layout.num_tokens)
    old, new = (
        each.run_rank[np.searchsorted(each.run_start, cuts, side="right") - 1]
        for each in (layout, homes)
    )
    moved = old != new
    ways = (
        np.bincount(rank[moved], lengths[moved], layout.num_ranks)
        for rank in (old, new)
    )
    return float(lengths[moved].sum() / layout.num_tokens), TOKEN_BYTES * int(
        max(way.max() for way in ways)
    )


def measure(layout: TokenLayout) -> Record:
    """Figures of both plans, and what placement and plan take, in milliseconds: by the clock, and of all processors."""
    config = PlannerConfig(tolerance=TOLERANCE)
    again = fresh(layout)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    plan = place_and_plan(again, SHAPE, config)
    wall, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    given = make_plan(layout, SHAPE, config)
    before, after = given.stats, plan.stats
    dealt_share, dealt_bytes = dealt(layout, plan.layout)
    return {
        "total_before": before.total_bytes,
        "worst_before": before.max_rank_bytes,
        "total": after.total_bytes,
        "worst": after.max_rank_bytes,
        "total_ratio": after.total_bytes / max(1, before.total_bytes),
        "worst_ratio": after.max_rank_bytes / max(1, before.max_rank_bytes),
        "worst_over_mean": after.max_rank_bytes / max(1.0, after.mean_rank_bytes),
        "max_over_mean": after.max_over_mean,
        "guaranteed": after.guaranteed_over_mean,
        "worst_over_bound": after.max_rank_bytes / max(1.0, free_homes_bound(plan)),
        "dealt_share": dealt_share,
        "dealt_bytes": dealt_bytes,
        "segments": len(plan.layout.seg_rank) / plan.layout.num_ranks,
        "wall_ms": wall * 1e3,
        "cpu_ms": cpu * 1e3,
    }


def free_homes_bound(plan: Plan) -> float:
    """Bytes below which the worst rank of no plan is, whatever the homes; docs/proofs.md derives it."""
    lengths, ranks = plan.layout.doc_lengths.astype(float), plan.layout.num_ranks
    held = float(plan.layout.tokens_per_rank.max())
    needed = float((lengths * np.maximum(0.0, lengths - held)).sum() / 2)
    most = min(needed, float(plan.cost.max_pairs(plan.stats.load_limit)))
    if most <= 0:
        return 0.0
    c_q, c_kv = plan.shape.query_bytes, plan.shape.kv_bytes
    keys = float(
        np.clip(np.sqrt(c_q / c_kv * (most + held**2)) - held, 0.0, most / held)
    )
    price = c_q * (most - held * keys) / (keys + held) + c_kv * keys
    return needed / ranks * price / most


def run(options: Options) -> list[Record]:
    """One record per case."""
    warm_up_placement()  # compiles, once per machine
    cases = [
        (ranks, workload, seed)
        for ranks in options.ranks
        for workload in known_workloads(options.workloads, options.pretrain)
        for seed in (options.seeds if ranks <= HUGE else options.seeds[:1])
    ]
    records = []
    for ranks, workload, seed in tqdm(cases, unit="layout", desc="placing"):
        layout = workload_layout(workload, ranks, seed, options.pretrain)
        records.append(
            {"ranks": ranks, "workload": workload, "seed": seed, **measure(layout)}
        )
    return records


COLUMNS = ("total_ratio", "worst_ratio", "worst_over_mean", "worst_over_bound", "max_over_mean", "segments",
           "dealt_share", "dealt_bytes", "wall_ms", "cpu_ms")  # fmt: skip
"""Columns of the printed table; the first two have limits."""


def table(records: list[Record]) -> list[Record]:
    """A line per ranks and workload, and one for all workloads: means over the seeds, and the largest two ratios."""
    lines = []
    for ranks, group in groupby(records, key=lambda record: record["ranks"]):
        rows = list(group)
        for name in [*dict.fromkeys(row["workload"] for row in rows), "all"]:
            some = [row for row in rows if name in (row["workload"], "all")]
            means = {
                column: statistics.fmean(row[column] for row in some)
                for column in COLUMNS
            }
            # A bound may be next to nothing: the bytes' mean over that of the bounds.
            bounds = sum(
                row["worst"] / row["worst_over_bound"]
                for row in some
                if row["worst_over_bound"]
            )
            means["worst_over_bound"] = sum(row["worst"] for row in some) / max(
                1.0, bounds
            )
            most = [max(row[column] for row in some) for column in COLUMNS[:2]]
            lines.append(
                {"ranks": ranks, "workload": name, **means, "largest ratios": most}
            )
    return lines


def problems(records: list[Record]) -> list[str]:
    """Cases and means that exceed their limits."""
    found = []
    for row in records:
        case = f"{row['ranks']} ranks, {row['workload']}, seed {row['seed']}"
        if row["max_over_mean"] > row["guaranteed"] * (1 + 1e-6):
            found.append(
                f"{case}: max/mean {row['max_over_mean']} exceeds the guaranteed {row['guaranteed']}"
            )
        for column, limit in zip(COLUMNS, CASE_LIMITS, strict=False):
            if row[column] > limit:
                found.append(f"{case}: {column} {row[column]:.3f} exceeds {limit}")
    for ranks, limits in LIMITS.items():
        rows = [row for row in records if row["ranks"] == ranks]
        for column, limit in zip(COLUMNS, limits, strict=False):
            if rows and (mean := statistics.fmean(row[column] for row in rows)) > limit:
                found.append(f"{ranks} ranks: mean {column} {mean:.3f} exceeds {limit}")
    return found


def main(options: Options) -> int:
    """Returns the exit code."""
    records = run(options)
    failed = problems(records) if options.check else []
    return conclude(options.output, "bench.placement", records, table(records), failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
