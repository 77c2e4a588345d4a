"""The picture of a run, imbalance.png."""

import io
import time
from typing import Any

import numpy as np

from torchtitan_cad.integration.report.summary import PICTURE_NAME, RunSummary, Spread, replace_file

_STYLE = {
    "before": {"color": "#8793a0", "label": "before: attention where the tokens are"},
    "after": {"color": "#1f77b4", "label": "after: core attention disaggregation"},
}
_MOST_BARS = 32
"""Ranks; more are drawn as lines."""


class Pace:
    """Says when to draw: at once, then at intervals that grow with the run.

    An interval is a tenth of the time so far, and at least a hundred times what the last drawing took: after the first,
    drawing takes at most 1% of a run.
    """

    def __init__(self) -> None:
        self._begin = self._next = time.monotonic()

    @property
    def due(self) -> bool:
        """Tell whether an interval has passed since the last drawing."""
        return time.monotonic() >= self._next

    def drew(self, seconds: float) -> None:
        """Take note that drawing has just ended, and of how long it took."""
        now = time.monotonic()
        self._next = now + max(100 * seconds, 0.1 * (now - self._begin))


def draw(summary: RunSummary) -> np.ndarray:
    """Write imbalance.png into the summary's folder, and return its pixels, uint8 [height, width, 3].

    Raises:
        OSError: the file cannot be written.
    """
    # The object interface of matplotlib: no global state, no display, whatever backend the process uses elsewhere.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.image import imsave

    figure = Figure(figsize=(12, 4.8), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    by_rank, by_step = figure.subplots(1, 2)
    _draw_ranks(by_rank, summary.ranked)
    _draw_steps(by_step, summary)
    means = summary.means()
    over = f"mean over {_count(means['steps'], 'step')} on {_count(means['ranks'], 'rank')}"
    figure.suptitle(
        f"Attention work of the busiest rank, over the mean rank's: {means['imbalance_before']:.2f} before, "
        f"{means['imbalance_after']:.2f} after ({over})",
        fontweight="bold",
    )
    handles, labels = by_rank.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    png = io.BytesIO()
    imsave(png, pixels, format="png")
    replace_file(summary.folder / PICTURE_NAME, png.getvalue())
    return pixels


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _draw_ranks(axes: Any, ranked: dict[str, Spread]) -> None:
    """Ranks in the order of their load in every plan: who is busiest changes from plan to plan, and a rank's mean over
    several would hide that the others wait for it in every one."""
    num_ranks = len(ranked["before"].total)
    places = np.arange(1, num_ranks + 1)
    for when, offset in (("before", -0.2), ("after", 0.2)):
        spread, mean = ranked[when], ranked[when].mean
        if num_ranks > _MOST_BARS:
            axes.plot(places, mean, linewidth=2, **_STYLE[when])
            label = "range over steps" if when == "before" else None
            color = _STYLE[when]["color"]
            axes.fill_between(places, spread.low, spread.high, color=color, alpha=0.25, linewidth=0, label=label)
            continue
        axes.bar(places + offset, mean, width=0.38, **_STYLE[when])
        axes.errorbar(
            places + offset,
            mean,
            yerr=np.maximum(0, (mean - spread.low, spread.high - mean)),
            fmt="none",
            ecolor="black",
            elinewidth=1,
            capsize=4 if num_ranks <= 16 else 0,
            label="range over steps" if when == "after" else None,
        )
        for place, value, high in zip(places, mean, spread.high, strict=True):
            if num_ranks <= 8:
                axes.annotate(
                    f"{value:.2f}",
                    (place + offset, high),
                    (0, 4),
                    textcoords="offset points",
                    ha="center",
                    fontsize=9,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="perfect balance")
    axes.set_title("Ranks of every plan in the order of their work")
    axes.set_xlabel("rank, the busiest first")
    axes.set_ylabel("attention work over the mean rank's")
    axes.set_xticks(places if num_ranks <= 16 else [1, *range(num_ranks // 8, num_ranks + 1, num_ranks // 8)])
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Any, summary: RunSummary) -> None:
    spans = summary.spans
    steps = [span.last_step for span in spans]
    for when, style in _STYLE.items():
        spreads = [span.figures[f"imbalance_{when}"] for span in spans]
        axes.plot(steps, [s.mean for s in spreads], marker="o" if len(steps) <= 64 else None, markersize=4, **style)
        if any(s.count > 1 for s in spreads):
            low, high = [s.low for s in spreads], [s.high for s in spreads]
            axes.fill_between(steps, low, high, color=style["color"], alpha=0.25, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_title("The busiest rank of every plan, step by step")
    axes.set_xlabel("step")
    axes.set_ylabel("attention work over the mean rank's")
    axes.set_ylim(bottom=0.95)
    if len(steps) == 1:
        axes.set_xticks(steps)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
