# SPDX-License-Identifier: BSD-3-Clause
"""The picture of ``torchtitan-cad plan --plot``: who computes what, and what every rank does and moves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.model.tasks import TaskArray, is_diagonal
from torchtitan_cad.tools.shared import byte_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCUMENTS = 3
"""Documents shown: those with the most moved work."""
PALE, DARK, IN_COLOR, OUT_COLOR = "#d9d9d9", "#333333", "#1b6ca8", "#d95f02"
FEW = 16
"""ranks: so many have colours of their own in the bars; of more, colours that the eye cannot tell apart say nothing."""
BARS = 128
"""Ranks up to which each has its own bars; more are drawn as one outline."""
POINTS = 310
"""Height of a document, about."""
LEAST_POINTS = 5
"""Height of the smallest number that is drawn."""
LIGHTNESS = (0.3, 0.6, 0.1)
"""share of red, green and blue in how light a color looks"""


def draw_plan(plan: Plan, path: Path, given_plan: Plan | None = None) -> None:
    """Write the picture; the suffix of ``path`` chooses the format (png, pdf, svg).

    ``given_plan`` is one for the homes as they were before ``place``: its bytes are drawn, too.
    """
    from matplotlib.figure import Figure

    documents = _most_moved(plan)
    stats = plan.stats
    figure = Figure(figsize=(15, 10.2), layout="constrained")
    upper, lower = cast(Any, figure.subfigures(2, 1, height_ratios=[1.5, 1]))
    triangles = upper.subplots(1, max(1, len(documents)), squeeze=False)[0]
    colors = _colors(plan.layout.num_ranks)
    for axes, doc in zip(triangles, documents, strict=False):
        _draw_document(axes, plan, doc, colors=colors)
    if not documents:
        text = "Nothing moves: every query is served where it lives."
        triangles[0].text(
            0.5, 0.5, text, ha="center", va="center", fontsize=14, color=DARK
        )
        triangles[0].set_axis_off()
    loads, volume = lower.subplots(1, 2)
    _draw_loads(loads, plan, colors)
    _draw_bytes(volume, plan, given_plan)
    scale, unit = byte_unit(stats.total_bytes)
    figure.suptitle(
        f"{plan.layout.num_ranks} ranks, {len(plan.layout.docs)} documents, planner {plan.config.planner}: "
        f"max/mean {stats.max_over_mean_before:.2f} -> {stats.max_over_mean:.3f}, "
        f"{stats.total_bytes / scale:.2f} {unit} per layer and forward "
        f"(no plan below {stats.lower_bound_bytes / scale:.2f})\n"
        "Queries downwards, keys to the right. Colour and number: the server; pale: the queries' home serves them.",
        fontsize=13,
    )
    figure.savefig(path, dpi=100)


def _colors(num_ranks: int) -> np.ndarray:
    """Return a color per rank, [ranks, 3], along a scale on which near ranks look alike."""
    from matplotlib import colormaps

    return colormaps["turbo"](np.linspace(0.05, 0.95, num_ranks))[:, :3]


def _homes(plan: Plan, tasks: TaskArray) -> np.ndarray:
    """Rank that holds each task's first query."""
    layout = plan.layout
    place = layout.global_position(tasks["doc"], tasks["q_start"])
    run = np.searchsorted(layout.run_start, place, side="right") - 1
    return layout.run_rank[run]


