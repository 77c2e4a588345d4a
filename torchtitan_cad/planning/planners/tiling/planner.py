"""The default planner: what overloaded ranks cannot do, as rectangles of queries and keys on the ranks with room.

1. Every rank keeps its own work up to the tolerated load. What is over is a block of its rows against early keys, or a
   staircase of two; several ways to choose it compete (``blocks.py``).
2. The blocks are tiled in strips over the ranks with room, each filled at most to the tolerated load (``strips.py``).
3. A fixed number of trials varies the choices and keeps the best tilings by total and worst-rank bytes (``search.py``);
   local moves lower their bytes further (``polish.py``). Two such searches run side by side.

What this does not know, cost models other than tile area and capacities, is kept by rounds of it and repair
(``rounds.py``); ranks in nodes are tiled in two levels (``nodes.py``).

Work that cannot be cut into rectangles of whole cells, as when documents are shorter than ``min_shard``, is left to the
greedy planner, whose plan competes with this one's where ranks are few. With ``split_kv = false`` the plan is the
greedy's. Nothing depends on clocks: how much is tried is counted.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.exchange.needs import key_needs
from torchtitan_cad.planning.intervals import IntArray, sum_by_index
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import server_loads
from torchtitan_cad.planning.model.shape import AttentionShape, RowPrices
from torchtitan_cad.planning.model.tasks import TASK_FIELDS, TaskArray, home_tasks, make_tasks, merge_queries
from torchtitan_cad.planning.planners.base import register_planner
from torchtitan_cad.planning.planners.greedy import plan_greedy
from torchtitan_cad.planning.planners.local_search.polish import polish_best
from torchtitan_cad.planning.planners.local_search.rounds import Candidate, Goal, plan_in_rounds
from torchtitan_cad.planning.planners.tiling.by_node import tile_by_node
from torchtitan_cad.planning.planners.tiling.search import climb
from torchtitan_cad.planning.planners.tiling.strips import Blocks
from torchtitan_cad.planning.planners.tiling.surplus import (
    DOC,
    K0,
    K1,
    OWNER,
    Q0,
    Q1,
    RUN,
    SPARES,
    Rules,
    find_blocks,
)

ALTERNATIVES = 24
"""Ways to give away a rank's excess that compete."""

SMALL = 16
"""Ranks up to which the greedy's plan is made too, and the better of the two kept: with few ranks that costs little."""

WORST_RANK_WEIGHT = 0.75
"""By how many percent of the total one percent of the worst rank's bytes is traded."""

SEARCHES = ((20251118, 0.02), (20251119, 0.7))
"""(seed, weight of the worst rank's bytes among tilings) of the searches that compete, each in its own thread."""

SHORT = 50
"""Documents that cost less than the mean limit over this, each whole on one rank, are not moved by the polish."""


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
    if plan is not None and (goal.exact or plan.tolerable) and (layout.num_ranks > SMALL or goal.rows):
        return plan.tasks
    other = Candidate(goal, plan_greedy(layout, shape, config, cost))
    if plan is None:
        return other.tasks
    return (plan.or_lighter(other) if goal.exact else plan.or_better(other)).tasks


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
    return _deal_out(layout, home, excess, limit, prices, tile, cell)


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
    over = np.where(loads > limit, loads - limit, 0)
    rules = Rules(tile, cell, shape.query_bytes, shape.kv_bytes)
    blocks, variants, first_variant = find_blocks(runs, first, over, room, rules, ALTERNATIVES)
    if len(blocks) == 0:
        return None
    count = variants[first_variant[1:] - 1, 1] - variants[first_variant[:-1], 0]
    return _Excess(blocks, np.repeat(np.arange(len(count)), count), variants, first_variant)


def _deal_out(
    layout: TokenLayout, home: TaskArray, excess: _Excess, limits: IntArray, shape: RowPrices, tile: int, cell: int
) -> TaskArray | None:
    """Tasks of the best tiling found, polished; None if there is none. ``limits`` [num_ranks] are tiles."""
    spare = limits - server_loads(home, TileAreaCost(tile), layout.num_ranks)
    rooms = np.maximum(spare, 0) // (cell // tile) ** 2
    helpers = np.flatnonzero(rooms > 0)
    helpers = helpers[np.argsort(rooms[helpers], kind="stable")]
    if len(helpers) == 0:
        return None
    row_bytes, column_bytes = float(shape.query_bytes * cell), float(shape.kv_bytes * cell)
    ideal = 2 * np.sqrt(row_bytes * column_bytes)
    prices = np.array([ideal, ideal / np.sqrt(rooms.max()), column_bytes])
    keys = key_needs(layout, home)
    base = np.stack([keys.rows_in(), keys.rows_out()], axis=1).astype(np.float64) * float(shape.kv_bytes)
    blocks = _blocks_to_tile(layout, excess, cell)
    kept, effort, budget = _efforts(len(helpers))
    finish = _Finish(layout, home, excess.blocks, limits, shape, tile, cell, budget)

    def search(seed: int, weight: float) -> _Found | None:
        pool = np.empty((kept, 4 * len(rooms) + 64 * len(excess.first_variant), 6), dtype=np.int64)
        sizes = np.empty(kept, dtype=np.int64)
        choices = (excess.variants, excess.first_variant, helpers, rooms)
        climb(blocks, *choices, prices, row_bytes, base, weight, seed, effort, pool, sizes)
        return finish.polish(pool, sizes) if sizes.max() >= 0 else None

    with ThreadPoolExecutor(len(SEARCHES) - 1) as pool:
        others = [pool.submit(search, *other) for other in SEARCHES[1:]]
        found = [search(*SEARCHES[0]), *(other.result() for other in others)]
    tilings = [tiling for tiling in found if tiling is not None]
    if not tilings:
        return None
    first = tilings[0]
    best = min(tilings, key=lambda t: t.total / first.total + WORST_RANK_WEIGHT * t.worst / first.worst)
    return finish.tasks(best)


