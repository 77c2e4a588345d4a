"""Blocks that overloaded ranks give away: their rows against early keys.

A rank keeps the keys nearest the diagonal: its own cost nothing, and with many rows at home an imported key serves many
pairs. What exceeds the load limit is, per run of a document, all rows against the earliest keys, and where that is not
enough a rectangle out of the triangle of the run's own keys, whose two remaining triangles are cut again in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit, jit_leaf
from torchtitan_cad.planning.model.tasks import DOC, KV_END, KV_START, Q_END, Q_START, SERVER

# Column of the blocks behind those of a task, whose server is the owner: the run's start.
RUN = 6
BLOCK_COLUMNS = 7

STEPS = 32
"""Numbers of last rows tried, each nine tenths of the one before."""

RUNS_TRIED = 3
"""Runs of a rank tried for a single block or staircase."""

MAX_BLOCKS = 4096
"""Blocks of one rank, at most, where a staircase of two does not suffice."""


class Rules(NamedTuple):
    """Tile and cell in tokens; bytes per query and key."""

    tile: int
    cell: int
    query_bytes: int
    kv_bytes: int


@jit_leaf
def tile_rows(start: int, end: int, tile: int) -> int:
    """Return the rows of tiles that positions [start, end) touch."""
    return -(-end // tile) - start // tile


@jit_leaf
def _give_early_keys(run: IntArray, excess: int, tile: int, cell: int, block: IntArray) -> int:
    """All rows of the run against as few of the earliest keys as the excess asks for; returns the cost given away."""
    start, end = run[Q_START], run[Q_END]
    before = start // cell * cell
    if before == 0:
        return 0
    per_cell = tile_rows(start, end, tile) * (cell // tile)
    cells = min(before // cell, -(-excess // per_cell))
    block[DOC], block[SERVER], block[Q_START], block[Q_END] = run[DOC], run[SERVER], start, end
    block[KV_START], block[KV_END], block[RUN] = 0, cells * cell, start
    return cells * per_cell


@jit_leaf
def _cut_triangle(start: int, end: int, excess: int, tile: int, cell: int) -> int:
    """Find where to cut rows [start, end) so that the later rows against the earlier keys cost just the excess.

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


