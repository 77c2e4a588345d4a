"""Ranks and chunks in one table, in which a move can be taken back.

A *chunk* is a part of a long document, or the whole of one that is not cut. The first rows of the table are ranks, then
come chunks, each named by its row. The last row, the *end*, has sums, and ends every list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_inner

RANK, DOC, NEXT, START, LENGTH, BEFORE, BEHIND = range(7)
"""Integers of a chunk: its rank, -1 for none; document; the next chunk of the rank; first token and tokens; and the
chunks before and behind it in the document."""

COLUMNS = 8
"""columns of both tables, some of them not used by every row"""

ROOM, COUNT = 0, 1
"""Integers of a rank: tokens that it has room for, and chunks. Its first chunk is ``NEXT``, and ``COUNT`` of the end is
the row for the next new chunk."""

WORK, KEYS, STRIPS, OLD_KEYS, OLD_STRIPS = range(5)
"""Reals of a chunk: its work; the keys given away, as a negative number where the rank imports them all the same; the
strips that these are read for; and both before the move under way."""

LOAD, INTO, OUT, SHARED, QUERIES, HELPED, BYTES, POWER = range(8)
"""Reals of a rank:

    LOAD     work
    INTO     bytes of keys into it, for what it keeps
    OUT      bytes of its keys that others read
    SHARED   the part of OUT that is read for what others give away
    QUERIES  bytes of queries that it gives away
    HELPED   bytes into those that get what it gives away
    BYTES    what it adds to the bytes of all ranks
    POWER    eighth powers of its bytes in and out, added up

