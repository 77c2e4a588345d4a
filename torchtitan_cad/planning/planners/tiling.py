"""The default planner: rectangles of rows and early keys, tiled in strips over the ranks with room."""

from __future__ import annotations

import numpy as np

from ..config import PlannerConfig
from ..cost import CostModel
from ..intervals import IntArray, split_at
from ..layout import TokenLayout
from ..limits import load_limits, server_loads
from ..shape import AttentionShape
from ..tasks import TaskArray, make_tasks, merge_queries
from .base import register_planner
from .blocks import DOC, K0, K1, OWNER, Q0, Q1, blocks_of_rank
from .greedy import plan_greedy
from .home import home_tasks
from .strips import BLOCK, COLUMN, COLUMN_END, HELPER, ROW, ROW_END, tile_blocks
from .search import climb
from ..transfers import key_needs


@register_planner("tiling")
def plan_tiling(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> TaskArray:
    home = home_tasks(layout)
    limits = load_limits(layout, config, cost, home)
    loads = server_loads(home, cost, layout.num_ranks)
    if loads.max(initial=0) <= limits.tolerated:
        return home
    tile, cell = cost.granularity, config.min_shard
    blocks = find_blocks(layout, home, loads, limits.tolerated, tile, cell)
    if blocks is None:
        return plan_greedy(layout, shape, config, cost)
    rooms = np.maximum(limits.tolerated - loads, 0) // (cell // tile) ** 2
    best = None
    for most in (64,):
        for f in VARS:
            pieces = tile_all(layout, home, blocks, rooms, shape, cell, most, f)
            if pieces is None:
                continue
            tasks = np.concatenate([kept_tasks(layout, home, blocks, cell), piece_tasks(layout, blocks, pieces, cell)])
            return merge_queries(tasks)
    return plan_greedy(layout, shape, config, cost)
VARS=[1]

def find_blocks(layout, home, loads, limit, tile, cell):
    runs = np.stack([layout.doc_index(home["doc"]), home["q_start"], home["q_end"], home["server"]], axis=1)
    order = np.lexsort((runs[:, 1] - runs[:, 2], runs[:, 3]))
    runs = runs[order]
    first = np.searchsorted(runs[:, 3], np.arange(layout.num_ranks + 1))
    blocks = np.empty((4 * len(runs) + 1024, 6), dtype=np.int64)
    count = 0
    for rank in np.flatnonzero(loads > limit):
        count = blocks_of_rank(runs[first[rank]:first[rank + 1]], loads[rank] - limit, tile, cell, blocks, count)
        if count < 0:
            return None
    return blocks[:count]


def tile_all(layout, home, blocks, rooms, shape, cell, most, f):
    heights = -(-blocks[:, Q1] // cell) - blocks[:, Q0] // cell
    widths = (blocks[:, K1] - blocks[:, K0]) // cell
    helpers = np.flatnonzero(rooms > 0)
    helpers = helpers[np.argsort(rooms[helpers], kind="stable")]
    pieces = np.empty((len(blocks) * 64 + 4 * len(rooms), 6), dtype=np.int64)
    shapes = np.stack([heights, widths], axis=1)
    row_bytes = np.full(len(blocks), float(shape.query_bytes * cell))
    key_bytes = widths * float(shape.kv_bytes * cell)
    ideal = 2 * np.sqrt(shape.query_bytes * shape.kv_bytes) * cell
    lost = f * ideal / np.sqrt(max(1, rooms.max()))
    order = np.argsort(-heights * widths, kind="stable")
    guests, first_guest, holders, first_holder = find_guests(layout, blocks, rooms, cell)
    kept = kept_tasks(layout, home, blocks, cell)
    keys = key_needs(layout, kept)
    n = climb(shapes, np.stack([row_bytes, key_bytes], axis=1), blocks[:, OWNER].copy(), holders, first_holder, rooms[helpers], helpers, guests, first_guest, np.array([ideal, lost, shape.kv_bytes * cell]),
       keys.rows_in() * float(shape.kv_bytes), keys.rows_out() * float(shape.kv_bytes), THETA, TRIALS, pieces)
    return None if n < 0 else pieces[:n]
import os
THETA=float(os.environ.get('THETA','0.5')); TRIALS=int(os.environ.get('TRIALS','100'))

def find_guests(layout, blocks, rooms, cell):
    start = layout.doc_offsets[blocks[:, DOC]] + blocks[:, K0]
    end = start + blocks[:, K1] - blocks[:, K0]
    block, run, a, b = split_at(start, end, layout.run_start)
    rank = layout.run_rank[run]
    a, b = -(-(a - start[block]) // cell), (b - start[block]) // cell
    good = (rooms[rank] > 0) & (a < b)
    guests = np.ascontiguousarray(np.stack([rank[good], a[good], b[good]], axis=1))
    holders = np.ascontiguousarray(np.stack([rank, a, b], axis=1))
    n = np.arange(len(blocks) + 1)
    return guests, np.searchsorted(block[good], n), holders, np.searchsorted(block, n)


def piece_tasks(layout, blocks, pieces, cell):
    block = blocks[pieces[:, BLOCK]]
    base = block[:, Q0] // cell
    start = np.maximum((base + pieces[:, ROW]) * cell, block[:, Q0])
    end = np.minimum((base + pieces[:, ROW_END]) * cell, block[:, Q1])
    k = block[:, K0]
    return make_tasks(layout.docs[block[:, DOC]], start, end, k + pieces[:, COLUMN] * cell, k + pieces[:, COLUMN_END] * cell, pieces[:, HELPER])


def kept_tasks(layout, home, blocks, cell):
    """Home tasks less the blocks."""
    doc = layout.docs[blocks[:, DOC]]
    early = blocks[:, K0] == 0
    # cuts: Q0 of triangle blocks
    records = np.stack([layout.doc_index(home["doc"]), home["q_start"], home["q_end"], home["q_start"] * 0, home["server"]], axis=1)
    position = layout.doc_offsets[records[:, 0]] + records[:, 1]
    at = np.argsort(position)
    where = at[np.searchsorted(position[at], layout.doc_offsets[blocks[:, DOC]] + blocks[:, Q0], side="right") - 1]
    cutting = blocks[:, Q0] > records[where, 1]
    records[where[~cutting], 3] = blocks[~cutting, K1]
    extra = []
    for run in np.unique(where[cutting]):
        cuts = np.sort(blocks[cutting & (where == run), Q0])
        ends = np.append(cuts[1:], records[run, 2])
        records[run, 2] = cuts[0]
        for c, e in zip(cuts, ends):
            extra.append((records[run, 0], c, e, c, records[run, 4]))
    if extra:
        records = np.concatenate([records, np.array(extra)])
    return make_tasks(layout.docs[records[:, 0]], records[:, 1], records[:, 2], records[:, 3], records[:, 2], records[:, 4])
