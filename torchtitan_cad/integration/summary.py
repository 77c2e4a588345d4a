"""What a run gained, on one page: cad_summary.json, imbalance.png and a few lines of text. May import matplotlib."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

JSON_NAME = "cad_summary.json"
PICTURE_NAME = "imbalance.png"

_BEFORE = {"color": "#8793a0", "label": "before: attention where the tokens are"}
_AFTER = {"color": "#1f77b4", "label": "after: core attention disaggregation"}


def write_summary(folder: str | os.PathLike[str], history: Sequence[Mapping[str, Any]]) -> str:
    """Writes cad_summary.json and imbalance.png into `folder`.

    Args:
        folder: made if missing.
        history: one mapping a step. Needed: `step`; `loads_before` and `loads_after`, the attention work of every rank
            (any unit, the same for all) without and with CAD. Used if there: `bytes_per_rank_mean`,
            `bytes_per_rank_max` (bytes sent for one layer's forward), `tasks_moved`, `plan_seconds`,
            `exchange_seconds`, `loss`. Other keys are kept as they are. Arrays and scalars of numpy and torch are fine.

    Returns:
        The summary as a few lines of text.

    Raises:
        ValueError: if `history` is empty, or steps differ in their number of ranks.
    """
    steps = [{key: _plain(value) for key, value in step.items()} for step in history]
    means = summarize(steps)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    document = _without_nan({"summary": means, "steps": steps})
    (folder / JSON_NAME).write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    _draw(folder / PICTURE_NAME, steps)
    return format_summary(means)


def summarize(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | int | None]:
    """Means over the steps, medians of times; `None` for what no step reports.

    An imbalance is the largest load over the mean load. The first plan of a fresh installation waits for numba to
    compile the planner, which a mean would spread over all steps.
    """
    if not steps:
        raise ValueError("history is empty; write_summary needs at least one step")
    before, after = _loads(steps, "loads_before"), _loads(steps, "loads_after")
    if before.shape != after.shape:
        raise ValueError(f"loads_before is for {before.shape[1]} ranks and loads_after for {after.shape[1]}")
    losses = [step["loss"] for step in steps if step.get("loss") is not None]
    return {
        "steps": len(steps),
        "ranks": before.shape[1],
        "imbalance_before": float(imbalance(steps, "before").mean()),
        "imbalance_after": float(imbalance(steps, "after").mean()),
        "imbalance_before_worst": float(imbalance(steps, "before").max()),
        "imbalance_after_worst": float(imbalance(steps, "after").max()),
        "bytes_per_rank_mean": _mean(steps, "bytes_per_rank_mean"),
        "bytes_per_rank_max": _mean(steps, "bytes_per_rank_max"),
        "tasks_moved": _mean(steps, "tasks_moved"),
        "plan_seconds": _median(steps, "plan_seconds"),
        "exchange_seconds": _median(steps, "exchange_seconds"),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
    }


def imbalance(steps: Sequence[Mapping[str, Any]], when: str) -> np.ndarray:
    """Largest over mean load of every step, [steps]; 1 where there is no work at all.

    A step may report it as `imbalance_before` and `imbalance_after`: if it has several microbatches, the loads of all
    of them together would hide that ranks wait for each other in every one.
    """
    loads = _loads(steps, f"loads_{when}")
    mean = loads.mean(axis=-1)
    ratios = np.divide(loads.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0)
    reported = [step.get(f"imbalance_{when}") for step in steps]
    return np.array([r if value is None else value for r, value in zip(ratios, reported, strict=True)])


def format_summary(means: Mapping[str, float | int | None]) -> str:
    """`summarize`'s result as text; lines about things that were not measured are left out."""
    lines = [
        f"Core attention disaggregation: {means['steps']} steps on {means['ranks']} ranks",
        f"  attention imbalance (max/mean)  {means['imbalance_before']:.2f} -> {means['imbalance_after']:.2f}"
        f"  (worst step {means['imbalance_before_worst']:.2f} -> {means['imbalance_after_worst']:.2f})",
    ]
    if means["bytes_per_rank_mean"] is not None:
        worst = means["bytes_per_rank_max"]
        worst_text = "" if worst is None else f", busiest rank {_bytes(worst)}"
        lines.append(f"  sent per rank and layer forward {_bytes(means['bytes_per_rank_mean'])}{worst_text}")
    if means["tasks_moved"] is not None:
        lines.append(f"  tasks moved per step            {means['tasks_moved']:.1f}")
    if means["plan_seconds"] is not None:
        lines.append(f"  planning, median step           {1000 * means['plan_seconds']:.1f} ms")
    if means["exchange_seconds"] is not None:
        lines.append(f"  exchange, median step           {1000 * means['exchange_seconds']:.1f} ms")
    if means["loss_first"] is not None:
        lines.append(f"  loss                            {means['loss_first']:.3f} -> {means['loss_last']:.3f}")
    return "\n".join(lines)


def _draw(path: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    # The object interface of matplotlib: no global state, no display, whatever backend the process uses elsewhere.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    before, after = _loads(steps, "loads_before"), _loads(steps, "loads_after")
    figure = Figure(figsize=(12, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    by_rank, by_step = figure.subplots(1, 2)
    _draw_ranks(by_rank, before, after)
    _draw_steps(
        by_step, np.array([step["step"] for step in steps]), imbalance(steps, "before"), imbalance(steps, "after")
    )
    figure.suptitle(
        "Attention work of the busiest rank, over the mean rank's: "
        f"{imbalance(steps, 'before').mean():.2f} before, {imbalance(steps, 'after').mean():.2f} after "
        f"(mean of {len(steps)} steps)",
        fontweight="bold",
    )
    handles, labels = by_rank.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def _draw_ranks(axes: Any, before: np.ndarray, after: np.ndarray) -> None:
    # Over many steps every rank has its turn with the long documents: the mean alone would hide the imbalance.
    num_ranks = before.shape[1]
    ranks = np.arange(num_ranks)
    for loads, offset, style in ((before, -0.2, _BEFORE), (after, 0.2, _AFTER)):
        relative = _relative(loads)
        mean, lowest, highest = relative.mean(axis=0), relative.min(axis=0), relative.max(axis=0)
        axes.bar(ranks + offset, mean, width=0.38, **style)
        axes.errorbar(
            ranks + offset,
            mean,
            yerr=np.maximum(0, (mean - lowest, highest - mean)),
            fmt="none",
            ecolor="black",
            elinewidth=1,
            capsize=4 if num_ranks <= 16 else 0,
            label="range over steps" if loads is after else None,
        )
        if num_ranks <= 8:
            for rank, value in enumerate(mean):
                axes.text(rank + offset, 0.05, f"{value:.2f}", ha="center", color="white", fontweight="bold")
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="perfect balance")
    axes.set_title("Every rank: its microbatches of a step together, mean over steps")
    axes.set_xlabel("rank")
    axes.set_ylabel("attention work over the mean rank's")
    axes.set_xticks(ranks if num_ranks <= 16 else ranks[:: -(-num_ranks // 16)])
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Any, steps: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    marker = "o" if len(steps) <= 64 else None
    axes.plot(steps, before, marker=marker, markersize=4, **_BEFORE)
    axes.plot(steps, after, marker=marker, markersize=4, **_AFTER)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_title("The busiest rank of every plan, mean over a step's plans")
    axes.set_xlabel("step")
    axes.set_ylabel("attention work over the mean rank's")
    axes.set_ylim(bottom=0.95)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _relative(loads: np.ndarray) -> np.ndarray:
    """Every step's loads over their mean; ones for a step without work."""
    mean = loads.mean(axis=1, keepdims=True)
    return np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0)


def _loads(steps: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """[steps, ranks] float64."""
    counts = {len(step[key]) for step in steps}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"{key} must have one entry a rank, the same number in every step, but has {sorted(counts)}")
    return np.array([step[key] for step in steps], dtype=np.float64)


def _mean(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [step[key] for step in steps if step.get(key) is not None]
    return float(np.mean(values)) if values else None


def _median(steps: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [step[key] for step in steps if step.get(key) is not None]
    return float(np.median(values)) if values else None


def _plain(value: Any) -> Any:
    """Arrays and scalars of numpy or torch as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _without_nan(value: Any) -> Any:
    """JSON has no nan and no infinity: null stands for them (a loss, say, of a run that diverged)."""
    match value:
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
