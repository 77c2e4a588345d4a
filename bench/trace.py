"""Draws the phases of core attention in the traces of a run: what computes, and what travels meanwhile.

    python -m bench.trace outputs/llama3_debug_cpu/profile_traces/iteration_4 --output trace.png

The folder is one that ``--profiling.enable_profiling`` writes, of a run with ``cad.nano_batches = 2``. Every rank gets
three rows: the phases of its host (linear work, attention, waiting), and the exchanges of each half from their start
to the end of the wait for them. Linear work of backward and of compiled turns, which a trace does not name, is found by
linear_work.py.
"""

import io
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import tyro
from matplotlib.patches import Patch

from bench.linear_work import Event, is_linear, phases_of, read_events, unnamed_linear_work

COLORS = {
    "linear": "#6baed6",
    "linear backward": "#c6dbef",
    "attention": "#31a354",
    "waiting": "#de2d26",
    "sending": "#756bb1",
    "in flight": "#fdae6b",
}
NAMED = ("linear", "linear backward", "attention")
"""Kinds whose spans have their name written on them."""
MOST_RANKS = 16
"""Drawn where none are chosen."""
USER_ERROR = 2


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
    folder: tyro.conf.Positional[Path]
    """Folder with rank*_trace.json files."""
    output: Path = Path("trace.png")
    ranks: tuple[int, ...] = ()
    """Ranks to draw; by default all, and the first 16 where there are more."""


def find_traces(folder: Path) -> dict[int, Path]:
    """The traces in a folder by rank, in the order of ranks.

    Raises:
        ValueError: there are none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name one that --profiling.enable_profiling has written")
    found = {int(m[1]): path for path in folder.iterdir() if (m := re.fullmatch(r"rank(\d+)_trace\.json", path.name))}
    if not found:
        raise ValueError(f"{folder} has no rank*_trace.json; name an iteration_N folder below profile_traces")
    return dict(sorted(found.items()))


def read_spans(path: Path) -> list[Span]:
    """The phases named ``cad/...`` of a trace, its exchanges from start to the end of their wait, and linear backward.

    Raises:
        ValueError: the file is not a trace, or has no such phases.
        OSError: the file cannot be read.
    """
    try:
        events = read_events(path.read_text())
        if phases := phases_of(events):
            spans = _forward_spans(phases)
            for name, start, end in unnamed_linear_work(events):
                kind = "linear backward" if name.endswith(" backward") else "linear"
                spans.append(Span(start / 1e3, end / 1e3, kind, 0, name))
            return spans
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a trace of torch.profiler ({type(error).__name__})") from error
    raise ValueError(f"{path} has no phases of core attention; trace a run with parallelism.cad = true")


def _forward_spans(phases: list[Event]) -> list[Span]:
    spans, flying, half = [], defaultdict[str, list[tuple[float, int]]](list), defaultdict[str, int](int)
    halves = 2 if any(re.search(r"\.pong$|^cad/turn ", event["name"]) for event in phases) else 1
    for event in phases:
        name, start, end = event["name"][4:], event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        phase, _, exchange = name.partition(" ")
        if phase == "exchange":  # halves take turns
            flying[exchange].append((start, half[exchange]))
            half[exchange] = (half[exchange] + 1) % halves
            spans.append(Span(start, end, "sending", 0, name))
        elif phase == "wait":
            spans.append(Span(start, end, "waiting", 0, name))
            if flying[exchange]:  # started within the trace
                begin, number = flying[exchange].pop(0)
                spans.append(Span(begin, end, "in flight", number, exchange))
        elif phase == "attention":
            spans.append(Span(start, end, "attention", 0, name))
        elif is_linear(event):
            spans.append(Span(start, end, "linear", 0, name))
    return spans


def draw(traces: dict[int, list[Span]], title: str, options: Options) -> None:
    """One group of rows per rank."""
    first = min(span.start for spans in traces.values() for span in spans)
    stop = max(span.end for spans in traces.values() for span in spans)
    figure, ax = plt.subplots(figsize=(15, 1.6 + 1.3 * len(traces)), layout="constrained")
    labels: dict[float, str] = {}
    for i, (rank, spans) in enumerate(traces.items()):
        for span in spans:
            row = 4.0 * i + (1 + span.half if span.kind == "in flight" else 0)
            length, begin = span.end - span.start, span.start - first
            ax.barh(row, length, left=begin, height=0.8, color=COLORS[span.kind], linewidth=0)
            # A letter takes about a 220th of the width.
            if span.kind in NAMED and length > (stop - first) * len(span.name) / 220:
                ax.text(begin + length / 2, row, span.name, ha="center", va="center", fontsize=7)
        labels[4.0 * i] = f"rank {rank}"
        halves = {span.half for span in spans if span.kind == "in flight"}
        labels |= {4.0 * i + 1: "ping's rows", 4.0 * i + 2: "pong's rows"} if 1 in halves else {4.0 * i + 1: "rows"}
    ax.set_yticks(list(labels), list(labels.values()))
    ax.set_ylim(4.0 * len(traces) - 1.3, -0.7)
    ax.set_xlim(0, stop - first)
    ax.set_xlabel("ms")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    kinds = {span.kind for spans in traces.values() for span in spans}
    handles: list[Any] = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in kinds]
    figure.suptitle(title, fontweight="bold")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format=options.output.suffix[1:] or "png")
    plt.close(figure)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_bytes(picture.getvalue())


def main(options: Options) -> None:
    """Reads and draws.

    Raises:
        ValueError: an option or a trace that cannot be drawn.
        OSError: a file that cannot be read or written.
    """
    paths = find_traces(options.folder)
    chosen = options.ranks or tuple(paths)[:MOST_RANKS]
    if missing := sorted(set(chosen) - set(paths)):
        raise ValueError(f"--ranks {missing[0]}: {options.folder} has no trace of it, only of {_listed(paths)}")
    which = f"ranks {_listed(chosen)} of {len(paths)}"
    traces = {rank: read_spans(paths[rank]) for rank in chosen}
    draw(traces, f"Core attention in {options.folder.resolve().name}, {which}", options)
    print(f"drew {which} to {options.output}")


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except (ValueError, OSError) as error:
        print(f"bench.trace: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(USER_ERROR)
