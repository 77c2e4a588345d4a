"""The default planner: what overloaded ranks cannot do, as rectangles of queries and keys on the ranks with room.

1. Every rank keeps its own work up to the tolerated load. What is over is a block of its rows against early keys, or a
   staircase of two; several ways to choose it compete (``blocks.py``).
2. The blocks are tiled in strips over the ranks with room, each filled at most to the tolerated load (``strips.py``).
3. A fixed number of trials varies the choices and keeps the best plan by total and worst-rank bytes (``search.py``).

What this does not know, cost models other than tile area and capacities, is kept by rounds of it and repair
(``rounds.py``); ranks in nodes are tiled in two levels (``nodes.py``).

Work that cannot be cut into rectangles of whole cells, as when documents are shorter than ``min_shard``, is left to the
greedy planner, whose plan competes with this one's where ranks are few. With ``split_kv = false`` the plan is the
greedy's. Nothing depends on clocks: the number of trials is a function of the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..config import PlannerConfig
from ..cost import CostModel, TileAreaCost
from ..intervals import IntArray, split_at
from ..layout import TokenLayout
from ..limits import server_loads
from ..shape import AttentionShape, RowPrices
from ..tasks import TaskArray, make_tasks, merge_queries
from ..transfers import key_needs
from .base import register_planner
from .blocks import BLOCK_COLUMNS, DOC, K0, K1, OWNER, Q0, Q1, RUN, SPARES, alternatives, blocks_of_rank
from .greedy import plan_greedy
from .home import home_tasks
from .nodes import tile_by_node
from .rounds import Candidate, Goal, plan_in_rounds
from .search import climb
from .strips import BLOCK, COLUMN, COLUMN_END, HELPER, ROW, ROW_END

ALTERNATIVES = 24
"""Ways to give away a rank's excess that compete."""

SMALL = 16
"""Ranks up to which the greedy's plan is made too, and the better of the two kept: with few ranks that costs little."""

MAX_BLOCKS = 4096
"""Blocks of one rank, at most, where a staircase of two does not suffice."""

WORST_RANK_WEIGHT = 1.0
"""By how many percent of the total one percent of the worst rank's bytes is traded."""

TRIALS_PER_PLAN = 30
TRIAL_BUDGET = 2000
MOST_TRIALS = 400
LARGE = 1000
"""With h helpers there are TRIALS_PER_PLAN + TRIAL_BUDGET / h trials, or LARGE * TRIALS_PER_PLAN / h beyond LARGE."""


@dataclass(frozen=True)
class _Excess:
    """What has to move.

    Attributes:
        blocks: [B, BLOCK_COLUMNS] the blocks of all alternatives.
        slots: [B] which overloaded rank a block belongs to, counted from 0.
        variants: [V, 2] alternatives as ranges [start, end) of blocks; first_variant [slots + 1] delimits the slots.
    """

    blocks: IntArray
    slots: IntArray
    variants: IntArray
    first_variant: IntArray