def _most_moved(plan: Plan) -> list[int]:
    """Documents with the most pairs of tasks served away from home, at most DOCUMENTS."""
    moved = plan.tasks[_homes(plan, plan.tasks) != plan.tasks["server"]]
    rows = moved["q_end"] - moved["q_start"]
    keys = moved["kv_end"] - moved["kv_start"]
    pairs = rows * keys - np.where(is_diagonal(moved), rows * (rows - 1) // 2, 0)
    docs, index = np.unique(moved["doc"], return_inverse=True)
    pairs_of_docs = np.bincount(index, weights=pairs, minlength=len(docs))
    order = np.argsort(-pairs_of_docs, kind="stable")
    return docs[order[:DOCUMENTS]].tolist()


def _draw_document(axes: Axes, plan: Plan, doc: int, colors: np.ndarray) -> None:
    """Causal triangle, queries downwards; full colour and number where a task is served away from home."""
    tasks = plan.tasks[plan.tasks["doc"] == doc]
    length = int(plan.layout.doc_lengths[plan.layout.doc_index(np.array([doc]))][0])
    away = _homes(plan, tasks) != tasks["server"]
    for task, moved in zip(tasks, away.tolist(), strict=True):
        server = int(task["server"])
        # pale where the queries' home serves them
        color = colors[server] if moved else 1 - 0.25 * (1 - colors[server])
        _draw_task(axes, task, color, points=POINTS / length)
    strip = 0.035 * length
    _draw_homes(axes, plan, doc, strip=strip, colors=colors)
    axes.set_xlim(-5.2 * strip, length)
    axes.set_ylim(length, -0.05 * length)
    axes.set_aspect("equal")
    axes.set_yticks([])
    ticks = range(0, length + 1, 2 ** max(0, int(np.log2(length / 4))))
    axes.set_xticks(ticks, [_tokens(tick) for tick in ticks])
    axes.set(xlabel="keys", title=f"document {doc}, {_tokens(length)} tokens")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_task(axes: Axes, task: np.void, color: np.ndarray, points: float) -> None:
    """Draw a task with its server's number, if that fits; ``points`` is the height of a token."""
    from matplotlib.patches import Polygon

    _, q_start, q_end, kv_start, kv_end, server = task.tolist()
    slanted = q_end == kv_end  # a diagonal ends in its own queries
    corners = [
        (kv_start, q_start),
        (q_start if slanted else kv_end, q_start),
        (kv_end, q_end),
        (kv_start, q_end),
    ]
    axes.add_patch(Polygon(corners, facecolor=color, edgecolor="white", linewidth=0.6))
    middle = (q_start + q_end) / 2
    # a trapezoid's free box is left of its diagonal
    width = (middle if slanted else kv_end) - kv_start
    height = q_end - q_start
    size = 0.7 * points * min(height, width / len(str(server)))
    if size >= LEAST_POINTS:
        axes.annotate(
            str(server),
            (kv_start + width / 2, middle),
            ha="center",
            va="center",
            color="white" if np.dot(LIGHTNESS, color) < 0.5 else "black",
            fontsize=min(13.0, size),
        )


def _draw_homes(
    axes: Axes, plan: Plan, doc: int, strip: float, colors: np.ndarray
) -> None:
    """Draw a column of the document's homes, ``strip`` tokens wide, left of its triangle."""
    from matplotlib.patches import Rectangle

    layout = plan.layout
    style: dict[str, Any] = {"ha": "right", "fontsize": 9, "color": DARK}
    for segment in np.flatnonzero(layout.seg_doc == doc).tolist():
        start = int(layout.seg_start[segment])
        tokens = int(layout.seg_length[segment])
        rank = int(layout.seg_rank[segment])
        axes.add_patch(
            Rectangle(
                (-1.6 * strip, start),
                strip,
                tokens,
                facecolor=colors[rank],
                edgecolor="white",
                linewidth=0.6,
            )
        )
        if tokens > strip:
            middle = start + tokens / 2
            axes.text(-1.9 * strip, middle, str(rank), va="center", **style)
    axes.text(-1.9 * strip, -0.5 * strip, "home", va="bottom", **style)


def _draw_loads(axes: Axes, plan: Plan, colors: np.ndarray) -> None:
    stats = plan.stats
    mean = stats.mean_load or 1.0
    few = len(stats.loads) <= FEW
    _bars(
        axes,
        stats.loads_before / mean,
        0.9,
        color=PALE,
        label="before: every query at home",
    )
    _bars(
        axes,
        stats.loads / mean,
        0.56,
        color=colors if few else IN_COLOR,
        label="planned",
    )
    axes.axhline(stats.max_over_mean, color=DARK, linewidth=1, linestyle="--")
    most = float(stats.loads_before.max() / mean)
    axes.text(
        int(stats.loads_before.argmax()),
        most,
        f"{most:.2f}",
        ha="center",
        va="bottom",
        color=DARK,
    )
    axes.set_ylim(0, max(most, stats.max_over_mean) * 1.35)
    axes.set_title(
        f"attention work over the mean rank's; dashed: the busiest after planning, {stats.max_over_mean:.3f}"
    )
    _finish(axes, len(stats.loads))


def _draw_bytes(axes: Axes, plan: Plan, given_plan: Plan | None) -> None:
    stats = plan.stats
    scale, unit = byte_unit(stats.max_rank_bytes)
    worst = f"{stats.max_rank_bytes / scale:.2f}"
    if given_plan is not None:
        worst = f"{given_plan.stats.max_rank_bytes / scale:.2f} -> {worst}"
        _bars(
            axes,
            given_plan.stats.bytes_in / scale,
            1.0,
            color=PALE,
            label="with the given homes",
        )
        _bars(axes, -given_plan.stats.bytes_out / scale, 1.0, color=PALE)
    _bars(
        axes,
        stats.bytes_in / scale,
        0.8,
        color=IN_COLOR,
        label="in: rows it serves for others",
    )
    _bars(
        axes,
        -stats.bytes_out / scale,
        0.8,
        color=OUT_COLOR,
        label="out: rows others serve for it",
    )
    axes.axhline(0, color=DARK, linewidth=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.2 * (high - low))
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.set_title(f"{unit} per layer and forward; worst rank {worst}")
    _finish(axes, len(stats.loads))


def _bars(axes: Axes, heights: np.ndarray, width: float, **style: Any) -> None:
    """Draw a bar per rank, or an area of their outline where ranks are many."""
    if len(heights) <= BARS:
        axes.bar(np.arange(len(heights)), heights, width, **style)
    else:
        axes.stairs(heights, np.arange(len(heights) + 1) - 0.5, fill=True, **style)


def _finish(axes: Axes, num_ranks: int) -> None:
    axes.set(xlabel="rank", xlim=(-0.7, num_ranks - 0.3))
    axes.set_xticks(
        range(0, num_ranks, max(1, 2 ** int(np.ceil(np.log2(num_ranks / 16)))))
    )
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", ncols=2, frameon=False)


def _tokens(count: int) -> str:
    return str(count) if count < 1024 else f"{count / 1024:.3g}K"
