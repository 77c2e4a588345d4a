"""Pictures of the results of ``bench/planner.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from bench.planner_checks import TOLERANCE
from bench.record import Record

COLORS = {"greedy": "#d95f02", "local_search, whole keys": "#e6ab02", "local_search": "#1b6ca8"}
"""Planners that balance, as they are drawn."""
HOME_COLOR = "#9a9a9a"
MAIN_RANKS = 64
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.titlesize": 11,
    "legend.frameon": False,
}
PANELS = (
    ("total bytes over the lower bound", "total_bytes", "bound_bytes"),
    ("worst rank's bytes over its lower bound", "rank_bytes", "bound_rank_bytes"),
)
"""(title, figure, its bound)"""


def draw_all(records: list[Record], directory: Path) -> list[Path]:
    """All pictures for which there are records; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures = {
        "planner_bytes": (draw_bytes, [r for r in records if r["ranks"] == MAIN_RANKS]),
        "planner_ranks": (draw_ranks, records),
    }
    drawn = []
    with plt.rc_context(STYLE):
        for name, (draw, used) in pictures.items():
            if used:
                figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
                draw(axes, used)
                handles, labels = axes[0].get_legend_handles_labels()
                figure.legend(handles, labels, loc="outside lower center", ncols=8)
                drawn.append(directory / f"{name}.png")
                figure.savefig(drawn[-1], dpi=110)
                plt.close(figure)
    return drawn


def draw_bytes(axes: list[Axes], records: list[Record]) -> None:
    """Bytes over the lower bound, total and worst rank, and balance, by workload: bars are means, dots are seeds."""
    workloads = list(dict.fromkeys(r["workload"] for r in records))
    width = 0.8 / len(COLORS)
    for i, planner in enumerate(COLORS):
        at = np.arange(len(workloads)) + (i - (len(COLORS) - 1) / 2) * width
        of_workloads = [[r for r in records if (r["workload"], r["planner"]) == (w, planner)] for w in workloads]
        for panel, (_, name, bound) in zip(axes, PANELS, strict=False):
            points = [[r[name] / r[bound] for r in rows if r[bound]] for rows in of_workloads]
            means = [statistics.mean(p) if p else np.nan for p in points]
            bars = panel.bar(at, means, width * 0.92, color=COLORS[planner], label=planner)
            panel.bar_label(bars, fmt="%.2f", fontsize=8)
            for x, values in zip(at, points, strict=True):
                panel.plot([x] * len(values), values, "o", color="black", markersize=2.5, alpha=0.45)
        for x, rows in zip(at, of_workloads, strict=True):
            axes[2].plot([x] * len(rows), [r["before"] for r in rows], "_", color=HOME_COLOR, markersize=10)
            axes[2].plot([x] * len(rows), [r["max_over_mean"] for r in rows], "o", color=COLORS[planner], markersize=5)
    for panel, (title, _, _) in zip(axes, PANELS, strict=False):
        panel.axhline(1, color="black", linestyle="--", linewidth=1)
        panel.set_title(f"{title}, {MAIN_RANKS} ranks")
    _log_axis(axes[2], (1, 2, 5, 10, 20, 50))
    axes[2].axhline(1 + TOLERANCE, color="black", linestyle="--", linewidth=1)
    axes[2].set_title("busiest rank over mean: before (grey) and after")
    for panel in axes:
        panel.set_xticks(range(len(workloads)), workloads)


def draw_ranks(axes: list[Axes], records: list[Record]) -> None:
    """Bytes and time over the number of ranks: lines are means over workloads and seeds, shades their range."""
    ranks = sorted({r["ranks"] for r in records})
    for planner, color in COLORS.items():
        mine = [r for r in records if r["planner"] == planner]
        for panel, (_, name, bound) in zip(axes, PANELS, strict=False):
            with_bound = [r for r in mine if r[bound]]
            _line_with_range(panel, with_bound, lambda r, a=name, b=bound: r[a] / r[b], color, planner)
        _line_with_range(axes[2], mine, lambda r: r["plan_ms"] + r["tables_ms"], color, planner)
    for panel, (title, _, _) in zip(axes, PANELS, strict=False):
        _log_axis(panel, (1, 2, 5, 10, 20))
        panel.axhline(1, color="black", linestyle="--", linewidth=1)
        panel.set_title(title)
    axes[2].set_yscale("log")
    axes[2].set_title("milliseconds per plan, all tables of one rank included")
    for panel in axes:
        panel.set_xscale("log", base=2)
        panel.set_xticks(ranks, [str(r) for r in ranks])
        panel.set_xlabel("ranks")


def _log_axis(axes: Axes, ticks: tuple[int, ...]) -> None:
    axes.set_yscale("log")
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0.9, None)


def _line_with_range(
    axes: Axes, records: list[Record], value: Callable[[Record], float], color: str, label: str
) -> None:
    points: dict[int, list[float]] = {}
    for r in sorted(records, key=lambda r: r["ranks"]):
        points.setdefault(r["ranks"], []).append(value(r))
    axes.plot(list(points), [statistics.mean(v) for v in points.values()], "o-", color=color, label=label)
    low, high = [min(v) for v in points.values()], [max(v) for v in points.values()]
    axes.fill_between(list(points), low, high, color=color, alpha=0.15, linewidth=0)
