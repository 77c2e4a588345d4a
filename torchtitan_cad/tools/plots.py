# SPDX-License-Identifier: BSD-3-Clause
"""Pictures of ``torchtitan-cad simulate`` and ``compare``: what the time of a step goes into."""

from collections.abc import Mapping, Sequence
from pathlib import Path

MOST_BARS = 32


def draw_parts(
    path: Path, title: str, labels: Sequence[str], parts: Mapping[str, Sequence[float]]
) -> None:
    """Draw a stacked bar for every label, at most ``MOST_BARS``.

    Args:
        parts: seconds of every part of a step, [labels].
    """
    from matplotlib.figure import Figure

    shown = labels[:MOST_BARS]
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(shown)), layout="constrained")
    axes = figure.subplots()
    # Neighbours differ in lightness too, for readers who do not tell red from green.
    axes.set_prop_cycle(
        color=(
            "#0072b2",
            "#f0c05a",
            "#b0b0b0",
            "#d55e00",
            "#56b4e9",
            "#444444",
            "#cc79a7",
        )
    )
    ends = [0.0] * len(shown)
    for part, seconds in parts.items():
        bars = axes.barh(
            range(len(shown)), seconds[:MOST_BARS], left=ends, height=0.7, label=part
        )
        ends = [end + width for end, width in zip(ends, seconds, strict=False)]
    axes.bar_label(bars, [f"{end:.3g} s" for end in ends], padding=3)
    axes.set_yticks(range(len(shown)), shown)
    axes.invert_yaxis()
    axes.set(
        title=title, xlabel="seconds per step", xlim=(0, 1.15 * max(ends, default=1.0))
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(parts),
        frameon=False,
    )
    figure.savefig(path, dpi=100)
