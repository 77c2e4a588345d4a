# SPDX-License-Identifier: BSD-3-Clause
"""Who computes what: the picture of a plan.

    python examples/draw_a_plan.py [PICTURE.png [LAYOUT.json]]

Needs matplotlib, and no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from torchtitan_cad.planning import Plan, PlannerConfig, make_plan
from torchtitan_cad.planning.model.tasks import TaskArray
from torchtitan_cad.planning.serialize import read_layout
from torchtitan_cad.tools.shared import byte_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLE = Path(__file__).with_name("layout.json")
DOCUMENTS = 3
"""documents shown: the longest of those of which tasks move"""
PALE = "#d9d9d9"
LEAST_SHARE = 0.03
"""part of a document's length from which a task is high and wide enough for its number"""


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture; the suffix of ``path`` chooses the format (png, pdf, svg)."""
    from matplotlib.figure import Figure

    stats = plan.stats
    figure = Figure(figsize=(15, 10.2), layout="constrained")
    upper, lower = cast(Any, figure.subfigures(2, 1, height_ratios=[1.5, 1]))
    documents = _moved_documents(plan)
    if documents:
        triangles = upper.subplots(1, len(documents), squeeze=False)[0]
        for axes, doc in zip(triangles, documents, strict=True):
            _draw_document(axes, plan, doc)
    else:
        upper.suptitle("Nothing moves: every query is served where it lives.")
    loads, volume = lower.subplots(1, 2)
    _draw_loads(loads, plan)
    _draw_bytes(volume, plan)
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


def _homes(plan: Plan, tasks: TaskArray) -> np.ndarray:
    """Rank that holds each task's first query."""
    layout = plan.layout
    place = layout.global_position(tasks["doc"], tasks["q_start"])
    run = np.searchsorted(layout.run_start, place, side="right") - 1
    return layout.run_rank[run]


def _length(plan: Plan, doc: int) -> int:
    layout = plan.layout
    return int(layout.doc_lengths[layout.doc_index(np.array([doc]))][0])


def _moved_documents(plan: Plan) -> list[int]:
    moved = plan.tasks[_homes(plan, plan.tasks) != plan.tasks["server"]]
    documents = np.unique(moved["doc"]).tolist()
    documents.sort(key=lambda doc: _length(plan, doc), reverse=True)
    return documents[:DOCUMENTS]


def _draw_document(axes: Axes, plan: Plan, doc: int) -> None:
    """Causal triangle, queries downwards, beside the queries' homes; full colour where a task is served away."""
    from matplotlib import colormaps

    layout = plan.layout
    # the lighter part, on which black can be read
    colors = colormaps["turbo"](np.linspace(0.15, 0.85, layout.num_ranks))[:, :3]
    length = _length(plan, doc)
    tasks = plan.tasks[plan.tasks["doc"] == doc]
    moved = _homes(plan, tasks) != tasks["server"]
    for task, is_moved in zip(tasks, moved.tolist(), strict=True):
        color = colors[task["server"]]
        pale = 1 - 0.25 * (1 - color)
        _draw_task(axes, task, color if is_moved else pale, LEAST_SHARE * length)
    segments = np.flatnonzero(layout.seg_doc == doc)
    ranks = layout.seg_rank[segments]
    homes = axes.barh(
        layout.seg_start[segments],
        0.04 * length,
        layout.seg_length[segments],
        left=-0.06 * length,
        align="edge",
        color=colors[ranks],
        edgecolor="white",
    )
    axes.bar_label(homes, ranks.tolist(), label_type="center")
    axes.set_ylim(length, 0)
    axes.set_aspect("equal")
    axes.set(xlabel="keys", title=f"document {doc}, {length} tokens; left: homes")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_task(axes: Axes, task: np.void, color: np.ndarray, least: float) -> None:
    """Draw a task, with its server's number if it is at least that many tokens high and wide."""
    from matplotlib.patches import Polygon

    _, q_start, q_end, kv_start, kv_end, server = task.tolist()
    is_diagonal = q_end == kv_end  # which ends in its own queries
    corners = [
        (kv_start, q_start),
        (q_start if is_diagonal else kv_end, q_start),
        (kv_end, q_end),
        (kv_start, q_end),
    ]
    axes.add_patch(Polygon(corners, facecolor=color, edgecolor="white", linewidth=0.6))
    if min(q_end - q_start, kv_end - kv_start) >= least:
        x, y = np.mean(corners, axis=0)
        axes.text(x, y, str(server), ha="center", va="center")


def _draw_loads(axes: Axes, plan: Plan) -> None:
    stats = plan.stats
    mean = stats.mean_load or 1.0
    _draw_ranks(axes, stats.loads_before / mean, PALE, "before: every query at home")
    _draw_ranks(axes, stats.loads / mean, "#1b6ca8", "planned")
    axes.set_title(
        f"attention work over the mean rank's: at most {stats.max_over_mean_before:.2f} before, "
        f"{stats.max_over_mean:.3f} after"
    )
    axes.legend(ncols=2, frameon=False)


def _draw_bytes(axes: Axes, plan: Plan) -> None:
    stats = plan.stats
    scale, unit = byte_unit(stats.max_rank_bytes)
    arriving = stats.bytes_in / scale
    leaving = -stats.bytes_out / scale
    _draw_ranks(axes, arriving, "#1b6ca8", "in: rows it serves for others")
    _draw_ranks(axes, leaving, "#d95f02", "out: rows others serve for it")
    axes.set_title(
        f"{unit} per layer and forward; worst rank {stats.max_rank_bytes / scale:.2f}"
    )
    axes.legend(ncols=2, frameon=False)


def _draw_ranks(axes: Axes, heights: np.ndarray, color: str, label: str) -> None:
    """Draw one outline for all ranks, as they may be thousands."""
    edges = np.arange(len(heights) + 1) - 0.5
    axes.stairs(heights, edges, fill=True, color=color, label=label)
    axes.set_xlabel("rank")
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    # room for the legend
    axes.margins(y=0.2)


def main(picture: str = "plan.png", layout_file: str | Path = EXAMPLE) -> None:
    """Plan a layout, as every rank would, and draw the plan."""
    layout, shape = read_layout(Path(layout_file))
    plan = make_plan(layout, shape, PlannerConfig(tolerance=0.02))
    print(
        f"busiest rank over mean: {plan.stats.max_over_mean_before:.2f} before, {plan.stats.max_over_mean:.2f} after"
    )
    draw_plan(plan, Path(picture))
    print(f"wrote {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