@jit_leaf
def _blocks_of_rank(runs: IntArray, excess: int, rules: Rules, blocks: IntArray, stack: IntArray) -> int:
    """Fill ``blocks`` by some that together cost at least ``excess``; returns how many, -1 if that cannot be done.

    ``runs`` [n, 6] are the home tasks of one rank, those to draw on first first. Blocks are rectangles
    with a positive number of keys, aligned to cells but for the ends of the run. ``stack`` [2 len(blocks), 2]
    is scratch.
    """
    tile, cell, count = rules.tile, rules.cell, 0
    for i in range(len(runs)):
        if excess <= 0:
            return count
        if count == len(blocks):
            return -1
        given = _give_early_keys(runs[i], excess, tile, cell, blocks[count])
        excess -= given
        count += given > 0
    for i in range(len(runs)):
        size = 1
        stack[0, 0], stack[0, 1] = runs[i, Q_START], runs[i, Q_END]
        head = 0
        while head < size and excess > 0:
            start, end = stack[head, 0], stack[head, 1]
            head += 1
            base = start // cell * cell
            cut = _cut_triangle(start, end, excess, tile, cell)
            if cut <= base:
                continue
            if count == len(blocks):
                return -1
            blocks[count, SERVER], blocks[count, DOC] = runs[i, SERVER], runs[i, DOC]
            blocks[count, Q_START], blocks[count, Q_END] = cut, end
            blocks[count, KV_START], blocks[count, KV_END] = base, cut
            blocks[count, RUN] = runs[i, Q_START]
            count += 1
            excess -= tile_rows(cut, end, tile) * ((cut - base) // tile)
            if size + 2 <= len(stack):
                stack[size, 0], stack[size, 1] = start, cut
                stack[size + 1, 0], stack[size + 1, 1] = cut, end
                size += 2
    return count if excess <= 0 else -1


@jit_leaf
def _estimate(rows: int, keys: int, helpers: float, imported: int, rules: Rules) -> float:
    """Bytes of a block dealt out to so many helpers at its best number side by side, and of keys its owner imports."""
    best = np.inf
    for beside in range(1, max(2, int(helpers + 1.5))):
        strips = max(1.0, helpers / beside)
        best = min(best, float(rows) * beside * rules.query_bytes + strips * keys * rules.kv_bytes)
    return best + float(imported) * rules.kv_bytes


@jit_leaf
def _last_rows(start: int, end: int, step: int, cell: int) -> int:
    """First row of the last rows [cut, end): all of them at step 0, a tenth fewer at every further step."""
    if step == 0:
        return start
    rows = int((end - start) * 0.9**step) // cell
    return max(start, (end - 1) // cell * cell - max(0, rows - 1) * cell)


@jit_leaf
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


@jit_leaf
def _judge(run: IntArray, cut: int, excess: int, room: float, rules: Rules) -> tuple[float, int]:
    """(estimated bytes, first row) of giving the excess away from rows [cut, end) on; infinite if that cannot be.

    If these rows suffice, the first row is the cut. Otherwise they give away all keys before them and the rows from the
    first one on the rest.
    """
    start, end, tile, cell = run[Q_START], run[Q_END], rules.tile, rules.cell
    before, usable = start // cell * cell, cut // cell * cell
    per_cell = tile_rows(cut, end, tile) * (cell // tile)
    keys = -(-excess // per_cell) * cell
    if keys <= usable:
        imported = before - keys if cut == start else before
        return _estimate(end - cut, keys, excess / room, imported, rules), cut
    rest = excess - per_cell * (usable // cell)
    first = _upper_rows(start, cut, rest, tile, cell) if cut > start else -1
    if first < 0:
        return np.inf, first
    keys = -(-rest // (tile_rows(first, cut, tile) * (cell // tile))) * cell
    imported = before - keys if first == start else before
    value = _estimate(end - cut, usable, (excess - rest) / room, 0, rules)
    return value + _estimate(cut - first, keys, rest / room, imported, rules), first


@jit_leaf
def _describe(run: IntArray, cut: int, first: int, excess: int, rules: Rules, blocks: IntArray, count: int) -> int:
    """Append the block, or the staircase of two, that ``_judge`` judged; returns the new count."""
    start, end, top = run[Q_START], run[Q_END], cut
    for k in range(1 if first == cut else 2):
        block = blocks[count + k]
        per_cell = tile_rows(top, end, rules.tile) * (rules.cell // rules.tile)
        keys = min(-(-excess // per_cell), top // rules.cell)
        block[DOC], block[SERVER], block[RUN], block[Q_START], block[Q_END] = run[DOC], run[SERVER], start, top, end
        block[KV_START], block[KV_END] = 0, keys * rules.cell
        excess -= per_cell * keys
        top, end = first, cut
    return count + (1 if first == cut else 2)


@jit_leaf
def _give_block(runs: IntArray, excess: int, room: float, rules: Rules, blocks: IntArray, count: int) -> int:
    """Append the block, or staircase of two, by which the excess is given away for the fewest estimated bytes.

    One block is the last rows of a run against early keys: all rows, or fewer in steps. Where that does not suffice,
    the last rows give away all keys before themselves and the rows before them the rest. Returns the new count, the
    old one if there is no such block; ``room`` is the cost a helper can take.
    """
    least, run, best_cut, best_first = np.inf, -1, 0, 0
    for i in range(min(RUNS_TRIED, len(runs))):
        for step in range(STEPS):
            cut = _last_rows(runs[i, Q_START], runs[i, Q_END], step, rules.cell)
            if step > 0 and cut == runs[i, Q_START]:
                continue
            value, first = _judge(runs[i], cut, excess, room, rules)
            if value < least:
                least, run, best_cut, best_first = value, i, cut, first
    return count if run < 0 else _describe(runs[run], best_cut, best_first, excess, rules, blocks, count)


@jit
def _find(
    runs: IntArray, first: IntArray, over: IntArray, room: float, rules: Rules, blocks: IntArray, stack: IntArray
) -> int:
    """Fill ``blocks`` [capacity, BLOCK_COLUMNS], see :func:`find_blocks`.

    Returns how many there are, 0 if some rank cannot give enough away, -1 if the table is too small.
    """
    count = 0
    for rank in range(len(over)):
        if over[rank] <= 0:
            continue
        if count + MAX_BLOCKS > len(blocks):
            return -1
        mine, before = runs[first[rank] : first[rank + 1]], count
        count = _give_block(mine, over[rank], room, rules, blocks, count)
        if count == before:
            found = _blocks_of_rank(mine, over[rank], rules, blocks[count : count + MAX_BLOCKS], stack)
            if found <= 0:
                return 0
            count += found
    return count


def find_blocks(runs: IntArray, over: IntArray, room: float, rules: Rules) -> IntArray:
    """Return the blocks [B, BLOCK_COLUMNS] that overloaded ranks give away; none if one cannot give enough.

    Args:
        runs: [n, 6] home tasks by rank, those to draw on first first.
        over: [num_ranks] cost to give away, not above 0 for ranks that are not overloaded.
        room: cost that a typical helper can take.
    """
    first = np.searchsorted(runs[:, SERVER], np.arange(len(over) + 1))
    stack = np.empty((2 * MAX_BLOCKS, 2), dtype=np.int64)
    capacity, count = 2 * int((over > 0).sum()) + MAX_BLOCKS, -1
    while count < 0:
        blocks = np.empty((capacity, BLOCK_COLUMNS), dtype=np.int64)
        count = _find(runs, first, over, room, rules, blocks, stack)
        capacity *= 2
    return blocks[:count].copy()
