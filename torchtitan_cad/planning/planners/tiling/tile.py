"""What is over a number of tiles per rank, dealt out in rectangles to the ranks with room.

1. What is over is a block of a rank's rows against early keys, or a staircase of two (``surplus.py``).
2. The blocks, the largest first, are tiled in strips over the ranks with room, each filled at most to the limit
   (``strips.py``). Where ranks share nodes, what a node has room for is tiled over its own ranks first.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, sum_by_index
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import DOC, KV_END, KV_START, Q_END, Q_START, SERVER
from torchtitan_cad.planning.planners.tiling.strips import Blocks, make_helpers, tile_blocks
from torchtitan_cad.planning.planners.tiling.surplus import Rules, find_blocks

MARGIN = 50
"""Blocks that stay inside a node leave 1 / MARGIN of its room free, so that pieces fit."""


def tile(
    layout: TokenLayout,
    shape: AttentionShape,
    home: IntArray,
    room: IntArray,
    granularity: int,
    cell: int,
    node: IntArray,
) -> tuple[IntArray, IntArray] | None:
    """Return the blocks (table of ``surplus.py``) and the pieces of them (of ``strips.py``) that leave no rank over.

    None where whole cells cannot bring that about.

    Args:
        home: int64 [n, TASK_COLUMNS] home tasks, documents as indices.
        room: int64 [num_ranks] tiles that every rank may take, negative where it has to give.
        granularity: tokens of a tile; ``cell`` tokens of a cell, a multiple.
        node: int64 [num_ranks] of every rank. What a node has room for stays inside, if cells allow it.
    """
    cells = np.maximum(room, 0) // (cell // granularity) ** 2
    if not cells.any():
        return None
    runs = home[np.lexsort((home[:, Q_START] - home[:, Q_END], home[:, SERVER]))]
    free = np.maximum(room, 0).astype(np.float64)
    typical = float((free**2).sum() / free.sum())  # room of the helper of a typical pair
    rules = Rules(granularity, cell, shape.query_bytes, shape.kv_bytes)
    found = find_blocks(runs, np.maximum(-room, 0), typical, rules)
    if len(found) == 0:
        return None
    several = len(node) > 0 and node[-1] > 0
    parts, inside = _cut_by_node(found, cells, node, cell) if several else (found, np.full(len(found), -1))
    pieces = _tile(_in_cells(layout, parts, cell), inside, shape, cell, cells, node)
    if pieces is None and several:
        parts, pieces = found, _tile(_in_cells(layout, found, cell), np.full(len(found), -1), shape, cell, cells, node)
    return None if pieces is None else (parts, pieces)


def _tile(
    blocks: Blocks, inside: IntArray, shape: AttentionShape, cell: int, cells: IntArray, node: IntArray
) -> IntArray | None:
    """Deal out the blocks, first those that stay ``inside`` [B] a node (-1: anywhere); None if cells do not suffice."""
    row_bytes, column_bytes = float(shape.query_bytes * cell), float(shape.kv_bytes * cell)
    ideal = 2 * np.sqrt(row_bytes * column_bytes)
    prices = np.array([ideal, ideal / np.sqrt(cells.max()), column_bytes, row_bytes, 0.0])
    area, left, every = blocks.size.prod(axis=1), cells, []
    pieces = np.empty((4 * len(cells) + 64 * len(area), 6), dtype=np.int64)
    for each in [*np.unique(inside[inside >= 0]).tolist(), -1]:
        mine = np.flatnonzero(inside == each)
        ranks = np.flatnonzero((left > 0) & (node == each if each >= 0 else True))
        helpers = make_helpers(ranks[np.argsort(left[ranks], kind="stable")], left, prices)
        count = tile_blocks(blocks, mine[np.argsort(-area[mine], kind="stable")], helpers, pieces)
        if count < 0 and each < 0:
            return None
        if count < 0:
            inside[mine] = -1
            continue
        every.append(pieces[:count].copy())
        left = helpers.left
    return np.concatenate(every)


def _cut_by_node(found: IntArray, cells: IntArray, node: IntArray, cell: int) -> tuple[IntArray, IntArray]:
    """Return the blocks, cut along the rows where a node has room for a part, and the node that each stays in or -1."""
    room = sum_by_index(node, cells, int(node[-1]) + 1)
    room -= room // MARGIN
    parts, inside = [], []
    for block in found:
        first, width, home = (
            int(block[Q_START]) // cell,
            int(block[KV_END] - block[KV_START]) // cell,
            node[block[SERVER]],
        )
        cut = (first + int(room[home]) // width) * cell
        for start, end, stays in (
            (block[Q_START], min(cut, block[Q_END]), home),
            (max(cut, block[Q_START]), block[Q_END], -1),
        ):
            if start < end:
                part = block.copy()
                part[Q_START], part[Q_END] = start, end
                parts.append(part)
                inside.append(stays)
                room[home] -= (-(-int(end) // cell) - int(start) // cell) * width if stays >= 0 else 0
    return np.array(parts), np.array(inside)


def _in_cells(layout: TokenLayout, blocks: IntArray, cell: int) -> Blocks:
    """Return the blocks in cells, with the ranks that are home to their columns."""
    height = -(-blocks[:, Q_END] // cell) - blocks[:, Q_START] // cell
    start = layout.seg_start[layout.run_order]
    end = start + layout.seg_length[layout.run_order]
    base = layout.doc_offsets[blocks[:, DOC]]
    first = np.searchsorted(layout.run_start, base + blocks[:, KV_START], side="right") - 1
    stop = np.searchsorted(layout.run_start, base + blocks[:, KV_END], side="left")
    return Blocks(
        np.stack([height, (blocks[:, KV_END] - blocks[:, KV_START]) // cell], axis=1),
        np.ascontiguousarray(blocks[:, DOC]),
        np.stack([layout.run_rank, -(-start // cell), end // cell], axis=1),
        np.stack([first, stop, blocks[:, KV_START] // cell], axis=1),
    )
