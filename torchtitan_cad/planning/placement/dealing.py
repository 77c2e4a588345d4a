"""Dealing documents to ranks: chunks of the long ones by attention, the short ones whole.

A *chunk* is a part of a long document, or the whole of one that is not cut. The numbers of ``Chunks`` and ``Ranks`` are
those that ``estimate.py`` estimates bytes from.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.sorting import pop, push

NEAR = 0.5
"""By how many mean loads a rank of the node of a document may have more than the one of least load elsewhere."""

MOST_CHUNKS = 12
"""Chunks of a rank, at most, unless the room of others does not suffice."""


BLOCK = 32
"""Ranks of which the least time is known, so that most ranks are not looked at."""


class Ranks(NamedTuple):
    """Limits of the ranks. All [num_ranks].

    ``room`` tokens, ``limit`` load, ``speed`` relative, ``node`` number.
    """

    room: IntArray
    limit: FloatArray
    speed: FloatArray
    node: IntArray


class Chunks(NamedTuple):
    """Chunks by (document, start): index of the document, first token, tokens, work, and rank, -1 for none. All [n]."""

    doc: IntArray
    start: IntArray
    length: IntArray
    work: FloatArray
    rank: IntArray


class State(NamedTuple):
    """Tokens and work dealt so far, and scratch. All [num_ranks], but for the last.

    ``left`` tokens of room, ``load``, ``time`` (load over speed), ``chunks`` had, and a ``heap`` of ranks; the
    ``least`` time of each BLOCK of ranks.
    """

    left: IntArray
    load: FloatArray
    time: FloatArray
    chunks: IntArray
    heap: IntArray
    least: FloatArray


@jit_leaf
def work_of(prefix: FloatArray, tile: int, start: int, end: int) -> float:
    """Return the work of queries [start, end) of a document against all keys before them."""
    return prefix[-(-end // tile)] - prefix[start // tile]


@jit_leaf
def cut_document(
    prefix: FloatArray, units: IntArray, doc: int, length: int, most_work: float, chunks: Chunks, count: int
) -> int:
    """Append chunks of at most ``most_work``, but of no fewer than the least tokens; returns the new count.

    ``units`` are (tile, grid, least, most): tokens of a tile, cuts at multiples of grid, tokens of a chunk.
    """
    tile, grid, least, most = units[0], units[1], units[2], units[3]
    start = 0
    while start < length:
        target = prefix[start // tile] + most_work
        low, high = start // tile, -(-length // tile)
        while low < high:
            middle = (low + high + 1) // 2
            if prefix[middle] <= target:
                low = middle
            else:
                high = middle - 1
        tokens = min(most, max(least, (low * tile - start) // grid * grid))
        if length - start - tokens < least // 2 and length - start <= most:
            tokens = length - start
        tokens = min(tokens, length - start)
        chunks.doc[count], chunks.start[count], chunks.length[count] = doc, start, tokens
        chunks.work[count] = work_of(prefix, tile, start, start + tokens)
        start += tokens
        count += 1
    return count


@jit_leaf
def give(state: State, ranks: Ranks, rank: int, tokens: int, work: float) -> None:
    """Book tokens and their work on a rank."""
    state.left[rank] -= tokens
    state.load[rank] += work
    state.time[rank] = state.load[rank] / ranks.speed[rank]


@jit_leaf
def start_over(density: float, ranks: Ranks, state: State) -> None:
    """Take back all that was dealt, and expect ``density`` work per token of room."""
    for rank in range(len(ranks.room)):
        state.left[rank], state.load[rank], state.chunks[rank] = 0, 0.0, 0
        give(state, ranks, rank, -ranks.room[rank], density * ranks.room[rank])


@jit_leaf
def _is_open(state: State, rank: int, grid: int) -> bool:
    """Tell whether the rank may have another chunk."""
    return state.left[rank] >= grid and state.chunks[rank] < MOST_CHUNKS


@jit_leaf
def _note_least(state: State, rank: int, grid: int) -> None:
    """Note the least time of the ranks of that rank's block that may have another chunk."""
    block = rank // BLOCK
    state.least[block] = np.inf
    for other in range(block * BLOCK, min(block * BLOCK + BLOCK, len(state.left))):
        if _is_open(state, other, grid):
            state.least[block] = min(state.least[block], state.time[other])


