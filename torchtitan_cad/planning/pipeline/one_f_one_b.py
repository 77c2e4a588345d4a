# SPDX-License-Identifier: BSD-3-Clause
"""The time of 1F1B, and how microbatches of unequal attention are best ordered and filled for it.

A microbatch with much attention makes all stages wait for its results, one after the other. They wait least if they
have other long work meanwhile: if its neighbours have much attention, too. The first and the last microbatches, by
which the pipeline fills and drains, then have little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.placement.home_search import random

BACKWARD_LINEAR = 2.0
BACKWARD_ATTENTION = 2.5
"""Operations of the backward over those of the forward."""
TRIES = 125
"""changes that a search for the order, or the profile, of a step's microbatches tries for each of them"""

# Rows of the table of microbatches: linear work, attention that stays, and attention that may move.
LINEAR, FIXED, LOOSE = range(3)


def one_f_one_b(
    stages: int, forward: Any, backward: Any, together: Sequence[bool] | None = None
) -> float:
    """Return the time of stock 1F1B over equal ``stages``, in which a pass begins as soon as what it needs is there.

    Args:
        forward, backward: times of every microbatch on one stage, a number or [ranks].
        together: whether the ranks of a stage begin and end a microbatch together; by default none does.
    """
    times = np.stack(
        [
            np.array(seconds, dtype=np.float64).reshape(len(seconds), -1)
            for seconds in (forward, backward)
        ]
    )
    scratch = _scratch(stages, *times.shape[1:])
    if together is not None:
        scratch[0][:] = together
    return float(run(times, *scratch))


def in_stages(attention: FloatArray, stages: int, linear: float = 0.0) -> float:
    """Return the time in which microbatches pass through a pipeline's ``stages``, their sum if there is one.

    Args:
        attention: [microbatches] times on a stage, forward and backward together, in the order in which they run.
        linear: what every microbatch's linear work takes besides.
    """
    forward = linear / (1 + BACKWARD_LINEAR) + attention / (1 + BACKWARD_ATTENTION)
    return one_f_one_b(stages, forward, linear + attention - forward)


def best_order(attention: FloatArray, stages: int, linear: float = 0.0) -> IntArray:
    """Return an order of the microbatches in which they take little time; arguments as for ``in_stages``."""
    as_is = np.arange(len(attention))
    order = light_ends(attention)
    if stages == 1:
        return as_is
    improved = order[_improved(attention[order], 0.0, stages, linear)[1]]

    def seconds(order: IntArray) -> float:
        return in_stages(attention[order], stages, linear)

    return min(as_is, improved, key=seconds)


def best_profile(
    documents: FloatArray, microbatches: int, stages: int, linear: float
) -> FloatArray:
    """Return [microbatches] the attention with which they would take little time, in the order in which they run.

    Args:
        documents: time of every document's attention. Where it is more than the mean microbatch's, it stays together;
            all other attention is divided at will, although not every microbatch's tokens could have so much.
        linear: time of a microbatch's linear work.
    """
    mean = documents.sum() / microbatches
    fixed = np.zeros(microbatches)
    long = documents[documents > mean]
    fixed[: len(long)] = long
    return _improved(fixed[light_ends(fixed)], mean - fixed.mean(), stages, linear)[0]


def light_ends(work: FloatArray) -> IntArray:
    """Return the order of microbatches, the last axis, that rises to the one with most work and falls after it."""
    order = np.argsort(work, axis=-1, kind="stable")
    return np.concatenate([order[..., ::2], order[..., 1::2][..., ::-1]], axis=-1)


def _improved(
    fixed: FloatArray, loose: float, stages: int, linear: float
) -> tuple[FloatArray, IntArray]:
    """Return the microbatches' attention, of which ``loose`` of each may move, and their numbers in ``fixed``."""
    order = np.arange(len(fixed))
    numbers = np.zeros(1, dtype=np.int64)
    table = np.stack([np.full(len(fixed), linear), fixed, np.full(len(fixed), loose)])
    improve(
        table,
        order,
        numbers,
        np.zeros((2, len(fixed), 1)),
        _scratch(stages, len(fixed), 1),
    )
    return table[FIXED] + table[LOOSE], order


