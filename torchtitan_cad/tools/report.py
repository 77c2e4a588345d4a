# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad report``: what a run has gained so far, from the figures of its logged steps."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from torchtitan_cad.integration.report.steps_file import STEPS_NAME
from torchtitan_cad.planning.text import is_number, printable
from torchtitan_cad.tools.shared import check_output, write_json
from torchtitan_cad.tools.steps import read_steps, require

MEANS = {
    "imbalance_before": ("attention imbalance (max/mean), before", 1),
    "imbalance_after": ("attention imbalance (max/mean), after", 1),
    "bytes_per_rank_mean": ("sent per rank and layer forward (MB)", 1e-6),
    "bytes_per_rank_max": ("sent by the busiest rank (MB)", 1e-6),
    "tasks_moved": ("tasks moved per microbatch", 1),
    "exposed_percent": ("exposed wait (% of the time)", 1),
}
MEDIANS = {
    "tokens_per_second": ("tokens per second and GPU (median)", 1),
    "mfu_percent": ("mfu (%, median), by the documents' pairs", 1),
    "plan_seconds": ("planning (ms, median)", 1e3),
    "exchange_seconds": ("exchange (ms, median)", 1e3),
}
"""Both: keys that are summed up, with words and the factor for their unit; any may be missing or null in a line."""
LOSSES = {"loss_first": ("loss, first step", 1), "loss_last": ("loss, last step", 1)}


def check_logged_step(step: dict[str, Any]) -> None:
    """Raise ValueError for figures that are no finite numbers."""
    for key in (*MEANS, *MEDIANS, "loss"):
        require(step, key, _is_figure, "a finite number")
    words = "a list of finite numbers, one a rank"
    require(step, "ranked_after", _are_figures, words)


def _is_figure(value: Any) -> bool:
    return value is None or is_number(value)


def _are_figures(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def run(folder: Annotated[Path, tyro.conf.Positional]) -> None:
    """Summarize a run that is going on, has finished or was killed.

    Prints means over the logged steps and medians of times; writes cad_summary.json beside the figures of the steps.
    Traces of the run also get the names that TensorBoard's profile plugin looks for.

    Args:
        folder: The job's dump folder, of whose runs the newest is taken, or a cad_steps.jsonl, or its folder.
    """
    steps_file = find_steps(folder)
    rows = read_steps(steps_file, check_logged_step)
    summary = summarize(rows)
    print(
        f"Core attention disaggregation in a CAD group of {summary['ranks']} ranks, logged steps: {summary['steps']}"
    )
    for name, (label, factor) in {**MEANS, **MEDIANS, **LOSSES}.items():
        if summary.get(name) is not None:
            print(f"  {label:42}{factor * summary[name]:z9.3f}")
    if rows[-1].get("loss", 0.0) is None:
        print(f"  {'loss, last step':42}not finite")
    summary_file = steps_file.with_name("cad_summary.json")
    check_output("report", summary_file)
    write_json(summary_file, summary)
    for trace in folder.glob("**/iteration_*/rank*_trace.json*"):
        link = trace.with_name(trace.name.replace("_trace.json", ".pt.trace.json"))
        if not os.path.lexists(link):
            link.symlink_to(trace.name)


def find_steps(path: Path) -> Path:
    """Return the steps file that is named, or in a folder, or else the newest below it, also behind links of folders.

    Raises ValueError if there is none.
    """
    for named in (path, path / STEPS_NAME):
        if named.name == STEPS_NAME and named.exists() and not named.is_dir():
            return named
    below = glob.glob(f"**/{STEPS_NAME}", root_dir=path, recursive=True)
    found = [path / name for name in below if (path / name).is_file()]
    if not found:
        raise ValueError(
            f"{printable(path)}: there is no {STEPS_NAME}; name the dump folder of a job with parallelism.cad"
        )
    return max(found, key=lambda file: file.stat().st_mtime_ns)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return means over steps, and medians of times: a mean would spread the first step's wait over all."""
    last = rows[-1]
    summary = {
        "steps": len(rows),
        "last_step": last["step"],
        "ranks": len(last["ranked_after"]),
    }
    for name in (*MEANS, *MEDIANS):
        values = [row[name] for row in rows if row.get(name) is not None]
        average = np.median if name in MEDIANS else np.mean
        if values:
            summary[name] = float(average(values))
    losses = {"loss_first": rows[0].get("loss"), "loss_last": last.get("loss")}
    return summary | losses
