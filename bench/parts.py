# SPDX-License-Identifier: BSD-3-Clause
"""The picture of what the time of a step goes into, from the JSON of ``torchtitan-cad simulate`` or ``compare``.

torchtitan-cad simulate --model llama-8b --ranks 256 --tp 8 --row-tokens 524288 --output out.json
python -m bench.parts out.json docs/images/simulation.png
python -m bench.parts outputs/compare/compare.json docs/images/compare.png
"""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import tyro

MODES = {"off": "without CAD", "on": "with CAD"}
COLORS = ["#0072b2", "#f0c05a", "#b0b0b0", "#d55e00", "#56b4e9", "#444444", "#cc79a7"]
"""Neighbours differ in lightness too, for readers who do not tell red from green."""


def parts_of_systems(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds by part, of every simulated system that fits."""
    return {
        f"{name}, {system['share_of_perfect']:.0%} of perfect": system["parts"]
        for name, system in report["systems"].items()
        if system["fits"]
    }


def parts_of_ranks(figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds by part, of every rank with and without CAD."""
    bars = {}
    for rank, mode in product(range(figures["ranks"]), MODES):
        seconds = figures["rank_seconds"][mode]
        parts = {part: of_ranks[rank] for part, of_ranks in seconds.items()}
        bars[f"rank {rank}, {MODES[mode]}"] = parts
    return bars


def draw(bars: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """A stacked bar for every label."""
    from matplotlib.figure import Figure

    if not bars:
        raise SystemExit("no system fits: nothing to draw")
    figure = Figure(figsize=(10, 1.5 + 0.45 * len(bars)), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=COLORS)
    ends = [0.0] * len(bars)
    names = next(iter(bars.values())).keys()
    for name in names:
        seconds = [parts[name] for parts in bars.values()]
        patches = axes.barh(
            range(len(bars)), seconds, left=ends, height=0.7, label=name
        )
        ends = [end + width for end, width in zip(ends, seconds, strict=True)]
    axes.bar_label(patches, [f"{end:.3g} s" for end in ends], padding=3)
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set(xlabel="seconds per step", xlim=(0, 1.15 * max(ends)))
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False
    )
    figure.savefig(path, dpi=100)


def main(
    figures: Annotated[Path, tyro.conf.Positional],
    picture: Annotated[Path, tyro.conf.Positional],
) -> None:
    """Draw what a file of figures holds."""
    document = json.loads(figures.read_text())
    is_simulated = "systems" in document
    parts = parts_of_systems if is_simulated else parts_of_ranks
    draw(parts(document), picture)


if __name__ == "__main__":
    tyro.cli(main)
