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

TIME, ROOM = range(2)
"""Columns of the tree."""

MOST_CHUNKS = 12
"""Chunks of a rank, at most, unless the room of others does not suffice."""


class Ranks(NamedTuple):
    """Limits of the ranks. All [num_ranks].

    ``room`` tokens, ``limit`` load, ``speed`` relative.
    """

    room: IntArray
    limit: FloatArray
    speed: FloatArray


class Chunks(NamedTuple):
    """Chunks by (document, start): index of the document, first token, tokens, work, and rank, -1 for none. All [n]."""

    doc: IntArray
    start: IntArray
    length: IntArray
    work: FloatArray
    rank: IntArray


class State(NamedTuple):
    """Tokens and work dealt so far, and scratch. All [num_ranks], but for the last.

    ``left`` tokens of room, ``load``, ``time`` (load over speed), ``chunks`` had, and a ``heap`` of ranks. A binary
    ``tree``, [nodes, 2], has the least time and the most room of the ranks below a node; 2 and 3 are below node 1.
    """

    left: IntArray
    load: FloatArray
    time: FloatArray
    chunks: IntArray
    heap: IntArray
    tree: FloatArray


def make_state(num_ranks: int) -> State:
    """Return a state of so many ranks, to be begun with ``start_over``."""
    left, chunks, heap = np.zeros((3, num_ranks), dtype=np.int64)
    load, time = np.zeros((2, num_ranks))
    return State(left, load, time, chunks, heap, np.zeros((2 << (num_ranks - 1).bit_length(), 2)))


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
def take_up(chunks: Chunks, count: int, density: float, ranks: Ranks, state: State) -> None:
    """Book chunks that are dealt already."""
    start_over(density, ranks, state)
    for i in range(count):
        if chunks.rank[i] >= 0:
            give(state, ranks, chunks.rank[i], chunks.length[i], chunks.work[i] - density * chunks.length[i])
            state.chunks[chunks.rank[i]] += 1


@jit_leaf
def _join(tree: FloatArray, node: int) -> None:
    """Set the figures of a node of the tree by those of both below it."""
    tree[node, TIME] = min(tree[2 * node, TIME], tree[2 * node + 1, TIME])
    tree[node, ROOM] = max(tree[2 * node, ROOM], tree[2 * node + 1, ROOM])


@jit_leaf
def _note(state: State, rank: int, grid: int) -> int:
    """Set the figures of a rank in the tree: none, unless it may have another chunk; returns its node."""
    is_open = state.left[rank] >= grid and state.chunks[rank] < MOST_CHUNKS
    node = len(state.tree) // 2 + rank
    state.tree[node, TIME] = state.time[rank] if is_open else np.inf
    state.tree[node, ROOM] = state.left[rank] if is_open else -1.0
    return node


@jit_leaf
def _find(state: State, tokens: int) -> int:
    """Return the rank of least time that has room for so many tokens; -1 for none."""
    tree, first, found, least, node = state.tree, len(state.tree) // 2, -1, np.inf, 1
    while node < first:  # most often the rank of least time has room
        node = 2 * node if tree[2 * node, TIME] <= tree[2 * node + 1, TIME] else 2 * node + 1
    if tree[node, TIME] == np.inf or tree[node, ROOM] >= tokens:
        return node - first if tree[node, TIME] < np.inf else -1
    node = 1
    while True:
        if tree[node, TIME] < least and tree[node, ROOM] >= tokens:
            if node < first:
                node *= 2
                continue
            found, least = node - first, tree[node, TIME]
        while node % 2 == 1:
            if node == 1:
                return found
            node //= 2
        node += 1


@jit_leaf
def _roomiest(state: State) -> int:
    """Return the rank of most room of those that may have another chunk; -1 for none."""
    first, node = len(state.tree) // 2, 1
    while node < first:
        node = 2 * node if state.tree[2 * node, ROOM] >= state.tree[2 * node + 1, ROOM] else 2 * node + 1
    return node - first if state.tree[node, ROOM] >= 0 else -1


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
) -> int:
    """Give the chunks, in ``order``, each to the rank of least time that has room for it; returns the new count.

    Where no rank has room for the whole, as much as fits goes to the one with most, and the rest is a new chunk; what
    is less than a grid cell remains without a rank.
    """
    tile, grid = units[0], units[1]
    start_over(density, ranks, state)
    state.tree[:, TIME], state.tree[:, ROOM] = np.inf, -1.0
    for rank in range(len(ranks.room)):
        _note(state, rank, grid)
    for node in range(len(state.tree) // 2 - 1, 0, -1):
        _join(state.tree, node)
    for number in range(len(order)):
        i = order[number]
        while True:
            part = chunks.length[i]
            found = _find(state, part)
            if found < 0:
                found = _roomiest(state)
                part = state.left[found] // grid * grid if found >= 0 else part
            chunks.rank[i] = found
            if found < 0:
                break
            rest = chunks.length[i] - part
            start = chunks.start[i]
            chunks.length[i] = part
            chunks.work[i] = work_of(prefix, tile, start, start + part)
            give(state, ranks, found, part, chunks.work[i] - density * part)
            state.chunks[found] += 1
            node = _note(state, found, grid)
            while node > 1:
                node //= 2
                _join(state.tree, node)
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
    evenly: bool,
    ranks: Ranks,
    state: State,
    home: IntArray,
) -> None:
    """Give whole ``docs`` [n], longest first, of ``lengths`` [documents], each to the rank of least time.

    With ``evenly`` to the rank that lacks most of the work expected on it instead, so that all ranks get what the
    search took them for. A rank without room for the next one gets no more. ``home`` [documents] becomes the rank, -1
    for none.
    """
    size = 0
    for rank in range(len(ranks.room)):
        expected = density * state.left[rank]
        state.time[rank] = -expected if evenly else (state.load[rank] - expected) / ranks.speed[rank]
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
                state.left[rank] -= lengths[doc]
                state.time[rank] += work_of(prefix, units[0], 0, lengths[doc]) / ranks.speed[rank]
                size = push(state.heap, size, state.time, rank)
                break
