"""The picture of ``torchtitan-cad profile``. Imports matplotlib, without its global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchtitan_cad.planning import Profile
from torchtitan_cad.planning.profile import Direction


def draw(profile: Profile, path: Path) -> None:
    """Throughput over query length, one line per key length, forward and backward side by side."""
    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_direction(left, profile, "forward")
    _draw_direction(right, profile, "backward")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], title="keys of a task", loc="outside right center", frameon=False)
    heads = f"{profile.num_heads}:{profile.num_kv_heads} heads of {profile.head_dim}, {profile.dtype}"
    figure.suptitle(f"Attention throughput, tasks of one size: {profile.device}, kernel {profile.kernel}, {heads}")
    figure.savefig(path)


def _draw_direction(axes: Any, profile: Profile, direction: Direction) -> None:
    throughput = profile.throughput(direction)
    unit, name = (1e12, "TFLOP/s") if throughput.max() >= 1e12 else (1e9, "GFLOP/s")
    colors = colormaps["viridis_r"]
    last = max(1, len(profile.kv_lengths) - 1)
    for index, (length, values) in enumerate(zip(profile.kv_lengths, throughput.T, strict=True)):
        color = colors(0.1 + 0.9 * index / last)
        axes.plot(profile.q_lengths, values / unit, marker="o", markersize=4, color=color, label=f"{length:,}")
    axes.axvline(profile.tile, color="black", linewidth=1, linestyle="--")
    axes.annotate(" one tile", (profile.tile, 0), ha="left", va="bottom")
    axes.set_xscale("log", base=2)
    axes.set_xticks(profile.q_lengths, [f"{length}" for length in profile.q_lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(direction.capitalize())
    axes.set_xlabel("queries of a task")
    axes.set_ylabel(name)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
