"""The picture of ``torchtitan-cad compare``: time per step of both runs, and what ranks spend it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

_RUNS = {"off": ("without CAD", "#8793a0"), "on": ("with CAD", "#1f77b4")}
_PARTS = {"other": ("linear layers and the rest", "#6baed6"), "attention": ("attention", "#31a354")}
_WAITING = ("waiting", "#fc9272")
_MOST_RANKS = 16


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw the figures that `compare` writes as JSON to ``path``."""
    figure, (steps, ranks) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    _draw_steps(steps, figures)
    _draw_ranks(ranks, figures)
    gain, predicted = figures["speedup"]["overall"], figures["predicted_speedup"]["overall"]
    title = f"{gain:.2f} times as fast with CAD"
    if np.isfinite(predicted):
        title += f" ({predicted:.2f} predicted by the plans)"
    figure.suptitle(title, fontweight="bold")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_steps(axes: Axes, figures: dict[str, Any]) -> None:
    for mode, (label, color) in _RUNS.items():
        seconds = figures["seconds_per_step"][mode]
        axes.plot(
            figures["first_step"] + np.arange(len(seconds)), seconds, color=color, marker="o", markersize=3, label=label
        )
    axes.set(xlabel="step", ylabel="seconds", title="Time per step")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right")
    axes.grid(axis="y", alpha=0.3)


def _draw_ranks(axes: Axes, figures: dict[str, Any]) -> None:
    count = min(figures["ranks"], _MOST_RANKS)
    for i, mode in enumerate(_RUNS):
        place, bottom = np.arange(count) + (i - 0.5) * 0.42, np.zeros(count)
        for part, (label, color) in {**_PARTS, "waiting": _WAITING}.items():
            height = np.nan_to_num(np.array(figures["rank_seconds"][mode][part][:count]), nan=0.0)
            axes.bar(place, height, 0.38, bottom, color=color, label=label if i == 0 else None)
            bottom += height
        for x, top in zip(place, bottom, strict=True):
            axes.text(x, top, mode, ha="center", va="bottom", fontsize=9)
    shown = "" if count == figures["ranks"] else f", the first {count} of {figures['ranks']}"
    axes.set(xlabel=f"rank{shown}; CAD off and on", ylabel="seconds per step", title="What a rank spends its time on")
    axes.set_xticks(range(count))
    axes.margins(y=0.1)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
