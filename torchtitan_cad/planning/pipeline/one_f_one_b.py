# SPDX-License-Identifier: BSD-3-Clause
"""The time of 1F1B, and good orders and profiles of microbatches of unequal attention.

A microbatch with much attention makes all stages wait for its results, one after the other. They wait least if they
have other long work meanwhile: if its neighbours have much attention, too. The first and the last microbatches, by
which the pipeline fills and drains, then have little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray

BACKWARD_LINEAR = 2.0
BACKWARD_ATTENTION = 2.5
"""Operations of the backward over those of the forward."""


def one_f_one_b(
    stages: int, forward: Any, backward: Any, together: Sequence[bool] = ()
) -> float:
    """Return the time of stock 1F1B over equal ``stages``, in which a pass begins as soon as what it needs is there.

    Args:
        forward, backward: times of every microbatch on one stage, a number or [ranks].
        together: whether the ranks of a stage begin and end a microbatch together; by default none does.
    """
    count = len(forward)
    both = np.array([forward, backward], dtype=np.float64)
    times = both.reshape(2, count, -1)
    ends = _ends(stages, times, together or [False] * count)
    return float(ends.max())


def _ends(stages: int, times: FloatArray, together: Sequence[bool]) -> FloatArray:
    """Return [ranks] the ends of 1F1B on the first stage, for ``times`` [2, microbatches, ranks] of both ways.

    If all passes took one tick, stage s would run forward m in tick s + 2 m, and backward m in tick 2 S - 1 - s + 2 m.
    So what a pass needs comes in an earlier tick, and a stage runs its passes in the order of 1F1B.
    """
    count = len(together)
    ranks = times.shape[2]
    free = np.zeros((stages, ranks))
    # on the last stage that has run the pass
    ends = np.zeros_like(times)
    ticks = 2 * (stages + count - 1)
    for tick in range(ticks):
        for stage in range(stages):
            way = (tick - stage) % 2
            first_tick = stage
            if way:
                first_tick = 2 * stages - 1 - stage
            m = (tick - first_tick) // 2
            if not 0 <= m < count:
                continue
            seconds = times[way, m]
            begin = np.maximum(free[stage], ends[way, m])
            end = begin + seconds
            if together[m]:
                end[:] = begin.max() + seconds.max()
            free[stage] = end
            ends[way, m] = end
    return free[0]


def in_stages(attention: FloatArray, stages: int, linear: float = 0.0) -> float:
    """Return the time in which microbatches pass through a pipeline's ``stages``, their sum if there is one.

    Args:
        attention: [microbatches] times on a stage, forward and backward together, in the order in which they run.
        linear: what every microbatch's linear work takes besides.
    """
    in_one_order = attention[:, np.newaxis]
    seconds = _in_orders(in_one_order, stages, linear)
    return float(seconds[0])


def _in_orders(attention: FloatArray, stages: int, linear: float) -> FloatArray:
    """Return [orders] the ``in_stages`` of attention [microbatches, orders]."""
    forward_linear = linear / (1 + BACKWARD_LINEAR)
    forward = forward_linear + attention / (1 + BACKWARD_ATTENTION)
    backward = linear + attention - forward
    times = np.stack([forward, backward])
    by_themselves = [False] * len(attention)
    return _ends(stages, times, by_themselves)


def best_order(attention: FloatArray, stages: int, linear: float = 0.0) -> IntArray:
    """Return an order of the microbatches in which they take little time; arguments as for ``in_stages``.

    It is the order as it is, or work rises and falls from one of the microbatches on, round the end.
    """
    as_is = np.arange(len(attention))
    if stages == 1:
        return as_is
    ascending = np.argsort(attention, kind="stable")
    rising = ascending[::2]
    falling = ascending[1::2][::-1]
    light_ends = np.append(rising, falling)
    rotated = [np.roll(light_ends, shift) for shift in as_is]
    orders = np.stack([as_is, *rotated])
    in_orders = attention[orders].T
    seconds = _in_orders(in_orders, stages, linear)
    fastest = int(seconds.argmin())
    return orders[fastest]


def ramps(microbatches: int, stages: int) -> FloatArray:
    """Return [microbatches] attention over the mean one's: 0 at the ends, rising and falling over 0.75 x ``stages``."""
    number = np.arange(microbatches)
    from_end = np.minimum(number, number[::-1])
    ramp = np.minimum(from_end, 0.75 * stages)
    if not ramp.any():
        return np.ones(microbatches)
    return ramp / ramp.mean()
