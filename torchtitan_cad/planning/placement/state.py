# SPDX-License-Identifier: BSD-3-Clause
"""The state of the search for homes: ranks and chunks, in which a move can be undone.

A *chunk* is a range of a long document, or all of it. The first rows of the state are ranks, the next rows are chunks,
and a chunk is named by its row. The last row, the *end*, has sums over the ranks and ends every list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_inner

RANK, CHUNK_DOC, NEXT_CHUNK, START, LENGTH, BEFORE, BEHIND = range(7)
"""Integers of a chunk:

    RANK        the rank that holds it, -1 for none
    CHUNK_DOC   document
    NEXT_CHUNK  next chunk of the same rank
    START       first token, as a position in the document
    LENGTH      tokens
    BEFORE      previous chunk of the document
    BEHIND      next chunk of the document"""

COLUMNS = 8
"""columns of both arrays; a row does not use all of them"""

CAPACITY, COUNT = range(2)
"""Integers of a rank: tokens that still fit, and number of chunks. ``NEXT_CHUNK`` of a rank is its first chunk, and
``COUNT`` of the end row is the row for the next new chunk."""

WORK, KEYS_OFFLOADED, STRIPS, OLD_KEYS_OFFLOADED, OLD_STRIPS = range(5)
"""Reals of a chunk:

    WORK            work of its queries
    KEYS_OFFLOADED      early keys whose work is offloaded, negated if the rank imports these keys all the same
    STRIPS          strips in which helpers read the offloaded keys
    OLD_KEYS_OFFLOADED  KEYS_OFFLOADED before the current move
    OLD_STRIPS      STRIPS before the current move"""

LOAD, KEYS_IN, KEYS_OUT, KEYS_SHARED, QUERIES_OUT, HELPERS_IN, BYTES, POWER = range(8)
"""Reals of a rank:

    LOAD         work
    KEYS_IN      bytes of keys that it receives for the work that it keeps
    KEYS_OUT     bytes of its keys that other ranks read
    KEYS_SHARED  the part of KEYS_OUT that is read for work that other ranks offload
    QUERIES_OUT  bytes of queries that it offloads
    HELPERS_IN   bytes into the ranks that take work from it
    BYTES        what it adds to the bytes of all ranks
    POWER        sum of the eighth powers of its bytes in and out