@dataclass(frozen=True)
class _Found:
    """A polished tiling: pieces [n, 6] of the documents looked at; bytes in total, and of the worst rank."""

    pieces: IntArray
    total: float
    worst: float


class _Finish:
    """Polishes tilings and makes tasks of them. Documents that are short and stay at home are left alone."""

    def __init__(
        self,
        layout: TokenLayout,
        home: TaskArray,
        blocks: IntArray,
        limits: IntArray,
        shape: RowPrices,
        tile: int,
        cell: int,
        budget: int,
    ) -> None:
        doc, cost = layout.doc_index(home["doc"]), TileAreaCost(tile).cost(home)
        looked_at = sum_by_index(doc, cost, len(layout.docs)) * SHORT >= limits.mean()
        looked_at |= np.bincount(doc, minlength=len(layout.docs)) > 1
        looked_at[blocks[:, DOC]] = True
        ours = looked_at[doc]
        number = np.cumsum(looked_at) - 1
        position = layout.doc_offsets[doc[ours]] + home["q_start"][ours]
        self._docs = layout.docs[looked_at]
        self._rest = home[~ours]
        self._home = np.stack([number[doc[ours]], *(home[name][ours] for name in TASK_FIELDS[1:])], axis=1)
        self._blocks = blocks
        self._run = np.searchsorted(position, layout.doc_offsets[blocks[:, DOC]] + blocks[:, RUN])
        self._first_run = np.searchsorted(self._home[:, 0], np.arange(len(self._docs) + 1))
        self._limits = limits
        self._loads = server_loads(self._rest, TileAreaCost(tile), layout.num_ranks)
        self._units = np.array([tile, cell, shape.query_bytes, shape.kv_bytes])
        self._budget = budget
        self._capacity = 3 * len(home)

    def polish(self, pool: IntArray, sizes: IntArray) -> _Found:
        """The best of the tilings (see ``search.climb``) after polishing."""
        pieces = np.empty((self._capacity + 2 * pool.shape[1], 6), dtype=np.int64)
        tilings = (self._home, self._blocks, self._run, pool, sizes, self._first_run)
        count, total, worst = polish_best(
            *tilings, self._limits, self._loads, self._units, WORST_RANK_WEIGHT, self._budget, pieces
        )
        return _Found(pieces[:count], total, worst)

    def tasks(self, found: _Found) -> TaskArray:
        """Tasks of all documents."""
        doc, *columns = found.pieces.T
        return merge_queries(np.concatenate([self._rest, make_tasks(self._docs[doc], *columns)]))


def _efforts(helpers: int) -> tuple[int, int, int]:
    """(tilings to polish, helpers looked at, moves evaluated per tiling) for that many ranks with room."""
    if helpers <= SMALL:
        return 32, 200000, 2000
    return 1, 95000 + 400 * helpers, 3600 + 40 * helpers


def _blocks_to_tile(layout: TokenLayout, excess: _Excess, cell: int) -> Blocks:
    """The blocks in cells, with the ranks that are home to their columns."""
    blocks = excess.blocks
    height = -(-blocks[:, Q1] // cell) - blocks[:, Q0] // cell
    start = layout.seg_start[layout.run_order]
    end = start + layout.seg_length[layout.run_order]
    base = layout.doc_offsets[blocks[:, DOC]]
    first = np.searchsorted(layout.run_start, base + blocks[:, K0], side="right") - 1
    stop = np.searchsorted(layout.run_start, base + blocks[:, K1], side="left")
    return Blocks(
        np.stack([height, (blocks[:, K1] - blocks[:, K0]) // cell], axis=1),
        np.ascontiguousarray(blocks[:, OWNER]),
        np.ascontiguousarray(blocks[:, DOC]),
        np.ascontiguousarray(blocks[:, SPARES]),
        excess.slots,
        np.stack([layout.run_rank, -(-start // cell), end // cell], axis=1),
        np.stack([first, stop, blocks[:, K0] // cell], axis=1),
    )
