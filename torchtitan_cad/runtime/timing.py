# SPDX-License-Identifier: BSD-3-Clause
"""Timing calls on a device: by events on a GPU, by the clock elsewhere."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

WARM_UP = 2
"""calls before the timed calls"""

_GATE_CYCLES = 1_000_000
"""cycles: a GPU is kept busy for 0.5 ms while the host enqueues the timed call, so that host time does not count."""


class Timing(NamedTuple):
    """Time of repeated calls: the median in milliseconds, and interquartile range / median."""

    milliseconds: float
    spread: float


def time_calls(run: Callable[[], object], device: torch.device, repeats: int) -> Timing:
    """Time ``repeats`` calls: device time on a GPU and wall-clock elsewhere."""
    for _ in range(WARM_UP):
        run()
    measure = _event_milliseconds if device.type == "cuda" else _clock_milliseconds
    low, median, high = np.percentile(
        [measure(run, device) for _ in range(repeats)], (25, 50, 75)
    ).tolist()
    return Timing(median, (high - low) / median if median else 0.0)


def median_milliseconds(
    run: Callable[[], object], device: torch.device, repeats: int
) -> float:
    """Return the median of ``time_calls``."""
    return time_calls(run, device, repeats).milliseconds


def _clock_milliseconds(run: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def _event_milliseconds(run: Callable[[], object], device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        torch.cuda._sleep(_GATE_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; for a CPU the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
