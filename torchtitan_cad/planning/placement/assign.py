# SPDX-License-Identifier: BSD-3-Clause
"""Cut long documents into chunks, and assign chunks and short documents to ranks by their work."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.placement.state import (
    CAPACITY,
    CHUNK_DOC,
    COUNT,
    GRID,
    LENGTH,
    LOAD,
    START,
    TILE,
    WORK,
    State,
    append,
    begin,
    give,
    link,
    resize,
    work_of,
)
from torchtitan_cad.planning.sorting import pop, push

MOST_CHUNKS = 12
"""chunks: maximum per rank."""


@jit_inner
def cut(
    state: State, doc: int, length: int, most_work: float, shortest: int, longest: int
) -> None:
    """Cut a document into chunks of ``shortest`` to ``longest`` tokens and at most ``most_work``, where possible."""
    prefix = state.prefix
    tile = state.sizes[TILE]
    grid = state.sizes[GRID]
    start = 0
    before = len(state.ints) - 1
    while start < length:
        tokens = shortest
        while (
            tokens < longest
            and work_of(prefix, tile, start, min(length, start + tokens + grid))
            <= most_work
        ):
            tokens += grid
        if length - start - tokens < shortest // 2 and length - start <= longest:
            tokens = length - start
        tokens = min(tokens, length - start)
        before = append(state, doc, start, tokens, before)
        link(state, before)
        start += tokens


@jit
def cut_long(
    state: State,
    capacities: IntArray,
    long: IntArray,
    lengths: IntArray,
    most_work: float,
    shortest: int,
    longest: int,
) -> None:
    """Empty the state for ranks with ``capacities`` [num_ranks], and cut the documents ``long`` [n] of ``lengths``
    [n]."""
    begin(state, capacities)
    for i in range(len(long)):
        cut(state, long[i], lengths[i], most_work, shortest, longest)


def by_work(state: State) -> IntArray:
    """Return the rows of all chunks in descending order of work."""
    first = len(state.limit)
    return first + np.argsort(
        -state.reals[first : state.ints[-1, COUNT], WORK], kind="stable"
    )


@jit_inner
def assign_chunks(
    state: State, order: IntArray, heap: IntArray, time: FloatArray
) -> None:
    """Assign the chunks of ``order`` one by one, each to the rank of least time.

    A chunk that does not fit is cut, and its rest goes to the next rank. Chunks that no rank can take, because all are
    full or have ``MOST_CHUNKS``, keep the rank -1.

    Args:
        heap: [num_ranks] scratch.
        time: [num_ranks] load of every rank, updated.
    """
    grid = state.sizes[GRID]
    size = 0
    for rank in range(len(heap)):
        size = push(heap, size, time, rank)
    for i in order:
        while size > 0:
            rank = pop(heap, size, time)
            size -= 1
            start = state.ints[i, START]
            length = state.ints[i, LENGTH]
            part = min(length, state.ints[rank, CAPACITY] // grid * grid)
            if part <= 0:
                continue
            resize(state, i, start, start + part)
            give(state, i, rank)
            time[rank] = state.reals[rank, LOAD]
            if state.ints[rank, COUNT] < MOST_CHUNKS:
                size = push(heap, size, time, rank)
            if part == length:
                break
            i = append(state, state.ints[i, CHUNK_DOC], start + part, length - part, i)
            link(state, i)


@jit
def assign_short(
    state: State, lengths: IntArray, home: IntArray, heap: IntArray, time: FloatArray
) -> None:
    """Assign whole documents of descending ``lengths`` [n], each to the rank of least time.

    A rank on which a document does not fit gets no more documents. ``home`` [n] is set to the rank, or -1.
    """
    size = 0
    for rank in range(len(heap)):
        if state.ints[rank, CAPACITY] > 0:
            size = push(heap, size, time, rank)
    for number in range(len(lengths)):
        home[number] = -1
        while size > 0 and home[number] < 0:
            rank = pop(heap, size, time)
            size -= 1
            if state.ints[rank, CAPACITY] >= lengths[number]:
                work = work_of(state.prefix, state.sizes[TILE], 0, lengths[number])
                home[number] = rank
                state.ints[rank, CAPACITY] -= lengths[number]
                time[rank] += work
                size = push(heap, size, time, rank)
