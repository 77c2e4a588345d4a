"""What overloaded ranks give away: blocks of their rows against early keys. Imports numpy and numba.

A rank keeps the keys nearest the diagonal: its own cost nothing, and with many rows at home an imported key serves many
pairs. What exceeds the load limit is, per run of a document, all rows against the earliest keys, and where that is not
enough a rectangle out of the triangle of the run's own keys, whose two remaining triangles are cut again in turn.
"""

from __future__ import annotations

import numpy as np

from ..intervals import IntArray
from .jit import jit
from .strips import FloatArray

# Columns of the block table: owner, document (index), rows [Q0, Q1), keys [K0, K1) in tokens of the document.
# then the run's start, and whether giving the block away spares its owner the import of the keys.
OWNER, DOC, Q0, Q1, K0, K1, RUN, SPARES = range(8)
BLOCK_COLUMNS = 8

STEPS = 32
RUNS_TRIED = 3


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
    block[K0], block[K1], block[RUN], block[SPARES] = 0, cells * cell, start, 1
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
    stack = np.empty((2 * len(blocks), 2), dtype=np.int64)
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
            blocks[count, RUN], blocks[count, SPARES] = runs[i, 1], 0
            count += 1
            excess -= tile_rows(cut, end, tile) * ((cut - base) // tile)
            if size + 2 <= len(stack):
                stack[size, 0], stack[size, 1] = start, cut
                stack[size + 1, 0], stack[size + 1, 1] = cut, end
                size += 2
    return count if excess <= 0 else -1


@jit
def _estimate(rows: int, keys: int, helpers: float, imported: int, query_bytes: int, kv_bytes: int) -> float:
    """Bytes of a block dealt out to so many helpers at its best number side by side, and of keys its owner imports."""
    best = np.inf
    for beside in range(1, max(2, int(helpers + 1.5))):
        strips = max(1.0, helpers / beside)
        best = min(best, float(rows) * beside * query_bytes + strips * keys * kv_bytes)
    return best + float(imported) * kv_bytes


@jit
def _insert(found: IntArray, values: FloatArray, size: int, keep: int, value: float, entry: IntArray) -> int:
    """Insert an alternative into the best ``keep``, ordered by value; returns how many there are."""
    at = size
    while at > 0 and values[at - 1] > value:
        at -= 1
    if at >= keep:
        return size
    size = min(size + 1, keep)
    for j in range(size - 1, at, -1):
        values[j] = values[j - 1]
        found[j] = found[j - 1]
    values[at] = value
    found[at] = entry
    return size


@jit
def _last_rows(start: int, end: int, step: int, cell: int) -> int:
    """First row of the last rows [cut, end): all of them at step 0, fewer by a fifth at every further step."""
    if step == 0:
        return start
    rows = int((end - start) * 0.9**step) // cell
    return max(start, (end - 1) // cell * cell - max(0, rows - 1) * cell)


@jit
def alternatives(
    runs: IntArray,
    excess: int,
    room: float,
    tile: int,
    cell: int,
    query_bytes: int,
    kv_bytes: int,
    keep: int,
    found: IntArray,
) -> int:
    """Ways to give the excess away as one block or a staircase of two; returns how many are in ``found`` [keep, 2, 8].

    One block is the last rows of a run against early keys: all rows, or fewer in steps. Where that does not suffice,
    the last rows give away all keys before themselves and the rows before them the rest. The ways with the least
    estimated bytes are kept, best first; ``room`` is the cost a helper can take. An unused second block has OWNER -1.
    """
    values = np.full(keep, np.inf)
    entry = np.zeros((2, BLOCK_COLUMNS), dtype=np.int64)
    size = 0
    for i in range(min(RUNS_TRIED, len(runs))):
        doc, start, end, owner = runs[i]
        before = start // cell * cell
        entry[:, OWNER], entry[:, DOC], entry[:, RUN], entry[:, K0] = owner, doc, start, 0
        for step in range(STEPS):
            cut = _last_rows(start, end, step, cell)
            if step > 0 and cut == start:
                continue
            usable = cut // cell * cell
            per_cell = tile_rows(cut, end, tile) * (cell // tile)
            keys = -(-excess // per_cell) * cell
            if keys <= usable:
                imported = before - keys if cut == start else before
                value = _estimate(end - cut, keys, excess / room, imported, query_bytes, kv_bytes)
                entry[0, Q0], entry[0, Q1], entry[0, K1], entry[0, SPARES] = cut, end, keys, cut == start
                entry[1, OWNER] = -1
                size = _insert(found, values, size, keep, value, entry)
            elif cut > start:
                rest = excess - per_cell * (usable // cell)
                first = _upper_rows(start, cut, rest, tile, cell)
                if first < 0:
                    continue
                per_cell = tile_rows(first, cut, tile) * (cell // tile)
                keys = -(-rest // per_cell) * cell
                imported = before - keys if first == start else before
                value = _estimate(end - cut, usable, (excess - rest) / room, 0, query_bytes, kv_bytes)
                value += _estimate(cut - first, keys, rest / room, imported, query_bytes, kv_bytes)
                entry[0, Q0], entry[0, Q1], entry[0, K1], entry[0, SPARES] = cut, end, usable, 0
                entry[1, OWNER] = owner
                entry[1, Q0], entry[1, Q1], entry[1, K1], entry[1, SPARES] = first, cut, keys, first == start
                size = _insert(found, values, size, keep, value, entry)
    return size


@jit
def _upper_rows(start: int, end: int, excess: int, tile: int, cell: int) -> int:
    """Latest cut such that rows [cut, end) against all keys before them cost the excess; ``start`` for all rows.

    -1 if the excess is more than that. Only cuts in the later half of the document are tried: fewer rows, more keys.
    """
    low, high = max(start // cell + 1, end // cell // 2), (end - 1) // cell
    cut = -1
    if tile_rows(start, end, tile) * (start // cell) * (cell // tile) >= excess:
        cut = start
    while low <= high:
        middle = (low + high) // 2
        if tile_rows(middle * cell, end, tile) * middle * (cell // tile) >= excess:
            cut = middle * cell
            low = middle + 1
        else:
            high = middle - 1
    return cut
