"""The picture of ``torchtitan-cad simulate --plot``: what a step's time goes into, and what varied numbers change."""

from __future__ import annotations

from pathlib import Path

from torchtitan_cad.simulation.report import PARTS, Report

COLORS = {
    "linear": "#4c78a8",
    "attention": "#72b7b2",
    "imbalance": "#e45756",
    "exchange": "#f58518",
    "tp": "#b279a2",
    "bubble": "#bab0ac",
    "synchronisation": "#8c8c4f",
}
LINES = {
    "packed": "#8c8c8c",
    "packing_cp": "#e45756",
    "greedy": "#f58518",
    "cad": "#1b6ca8",
    "cad_placed": "#54a24b",
}
DARK = "#333333"


def draw(report: Report, others: list[tuple[str, float, Report]], path: Path) -> None:
    """Draw a stacked bar per system, and for every varied key the share of perfect by its values.

    Args:
        others: (key, value, report with it).
    """
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys(key for key, _, _ in others))
    figure = Figure(figsize=(9 + 5 * len(keys), 5.5), layout="constrained")
    panels = figure.subplots(1, 1 + len(keys), width_ratios=[9, *[5] * len(keys)], squeeze=False)[0]
    bars = panels[0]
    systems = {name: system for name, system in report.systems.items() if system.fits}
    lefts = dict.fromkeys(systems, 0.0)
    for part in PARTS:
        widths = [system.part(part) for system in systems.values()]
        bars.barh(list(systems), widths, left=list(lefts.values()), color=COLORS[part], label=part, height=0.62)
        lefts = {name: left + width for (name, left), width in zip(lefts.items(), widths, strict=True)}
    for index, (name, system) in enumerate(systems.items()):
        text = f" {system.seconds:.2f} s, {report.share_of_perfect(name):.0%} of perfect"
        bars.text(system.seconds, index, text, va="center", color=DARK)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.32 * max((system.seconds for system in systems.values()), default=1.0))
    bars.set_xlabel("seconds per step, mean over the batches")
    bars.set_title(f"{report.cluster.ranks} GPUs, {report.step_tokens:,} tokens per step")
    bars.spines[["top", "right"]].set_visible(False)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=len(PARTS), frameon=False)
    for axes, key in zip(panels[1:], keys, strict=True):
        mine = sorted((value, other) for k, value, other in others if k == key)
        for name, color in LINES.items():
            shown = [(v, other) for v, other in mine if name in other.systems and other.systems[name].fits]
            if shown:
                points = [(value, other.share_of_perfect(name)) for value, other in shown]
                axes.plot(*zip(*points, strict=True), "o-", color=color, label=name)
        axes.axhline(1.0, color=DARK, linewidth=0.8)
        axes.set_ylim(0, 1.05)
        axes.set_xlabel(key)
        axes.set_title("share of perfect")
        axes.legend(frameon=False, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
