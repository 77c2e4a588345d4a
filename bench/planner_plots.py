"""Pictures of the results of ``bench/planner.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from bench.planner_checks import TOLERANCE

Record = dict[str, Any]

COLORS = {"home": "#9a9a9a", "greedy": "#d95f02", "local_search, whole keys": "#e6ab02", "local_search": "#1b6ca8"}
DIGITS = {"local_search, whole keys": "black"}
"""On bars whose colour is too light for white ones."""
LABELS = {
    "home": "nothing moves",
    "greedy": "greedy (the paper's, bounded)",
    "local_search, whole keys": "local_search, split_kv = false",
    "local_search": "local_search (default)",
}
LAYOUT_TITLES = {"placed": "homes as place chooses them"}
WORKLOAD_COLORS = ("#1b6ca8", "#d95f02", "#1b9e77", "#7570b3", "#e7298a")
MAIN_RANKS = 64
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "font.size": 10,
    "axes.titlesize": 11,
    "legend.frameon": False,
}


def draw_all(records: list[Record], directory: Path) -> list[Path]:
    """All pictures for which there are records; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    main = [r for r in records if r["tolerance"] == TOLERANCE]
    sweep = [r for r in records if r["ranks"] == MAIN_RANKS and r["layout"] == "placed"]
    drawn = []
    with plt.rc_context(STYLE):
        for name, draw, used in (
            ("planner_bytes", draw_bytes, [r for r in main if r["ranks"] == MAIN_RANKS]),
            ("planner_ranks", draw_ranks, main),
            ("planner_tolerance", draw_tolerance, sweep),
        ):
            if not used or (name == "planner_tolerance" and len({r["tolerance"] for r in used}) < 2):
                continue
            figure = draw(used)
            drawn.append(directory / f"{name}.png")
            figure.savefig(drawn[-1], dpi=110)
            plt.close(figure)
    return drawn


def _shown_planners(records: list[Record]) -> list[str]:
    """Planners that balance; not the one without split keys where it is the greedy."""
    totals: dict[str, dict[Any, int]] = {}
    for r in records:
        case = (r["ranks"], r["workload"], r["layout"], r["seed"], r["tolerance"])
        totals.setdefault(r["planner"], {})[case] = r["total_bytes"]
    same = totals.get("local_search, whole keys", {}).items() <= totals.get("greedy", {}).items()
    return [p for p in LABELS if p in totals and p != "home" and not (same and p == "local_search, whole keys")]


