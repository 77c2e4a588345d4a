# SPDX-License-Identifier: BSD-3-Clause
"""The time of stock 1F1B, in which every stage runs forward or backward as soon as what it needs is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def one_f_one_b(
    pp: int, forward: Sequence[Any], backward: Sequence[Any], together: Sequence[bool] | None = None
) -> float:
    """Return the seconds of 1F1B over ``pp`` equal stages.

    Args:
        forward, backward: seconds of every microbatch on one stage, a number or [ranks].
        together: whether the ranks of a stage begin and end a microbatch together; by default none does.
    """
    ready: dict[tuple[bool, int, int], Any] = {}
    free: list[Any] = [0.0] * pp
    orders = [_order(len(forward), min(len(forward), pp - stage)) for stage in range(pp)]
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                is_forward, m = order[0]
                before = (is_forward, stage - 1 if is_forward else stage + 1, m)
                if 0 <= before[1] < pp and before not in ready:
                    break
                start = np.maximum(free[stage], ready.get(before, 0.0))
                seconds = (forward if is_forward else backward)[m]
                if together and together[m]:
                    start, seconds = np.max(start), np.max(seconds)
                free[stage] = ready[is_forward, stage, m] = start + seconds
                del order[0]
    return float(np.max([np.max(each) for each in free]))


def _order(num: int, ahead: int) -> list[tuple[bool, int]]:
    """(forward or backward, microbatch) of a stage that runs ``ahead`` forwards first."""
    order = [(True, m) for m in range(ahead)]
    for m in range(num):
        order.append((False, m))
        if ahead + m < num:
            order.append((True, ahead + m))
    return order