BYTES and POWER of the end row are sums over ranks."""

NUM_TOUCHED, MOVE_NUMBER = range(2)
"""Counters: rows that the current move has touched, and the number of the current move."""

TILE, GRID, LEAST_CHUNK = range(3)
"""Sizes in tokens: rows of a tile; grid of the cuts; smallest chunk that a move makes."""

QUERY_BYTES, KEY_BYTES, PER_PAIR, PER_TOKEN, TYPICAL, HELP, WORST_WEIGHT, SPARE = range(
    8
)
"""Prices:

    QUERY_BYTES   bytes of a query
    KEY_BYTES     bytes of a key
    PER_PAIR      work of a (query, key) pair
    PER_TOKEN     work of a token of a short document
    TYPICAL       work that fits on a typical rank with capacity
    HELP          bytes into a rank for work that others offload / square root of the work that fits on it
    WORST_WEIGHT  weight of the worst rank in the objective
    SPARE         helpers added to those side by side, as blocks do not fill capacities exactly"""


class State(NamedTuple):
    """Ranks and chunks; the constants above name the columns and entries.

    Attributes:
        ints, reals: [rows, COLUMNS] the state.
        ints_before, reals_before: [rows, COLUMNS] rows ``touched[i]`` before the current move.
        touched: [rows] the rows that the current move has touched.
        stamp: [rows] number of the move that touched a row last.
        counters: [2].
        limit: [num_ranks] limit of the work of each rank.
        prefix: prefix[i] is the work of the first i rows of tiles of a document.
        sizes, prices: [3] and [8].
    """

    ints: IntArray
    reals: FloatArray
    ints_before: IntArray
    reals_before: FloatArray
    touched: IntArray
    stamp: IntArray
    counters: IntArray
    limit: FloatArray
    prefix: FloatArray
    sizes: IntArray
    prices: FloatArray


def make_state(
    chunks: int,
    limit: FloatArray,
    prefix: FloatArray,
    sizes: IntArray,
    prices: FloatArray,
) -> State:
    """Return a state for at most ``chunks`` chunks, to be filled by :func:`begin`."""
    rows = len(limit) + chunks + 1
    ints, ints_before = np.zeros((2, rows, COLUMNS), dtype=np.int64)
    reals, reals_before = np.zeros((2, rows, COLUMNS))
    touched, stamp = np.zeros((2, rows), dtype=np.int64)
    return State(
        ints=ints,
        reals=reals,
        ints_before=ints_before,
        reals_before=reals_before,
        touched=touched,
        stamp=stamp,
        counters=np.zeros(2, dtype=np.int64),
        limit=limit,
        prefix=prefix,
        sizes=sizes,
        prices=prices,
    )


@jit_inner
def work_of(prefix: FloatArray, tile: int, start: int, end: int) -> float:
    """Return the work of queries [start, end) of a document against all keys before them."""
    return prefix[-(-end // tile)] - prefix[start // tile]


@jit_inner
def begin(state: State, capacities: IntArray) -> None:
    """Empty the state; ranks get ``capacities`` [num_ranks] tokens of capacity, expected to be filled by short
    documents."""
    end = len(state.ints) - 1
    state.ints[:] = 0
    state.reals[:] = 0.0
    state.stamp[:] = 0
    state.counters[:] = 0
    start_move(state)
    for rank in range(len(capacities)):
        state.ints[rank, CAPACITY] = capacities[rank]
        state.ints[rank, NEXT_CHUNK] = end
        state.reals[rank, LOAD] = state.prices[PER_TOKEN] * capacities[rank]
    state.ints[end, COUNT] = len(capacities)


@jit_inner
def start_move(state: State) -> None:
    """Begin a move that ``undo`` can undo."""
    state.counters[NUM_TOUCHED] = 0
    state.counters[MOVE_NUMBER] += 1


@jit_inner
def touch(state: State, row: int) -> None:
    """Save a row before the current move changes it."""
    if state.stamp[row] != state.counters[MOVE_NUMBER]:
        at = state.counters[NUM_TOUCHED]
        state.stamp[row] = state.counters[MOVE_NUMBER]
        state.touched[at] = row
        state.counters[NUM_TOUCHED] = at + 1
        for column in range(COLUMNS):
            state.ints_before[at, column] = state.ints[row, column]
            state.reals_before[at, column] = state.reals[row, column]


@jit_inner
def undo(state: State) -> None:
    """Undo the current move."""
    for at in range(state.counters[NUM_TOUCHED]):
        for column in range(COLUMNS):
            state.ints[state.touched[at], column] = state.ints_before[at, column]
            state.reals[state.touched[at], column] = state.reals_before[at, column]


@jit_inner
def append(state: State, doc: int, start: int, length: int, before: int) -> int:
    """Return a new chunk of a document, without a rank and not yet linked, to stand behind ``before`` (end: first)."""
    end = len(state.ints) - 1
    row = state.ints[end, COUNT]
    touch(state, end)
    touch(state, row)
    state.ints[end, COUNT] += 1
    state.ints[row, RANK] = -1
    state.ints[row, CHUNK_DOC] = doc
    state.ints[row, BEFORE] = before
    state.ints[row, BEHIND] = end if before == end else state.ints[before, BEHIND]
    state.reals[row, KEYS_OFFLOADED] = 0.0
    state.reals[row, STRIPS] = 0.0
    resize(state, row, start, start + length)
    return row


@jit_inner
def resize(state: State, i: int, start: int, end: int) -> None:
    """Set the tokens of chunk ``i``, which has no rank, to [start, end)."""
    touch(state, i)
    state.ints[i, START] = start
    state.ints[i, LENGTH] = end - start
    state.reals[i, WORK] = work_of(state.prefix, state.sizes[TILE], start, end)


@jit_inner
def _count_in(state: State, i: int, sign: int) -> None:
    """Add ``sign`` times the tokens and work of chunk ``i`` to its rank."""
    rank = state.ints[i, RANK]
    tokens = state.ints[i, LENGTH]
    touch(state, rank)
    state.ints[rank, CAPACITY] -= sign * tokens
    state.ints[rank, COUNT] += sign
    state.reals[rank, LOAD] += sign * (
        state.reals[i, WORK] - state.prices[PER_TOKEN] * tokens
    )


@jit_inner
def give(state: State, i: int, rank: int) -> None:
    """Give chunk ``i``, which has no rank, to a rank."""
    touch(state, i)
    touch(state, rank)
    state.ints[i, RANK] = rank
    state.ints[i, NEXT_CHUNK] = state.ints[rank, NEXT_CHUNK]
    state.ints[rank, NEXT_CHUNK] = i
    _count_in(state, i, 1)


@jit_inner
def take(state: State, i: int) -> None:
    """Take chunk ``i`` from its rank."""
    _count_in(state, i, -1)
    k = state.ints[i, RANK]
    while state.ints[k, NEXT_CHUNK] != i:
        k = state.ints[k, NEXT_CHUNK]
    touch(state, k)
    touch(state, i)
    state.ints[k, NEXT_CHUNK] = state.ints[i, NEXT_CHUNK]
    state.ints[i, RANK] = -1


@jit_inner
def link(state: State, i: int) -> None:
    """Put chunk ``i`` into the list of its document, between those before and behind it."""
    before = state.ints[i, BEFORE]
    behind = state.ints[i, BEHIND]
    touch(state, before)
    touch(state, behind)
    state.ints[before, BEHIND] = state.ints[behind, BEFORE] = i


@jit_inner
def unlink(state: State, i: int) -> None:
    """Take chunk ``i`` out of the list of its document; its own BEFORE and BEHIND stay."""
    before = state.ints[i, BEFORE]
    behind = state.ints[i, BEHIND]
    touch(state, before)
    touch(state, behind)
    state.ints[before, BEHIND] = behind
    state.ints[behind, BEFORE] = before
