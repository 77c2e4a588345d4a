"""Duration of a pipeline for given times of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_cad.planning.pipeline.ticks import tick_schedule

PoolKey = tuple[int, ...]
"""Microbatches that run together in a tick, ascending."""


def one_f_one_b(pp: int, forward: Sequence[float], backward: Sequence[float]) -> float:
    """Return the seconds of 1F1B over ``pp`` equal stages; times are those of every microbatch on one stage."""
    if pp == 1:
        return sum(forward) + sum(backward)
    num = len(forward)
    ready: dict[tuple[bool, int, int], float] = {}
    free, at = [0.0] * pp, [0] * pp
    orders = [_order(num, min(num, pp - stage)) for stage in range(pp)]
    while any(at[stage] < len(orders[stage]) for stage in range(pp)):
        for stage in range(pp):
            while at[stage] < len(orders[stage]):
                is_forward, m = orders[stage][at[stage]]
                before = (is_forward, stage - 1 if is_forward else stage + 1, m)
                if 0 <= before[1] < pp and before not in ready:
                    break
                start = max(free[stage], ready.get(before, 0.0))
                free[stage] = ready[is_forward, stage, m] = start + (forward if is_forward else backward)[m]
                at[stage] += 1
    return max(free)


def _order(num: int, ahead: int) -> list[tuple[bool, int]]:
    """(forward or backward, microbatch) of a stage that runs ``ahead`` forwards first."""
    order = [(True, m) for m in range(ahead)]
    for m in range(num):
        order.append((False, m))
        if ahead + m < num:
            order.append((True, ahead + m))
    return order


def tick_pools(pp: int, microbatches: int) -> list[tuple[bool, PoolKey]]:
    """Return (forward or backward, pool) of every tick of the schedule in ticks."""
    return [
        (tick.forward, tuple(sorted(work.microbatch for work in tick.work if work)))
        for tick in tick_schedule(pp, microbatches)
    ]
