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
from .blocks import DOC, K0, K1, OWNER, Q0, Q1, RUN, SPARES, blocks_of_rank, alternatives
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
    rooms = np.maximum(limits.tolerated - loads, 0) // (cell // tile) ** 2
    found = find_blocks(layout, home, loads, limits.tolerated, tile, cell, shape)
    if found is None:
        return plan_greedy(layout, shape, config, cost)
    blocks, slots, variants, first_variant = found
    pieces = tile_all(layout, home, blocks, slots, variants, first_variant, rooms, shape, cell)
    if pieces is None:
        return plan_greedy(layout, shape, config, cost)
    used = np.unique(pieces[:, BLOCK])
    tasks = np.concatenate([kept_tasks(layout, home, blocks[used], cell), piece_tasks(layout, blocks, pieces, cell)])
    return merge_queries(tasks)


def find_blocks(layout, home, loads, limit, tile, cell, shape):
    runs = np.stack([layout.doc_index(home["doc"]), home["q_start"], home["q_end"], home["server"]], axis=1)
    order = np.lexsort((runs[:, 1] - runs[:, 2], runs[:, 3]))
    runs = runs[order]
    first = np.searchsorted(runs[:, 3], np.arange(layout.num_ranks + 1))
    room = np.maximum(limit - loads, 0)
    room = (room.astype(float)**2).sum() / max(1, room.sum())
    table = np.empty((256, 8), dtype=np.int64)
    blocks, slots, variants, first_variant = [], [], [], [0]
    size = 0
    ways = np.empty((NVAR, 2, 8), dtype=np.int64)
    for slot, rank in enumerate(np.flatnonzero(loads > limit).tolist()):
        mine = runs[first[rank]:first[rank + 1]]
        excess = int(loads[rank] - limit)
        n = alternatives(mine, excess, room, tile, cell, shape.query_bytes, shape.kv_bytes, NVAR, ways)
        for i in range(n):
            way = ways[i][ways[i, :, OWNER] >= 0]
            blocks.append(way); slots += [slot] * len(way); variants.append((size, size + len(way))); size += len(way)
        if n == 0:
            n = blocks_of_rank(mine, excess, tile, cell, table, 0)
            if n > 0:
                blocks.append(table[:n].copy()); slots += [slot]*n; variants.append((size, size+n)); size += n
            elif len(variants) == first_variant[-1]:
                return None
        first_variant.append(len(variants))
    return np.concatenate(blocks), np.array(slots), np.array(variants), np.array(first_variant)
NVAR=int(__import__('os').environ.get('NVAR','6'))

def tile_all(layout, home, blocks, slots, variants, first_variant, rooms, shape, cell):
    heights = -(-blocks[:, Q1] // cell) - blocks[:, Q0] // cell
    widths = (blocks[:, K1] - blocks[:, K0]) // cell
    helpers = np.flatnonzero(rooms > 0)
    helpers = helpers[np.argsort(rooms[helpers], kind="stable")]
    pieces = np.empty((len(blocks) * 64 + 4 * len(rooms), 6), dtype=np.int64)
    shapes = np.stack([heights, widths], axis=1)
    row_bytes = np.full(len(blocks), float(shape.query_bytes * cell))
    key_bytes = widths * float(shape.kv_bytes * cell)
    ideal = 2 * np.sqrt(shape.query_bytes * shape.kv_bytes) * cell
    lost = ideal / np.sqrt(max(1, rooms.max()))
    guests, first_guest, holders, first_holder = find_guests(layout, blocks, rooms, cell)
    keys = key_needs(layout, home)
    n = climb(shapes, np.stack([row_bytes, key_bytes], axis=1), blocks[:, OWNER].copy(), blocks[:, SPARES].copy(), slots, variants, first_variant, holders, first_holder, rooms[helpers], helpers, guests, first_guest, blocks[:, DOC].copy(), np.array([ideal, lost, shape.kv_bytes * cell]),
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
    """Home tasks less the blocks: per run, what is left of its rows between the cuts that the blocks make."""
    doc = layout.doc_index(home["doc"])
    position = layout.doc_offsets[doc] + home["q_start"]
    run = np.searchsorted(position, layout.doc_offsets[blocks[:, DOC]] + blocks[:, RUN])
    touched = np.unique(run)
    whole = np.ones(len(home), dtype=bool)
    whole[touched] = False
    records = []
    for r in touched.tolist():
        mine = blocks[run == r]
        start, end = int(home["q_start"][r]), int(home["q_end"][r])
        cuts = sorted({start, *mine[:, Q0].tolist(), *mine[:, Q1].tolist()})
        for a, b in zip(cuts, [*cuts[1:], end]):
            if a == b: continue
            given = mine[(mine[:, Q0] <= a) & (mine[:, Q1] >= b)]
            given = given[np.argsort(given[:, K0])]
            at = 0
            for k0, k1 in given[:, [K0, K1]].tolist():
                if at < k0:
                    records.append((home["doc"][r], a, b, at, k0, home["server"][r]))
                at = k1
            records.append((home["doc"][r], a, b, at, b, home["server"][r]))
    return np.concatenate([home[whole], make_tasks(*np.array(records, dtype=np.int64).T)])
