# SPDX-License-Identifier: BSD-3-Clause
"""Draws the phases of core attention in the traces of a run: what computes, and what travels meanwhile.

    python -m bench.trace outputs/llama3_debug_cpu/profile_traces/iteration_4 --output trace.png

The folder is one that ``--profiling.enable_profiling`` writes, of a run with ``cad.nano_batches = 2``. Every rank gets
three rows: the phases of its host (linear work, attention, waiting), and the exchanges of each nano-batch from their
start to the end of the wait for them. A trace does not name linear work of backward and of traced graphs. Backward's is
found by the sequence numbers that autograd gives to the operators of forward and to the nodes that undo them; that of
graphs (pingpong/segment_graph.py) lies between operators of core attention, in either direction.
"""

import io
import json
import re
import sys
from bisect import bisect_right
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

OPERATOR = "torchtitan_cad::traced_"

Event = dict[str, Any]
COLORS = {
    "linear": "#56b4e9",
    "linear backward": "#c6dbef",
    "attention": "#78c679",
    "waiting": "#a50f15",
    "sending": "#54278f",
    "in flight": "#fed976",
}
"""They differ in lightness too, for readers who do not tell red from green."""
NAMED = ("linear", "linear backward", "attention")
"""Kinds whose spans have their name written on them."""
MOST_RANKS = 16
"""Drawn where none are chosen."""
USER_ERROR = 2


@dataclass(frozen=True)
class Span:
    """A phase; times in milliseconds of the trace. ``nano-batch`` is 0 or 1."""

    start: float
    end: float
    kind: str
    nano_batch: int
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
        raise ValueError(
            f"{folder} is not a folder; name one that --profiling.enable_profiling has written"
        )
    found = {
        int(m[1]): path
        for path in folder.iterdir()
        if (m := re.fullmatch(r"rank(\d+)_trace\.json", path.name))
    }
    if not found:
        raise ValueError(
            f"{folder} has no rank*_trace.json; name an iteration_N folder below profile_traces"
        )
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
            return (
                _forward_spans(phases)
                + _backward_work(events, phases)
                + _work_of_graphs(events)
            )
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ValueError(
            f"{path} is not a trace of torch.profiler ({type(error).__name__})"
        ) from error
    raise ValueError(
        f"{path} has no phases of core attention; trace a run with parallelism.cad = true"
    )


def _forward_spans(phases: list[Event]) -> list[Span]:
    spans = []
    pending_calls = defaultdict[str, list[tuple[float, int]]](list)
    nano_batch = defaultdict[str, int](int)
    nano_batches = (
        2
        if any(
            re.search(r"\.nano_batch_1$|^cad/segments ", event["name"])
            for event in phases
        )
        else 1
    )
    for event in phases:
        name = event["name"][4:]
        start = event["ts"] / 1e3
        end = (event["ts"] + event["dur"]) / 1e3
        phase, _, exchange = name.partition(" ")
        if phase == "exchange":  # nano-batches take turns
            pending_calls[exchange].append((start, nano_batch[exchange]))
            nano_batch[exchange] = (nano_batch[exchange] + 1) % nano_batches
            spans.append(Span(start, end, "sending", 0, name))
        elif phase == "wait":
            spans.append(Span(start, end, "waiting", 0, name))
            if pending_calls[exchange]:  # started within the trace
                begin, number = pending_calls[exchange].pop(0)
                spans.append(Span(begin, end, "in flight", number, exchange))
        elif phase == "attention":
            spans.append(Span(start, end, "attention", 0, name))
        elif is_linear(event):
            spans.append(Span(start, end, "linear", 0, name))
    return spans


def read_events(trace: str) -> list[Event]:
    """Return of a trace's complete events those that say where linear work is, and the phases of CAD.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, RecursionError: it is no trace of torch.profiler.
    """
    complete = [
        event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"
    ]
    return [
        event
        for event in complete
        if "Sequence number" in event.get("args", {})
        or event["name"].startswith(("cad/", OPERATOR))
    ]


def phases_of(events: list[Event]) -> list[Event]:
    """Return those that are phases of CAD, ``cad/...``, by their start."""
    phases = [
        e
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("cad/")
    ]
    return sorted(phases, key=lambda e: e["ts"])


def is_linear(phase: Event) -> bool:
    """Whether a phase is linear work of a nano-batch."""
    return re.match(r"cad/(pre|post) \d", phase["name"]) is not None


def _linear(name: str, start: float, end: float) -> Span:
    """Linear work of a nano-batch, by the name of its phase without "cad/"; times in microseconds of the trace."""
    return Span(
        start / 1e3,
        end / 1e3,
        "linear backward" if name.endswith(" backward") else "linear",
        0,
        name,
    )


