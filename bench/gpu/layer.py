"""What one layer's core attention asks of host and device, in the steady state."""

import time
import warnings
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from bench.gpu.events import SPAN, Event, counts, longest
from bench.gpu.loopback import Layer, two_rank_plan
from bench.gpu.parts import Emit
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.timing import median_milliseconds

LAYERS = 4
"""Profiled, after WARM_UP."""
WARM_UP = 3

MOST_ERROR = 0.02
"""Norm of the difference to undivided attention over the latter's, in bf16 with its 8 bits: some roundings of 2^-9."""


def measure(device: str, emit: Emit) -> None:
    """Counts are per layer and rank, forward and backward, of two ranks that this process plays in turns."""
    on_gpu = device == "cuda"
    where = torch.device(device, 0) if on_gpu else torch.device(device)
    shape = AttentionShape(32, 8, 128, 2) if on_gpu else AttentionShape(2, 1, 8, 4)
    layer = Layer(two_rank_plan(16_384 if on_gpu else 16, shape), where)
    for _ in range(WARM_UP if on_gpu else 1):
        layer()
    _synchronise(on_gpu)
    layer.raise_if_late()
    errors = _errors(layer)
    emit("errors", errors)
    if not max(errors.values()) <= MOST_ERROR:
        raise RuntimeError(f"two ranks do not compute what one call does: {errors}")
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
    emit("counts", {name: count / num_layers / 2 for name, count in counts(events).items()})
    emit("kernels", longest(events, 2 * num_layers))
    layer.raise_if_late()


def _errors(layer: Layer) -> dict[str, float]:
    """Norm of the difference between both ranks' results and undivided attention's, over the latter's norm."""
    results = [torch.cat(column).double() for column in zip(*layer(), strict=True)]
    wanted = [x.double() for x in layer.undivided()]
    names = ("out", "lse", "dq", "dk", "dv")
    return {name: float((x - y).norm() / y.norm()) for name, x, y in zip(names, results, wanted, strict=True)}


def _synchronise(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _host_milliseconds(layer: Callable[[], object], on_gpu: bool) -> float:
    """What it takes the host to launch a layer while the device is idle at first."""
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
    return None if before is None else torch.cuda.memory_stats()["num_device_alloc"] - before


def _synchronisation_warnings(layer: Callable[[], object]) -> list[str]:
    """What torch says of operations of one layer that wait for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            layer()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return [f"{w.filename}:{w.lineno}: {w.message}" for w in caught if "called a synchronizing" in str(w.message)]


def trace(layer: Callable[[], object], num_layers: int, on_gpu: bool) -> list[Event]:
    """Events of so many layers, of which each is in a span."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        layer()  # outside of spans: the profiler itself begins
        _synchronise(on_gpu)
        for _ in range(num_layers):
            with record_function(SPAN):
                layer()
        _synchronise(on_gpu)
    return [
        Event(e.name, e.device_type == DeviceType.CUDA, e.time_range.start, e.time_range.end)
        for e in profiler.events() or ()
    ]
