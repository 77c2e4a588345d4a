"""Linear work that has no name in a trace of torch.profiler: backward's, and that of compiled turns.

Backward's is found by the sequence numbers that autograd gives to the operators of forward and to the nodes that undo
them. That of turns (pingpong/turn.py) lies between operators of core attention, in either direction.
"""

import json
import re
from bisect import bisect_right
from typing import Any, NamedTuple

OPERATOR = "torchtitan_cad::traced_"

Event = dict[str, Any]


class LinearWork(NamedTuple):
    """Linear work of a half; times in microseconds of the trace.

    ``name`` is that of the phase without "cad/": "post 3 pre 4.ping", "post 3 pre 4.ping backward".
    """

    name: str
    start: float
    end: float


def read_events(trace: str) -> list[Event]:
    """Return of a trace's complete events those that say where linear work is, and the phases of CAD.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, RecursionError: it is no trace of torch.profiler.
    """
    complete = [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]
    return [
        event
        for event in complete
        if "Sequence number" in event.get("args", {}) or event["name"].startswith(("cad/", OPERATOR))
    ]


def phases_of(events: list[Event]) -> list[Event]:
    """Return those that are phases of CAD, ``cad/...``, by their start."""
    phases = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("cad/")]
    return sorted(phases, key=lambda e: e["ts"])


def is_linear(phase: Event) -> bool:
    """Whether a phase is linear work of a half."""
    return re.match(r"cad/(pre|post) \d", phase["name"]) is not None


def unnamed_linear_work(events: list[Event]) -> list[LinearWork]:
    """Return the linear work that no phase names; errors as in ``read_events``."""
    return _backward_work(events, phases_of(events)) + _work_of_turns(events)


def _backward_work(events: list[Event], phases: list[Event]) -> list[LinearWork]:
    """Return backward's linear work outside of turns, by forward's name."""
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
        if i >= 0 and event["tid"] == linear[i]["tid"] and event["ts"] < linear[i]["ts"] + linear[i]["dur"]:
            name_of.setdefault(number, linear[i]["name"][4:])
    nodes.sort(key=lambda e: e["ts"])
    times = [event["ts"] for event in phases]
    work: list[LinearWork] = []
    phases_before = -1
    for node in nodes:
        begin, end = node["ts"], node["ts"] + node["dur"]
        name, before = name_of.get(node["args"]["Sequence number"]), bisect_right(times, begin)
        if name is None or bisect_right(times, end) > before:  # what holds phases of its own is no linear work
            continue
        name += " backward"
        if work and work[-1].name == name and before == phases_before:
            begin = work.pop().start
        work.append(LinearWork(name, begin, end))
        phases_before = before
    return work


def _work_of_turns(events: list[Event]) -> list[LinearWork]:
    """Return the linear work in turns: of a half, between its ``combine`` and its ``prepare``."""
    turns = [event for event in events if event["name"].startswith("cad/turn ")]
    compiled = [event for event in events if event["name"] in ("CompiledFunction", "CompiledFunctionBackward")]
    operators = sorted((e for e in events if e["name"].startswith(OPERATOR)), key=lambda e: e["ts"])
    times = [event["ts"] for event in operators]
    number_of = {
        graph["args"]["Sequence number"]: int(turn["name"].split()[1])
        for turn in turns
        for graph in compiled
        if turn["ts"] <= graph["ts"] < turn["ts"] + turn["dur"] and graph["tid"] == turn["tid"]
    }
    work = []
    for graph in compiled:
        number, end = number_of.get(graph["args"].get("Sequence number")), graph["ts"] + graph["dur"]
        inside = operators[bisect_right(times, graph["ts"]) : bisect_right(times, end)]
        inside = [event for event in inside if event["tid"] == graph["tid"]]
        names = [event["name"].removeprefix(OPERATOR) for event in inside]
        backward = graph["name"].endswith("Backward")
        last, first = ("prepare_backward", "combine_backward") if backward else ("combine", "prepare")
        if number is None or not {last, first} & set(names):
            continue
        begins, ends = (last, first) if backward else (first, last)
        name = " ".join([f"post {number - 1}"] * (ends in names) + [f"pre {number}"] * (begins in names))
        gaps = zip(
            [None, *names],
            [*names, None],
            [graph["ts"], *(event["ts"] + event["dur"] for event in inside)],
            [*(event["ts"] for event in inside), end],
            strict=True,
        )
        for i, (before, after, start, stop) in enumerate(gaps):
            if before == last or after == first:
                half = names[:i].count(last) - 1 if before == last else names[:i].count(first)
                half_name = ("pong", "ping")[half] if backward else ("ping", "pong")[half]
                work.append(LinearWork(f"{name}.{half_name}{' backward' * backward}", start, stop))
    return work
