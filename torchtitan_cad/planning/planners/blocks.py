"""What overloaded ranks give away: blocks of their rows against early keys. Imports numpy and numba.

A rank keeps the keys nearest the diagonal: its own cost nothing, and with many rows at home an imported key serves many
pairs. What exceeds the load limit is, per run of a document, all rows against the earliest keys, and where that is not
enough a rectangle out of the triangle of the run's own keys, whose two remaining triangles are cut again in turn.
"""

from __future__ import annotations

import numpy as np

from ..intervals import IntArray
from .jit import jit

# Columns of the block table: owner, document (index), rows [Q0, Q1), keys [K0, K1) in tokens of the document.
OWNER, DOC, Q0, Q1, K0, K1 = range(6)


@jit
def tile_rows(start: int, end: int, tile: int) -> int:
    """Rows of tiles that positions [start, end) touch."""
    return -(-end // tile) - start // tile


@jit
def _give_early_keys(run: IntArray, excess: int, tile: int, cell: int, block: IntArray) -> int:
    """All rows of the run against as few of the earliest keys as the excess asks for; returns the cost given away."""
    doc, start, end, owner = run
    before = start // cell * cell
    if before == 0:
        return 0
    per_cell = tile_rows(start, end, tile) * (cell // tile)
    cells = min(before // cell, -(-excess // per_cell))
    block[OWNER], block[DOC], block[Q0], block[Q1] = owner, doc, start, end
    block[K0], block[K1] = 0, cells * cell
    return cells * per_cell


@jit
def _cut_triangle(start: int, end: int, excess: int, tile: int, cell: int) -> int:
    """Where to cut rows [start, end) so that the later rows against the earlier keys cost just the excess.

    The later rows are as few as that allows; at the middle, where the rectangle is largest, if it never suffices.
    Returns 0 if there is no cut.
    """
    first, last = start // cell + 1, (end - 1) // cell
    if first > last:
        return 0
    base = start // cell
    low, high = (first + last) // 2, last
    if tile_rows(low * cell, end, tile) * (low - base) * (cell // tile) < excess:
        return low * cell
    while low < high:
        middle = (low + high + 1) // 2
        if tile_rows(middle * cell, end, tile) * (middle - base) * (cell // tile) >= excess:
            low = middle
        else:
            high = middle - 1
    return low * cell


@jit
def blocks_of_rank(runs: IntArray, excess: int, tile: int, cell: int, blocks: IntArray, count: int) -> int:
    """Append blocks that together cost at least ``excess``; returns the new count, or -1 if that cannot be done.

    ``runs`` [n, 4] are (document, start, end, owner) of one rank, those to draw on first first. Blocks are rectangles
    with a positive number of keys, aligned to cells but for the ends of the run.
    """
    for i in range(len(runs)):
        if excess <= 0:
            return count
        if count == len(blocks):
            return -1
        given = _give_early_keys(runs[i], excess, tile, cell, blocks[count])
        excess -= given
        count += given > 0
    stack = np.empty((64, 2), dtype=np.int64)
    for i in range(len(runs)):
        size = 1
        stack[0, 0], stack[0, 1] = runs[i, 1], runs[i, 2]
        head = 0
        while head < size and excess > 0:
            start, end = stack[head]
            head += 1
            base = start // cell * cell
            cut = _cut_triangle(start, end, excess, tile, cell)
            if cut <= base:
                continue
            if count == len(blocks):
                return -1
            blocks[count, OWNER], blocks[count, DOC] = runs[i, 3], runs[i, 0]
            blocks[count, Q0], blocks[count, Q1] = cut, end
            blocks[count, K0], blocks[count, K1] = base, cut
            count += 1
            excess -= tile_rows(cut, end, tile) * ((cut - base) // tile)
            if size + 2 <= len(stack):
                stack[size, 0], stack[size, 1] = start, cut
                stack[size + 1, 0], stack[size + 1, 1] = cut, end
                size += 2
    return count if excess <= 0 else -1
