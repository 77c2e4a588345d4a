"""Checks of the results of ``bench/planner.py``."""

import statistics
from typing import Any

from bench.record import Record

TOLERANCE = 0.02
"""At which the planners are compared and timed."""
TIME_LIMITS = {64: 10.0, 512: 100.0, 4096: 2000.0}
"""Milliseconds by number of ranks, for a plan of the default planner and all tables of one rank, on two cores."""


def wrong_cases(records: list[Record]) -> list[str]:
    """Plans above their guarantee or below their bound; workloads for which the default planner moves more bytes than
    the greedy one, in total or for the worst rank, on average over the seeds."""
    problems = []
    bounds = (("total_bytes", "bound_bytes"), ("rank_bytes", "bound_rank_bytes"), ("rank_bytes", "forced_export_bytes"))
    for record in records:
        name = ", ".join(f"{key} {record[key]}" for key in ("ranks", "workload", "seed", "planner"))
        if record["planner"] != "home" and record["max_over_mean"] > record["guaranteed"] * (1 + 1e-6):
            problems.append(f"{name}: max/mean {record['max_over_mean']} exceeds the guaranteed {record['guaranteed']}")
        for figure, bound in bounds:
            if record[figure] < record[bound]:
                problems.append(f"{name}: {figure} {record[figure]} is below {bound} {record[bound]}")
    for figure in ("total_bytes", "rank_bytes"):
        ours, greedy = (_by_workload(records, planner, figure) for planner in ("local_search", "greedy"))
        for key in ours.keys() & greedy.keys():
            ratio = statistics.fmean(ours[key]) / max(1, statistics.fmean(greedy[key]))
            if ratio > 1:
                problems.append(f"ranks {key[0]}, workload {key[1]}: {figure} is {ratio:.3f} of the greedy's")
    return problems


def slow_cases(records: list[Record], limits: dict[int, float] = TIME_LIMITS) -> list[str]:
    """Numbers of ranks and workloads whose median time over the seeds exceeds the limit."""
    timed = [record | {"ms": record["plan_ms"] + record["tables_ms"]} for record in records]
    return [
        f"{ranks} ranks, {workload}: {statistics.median(values):.1f} ms, limit {limits[ranks]:.0f} ms"
        for (ranks, workload), values in _by_workload(timed, "local_search", "ms").items()
        if ranks in limits and statistics.median(values) > limits[ranks]
    ]


def _by_workload(records: list[Record], planner: str, figure: str) -> dict[tuple[Any, ...], list[float]]:
    """A planner's figure for the seeds of every workload."""
    values: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        if record["planner"] == planner:
            values.setdefault((record["ranks"], record["workload"]), []).append(record[figure])
    return values
