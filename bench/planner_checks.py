"""What the results of ``bench/planner.py`` must satisfy."""

from __future__ import annotations

import statistics
from typing import Any

Record = dict[str, Any]

TOLERANCE = 0.02
"""At which the planners are compared and timed."""

TIME_LIMITS = {64: 10.0, 512: 100.0, 4096: 2000.0}
"""Milliseconds by number of ranks, for a plan of the default planner and all tables of one rank, on two cores."""


WORKLOAD = ("ranks", "workload", "layout", "tolerance")
"""What records of the same workload have in common."""


def name(record: Record) -> str:
    """What a reader needs to make the plan again."""
    keys = ("ranks", "workload", "layout", "seed", "planner", "tolerance")
    return ", ".join(f"{key} {record[key]}" for key in keys)


def wrong_cases(records: list[Record]) -> list[str]:
    """Plans above their guarantee or below their bound; workloads for which the default planner moves more bytes than
    the greedy one, in total or for the worst rank, on average over the seeds."""
    problems = []
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
    for figure in ("total_bytes", "rank_bytes"):
        ours, greedy = _means(records, "local_search", figure), _means(records, "greedy", figure)
        for key in ours.keys() & greedy.keys():
            if ours[key] > greedy[key]:
                case = ", ".join(f"{name} {value}" for name, value in zip(WORKLOAD, key, strict=True))
                problems.append(f"{case}: {figure} is {ours[key] / max(1, greedy[key]):.3f} of the greedy's")
    return problems


def _means(records: list[Record], planner: str, figure: str) -> dict[tuple[Any, ...], float]:
    """The figure's mean over the seeds of every workload."""
    values: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        if record["planner"] == planner:
            values.setdefault(tuple(record[key] for key in WORKLOAD), []).append(record[figure])
    return {key: statistics.fmean(value) for key, value in values.items()}


def slow_cases(records: list[Record], limits: dict[int, float] = TIME_LIMITS) -> list[str]:
    """Numbers of ranks, layouts and workloads whose median time over the seeds exceeds the limit."""
    times: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        if record["planner"] == "local_search" and record["ranks"] in limits and record["tolerance"] == TOLERANCE:
            key = tuple(record[k] for k in ("ranks", "layout", "workload"))
            times.setdefault(key, []).append(record["plan_ms"] + record["tables_ms"])
    return [
        f"{ranks} ranks, {layout} {workload}: {statistics.median(values):.1f} ms, limit {limits[ranks]:.0f} ms"
        for (ranks, layout, workload), values in times.items()
        if statistics.median(values) > limits[ranks]
    ]
