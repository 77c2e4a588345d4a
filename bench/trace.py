"""Draws the phases of core attention in the traces of a run: what computes, and what travels meanwhile.

    python -m bench.trace outputs/llama3_debug_cpu/profile_traces/iteration_4 --output trace.png

The folder is one that ``--profiling.enable_profiling`` writes, of a run with ``cad.nano_batches = 2``. Every rank gets
three rows: the phases of its host (linear work, attention, waiting), and the exchanges of each half from their start
to the end of the wait for them.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import tyro
from matplotlib.patches import Patch

COLORS = {
    "linear": "#6baed6",
    "attention": "#31a354",
    "waiting": "#de2d26",
    "sending": "#756bb1",
    "in flight": "#fdae6b",
}


@dataclass(frozen=True)
class Span:
    """A phase; times in milliseconds of the trace. ``half`` is 0 or 1."""

    start: float
    end: float
    kind: str
    half: int
    name: str


@dataclass(frozen=True)
class Options:
    """What to draw."""

    folder: tyro.conf.Positional[Path]
    """Folder with rank*_trace.json files."""
    output: Path = Path("trace.png")
    ranks: int = 2
    """First ranks to draw."""
    start_ms: float = 0.0
    """After the first phase of any rank."""
    length_ms: float | None = None
    """By default all."""


def read_spans(path: Path) -> list[Span]:
    """The phases named ``cad/...`` of a trace, in order, and its exchanges from start to the end of their wait.

    Raises:
        ValueError: the trace has none.
    """
    trace = json.loads(path.read_text())
    if not isinstance(trace, dict) or "traceEvents" not in trace:
        raise ValueError(f"{path} is no trace: it has no traceEvents")
    events = [e for e in trace["traceEvents"] if str(e.get("name", "")).startswith("cad/")]
    events = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    if not events:
        raise ValueError(f"{path} has no phases of core attention: trace a run with parallelism.cad = true")
    spans, flying, half = [], defaultdict[str, list[tuple[float, int]]](list), defaultdict[str, int](int)
    for event in events:
        name, start, end = event["name"][4:], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        phase, _, exchange = name.partition(" ")
        if phase == "exchange":  # halves take turns
            flying[exchange].append((start, half[exchange]))
            half[exchange] = 1 - half[exchange]
            spans.append(Span(start, end, "sending", 0, name))
        elif phase == "wait":
            begin, number = flying[exchange].pop(0)
            spans += [Span(start, end, "waiting", 0, name), Span(begin, end, "in flight", number, exchange)]
        elif phase == "attention":
            spans.append(Span(start, end, "attention", 0, name))
        elif re.match(r"(pre|post) \d", name):
            spans.append(Span(start, end, "linear", 0, name))
    return spans


def draw(traces: list[list[Span]], options: Options) -> None:
    """One group of rows per rank."""
    first = min(span.start for spans in traces for span in spans) + options.start_ms
    last = max(span.end for spans in traces for span in spans)
    stop = last if options.length_ms is None else first + options.length_ms
    figure, ax = plt.subplots(figsize=(15, 1.0 + 1.3 * len(traces)), layout="constrained")
    labels: dict[float, str] = {}
    for rank, spans in enumerate(traces):
        for span in spans:
            if span.end < first or span.start > stop:
                continue
            row = 4.0 * rank + (1 + span.half if span.kind == "in flight" else 0)
            begin, end = max(span.start, first), min(span.end, stop)
            ax.barh(row, end - begin, left=begin - first, height=0.8, color=COLORS[span.kind], linewidth=0)
            if span.kind in ("linear", "attention") and end - begin > (stop - first) / 25:
                ax.text((begin + end) / 2 - first, row, span.name, ha="center", va="center", fontsize=7)
        labels |= {4.0 * rank: f"rank {rank}", 4.0 * rank + 1: "ping's rows", 4.0 * rank + 2: "pong's rows"}
    ax.set_yticks(list(labels), list(labels.values()))
    ax.invert_yaxis()
    ax.set_xlim(0, stop - first)
    ax.set_xlabel("ms")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    handles: list[Any] = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output, dpi=110)
    plt.close(figure)


def main(options: Options) -> int:
    """Read and draw; returns the exit code."""
    paths = [options.folder / f"rank{rank}_trace.json" for rank in range(options.ranks)]
    try:
        draw([read_spans(path) for path in paths], options)
    except (ValueError, OSError) as error:
        print(f"bench.trace: error: {error}", file=sys.stderr)
        return 2
    print(f"drew {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
