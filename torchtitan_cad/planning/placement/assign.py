"""Deals chunks of long documents to ranks by their work, and short documents whole."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.placement.table import (
    CHUNK_DOC,
    COUNT,
    GRID,
    LENGTH,
    LOAD,
    ROOM,
    START,
    TILE,
    WORK,
    Table,
    append,
    begin,
    give,
    link,
    resize,
    work_of,
)
from torchtitan_cad.planning.sorting import pop, push

MOST_CHUNKS = 12
"""chunks: what a rank has, at most."""


@jit_inner
def cut(table: Table, doc: int, length: int, most_work: float, shortest: int, longest: int) -> None:
    """Cut a document into chunks of at most ``most_work``, but of ``shortest`` to ``longest`` tokens."""
    prefix, tile, grid, start = table.prefix, table.sizes[TILE], table.sizes[GRID], 0
    before = len(table.ints) - 1
    while start < length:
        tokens = shortest
        while tokens < longest and work_of(prefix, tile, start, min(length, start + tokens + grid)) <= most_work:
            tokens += grid
        if length - start - tokens < shortest // 2 and length - start <= longest:
            tokens = length - start
        tokens = min(tokens, length - start)
        before = append(table, doc, start, tokens, before)
        link(table, before)
        start += tokens


@jit
def cut_long(
    table: Table, rooms: IntArray, long: IntArray, lengths: IntArray, most_work: float, shortest: int, longest: int
) -> None:
    """Begin with empty ranks of ``rooms`` [num_ranks], and cut documents ``long`` [n] of ``lengths`` [n]."""
    begin(table, rooms)
    for each in range(len(long)):
        cut(table, long[each], lengths[each], most_work, shortest, longest)


def by_work(table: Table) -> IntArray:
    """Return the rows of all chunks, the one of most work first."""
    first = len(table.limit)
    return first + np.argsort(-table.reals[first : table.ints[-1, COUNT], WORK], kind="stable")


@jit
def assign_chunks(table: Table, order: IntArray, heap: IntArray, time: FloatArray) -> None:
    """Give the chunks in this ``order``, each to the rank of least time, load over speed.

    A rank takes no more than it has room for, and the rest goes on. What is left when all ranks are full, or have
    ``MOST_CHUNKS``, remains without a rank, as less than a grid cell does. ``time`` [num_ranks] is that of every rank,
    and ``heap`` [num_ranks] scratch.
    """
    grid, size = table.sizes[GRID], 0
    for rank in range(len(heap)):
        size = push(heap, size, time, rank)
    for i in order:
        while size > 0:
            rank = pop(heap, size, time)
            size -= 1
            start, length = table.ints[i, START], table.ints[i, LENGTH]
            part = min(length, table.ints[rank, ROOM] // grid * grid)
            if part <= 0:
                continue
            resize(table, i, start, start + part)
            give(table, i, rank)
            time[rank] = table.reals[rank, LOAD] / table.speed[rank]
            if table.ints[rank, COUNT] < MOST_CHUNKS:
                size = push(heap, size, time, rank)
            if part == length:
                break
            i = append(table, table.ints[i, CHUNK_DOC], start + part, length - part, i)
            link(table, i)


@jit
def assign_short(table: Table, lengths: IntArray, home: IntArray, heap: IntArray, time: FloatArray) -> None:
    """Give whole documents of ``lengths`` [n], the longest first, as ``assign_chunks`` does.

    A rank without room for the next one gets no more. ``home`` [n] becomes the rank, -1 for none.
    """
    size = 0
    for rank in range(len(heap)):
        if table.ints[rank, ROOM] > 0:
            size = push(heap, size, time, rank)
    for number in range(len(lengths)):
        home[number] = -1
        while size > 0 and home[number] < 0:
            rank = pop(heap, size, time)
            size -= 1
            if table.ints[rank, ROOM] >= lengths[number]:
                work = work_of(table.prefix, table.sizes[TILE], 0, lengths[number])
                home[number] = rank
                table.ints[rank, ROOM] -= lengths[number]
                time[rank] += work / table.speed[rank]
                size = push(heap, size, time, rank)
