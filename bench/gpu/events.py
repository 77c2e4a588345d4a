"""Events of a profiler's trace, counted."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

SPAN = "layer"
"""Name of what is counted in: the host's part of a layer."""
SHOWN = 25
"""Kernels listed, those that take longest."""

LAUNCH = re.compile(r"(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)|(cuda|cu)(Memcpy|Memset).*Async")
SYNCHRONISE = re.compile(r"(cuda|cu).*Synchronize|(cuda|cu)(Memcpy|Memset)(?!.*Async)")
ALLOCATE = re.compile(r"cuda(Malloc|Free|Host(Alloc|Register))|cuMem(Create|Alloc|Map|Unmap|Release|Free|Host|Address)")


class Event(NamedTuple):
    """Of a trace: times in microseconds."""

    name: str
    on_device: bool
    begin: float
    end: float


def counts(events: Sequence[Event]) -> dict[str, int]:
    """Launches, synchronisations and allocations that the host makes within the spans, and what runs on the device."""
    spans = _spans(events)
    found = {"launches": 0, "synchronisations": 0, "allocations": 0, "on_device": len(_work(events))}
    for event in events:
        if not event.on_device and any(begin <= event.begin < end for begin, end in spans):
            found["launches"] += bool(LAUNCH.match(event.name))
            found["synchronisations"] += bool(SYNCHRONISE.match(event.name))
            found["allocations"] += bool(ALLOCATE.match(event.name))
    return found


def longest(events: Sequence[Event], num_layers: int) -> list[dict[str, Any]]:
    """The kernels that take longest: how often one runs in a layer, and for how many microseconds altogether."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in _work(events):
        times[event.name[:90]].append(event.end - event.begin)
    rows = sorted(times.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    return [{"kernel": name, "per_layer": len(x) / num_layers, "microseconds": sum(x) / num_layers} for name, x in rows]


def _spans(events: Sequence[Event]) -> list[tuple[float, float]]:
    return [(e.begin, e.end) for e in events if e.name == SPAN and not e.on_device]


def _work(events: Sequence[Event]) -> list[Event]:
    """What runs on the device from the first span on, without the spans, which the profiler repeats for the device."""
    first = min((begin for begin, _ in _spans(events)), default=0.0)
    return [e for e in events if e.on_device and e.begin >= first and e.name != SPAN and not e.name.startswith("cad/")]
