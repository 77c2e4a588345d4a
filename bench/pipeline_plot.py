"""Timelines of ``bench/pipeline.py``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from bench.pipeline import Timeline

COLORS = {"forward": "#6baed6", "backward": "#31a354", "serve": "#fdae6b"}


def draw_timelines(timelines: dict[str, Timeline], dp: int, workload: str, path: Path) -> None:
    """One timeline per schedule, ranks down, time across, the same scale."""
    longest = max(timeline.makespan for timeline in timelines.values())
    figure, axes = plt.subplots(len(timelines), 1, figsize=(14, 3 * len(timelines)), sharex=True, layout="constrained")
    for ax, (name, timeline) in zip(axes, timelines.items(), strict=True):
        for rank, start, end, kind, microbatch in timeline.spans:
            ax.barh(rank, end - start, left=start, height=0.92, color=COLORS[kind], edgecolor="white", linewidth=0.6)
            if microbatch >= 0 and end - start > longest / 60:
                ax.text((start + end) / 2, rank, str(microbatch), ha="center", va="center", fontsize=6)
        ranks = 1 + max(span[0] for span in timeline.spans)
        ax.set_title(f"{name}: {timeline.makespan:.1f}", loc="left", fontsize=11)
        ax.set_yticks([dp * (stage + 0.5) - 0.5 for stage in range(ranks // dp)])
        ax.set_yticklabels([f"stage {stage}" for stage in range(ranks // dp)])
        ax.set_ylim(ranks - 0.5, -0.5)
        ax.set_xlim(0, longest * 1.01)
        for stage in range(1, ranks // dp):
            ax.axhline(dp * stage - 0.5, color="black", linewidth=0.8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    axes[-1].set_xlabel("time, in units of one microbatch's forward linear work on one rank")
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
    figure.suptitle(
        f"One step of {workload} documents, {dp} data-parallel ranks per stage; numbers are microbatches, white is idle"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