def _backward_work(events: list[Event], phases: list[Event]) -> list[Span]:
    """Return backward's linear work outside of traced graphs, by forward's name."""
    linear = [event for event in phases if is_linear(event)]
    starts = [event["ts"] for event in linear]
    name_of: dict[int, str] = {}
    nodes = []
    for event in events:
        number = event.get("args", {}).get("Sequence number", -1)
        if number < 0 or event.get("cat") != "cpu_op":
            continue
        if event["name"].startswith("autograd::engine::evaluate_function"):
            nodes.append(event)
            continue
        i = bisect_right(starts, event["ts"]) - 1
        if (
            i >= 0
            and event["tid"] == linear[i]["tid"]
            and event["ts"] < linear[i]["ts"] + linear[i]["dur"]
        ):
            name_of.setdefault(number, linear[i]["name"][4:])
    nodes.sort(key=lambda e: e["ts"])
    times = [event["ts"] for event in phases]
    work: list[tuple[str, float, float]] = []
    phases_before = -1
    for node in nodes:
        begin = node["ts"]
        end = node["ts"] + node["dur"]
        name = name_of.get(node["args"]["Sequence number"])
        before = bisect_right(times, begin)
        # what holds phases of its own is no linear work
        if name is None or bisect_right(times, end) > before:
            continue
        name += " backward"
        if work and work[-1][0] == name and before == phases_before:
            _, begin, _ = work.pop()
        work.append((name, begin, end))
        phases_before = before
    return [_linear(*span) for span in work]


def _work_of_graphs(events: list[Event]) -> list[Span]:
    """Return the linear work in traced graphs: of a nano-batch, between ``traced_close`` and ``traced_open``."""
    phases = [event for event in events if event["name"].startswith("cad/segments ")]
    compiled = [
        event
        for event in events
        if event["name"] in ("CompiledFunction", "CompiledFunctionBackward")
    ]
    operators = sorted(
        (e for e in events if e["name"].startswith(OPERATOR)), key=lambda e: e["ts"]
    )
    times = [event["ts"] for event in operators]
    number_of = {
        graph["args"]["Sequence number"]: int(phase["name"].split()[1])
        for phase in phases
        for graph in compiled
        if phase["ts"] <= graph["ts"] < phase["ts"] + phase["dur"]
        and graph["tid"] == phase["tid"]
    }
    work = []
    for graph in compiled:
        number = number_of.get(graph["args"].get("Sequence number"))
        end = graph["ts"] + graph["dur"]
        inside = operators[bisect_right(times, graph["ts"]) : bisect_right(times, end)]
        inside = [event for event in inside if event["tid"] == graph["tid"]]
        names = [event["name"].removeprefix(OPERATOR) for event in inside]
        backward = graph["name"].endswith("Backward")
        last, first = (
            ("open_backward", "close_backward") if backward else ("close", "open")
        )
        if number is None or not {last, first} & set(names):
            continue
        begins, ends = (last, first) if backward else (first, last)
        name = " ".join(
            [f"post {number - 1}"] * (ends in names)
            + [f"pre {number}"] * (begins in names)
        )
        gaps = zip(
            [None, *names],
            [*names, None],
            [graph["ts"], *(event["ts"] + event["dur"] for event in inside)],
            [*(event["ts"] for event in inside), end],
            strict=True,
        )
        for i, (before, after, start, stop) in enumerate(gaps):
            if before == last or after == first:
                nano_batch = (
                    names[:i].count(last) - 1
                    if before == last
                    else names[:i].count(first)
                )
                number = 1 - nano_batch if backward else nano_batch
                work.append(
                    _linear(
                        f"{name}.nano_batch_{number}{' backward' * backward}",
                        start,
                        stop,
                    )
                )
    return work


def draw(traces: dict[int, list[Span]], title: str, options: Options) -> None:
    """One group of rows per rank."""
    first = min(span.start for spans in traces.values() for span in spans)
    stop = max(span.end for spans in traces.values() for span in spans)
    figure, ax = plt.subplots(
        figsize=(15, 1.6 + 1.3 * len(traces)), layout="constrained"
    )
    labels: dict[float, str] = {}
    for i, (rank, spans) in enumerate(traces.items()):
        for span in spans:
            row = 4.0 * i + (1 + span.nano_batch if span.kind == "in flight" else 0)
            length = span.end - span.start
            begin = span.start - first
            ax.barh(
                row,
                length,
                left=begin,
                height=0.8,
                color=COLORS[span.kind],
                linewidth=0,
            )
            # A letter takes about a 220th of the width.
            if span.kind in NAMED and length > (stop - first) * len(span.name) / 220:
                ax.text(
                    begin + length / 2,
                    row,
                    span.name,
                    ha="center",
                    va="center",
                    fontsize=7,
                )
        labels[4.0 * i] = f"rank {rank}"
        nano_batches = {span.nano_batch for span in spans if span.kind == "in flight"}
        labels |= (
            {4.0 * i + 1: "nano-batch 0's rows", 4.0 * i + 2: "nano-batch 1's rows"}
            if 1 in nano_batches
            else {4.0 * i + 1: "rows"}
        )
    ax.set_yticks(list(labels), list(labels.values()))
    ax.set_ylim(4.0 * len(traces) - 1.3, -0.7)
    ax.set_xlim(0, stop - first)
    ax.set_xlabel("ms")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    kinds = {span.kind for spans in traces.values() for span in spans}
    handles: list[Any] = [
        Patch(color=color, label=kind)
        for kind, color in COLORS.items()
        if kind in kinds
    ]
    figure.suptitle(title, fontweight="bold")
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
    )
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
        raise ValueError(
            f"--ranks {missing[0]}: {options.folder} has no trace of it, only of {_listed(paths)}"
        )
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
