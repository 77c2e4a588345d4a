# SPDX-License-Identifier: BSD-3-Clause
"""The search for an assignment of few bytes, by threshold accepting.

A move is undone if it raises the objective by more than a threshold, which falls linearly to 0.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.placement.assign import assign_chunks
from torchtitan_cad.planning.placement.estimate import (
    choose,
    estimate,
    read_by,
    worst_rank,
)
from torchtitan_cad.planning.placement.moves import random, relocate, shift, swap
from torchtitan_cad.planning.placement.state import (
    COUNT,
    HELP,
    HELPERS_IN,
    LOAD,
    NEXT_CHUNK,
    RANK,
    TYPICAL,
    State,
    start_move,
    touch,
    undo,
    unlink,
)


@jit
def begin_search(
    state: State, order: IntArray, heap: IntArray, time: FloatArray
) -> float:
    """Assign chunks as ``assign_chunks`` and return the objective; those left over leave their documents' lists."""
    assign_chunks(state, order, heap, time)
    first = len(state.limit)
    end = len(state.ints) - 1
    slack = 0.0
    roots = 0.0
    for rank in range(first):
        capacity = max(0.0, state.limit[rank] - state.reals[rank, LOAD])
        slack += capacity
        roots += np.sqrt(capacity)
    state.prices[TYPICAL] = (slack / roots) ** 2 if roots > 0 else 1.0
    for i in range(first, state.ints[end, COUNT]):
        if state.ints[i, RANK] < 0:
            unlink(state, i)
    for i in range(first, state.ints[end, COUNT]):
        if state.ints[i, RANK] >= 0:
            read_by(state, i, 1.0, 0.0, 0.0)
    for rank in range(first):
        choose(state, rank, -1, -1)
    return _estimate_anew(state)


@jit_inner
def _estimate_anew(state: State) -> float:
    """Return the objective after updating the price HELP to what the ranks offload now."""
    helped = 0.0
    roots = 0.0
    start_move(state)
    for rank in range(len(state.limit)):
        touch(state, rank)
        helped += state.reals[rank, HELPERS_IN]
        roots += np.sqrt(max(0.0, state.limit[rank] - state.reals[rank, LOAD]))
    state.prices[HELP] = helped / max(1e-9, roots)
    return estimate(state)


@jit_inner
def _random_chunk(state: State, numbers: IntArray, rank: int) -> int:
    """Return a random chunk of a rank; the end row if it has none."""
    i = state.ints[rank, NEXT_CHUNK]
    count = state.ints[rank, COUNT]
    for _ in range(random(numbers, count) if count > 0 else 0):
        i = state.ints[i, NEXT_CHUNK]
    return i


@jit
def improve(state: State, rise: float, tries: int, numbers: IntArray) -> None:
    """Try ``tries`` moves, half of them with chunks of the worst rank.

    Args:
        rise: initial threshold / objective.
        numbers: [1] state of the pseudo-random numbers.
    """
    first = len(state.limit)
    end = len(state.ints) - 1
    worst = -1
    best = _estimate_anew(state)
    accepted = 0
    rise *= best
    for number in range(tries):
        i = first + random(numbers, state.ints[end, COUNT] - first)
        if number % 2 == 0:
            worst = worst_rank(state) if worst < 0 else worst
            i = _random_chunk(state, numbers, worst)
        if i == end or state.ints[i, RANK] < 0:
            continue
        start_move(state)
        kind = random(numbers, 5)
        if kind == 0:
            is_made = swap(state, i, numbers)
        elif kind <= 2:
            is_made = relocate(state, i, numbers)
        else:
            is_made = shift(state, i, numbers)
        if not is_made:
            continue
        objective = estimate(state)
        if objective < best + rise * (tries - number) / tries:
            best = objective
            worst = -1
            accepted = accepted + 1
            if accepted % first == 0:
                best = _estimate_anew(state)
        else:
            undo(state)
    _estimate_anew(state)
