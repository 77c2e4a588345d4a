# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad report``: what a run has gained so far, from the figures of its logged steps."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from torchtitan_cad.integration.report.steps_file import to_json
from torchtitan_cad.planning.text import printable
from torchtitan_cad.tools.logged_steps import MEANS, MEDIANS, find_steps, read_steps
from torchtitan_cad.tools.shared import check_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    "before": {"color": "#8793a0", "label": "before: attention where the tokens are"},
    "after": {"color": "#1f77b4", "label": "after: core attention disaggregation"},
}


def run(folder: Annotated[Path, tyro.conf.Positional]) -> None:
    """Summarize a run that is going on, has finished or was killed.

    Prints means over the logged steps and medians of times; writes cad_summary.json and imbalance.png beside the
    figures of the steps. Traces of the run also get the names that TensorBoard's profile plugin looks for.

    Args:
        folder: The job's dump folder, of whose runs the newest is taken, or a cad_steps.jsonl, or its folder.
    """
    steps_file = find_steps(folder)
    rows = read_steps(steps_file, say=lambda text: print(text, file=sys.stderr))
    summary_file, picture_file = (
        steps_file.with_name(name) for name in ("cad_summary.json", "imbalance.png")
    )
    for path in (summary_file, picture_file):
        if path.is_symlink():
            raise ValueError(
                f"report {path}: this is a link to another file; remove it"
            )
    summary = summarize(rows)
    print(
        f"Core attention disaggregation in a CAD group of {summary['ranks']} ranks, logged steps: {summary['steps']}"
    )
    labels = {
        **MEANS,
        **MEDIANS,
        "loss_first": ("loss, first step", 1),
        "loss_last": ("loss, last step", 1),
    }
    for name, (label, factor) in labels.items():
        if summary.get(name) is not None:
            print(f"  {label:42}{factor * summary[name]:z9.3f}")
    if rows[-1].get("loss", 0.0) is None:
        print(f"  {'loss, last step':42}not finite")
    try:
        check_output("report", summary_file)
        check_output("report", picture_file)
    except ValueError as error:
        reason, _, _ = str(error).partition(";")
        print(f"wrote nothing: {reason}")
        return
    summary_file.write_text(f"{to_json(summary, indent=2)}\n")
    if draws := find_spec("matplotlib") is not None:
        draw(rows, picture_file)
    picture = (
        "and imbalance.png" if draws else "(imbalance.png needs the extra [plots])"
    )
    print(f"wrote cad_summary.json {picture} in {printable(steps_file.parent)}")
    for trace in folder.glob("**/iteration_*/rank*_trace.json*"):
        link = trace.with_name(trace.name.replace("_trace.json", ".pt.trace.json"))
        if not os.path.lexists(link):
            link.symlink_to(trace.name)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over steps, and medians of times: a mean would spread the first step's wait over all."""
    last = rows[-1]
    summary = {
        "steps": len(rows),
        "last_step": last["step"],
        "ranks": len(last["ranked_after"]),
    }
    for name in (*MEANS, *MEDIANS):
        if values := [row[name] for row in rows if row.get(name) is not None]:
            summary[name] = float((np.median if name in MEDIANS else np.mean)(values))
    losses = {"loss_first": rows[0].get("loss"), "loss_last": last.get("loss")}
    return summary | losses


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw every plan's ranks in the order of their work, as who is busiest changes, and the busiest one by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    by_rank, by_step = figure.subplots(1, 2)
    steps = [row["step"] for row in rows]
    marks = "o-" if len(steps) <= 64 else "-"
    for when, style in STYLES.items():
        ranked = np.array([row[f"ranked_{when}"] for row in rows])
        _draw_ranks(by_rank, ranked, style)
        by_step.plot(steps, ranked[:, 0], marks, markersize=3, **style)
    by_rank.set_title("Ranks of every plan by their work: mean and range")
    by_rank.set_xlabel("rank, the busiest first")
    by_step.set_title("The busiest rank of every plan, step by step")
    by_step.set_xlabel("step")
    by_step.set_xlim(steps[0] - 1, steps[-1] + 1)
    for axes in (by_rank, by_step):
        axes.margins(y=0.1)
        axes.set_ylabel("attention work over the mean rank's")
        axes.axhline(
            1.0, color="black", linewidth=1, linestyle="--", label="perfect balance"
        )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *by_step.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.suptitle(
        f"Core attention on {ranked.shape[1]} ranks, logged steps: {len(steps)}",
        fontweight="bold",
    )
    figure.savefig(path, dpi=100)


def _draw_ranks(axes: Axes, ranked: np.ndarray, style: dict[str, Any]) -> None:
    """Draw the mean and the range over plans, [plans, ranks], of every rank's work."""
    places = 1 + np.arange(ranked.shape[1])
    axes.plot(places, ranked.mean(axis=0), "o-", markersize=3, **style)
    axes.fill_between(
        places,
        ranked.min(axis=0),
        ranked.max(axis=0),
        color=style["color"],
        alpha=0.25,
        linewidth=0,
    )
