# SPDX-License-Identifier: BSD-3-Clause
"""Moves of the search for homes: swap two chunks, relocate a chunk or its first tokens, shift a boundary.

Each function draws a move of chunk ``i`` and carries it out. It returns False, without any change, if that move is not
possible.
"""

from __future__ import annotations

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.placement.assign import MOST_CHUNKS
from torchtitan_cad.planning.placement.estimate import attach, choose, detach
from torchtitan_cad.planning.placement.state import (
    BEHIND,
    CAPACITY,
    CHUNK_DOC,
    COUNT,
    GRID,
    LEAST_CHUNK,
    LENGTH,
    RANK,
    START,
    State,
    append,
    give,
    resize,
    take,
)


@jit_inner
def random(state: IntArray, below: int) -> int:
    """Return the next pseudo-random number in [0, ``below``), ``below`` at most 2^31; updates ``state`` [1]."""
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return (state[0] >> 8) * below >> 23


@jit_inner
def _settle(state: State, i: int, j: int, one: int, other: int) -> None:
    """End a move between two ranks: choose what they offload, and attach the chunks ``i`` and ``j``, -1 for none."""
    choose(state, one, i, j)
    choose(state, other, i, j)
    attach(state, i)
    if j >= 0:
        attach(state, j)


@jit_inner
def swap(state: State, i: int, numbers: IntArray) -> bool:
    """Exchange the ranks of a chunk and a random other one."""
    ints = state.ints
    first = len(state.limit)
    j = first + random(numbers, ints[len(ints) - 1, COUNT] - first)
    one = ints[i, RANK]
    other = ints[j, RANK]
    more = ints[i, LENGTH] - ints[j, LENGTH]
    if (
        other < 0
        or other == one
        or ints[other, CAPACITY] < more
        or ints[one, CAPACITY] < -more
    ):
        return False
    if ints[one, COUNT] == ints[other, COUNT] == 1:
        return False  # the same as exchanging the ranks' numbers
    detach(state, j)
    detach(state, i)
    take(state, i)
    take(state, j)
    give(state, i, other)
    give(state, j, one)
    _settle(state, i, j, one, other)
    return True


@jit_inner
def relocate(state: State, i: int, numbers: IntArray) -> bool:
    """Give a chunk, or its first tokens, to a random other rank."""
    ints = state.ints
    end = len(state.ints) - 1
    one = ints[i, RANK]
    other = random(numbers, len(state.limit))
    splits = random(numbers, 2) == 1
    start = ints[i, START]
    tokens = ints[i, LENGTH]
    least = state.sizes[LEAST_CHUNK]
    grid = state.sizes[GRID]
    if other == one or ints[other, COUNT] >= MOST_CHUNKS:
        return False
    if splits:
        cells = (min(ints[other, CAPACITY], tokens - least) - least) // grid + 1
        if cells <= 0 or ints[end, COUNT] == end or ints[one, COUNT] >= MOST_CHUNKS:
            return False
        tokens = least + random(numbers, cells) * grid
    elif ints[other, CAPACITY] < tokens or (
        ints[one, COUNT] == 1 and ints[other, COUNT] == 0
    ):
        return False  # no capacity, or the same as exchanging the ranks' numbers
    detach(state, i)
    take(state, i)
    rest = -1
    if splits:
        rest = append(
            state, ints[i, CHUNK_DOC], start + tokens, ints[i, LENGTH] - tokens, i
        )
        resize(state, i, start, start + tokens)
        give(state, rest, one)
    give(state, i, other)
    _settle(state, i, rest, one, other)
    return True


@jit_inner
def shift(state: State, i: int, numbers: IntArray) -> bool:
    """Shift the boundary with the next chunk of the document, or join that chunk."""
    ints = state.ints
    grid = state.sizes[GRID]
    j = ints[i, BEHIND]
    start = ints[i, START]
    middle = start + ints[i, LENGTH]
    joins = random(numbers, 2) == 1
    one = ints[i, RANK]
    other = ints[j, RANK]
    if j == len(ints) - 1 or ints[j, START] != middle or one == other:
        return False
    end = middle + ints[j, LENGTH]
    cut = (
        end
        if joins
        else middle
        + (random(numbers, 33) - 16) * max(1, ints[i, LENGTH] // (40 * grid)) * grid
    )
    if cut == middle or cut - start < grid or (end - cut < grid and not joins):
        return False
    if ints[one, CAPACITY] < cut - middle or ints[other, CAPACITY] < middle - cut:
        return False
    detach(state, j)
    detach(state, i)
    take(state, i)
    take(state, j)
    resize(state, i, start, cut)
    resize(state, j, cut, end)
    give(state, i, one)
    if not joins:
        give(state, j, other)
    _settle(state, i, -1 if joins else j, one, other)
    return True
