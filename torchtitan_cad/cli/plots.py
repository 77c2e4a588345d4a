"""Pictures of ``torchtitan-cad simulate`` and ``compare``: what the time of a step goes into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_BARS = 32


def draw_parts(path: Path, title: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draw a stacked bar for every label, at most ``MOST_BARS``.

    Args:
        parts: seconds of every part of a step, [labels].
    """
    from matplotlib.figure import Figure

    shown = labels[:MOST_BARS]
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    ends = [0.0] * len(shown)
    for part, seconds in parts.items():
        axes.barh(range(len(shown)), seconds[:MOST_BARS], left=ends, height=0.7, label=part)
        ends = [end + each for end, each in zip(ends, seconds, strict=False)]
    for place, end in enumerate(ends):
        axes.text(end, place, f" {end:.3g} s", va="center")
    axes.set_yticks(range(len(shown)), shown)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(ends, default=1.0))
    axes.set(title=title, xlabel="seconds per step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(parts), frameon=False)
    figure.savefig(path, dpi=100)