def _scratch(
    stages: int, count: int, ranks: int
) -> tuple[IntArray, FloatArray, FloatArray, IntArray]:
    """Return whether the ranks meet in each microbatch (none), and the other arguments of ``run``."""
    return (
        np.zeros(count, dtype=np.int64),
        np.zeros((2, stages, count, ranks)),
        np.zeros((stages, ranks)),
        np.zeros(stages, dtype=np.int64),
    )


@jit
def run(
    times: FloatArray, meets: IntArray, ends: FloatArray, free: FloatArray, at: IntArray
) -> float:
    """Return the time of 1F1B for ``times`` [2, microbatches, ranks], forward and backward.

    Scratch: the ends of all passes, -1 before; when stages are free; their passes so far.
    """
    stages = ends.shape[1]
    count = ends.shape[2]
    ranks = ends.shape[3]
    for stage in range(stages):
        at[stage] = 0
        for rank in range(ranks):
            free[stage, rank] = 0.0
        for m in range(count):
            ends[0, stage, m, 0] = -1.0
            ends[1, stage, m, 0] = -1.0
    left = 2 * stages * count
    while left > 0:
        for stage in range(stages):
            ahead = min(count, stages - stage)
            while at[stage] < 2 * count:
                # a stage runs ``ahead`` forwards, then backward and forward in turn
                done = at[stage] - ahead
                m = at[stage]
                way = 0
                if done >= 2 * (count - ahead):
                    m = done - (count - ahead)
                    way = 1
                elif done >= 0:
                    m = done // 2 + ahead * (done % 2)
                    way = 1 - done % 2
                before = stage - 1 + 2 * way
                if 0 <= before < stages and ends[way, before, m, 0] < 0:
                    break
                start = 0.0
                longest = 0.0
                for rank in range(ranks):
                    if 0 <= before < stages:
                        free[stage, rank] = max(
                            free[stage, rank], ends[way, before, m, rank]
                        )
                    start = max(start, free[stage, rank])
                    longest = max(longest, times[way, m, rank])
                for rank in range(ranks):
                    alone = free[stage, rank] + times[way, m, rank]
                    free[stage, rank] = ends[way, stage, m, rank] = (
                        start + longest if meets[m] != 0 else alone
                    )
                at[stage] += 1
                left -= 1
    latest = 0.0
    for rank in range(ranks):
        latest = max(latest, free[0, rank])  # the first stage has the last backward
    return latest


@jit_inner
def _change(table: FloatArray, order: IntArray, i: int, j: int, part: float) -> None:
    """Move the ``part`` of attention from one microbatch to another, or swap them if it is 0."""
    if part != 0:
        table[LOOSE, i], table[LOOSE, j] = (
            table[LOOSE, i] - part,
            table[LOOSE, j] + part,
        )
        return
    for row in range(len(table)):
        table[row, i], table[row, j] = table[row, j], table[row, i]
    order[i], order[j] = order[j], order[i]


@jit
def improve(
    table: FloatArray,
    order: IntArray,
    numbers: IntArray,
    times: FloatArray,
    scratch: Any,
) -> None:
    """Swap microbatches, with their numbers in ``order``, and move loose attention, for the least time of 1F1B.

    ``numbers`` is the state of the random numbers, ``scratch`` are the other arguments of ``run``.
    """
    meets, ends, free, at = scratch
    count = table.shape[1]
    best = np.inf
    for number in range(TRIES * count):
        i = random(numbers, count)
        j = random(numbers, count)
        part = table[LOOSE, i] * random(numbers, 257) / 256 * random(numbers, 2)
        if i == j:
            part = 0.0
        if number > 0:
            _change(table, order, i, j, part)
        for m in range(count):
            linear = table[LINEAR, m]
            attention = table[FIXED, m] + table[LOOSE, m]
            times[0, m, 0] = linear / (1 + BACKWARD_LINEAR) + attention / (
                1 + BACKWARD_ATTENTION
            )
            times[1, m, 0] = linear + attention - times[0, m, 0]
        time = run(times, meets, ends, free, at)
        if time <= best:
            best = time
        else:
            _change(table, order, i, j, -part)
