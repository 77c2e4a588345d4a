"""The picture of ``torchtitan-cad profile``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from torchtitan_cad.planning import Profile
from torchtitan_cad.planning.model.profile import Direction

OUTLIER = 2.0
"""Throughput over three quarters' of all cells from which on a cell is drawn at the upper edge, its value beside it."""

NOISY_COLOR = "#d62728"


def draw(profile: Profile, path: Path) -> None:
    """Draw the throughput over query length, one line per key length, forward and backward side by side."""
    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_direction(left, profile, "forward")
    _draw_direction(right, profile, "backward")
    handles, labels = left.get_legend_handles_labels()
    if profile.noisy_cells():
        handles.insert(0, Line2D([], [], linestyle="", marker="o", markerfacecolor="none", color=NOISY_COLOR))
        labels.insert(0, "noisy")
    figure.legend(handles[::-1], labels[::-1], title="keys of a task", loc="outside right center", frameon=False)
    heads = f"{profile.num_heads}:{profile.num_kv_heads} heads of {profile.head_dim}, {profile.dtype}"
    figure.suptitle(f"Attention throughput, tasks of one size: {profile.device}, kernel {profile.kernel}, {heads}")
    figure.savefig(path)


def _draw_direction(axes: Axes, profile: Profile, direction: Direction) -> None:
    throughput = profile.throughput(direction)
    unit, name = (1e12, "TFLOP/s") if throughput.max() >= 1e12 else (1e9, "GFLOP/s")
    throughput = throughput / unit
    top = min(throughput.max(), OUTLIER * np.quantile(throughput, 0.75))
    noisy = set(profile.noisy_cells())
    colors = colormaps["viridis_r"]
    last = max(1, len(profile.kv_lengths) - 1)
    for index, (keys, values) in enumerate(zip(profile.kv_lengths, throughput.T, strict=True)):
        color = colors(0.1 + 0.9 * index / last)
        axes.plot(profile.q_lengths, values, marker="o", markersize=4, color=color, label=f"{keys:,}")
        for queries, value in zip(profile.q_lengths, values.tolist(), strict=True):
            if (queries, keys) in noisy:
                axes.plot(queries, min(value, top), "o", markersize=9, markerfacecolor="none", color=NOISY_COLOR)
            if value > top:
                axes.annotate(f"{value:.3g}", (queries, top), (4, 0), textcoords="offset points", va="center")
                axes.plot(queries, top, marker="^", color=color)
    axes.axvline(profile.tile, color="black", linewidth=1, linestyle="--")
    # Above the axes, where no data is.
    axes.text(profile.tile, 1.01, "one tile", transform=axes.get_xaxis_transform(), ha="center", va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xticks(profile.q_lengths, [f"{length}" for length in profile.q_lengths])
    axes.minorticks_off()
    axes.set_ylim(0, 1.08 * top)
    axes.set_title(direction.capitalize(), loc="left")
    axes.set_xlabel("queries of a task")
    axes.set_ylabel(name)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