@register_planner("tiling")
def plan_tiling(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> TaskArray:
    """Diagonals and rectangles within the tolerated load, or the greedy planner's tasks where cells are too coarse."""
    if not config.split_kv:
        return plan_greedy(layout, shape, config, cost)
    home = home_tasks(layout)
    goal = Goal(layout, shape, config, cost, home)
    if Candidate(goal, home).tolerable:
        return home

    def tile(limit: IntArray, prices: RowPrices) -> TaskArray | None:
        flat = _tile(layout, home, limit, prices, cost.granularity, config.min_shard)
        if flat is None or goal.node[-1] == 0:
            return flat

        def tile_part(part: TokenLayout, home: TaskArray, limit: IntArray) -> TaskArray | None:
            return _tile(part, home, limit, prices, cost.granularity, config.min_shard)

        nested = tile_by_node(layout, home, limit, goal.node, cost.granularity, tile_part)
        return flat if nested is None else Candidate(goal, nested).or_lighter(Candidate(goal, flat)).tasks

    plan = plan_in_rounds(goal, home, tile)
    if plan is None or plan.excess or (layout.num_ranks <= SMALL and not goal.rows):
        other = Candidate(goal, plan_greedy(layout, shape, config, cost))
        plan = other if plan is None else plan.or_better(other)
    return plan.tasks


def _tile(
    layout: TokenLayout, home: TaskArray, limit: IntArray, prices: RowPrices, tile: int, cell: int
) -> TaskArray | None:
    """Tasks of at most ``limit`` [num_ranks] tiles per rank; None where whole cells cannot bring that about."""
    spare = limit - server_loads(home, TileAreaCost(tile), layout.num_ranks)
    if (spare >= 0).all():
        return home
    excess = _find_excess(layout, home, -spare, 0, tile, cell, prices)
    if excess is None:
        return None
    rooms = np.maximum(spare, 0) // (cell // tile) ** 2
    pieces = _deal_out(layout, home, excess, rooms, prices, cell)
    if pieces is None:
        return None
    blocks = excess.blocks[np.unique(pieces[:, BLOCK])]
    return merge_queries(
        np.concatenate([_kept_tasks(layout, home, blocks), _piece_tasks(layout, excess.blocks, pieces, cell)])
    )


def _find_excess(
    layout: TokenLayout, home: TaskArray, loads: IntArray, limit: int, tile: int, cell: int, shape: RowPrices
) -> _Excess | None:
    """Alternatives for every rank above ``limit``; None if some rank cannot give enough away in whole cells."""
    columns = (layout.doc_index(home["doc"]), home["q_start"], home["q_end"], home["server"])
    runs = np.stack(columns, axis=1)
    runs = runs[np.lexsort((runs[:, 1] - runs[:, 2], runs[:, 3]))]
    first = np.searchsorted(runs[:, 3], np.arange(layout.num_ranks + 1))
    free = np.maximum(limit - loads, 0).astype(np.float64)
    room = float((free**2).sum() / max(1.0, free.sum()))  # that of a helper met by a typical pair
    if room == 0:
        return None
    table = np.empty((MAX_BLOCKS, BLOCK_COLUMNS), dtype=np.int64)
    ways = np.empty((ALTERNATIVES, 2, BLOCK_COLUMNS), dtype=np.int64)
    blocks: list[IntArray] = []
    slots: list[int] = []
    variants: list[tuple[int, int]] = []
    first_variant = [0]
    for slot, rank in enumerate(np.flatnonzero(loads > limit).tolist()):
        mine, over = runs[first[rank] : first[rank + 1]], int(loads[rank] - limit)
        count = alternatives(mine, over, room, tile, cell, shape.query_bytes, shape.kv_bytes, ALTERNATIVES, ways)
        found = [way[way[:, OWNER] >= 0] for way in ways[:count]]
        if not found:
            count = blocks_of_rank(mine, over, tile, cell, table, 0)
            if count <= 0:
                return None
            found = [table[:count].copy()]
        for way in found:
            variants.append((len(slots), len(slots) + len(way)))
            slots += [slot] * len(way)
            blocks.append(way)
        first_variant.append(len(variants))
    return _Excess(np.concatenate(blocks), np.array(slots), np.array(variants), np.array(first_variant))


def _deal_out(
    layout: TokenLayout, home: TaskArray, excess: _Excess, rooms: IntArray, shape: RowPrices, cell: int
) -> IntArray | None:
    """Pieces of the best tiling found, or None if there is none. ``rooms`` [num_ranks] are free cells."""
    blocks = excess.blocks
    size = np.stack(
        [-(-blocks[:, Q1] // cell) - blocks[:, Q0] // cell, (blocks[:, K1] - blocks[:, K0]) // cell], axis=1
    )
    helpers = np.flatnonzero(rooms > 0)
    helpers = helpers[np.argsort(rooms[helpers], kind="stable")]
    if len(helpers) == 0:
        return None
    row_bytes, column_bytes = float(shape.query_bytes * cell), float(shape.kv_bytes * cell)
    block_bytes = np.stack([np.full(len(blocks), row_bytes), size[:, 1] * column_bytes], axis=1)
    ideal = 2 * np.sqrt(row_bytes * column_bytes)
    prices = np.array([ideal, ideal / np.sqrt(rooms.max()), column_bytes])
    holders, first_holder, guests, first_guest = _find_holders(layout, blocks, rooms, cell)
    keys = key_needs(layout, home)
    pieces = np.empty((4 * len(rooms) + 64 * len(excess.first_variant), 6), dtype=np.int64)
    count = climb(
        size,
        block_bytes,
        np.ascontiguousarray(blocks[:, OWNER]),
        np.ascontiguousarray(blocks[:, SPARES]),
        excess.slots,
        excess.variants,
        excess.first_variant,
        holders,
        first_holder,
        rooms[helpers],
        helpers,
        guests,
        first_guest,
        np.ascontiguousarray(blocks[:, DOC]),
        prices,
        keys.rows_in() * float(shape.kv_bytes),
        keys.rows_out() * float(shape.kv_bytes),
        WORST_RANK_WEIGHT,
        _trials(len(helpers)),
        pieces,
    )
    return None if count < 0 else pieces[:count]


def _trials(helpers: int) -> int:
    if helpers > LARGE:
        return max(1, LARGE * TRIALS_PER_PLAN // helpers)
    return min(MOST_TRIALS, TRIALS_PER_PLAN + TRIAL_BUDGET // helpers)


def _find_holders(
    layout: TokenLayout, blocks: IntArray, rooms: IntArray, cell: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """By block: ranks and the columns [start, end) they are home to, and those among them that have room."""
    begin = layout.doc_offsets[blocks[:, DOC]] + blocks[:, K0]
    block, run, start, end = split_at(begin, begin + blocks[:, K1] - blocks[:, K0], layout.run_start)
    rank = layout.run_rank[run]
    columns = np.stack([rank, -(-(start - begin[block]) // cell), (end - begin[block]) // cell], axis=1)
    guest = (rooms[rank] > 0) & (columns[:, 1] < columns[:, 2])
    number = np.arange(len(blocks) + 1)
    return (
        columns,
        np.searchsorted(block, number),
        np.ascontiguousarray(columns[guest]),
        np.searchsorted(block[guest], number),
    )


def _piece_tasks(layout: TokenLayout, blocks: IntArray, pieces: IntArray, cell: int) -> TaskArray:
    """The rectangles of the helpers."""
    block = blocks[pieces[:, BLOCK]]
    first_row = block[:, Q0] // cell
    return make_tasks(
        layout.docs[block[:, DOC]],
        np.maximum((first_row + pieces[:, ROW]) * cell, block[:, Q0]),
        np.minimum((first_row + pieces[:, ROW_END]) * cell, block[:, Q1]),
        block[:, K0] + pieces[:, COLUMN] * cell,
        block[:, K0] + pieces[:, COLUMN_END] * cell,
        pieces[:, HELPER],
    )


def _kept_tasks(layout: TokenLayout, home: TaskArray, blocks: IntArray) -> TaskArray:
    """Home tasks less the blocks: per run, what is left of its rows between the cuts that the blocks make."""
    position = layout.doc_offsets[layout.doc_index(home["doc"])] + home["q_start"]
    run = np.searchsorted(position, layout.doc_offsets[blocks[:, DOC]] + blocks[:, RUN])
    whole = np.ones(len(home), dtype=bool)
    whole[run] = False
    by_run: dict[int, list[list[int]]] = {}
    for i, row in zip(run.tolist(), blocks[:, [K0, K1, Q0, Q1]].tolist(), strict=True):
        by_run.setdefault(i, []).append(row)
    records = []
    for i, given in by_run.items():
        doc, start, end, _, _, server = home[i].tolist()
        cuts = sorted({start, end, *(row[2] for row in given), *(row[3] for row in given)})
        given.sort()
        for a, b in pairwise(cuts):
            at = 0
            for k0, k1, q0, q1 in given:
                if q0 <= a and b <= q1:
                    if at < k0:
                        records.append((doc, a, b, at, k0, server))
                    at = k1
            records.append((doc, a, b, at, b, server))
    return np.concatenate([home[whole], make_tasks(*np.array(records, dtype=np.int64).T)])