@jit_leaf
def deal_chunks(
    chunks: Chunks,
    count: int,
    order: IntArray,
    prefix: FloatArray,
    units: IntArray,
    density: float,
    ranks: Ranks,
    state: State,
    nodes: IntArray,
) -> int:
    """Give the chunks, in ``order``, each to the rank of least time that has room for it; returns the new count.

    Where no rank has room for the whole, as much as fits goes to the one with most, and the rest is a new chunk; what
    is less than a grid cell remains without a rank. Chunks of a document stay in the node of its heaviest, ``nodes``
    [documents], where that costs little time.
    """
    tile, grid = units[0], units[1]
    start_over(density, ranks, state)
    for rank in range(0, len(ranks.room), BLOCK):
        _note_least(state, rank, grid)
    nodes[:] = -1
    mean = state.load.mean()
    for number in range(len(order)):
        mean += chunks.work[order[number]] / len(ranks.room)
    for number in range(len(order)):
        i = order[number]
        while True:
            found, least, part = -1, np.inf, chunks.length[i]
            node = nodes[chunks.doc[i]]
            for block in range(0, len(ranks.room), BLOCK):
                if state.least[block // BLOCK] >= least:
                    continue
                for rank in range(block, min(block + BLOCK, len(ranks.room))):
                    if state.left[rank] >= part and _is_open(state, rank, grid):
                        time = state.time[rank] + (NEAR * mean if node >= 0 and node != ranks.node[rank] else 0.0)
                        if time < least:
                            found, least = rank, time
            if found < 0:
                for rank in range(len(ranks.room)):
                    if _is_open(state, rank, grid) and (found < 0 or state.left[rank] > state.left[found]):
                        found = rank
                part = state.left[found] // grid * grid if found >= 0 else part
            chunks.rank[i] = found
            if found < 0:
                break
            nodes[chunks.doc[i]] = ranks.node[found] if node < 0 else node
            rest = chunks.length[i] - part
            start = chunks.start[i]
            chunks.length[i] = part
            chunks.work[i] = work_of(prefix, tile, start, start + part)
            give(state, ranks, found, part, chunks.work[i] - density * part)
            state.chunks[found] += 1
            _note_least(state, found, grid)
            if rest == 0:
                break
            i, count = count, count + 1
            chunks.doc[i], chunks.start[i], chunks.length[i] = chunks.doc[order[number]], start + part, rest
            chunks.work[i] = work_of(prefix, tile, start + part, start + part + rest)
    return count


@jit_leaf
def deal_short(
    docs: IntArray,
    lengths: IntArray,
    prefix: FloatArray,
    units: IntArray,
    density: float,
    ranks: Ranks,
    state: State,
    home: IntArray,
) -> None:
    """Give whole ``docs`` [n], longest first, of ``lengths`` [documents], each to the rank of least time.

    A rank without room for the next one gets no more. ``home`` [documents] becomes the rank, -1 for none.
    """
    size = 0
    for rank in range(len(ranks.room)):
        give(state, ranks, rank, 0, -density * state.left[rank])
        if state.left[rank] > 0:
            size = push(state.heap, size, state.time, rank)
    for number in range(len(docs)):
        doc = docs[number]
        home[doc] = -1
        while size > 0:
            rank = pop(state.heap, size, state.time)
            size -= 1
            if state.left[rank] >= lengths[doc]:
                home[doc] = rank
                give(state, ranks, rank, lengths[doc], work_of(prefix, units[0], 0, lengths[doc]))
                size = push(state.heap, size, state.time, rank)
                break
