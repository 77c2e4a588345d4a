# SPDX-License-Identifier: BSD-3-Clause
"""Launches, synchronisations and allocations of one layer's core attention, in the steady state."""

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bench.gpu.loopback import KEY, Layer
from bench.gpu.parts import Emit
from tests.lib.two_ranks import two_rank_plan
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.timing import median_milliseconds

SPAN = "layer"
"""Name of what is counted in: the host's part of a layer."""
SHOWN = 25
"""Kernels listed, those that take longest."""

LAUNCH = re.compile(
    r"(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)|(cuda|cu)(Memcpy|Memset).*Async"
)
SYNCHRONISE = re.compile(r"(cuda|cu).*Synchronize|(cuda|cu)(Memcpy|Memset)(?!.*Async)")
ALLOCATE = re.compile(
    r"cuda(Malloc|Free|Host(Alloc|Register))|cuMem(Create|Alloc|Map|Unmap|Release|Free|Host|Address)"
)
ATTENTION = re.compile(
    r"flash|fmha|attention_(fwd|bwd)|sdpa|at::native::reduce_kernel", re.IGNORECASE
)
"""Kernels of the attention libraries, by name; FlashAttention-2 sums a group's key gradients by torch's reduction."""
LAYERS = 4
"""Profiled, after WARM_UP."""
WARM_UP = 3

MOST_ERROR = 0.02
"""Norm of the difference to undivided attention over the latter's, in bf16 with its 8 bits: some roundings of 2^-9."""


class Event(NamedTuple):
    """An event of a trace; times in microseconds."""

    name: str
    on_device: bool
    begin: float
    end: float


def measure(device: str, emit: Emit) -> None:
    """Counts are per layer and rank, forward and backward, of two ranks that this process plays in turns."""
    on_gpu = device == "cuda"
    where = torch.device(device, 0) if on_gpu else torch.device(device)
    shape = AttentionShape(32, 8, 128, 2) if on_gpu else AttentionShape(2, 1, 8, 4)
    layer = Layer(two_rank_plan(16_384 if on_gpu else 16, shape), where)
    for _ in range(WARM_UP if on_gpu else 1):
        layer()
    emit("errors", checked_errors(layer))
    if on_gpu:  # what the comparison has taken
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    emit("milliseconds", median_milliseconds(layer, where, 5 if on_gpu else 1) / 2)
    emit("host_milliseconds", _host_milliseconds(layer, on_gpu) / 2)
    if on_gpu:
        emit("device_allocations", _device_allocations(layer))
        emit("peak_gigabytes_of_both_ranks", torch.cuda.max_memory_allocated() / 1e9)
        emit("reserved_gigabytes", torch.cuda.memory_reserved() / 1e9)
        emit("warnings", _synchronisation_warnings(layer))
    num_layers = LAYERS if on_gpu else 1
    events = trace(layer, num_layers, on_gpu)
    emit(
        "counts",
        {name: count / num_layers / 2 for name, count in counts(events).items()},
    )
    emit("kernels", longest(events, 2 * num_layers))
    attention, own = (
        microseconds / num_layers / 2 for microseconds in attention_and_rest(events)
    )
    emit("attention_microseconds", attention)
    emit("own_microseconds", own)
    emit("own_over_attention", own / attention if attention else None)
    layer.raise_if_late()


def checked_errors(layer: Layer, key: int = KEY) -> dict[str, float]:
    """Norm of the difference between the ranks' results and undivided attention's, over the latter's norm.

    Raises RuntimeError if one of them is above ``MOST_ERROR``, and PeerError if an exchange has failed.
    """
    of_ranks = layer(key)
    _synchronise(layer.rows[0][0].is_cuda)  # ranks may have streams of their own
    layer.raise_if_late()
    errors = {}
    for name, *parts, wanted in zip(
        ("out", "lse", "dq", "dk", "dv"), *of_ranks, layer.undivided(), strict=True
    ):
        result = torch.cat(parts).double()
        reference = wanted.double()
        errors[name] = float((result - reference).norm() / reference.norm())
    if not max(errors.values()) <= MOST_ERROR:
        raise RuntimeError(f"the ranks do not compute what one call does: {errors}")
    return errors


def _synchronise(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _host_milliseconds(layer: Callable[[], object], on_gpu: bool) -> float:
    """Time in which the host launches a layer while the device is idle at first."""
    _synchronise(on_gpu)
    begin = time.perf_counter()
    layer()
    seconds = time.perf_counter() - begin
    _synchronise(on_gpu)
    return 1e3 * seconds


def _device_allocations(layer: Callable[[], object]) -> int | None:
    """Times that the caching allocator asked the device for memory in LAYERS layers; None if it does not count."""
    before = torch.cuda.memory_stats().get("num_device_alloc")
    for _ in range(LAYERS):
        layer()
    torch.cuda.synchronize()
    return (
        None
        if before is None
        else torch.cuda.memory_stats()["num_device_alloc"] - before
    )


def _synchronisation_warnings(layer: Callable[[], object]) -> list[str]:
    """Torch's warnings of operations of one layer that wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            layer()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return [
        f"{w.filename}:{w.lineno}: {w.message}"
        for w in caught
        if "called a synchronizing" in str(w.message)
    ]


def trace(layer: Callable[[], object], num_layers: int, on_gpu: bool) -> list[Event]:
    """Events of ``num_layers`` layers, each of which is in a span."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        layer()  # outside of spans: the profiler itself begins
        _synchronise(on_gpu)
        for _ in range(num_layers):
            with record_function(SPAN):
                layer()
        _synchronise(on_gpu)
    return [
        Event(
            e.name,
            e.device_type == DeviceType.CUDA,
            e.time_range.start,
            e.time_range.end,
        )
        for e in profiler.events() or ()
    ]


def counts(events: Sequence[Event]) -> dict[str, int]:
    """Launches, synchronisations and allocations that the host makes within the spans, and what runs on the device."""
    spans = _spans(events)
    found = {
        "launches": 0,
        "synchronisations": 0,
        "allocations": 0,
        "on_device": len(_work(events)),
    }
    for event in events:
        if not event.on_device and any(
            begin <= event.begin < end for begin, end in spans
        ):
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
    return [
        {
            "kernel": name,
            "per_layer": len(x) / num_layers,
            "microseconds": sum(x) / num_layers,
        }
        for name, x in rows
    ]


def attention_and_rest(events: Sequence[Event]) -> tuple[float, float]:
    """Microseconds of the device in kernels of the attention library, and in all that CAD adds.

    What runs on the sending stream beside other kernels counts in full, and waiting for peers counts too.
    """
    attention = rest = 0.0
    for event in _work(events):
        if ATTENTION.search(event.name):
            attention += event.end - event.begin
        else:
            rest += event.end - event.begin
    return attention, rest


def _spans(events: Sequence[Event]) -> list[tuple[float, float]]:
    return [(e.begin, e.end) for e in events if e.name == SPAN and not e.on_device]


def _work(events: Sequence[Event]) -> list[Event]:
    """Work of the device from the first span on, without the spans, which the profiler repeats for the device."""
    first = min((begin for begin, _ in _spans(events)), default=0.0)
    return [
        e
        for e in events
        if e.on_device
        and e.begin >= first
        and e.name != SPAN
        and not e.name.startswith("cad/")
    ]