BYTES and POWER of the end are the sums over ranks."""

TOUCHED, MOVE = range(2)
"""Marks: rows touched by the move under way, and its number."""

TILE, GRID, LEAST = range(3)
"""Units, in tokens: rows of a tile; multiples at which chunks are cut; and a chunk that a move makes, at least."""

QUERY_BYTES, KEY_BYTES, PER_PAIR, PER_TOKEN, TYPICAL, HELP = range(6)
"""Prices: bytes of a query and of a key; work of a pair, and of a token of short documents; work that a rank with room
typically has room for; and the bytes into it, for what others give away, over the square root of its room."""


class Table(NamedTuple):
    """Ranks and chunks.

    ``ints`` and ``reals`` [rows, COLUMNS]; what the ``touched`` [rows] rows had before the move under way, in the same
    order, ``ints_before`` and ``reals_before``; the move that last touched a row, ``stamp`` [rows]; ``marks`` [2].

    Of ranks [num_ranks] the ``limit`` of their work and relative ``speed``. ``prefix`` is the work of the first rows of
    tiles of a document; ``units`` [3] and ``prices`` [6] see above.
    """

    ints: IntArray
    reals: FloatArray
    ints_before: IntArray
    reals_before: FloatArray
    touched: IntArray
    stamp: IntArray
    marks: IntArray
    limit: FloatArray
    speed: FloatArray
    prefix: FloatArray
    units: IntArray
    prices: FloatArray


def make_table(
    chunks: int, limit: FloatArray, speed: FloatArray, prefix: FloatArray, units: IntArray, prices: FloatArray
) -> Table:
    """Return a table for at most so many chunks, to be filled by :func:`begin`."""
    rows = len(limit) + chunks + 1
    ints, ints_before = np.zeros((2, rows, COLUMNS), dtype=np.int64)
    reals, reals_before = np.zeros((2, rows, COLUMNS))
    touched, stamp = np.zeros((2, rows), dtype=np.int64)
    scratch = ints_before, reals_before, touched, stamp, np.zeros(2, dtype=np.int64)
    return Table(ints, reals, *scratch, limit, speed, prefix, units, prices)


@jit_inner
def work_of(prefix: FloatArray, tile: int, start: int, end: int) -> float:
    """Return the work of queries [start, end) of a document against all keys before them."""
    return prefix[-(-end // tile)] - prefix[start // tile]


@jit_inner
def begin(table: Table, rooms: IntArray) -> None:
    """Empty the table: of ranks with ``rooms`` [num_ranks], expected to have short documents in all of them."""
    end = len(table.ints) - 1
    table.ints[:], table.reals[:], table.stamp[:], table.marks[:] = 0, 0.0, 0, 0
    start_move(table)
    for rank in range(len(rooms)):
        table.ints[rank, ROOM], table.ints[rank, NEXT] = rooms[rank], end
        table.reals[rank, LOAD] = table.prices[PER_TOKEN] * rooms[rank]
    table.ints[end, COUNT] = len(rooms)


@jit_inner
def start_move(table: Table) -> None:
    """Begin a move, which ``undo`` can take back."""
    table.marks[TOUCHED] = 0
    table.marks[MOVE] += 1


@jit_inner
def touch(table: Table, row: int) -> None:
    """Note what a row has before the move under way changes it."""
    if table.stamp[row] != table.marks[MOVE]:
        at = table.marks[TOUCHED]
        table.stamp[row], table.touched[at], table.marks[TOUCHED] = table.marks[MOVE], row, at + 1
        for column in range(COLUMNS):
            table.ints_before[at, column] = table.ints[row, column]
            table.reals_before[at, column] = table.reals[row, column]


@jit_inner
def undo(table: Table) -> None:
    """Take back the move under way."""
    for at in range(table.marks[TOUCHED]):
        for column in range(COLUMNS):
            table.ints[table.touched[at], column] = table.ints_before[at, column]
            table.reals[table.touched[at], column] = table.reals_before[at, column]


@jit_inner
def append(table: Table, doc: int, start: int, length: int, before: int) -> int:
    """Return a new chunk of a document, of no rank yet and not yet linked, behind another one or the end."""
    end = len(table.ints) - 1
    row = table.ints[end, COUNT]
    touch(table, end)
    touch(table, row)
    table.ints[end, COUNT] += 1
    table.ints[row, RANK], table.ints[row, DOC] = -1, doc
    table.ints[row, BEFORE], table.ints[row, BEHIND] = before, end if before == end else table.ints[before, BEHIND]
    table.reals[row, KEYS], table.reals[row, STRIPS] = 0.0, 0.0
    resize(table, row, start, start + length)
    return row


@jit_inner
def resize(table: Table, i: int, start: int, end: int) -> None:
    """Make chunk ``i``, which no rank has, the tokens [start, end)."""
    touch(table, i)
    table.ints[i, START], table.ints[i, LENGTH] = start, end - start
    table.reals[i, WORK] = work_of(table.prefix, table.units[TILE], start, end)


@jit_inner
def book(table: Table, i: int, sign: int) -> None:
    """Add the chunk's tokens and work to its rank's, or with ``sign`` -1 take them away."""
    rank, tokens = table.ints[i, RANK], table.ints[i, LENGTH]
    touch(table, rank)
    table.ints[rank, ROOM] -= sign * tokens
    table.ints[rank, COUNT] += sign
    table.reals[rank, LOAD] += sign * (table.reals[i, WORK] - table.prices[PER_TOKEN] * tokens)


@jit_inner
def give(table: Table, i: int, rank: int) -> None:
    """Give chunk ``i``, which no rank has, to a rank."""
    touch(table, i)
    touch(table, rank)
    table.ints[i, RANK], table.ints[i, NEXT], table.ints[rank, NEXT] = rank, table.ints[rank, NEXT], i
    book(table, i, 1)


@jit_inner
def take(table: Table, i: int) -> None:
    """Take chunk ``i`` from its rank."""
    book(table, i, -1)
    k = table.ints[i, RANK]
    while table.ints[k, NEXT] != i:
        k = table.ints[k, NEXT]
    touch(table, k)
    touch(table, i)
    table.ints[k, NEXT], table.ints[i, RANK] = table.ints[i, NEXT], -1


@jit_inner
def link(table: Table, i: int) -> None:
    """Put chunk ``i`` into the list of its document, between those before and behind it."""
    before, behind = table.ints[i, BEFORE], table.ints[i, BEHIND]
    touch(table, before)
    touch(table, behind)
    table.ints[before, BEHIND] = table.ints[behind, BEFORE] = i


@jit_inner
def unlink(table: Table, i: int) -> None:
    """Take chunk ``i`` out of the list of its document; it keeps its neighbours."""
    before, behind = table.ints[i, BEFORE], table.ints[i, BEHIND]
    touch(table, before)
    touch(table, behind)
    table.ints[before, BEHIND], table.ints[behind, BEFORE] = behind, before