def _ordered(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def draw_bytes(records: list[Record]) -> plt.Figure:
    """Bytes over the lower bound, total and worst rank, and balance, by workload: bars are means, dots are seeds."""
    layouts = _ordered(r["layout"] for r in records)
    figure, axes = plt.subplots(
        len(layouts), 3, figsize=(14, 3.6 * len(layouts) + 0.9), squeeze=False, layout="constrained"
    )
    planners = _shown_planners(records)
    for row, layout in zip(axes, layouts, strict=True):
        here = [r for r in records if r["layout"] == layout]
        _bars(row[0], here, planners, lambda r: r["total_bytes"] / r["bound_bytes"])
        row[0].set_title("total bytes over the lower bound")
        _bars(row[1], here, planners, lambda r: r["rank_bytes"] / r["bound_rank_bytes"])
        row[1].set_title("worst rank's bytes over its lower bound")
        _balance(row[2], here, planners)
        row[0].set_ylabel(LAYOUT_TITLES[layout], fontsize=12, fontweight="bold")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    more, more_labels = axes[0, 2].get_legend_handles_labels()
    figure.legend([*handles, more[0]], [*labels, more_labels[0]], loc="outside lower center", ncols=5)
    figure.suptitle(
        f"{MAIN_RANKS} ranks x 32K tokens, tolerance {TOLERANCE}: the dashed line is a bound that no plan can cross",
        fontsize=13,
    )
    return figure


def _bars(axes: Axes, records: list[Record], planners: list[str], value: Callable[[Record], float]) -> None:
    workloads = _ordered(r["workload"] for r in records)
    width = 0.8 / len(planners)
    for i, planner in enumerate(planners):
        at = np.arange(len(workloads)) + (i - (len(planners) - 1) / 2) * width
        points = [
            [value(r) for r in records if r["workload"] == w and r["planner"] == planner and r["bound_bytes"]]
            for w in workloads
        ]
        means = [statistics.mean(p) if p else np.nan for p in points]
        axes.bar(at, means, width * 0.92, color=COLORS[planner], label=LABELS[planner])
        for x, mean, values in zip(at, means, points, strict=True):
            axes.plot([x] * len(values), values, "o", color="black", markersize=2.5, alpha=0.45)
            color = DIGITS.get(planner, "white")
            axes.text(x, 0.06, f"{mean:.2f}", ha="center", va="bottom", color=color, fontsize=8.5, fontweight="bold")
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylim(bottom=0)


def _balance(axes: Axes, records: list[Record], planners: list[str]) -> None:
    """Busiest rank over mean, before and after."""
    workloads = _ordered(r["workload"] for r in records)
    one = [r for r in records if r["planner"] == planners[-1]]
    for i, workload in enumerate(workloads):
        before = [r["before"] for r in one if r["workload"] == workload]
        label = LABELS["home"] if i == 0 else None
        axes.plot([i] * len(before), before, "_", color=COLORS["home"], markersize=16, markeredgewidth=2, label=label)
        axes.annotate(
            f"{statistics.mean(before):.1f}",
            (i, max(before)),
            (0, 6),
            textcoords="offset points",
            ha="center",
            color="#555555",
        )
        for j, planner in enumerate(planners):
            after = [r["max_over_mean"] for r in records if r["workload"] == workload and r["planner"] == planner]
            x = i + (j - (len(planners) - 1) / 2) * 0.25
            axes.plot([x] * len(after), after, "o", color=COLORS[planner], markersize=5)
    axes.set_yscale("log")
    ticks = [1, 2, 5, 10, 20, 50]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylim(0.9, max(r["before"] for r in records) * 1.6)
    axes.axhline(1 + TOLERANCE, color="black", linestyle="--", linewidth=1)
    worst = max(r["max_over_mean"] for r in records if r["planner"] in planners)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_title(f"busiest rank over mean: after planning at most {worst:.4f}")


def draw_ranks(records: list[Record]) -> plt.Figure:
    """Time and bytes over the number of ranks."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    planners = _shown_planners(records)
    _times(axes[0], records, planners)
    placed = [r for r in records if r["layout"] == "placed"] or records
    for panel, figure_name, bound, title in (
        (axes[1], "total_bytes", "bound_bytes", "total bytes over the lower bound"),
        (axes[2], "rank_bytes", "bound_rank_bytes", "worst rank's bytes over its lower bound"),
    ):
        for planner in planners:
            _line_with_range(
                panel,
                [r for r in placed if r["planner"] == planner and r[bound]],
                lambda r, a=figure_name, b=bound: r[a] / r[b],
                statistics.mean,
                color=COLORS[planner],
                label=LABELS[planner],
            )
        panel.set_yscale("log")
        panel.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
        panel.minorticks_off()
        panel.set_ylim(0.9, None)
        panel.axhline(1, color="black", linestyle="--", linewidth=1)
        panel.set_title(f"{title}\n(documents may span ranks)")
        _rank_axis(panel, records)
    axes[1].legend(loc="upper left")
    figure.suptitle("From 8 to 4096 ranks: lines are means over workloads and seeds, shades their range", fontsize=13)
    return figure


def _times(axes: Axes, records: list[Record], planners: list[str]) -> None:
    everything = lambda r: r["plan_ms"] + r["tables_ms"]  # noqa: E731
    for planner in planners:
        mine = [r for r in records if r["planner"] == planner]
        _line_with_range(axes, mine, everything, statistics.median, color=COLORS[planner], label=LABELS[planner])
    mine = [r for r in records if r["planner"] == planners[-1]]
    tables = _by_ranks(mine, lambda r: r["tables_ms"])
    axes.plot(
        list(tables),
        [statistics.median(v) for v in tables.values()],
        color=COLORS[planners[-1]],
        linestyle=":",
        label="tables alone",
    )
    medians = {ranks: statistics.median(values) for ranks, values in _by_ranks(mine, everything).items()}
    for ranks, value in medians.items():
        axes.annotate(
            f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms",
            (ranks, value),
            (7, -13),
            textcoords="offset points",
            color=COLORS[planners[-1]],
            fontweight="bold",
        )
    if len(medians) > 1:
        start = min(medians)
        x = np.array([start, max(medians)])
        growth = medians[start] * x / start
        axes.plot(x, growth, color="black", linewidth=0.8, linestyle="--", label="growth like the ranks")
    axes.set_yscale("log")
    axes.set_title("milliseconds per plan,\nall tables of one rank included")
    axes.grid(axis="both", alpha=0.3)
    axes.legend(loc="upper left")
    _rank_axis(axes, records)


def _by_ranks(records: list[Record], value: Callable[[Record], float]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for r in records:
        found.setdefault(r["ranks"], []).append(value(r))
    return dict(sorted(found.items()))


def _line_with_range(
    axes: Axes,
    records: list[Record],
    value: Callable[[Record], float],
    middle: Callable[[list[float]], float],
    color: str,
    label: str,
) -> None:
    points = _by_ranks(records, value)
    axes.plot(list(points), [middle(v) for v in points.values()], "o-", color=color, label=label)
    low, high = [min(v) for v in points.values()], [max(v) for v in points.values()]
    axes.fill_between(list(points), low, high, color=color, alpha=0.15, linewidth=0)


def _rank_axis(axes: Axes, records: list[Record]) -> None:
    ranks = sorted({r["ranks"] for r in records})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(r) for r in ranks])
    axes.set_xlabel("ranks")


def draw_tolerance(records: list[Record]) -> plt.Figure:
    """What balance costs: bytes over those at tolerance 0, and the balance that is reached."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    workloads = _ordered(r["workload"] for r in records)
    for panel, name, title in (
        (axes[0], "total_bytes", "total bytes"),
        (axes[1], "rank_bytes", "worst rank's bytes"),
    ):
        for planner, style in (("greedy", "--"), ("local_search", "-")):
            for color, workload in zip(WORKLOAD_COLORS, workloads, strict=False):
                mine = [r for r in records if r["workload"] == workload and r["planner"] == planner]
                tolerances = sorted({r["tolerance"] for r in mine})
                means = [statistics.mean(r[name] for r in mine if r["tolerance"] == t) / 1e9 for t in tolerances]
                panel.plot(tolerances, means, style, marker="o", markersize=4, color=color)
        panel.set_title(f"{title}, GB per layer and forward")
        panel.set_ylim(bottom=0)
    _tolerance_savings(axes[2], records, workloads)
    for color, workload in zip(WORKLOAD_COLORS, workloads, strict=False):
        axes[0].plot([], [], color=color, label=workload)
    axes[0].plot([], [], "--", color="black", label="greedy")
    axes[0].plot([], [], "-", color="black", label="local_search (default)")
    for panel in axes:
        panel.set_xlabel("tolerance: balance given up")
        panel.set_xticks(sorted({r["tolerance"] for r in records}))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7)
    figure.suptitle(f"What balance costs: {MAIN_RANKS} ranks, documents may span ranks", fontsize=13)
    return figure


def _tolerance_savings(axes: Axes, records: list[Record], workloads: list[str]) -> None:
    """Bytes saved against the smallest tolerance, mean over workloads, with the paper's figure."""
    for planner, style in (("greedy", "--"), ("local_search", "-")):
        mine = [r for r in records if r["planner"] == planner]
        tolerances = sorted({r["tolerance"] for r in mine})
        total = {
            (w, t): statistics.mean(r["total_bytes"] for r in mine if (r["workload"], r["tolerance"]) == (w, t))
            for w in workloads
            for t in tolerances
        }
        for color, workload in zip(WORKLOAD_COLORS, workloads, strict=False):
            saved = [100 * (1 - total[workload, t] / total[workload, tolerances[0]]) for t in tolerances]
            axes.plot(tolerances, saved, style, marker="o", markersize=4, color=color)
    axes.axhspan(20, 25, color="#bbbbbb", alpha=0.4, linewidth=0, label="the paper: 20-25 % at 0.15")
    axes.legend(loc="lower right", handlelength=1.2)
    axes.set_title("total bytes saved against tolerance 0, %")
