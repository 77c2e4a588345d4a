"""What the results of ``bench/planner.py`` must satisfy. Imports the standard library only."""

from __future__ import annotations

import statistics
from typing import Any

Record = dict[str, Any]

TIME_LIMITS = {64: 10.0, 512: 100.0, 4096: 2000.0}
"""Milliseconds by number of ranks, for a plan of the default planner and all tables of one rank, on two cores."""


def name(record: Record) -> str:
    """What a reader needs to make the plan again."""
    keys = ("ranks", "workload", "layout", "seed", "planner", "tolerance")
    return ", ".join(f"{key} {record[key]}" for key in keys)


def wrong_cases(records: list[Record]) -> list[str]:
    """Plans above their guarantee, below their bound, or of the default planner with more bytes than the greedy's."""
    problems = []
    greedy = {_layout_key(r): r for r in records if r["planner"] == "greedy"}
    for record in records:
        if record["planner"] != "home" and record["max_over_mean"] > record["guaranteed"] * (1 + 1e-6):
            problems.append(
                f"{name(record)}: max/mean {record['max_over_mean']} exceeds the guaranteed {record['guaranteed']}"
            )
        for figure, bound in (
            ("total_bytes", "bound_bytes"),
            ("rank_bytes", "bound_rank_bytes"),
            ("rank_bytes", "forced_export_bytes"),
        ):
            if record[figure] < record[bound]:
                problems.append(f"{name(record)}: {figure} {record[figure]} is below {bound} {record[bound]}")
        other = greedy.get(_layout_key(record))
        if record["planner"] == "tiling" and other is not None:
            for figure in ("total_bytes", "rank_bytes"):
                if record[figure] > other[figure]:
                    ratio = record[figure] / max(1, other[figure])
                    problems.append(f"{name(record)}: {figure} {record[figure]} is {ratio:.3f} of the greedy's")
    return problems


def _layout_key(record: Record) -> tuple[Any, ...]:
    return tuple(record[key] for key in ("ranks", "workload", "layout", "seed", "tolerance"))


def slow_cases(records: list[Record], limits: dict[int, float] = TIME_LIMITS) -> list[str]:
    """Numbers of ranks, layouts and workloads whose median time over the seeds exceeds the limit."""
    times: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        if record["planner"] == "tiling" and record["ranks"] in limits:
            key = tuple(record[k] for k in ("ranks", "layout", "workload"))
            times.setdefault(key, []).append(record["plan_ms"] + record["tables_ms"])
    return [
        f"{ranks} ranks, {layout} {workload}: {statistics.median(values):.1f} ms, limit {limits[ranks]:.0f} ms"
        for (ranks, layout, workload), values in times.items()
        if statistics.median(values) > limits[ranks]
    ]
