# SPDX-License-Identifier: BSD-3-Clause
"""Timing calls on a device: by events on a GPU, by the clock elsewhere."""

import time
from collections.abc import Callable

import numpy as np
import torch

WARM_UP = 2
"""calls before the timed calls"""

_GATE_CYCLES = 1_000_000
"""cycles: a GPU is kept busy for 0.5 ms while the host enqueues the timed call, so that host time does not count."""


def median_milliseconds(
    run: Callable[[], object], device: torch.device, repeats: int
) -> float:
    """Return the median time of ``repeats`` calls: device time on a GPU and wall-clock elsewhere."""
    for _ in range(WARM_UP):
        run()
    measure = _event_milliseconds if device.type == "cuda" else _clock_milliseconds
    return float(np.median([measure(run, device) for _ in range(repeats)]))


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
