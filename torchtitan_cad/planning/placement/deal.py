"""Deals chunks of long documents to ranks by their work, and short documents whole."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_inner, jit_leaf
from torchtitan_cad.planning.placement.table import (
    COUNT,
    DOC,
    GRID,
    LENGTH,
    LOAD,
    PER_TOKEN,
    ROOM,
    START,
    TILE,
    WORK,
    Table,
    append,
    give,
    link,
    resize,
    work_of,
)
from torchtitan_cad.planning.sorting import order_of, pop, push

MOST_CHUNKS = 12
"""chunks: what a rank has, at most."""


@jit_leaf
def cut(table: Table, doc: int, length: int, most_work: float, shortest: int, longest: int) -> None:
    """Cut a document into chunks of at most ``most_work``, but of ``shortest`` to ``longest`` tokens."""
    prefix, tile, grid, start = table.prefix, table.units[TILE], table.units[GRID], 0
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


@jit_inner
def deal_chunks(table: Table) -> None:
    """Give the chunks, the one of most work first, each to the rank of least time, load over speed.

    A rank takes no more than it has room for, and the rest goes on. What is left when all ranks are full, or have
    ``MOST_CHUNKS``, remains without a rank, as less than a grid cell does.
    """
    num_ranks, grid, size = len(table.limit), table.units[GRID], 0
    heap, time = np.zeros(num_ranks, dtype=np.int64), table.reals[:num_ranks, LOAD] / table.speed
    for rank in range(num_ranks):
        size = push(heap, size, time, rank)
    work = -table.reals[num_ranks : table.ints[len(table.ints) - 1, COUNT], WORK]
    order = order_of(work, len(work))
    for number in range(len(order)):
        i = num_ranks + order[number]
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
            i = append(table, table.ints[i, DOC], start + part, length - part, i)
            link(table, i)


@jit_inner
def deal_short(table: Table, lengths: IntArray, home: IntArray) -> None:
    """Give whole documents of ``lengths`` [n], the longest first, each to the rank of least time, load over speed.

    A rank without room for the next one gets no more. ``home`` [n] becomes the rank, -1 for none.
    """
    num_ranks, size = len(table.limit), 0
    heap, time = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks)
    for rank in range(num_ranks):
        expected = table.prices[PER_TOKEN] * table.ints[rank, ROOM]
        time[rank] = (table.reals[rank, LOAD] - expected) / table.speed[rank]
        if table.ints[rank, ROOM] > 0:
            size = push(heap, size, time, rank)
    for number in range(len(lengths)):
        home[number] = -1
        while size > 0 and home[number] < 0:
            rank = pop(heap, size, time)
            size -= 1
            if table.ints[rank, ROOM] >= lengths[number]:
                work = work_of(table.prefix, table.units[TILE], 0, lengths[number])
                home[number] = rank
                table.ints[rank, ROOM] -= lengths[number]
                time[rank] += work / table.speed[rank]
                size = push(heap, size, time, rank)
