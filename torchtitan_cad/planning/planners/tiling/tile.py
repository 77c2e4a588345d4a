"""One tiling: what is over a number of tiles per rank, dealt out to the ranks with room and improved by local search.

1. What is over is a block of a rank's rows against early keys, or a staircase of two; several ways to choose it compete
   (``surplus.py``).
2. The blocks are tiled in strips over the ranks with room, each filled at most to the limit (``strips.py``).
3. A fixed number of trials varies the choices and keeps the best tilings by total and worst-rank bytes (``search.py``);
   local search keeps their limits and lowers their bytes further. Two such searches run side by side.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.exchange.needs import key_needs
from torchtitan_cad.planning.intervals import IntArray, sum_by_index
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import server_loads
from torchtitan_cad.planning.model.shape import RowPrices
from torchtitan_cad.planning.model.tasks import (
    DOC,
    KV_END,
    KV_START,
    Q_END,
    Q_START,
    SERVER,
    TaskArray,
    make_tasks,
    merge_queries,
    task_table,
)
from torchtitan_cad.planning.planners.local_search.board import LOAD
from torchtitan_cad.planning.planners.local_search.improve import WORST_RANK_WEIGHT, Found, LocalGoal, LocalSearch
from torchtitan_cad.planning.planners.tiling.assemble import assemble
from torchtitan_cad.planning.planners.tiling.search import Choices, hill_climb
from torchtitan_cad.planning.planners.tiling.strips import Blocks
from torchtitan_cad.planning.planners.tiling.surplus import FREES_KEYS, RUN, Rules, find_blocks

SMALL = 16
"""Ranks with room up to which many tilings are improved."""

TILINGS_TO_MEND = 4
"""Tilings of each search that are improved, at most, where rows are limited."""

SHORT = 50
"""Where only tiles count, local search skips documents on one rank that cost less than the mean limit / SHORT."""


class Effort(NamedTuple):
    """Numbers of what a tiling tries.

    Attributes:
        alternatives: ways to give away a rank's excess that compete.
        searches: (seed, weight of the worst rank's bytes among tilings) of the searches that compete, each in its own
            thread.
        tilings: those of each search that local search improves.
        looked_at: helpers that a search looks at, after which no trial begins; by default as many as the ranks need.
        moves: that local search evaluates per tiling for fewer bytes.
    """

    tilings: int
    looked_at: int
    moves: int
    alternatives: int = 24
    searches: tuple[tuple[int, float], ...] = ((20251118, 0.02), (20251119, 0.7))

    @classmethod
    def of(cls, helpers: int) -> Effort:
        """Choose for that many ranks with room."""
        if helpers <= SMALL:
            return cls(tilings=32, looked_at=200000, moves=2000)
        return cls(tilings=1, looked_at=95000 + 400 * helpers, moves=3600 + 40 * helpers)

    @classmethod
    def quick(cls, num_ranks: int) -> Effort:
        """Choose for that many ranks where only the bytes are asked for, about; docs/placement.md has the times."""
        searches = ((20251118, 0.3),)
        if num_ranks <= SMALL:
            return cls(tilings=1, looked_at=5000 + 100 * num_ranks, moves=1000 + 10 * num_ranks, searches=searches)
        return cls(tilings=1, looked_at=20000 + 200 * num_ranks, moves=2000 + 20 * num_ranks, searches=searches)


@dataclass(frozen=True)
class _Excess:
    """Blocks that have to move.

    Attributes:
        blocks: [B, BLOCK_COLUMNS] the blocks of all alternatives.
        slots: [B] which overloaded rank a block belongs to, counted from 0.
        variants: [V, 2] alternatives as ranges [start, end) of blocks; first_variant [slots + 1] delimits the slots.
    """

    blocks: IntArray
    slots: IntArray
    variants: IntArray
    first_variant: IntArray


@dataclass(frozen=True)
class Problem:
    """Full-prefix home tasks in canonical order, to be tiled at given prices of rows, in cells of so many tokens."""

    layout: TokenLayout
    home: TaskArray
    prices: RowPrices
    cell: int


def tile(
    problem: Problem, limit: IntArray, granularity: int, local: LocalGoal | None = None, effort: Effort | None = None
) -> TaskArray | None:
    """Return the tasks of at most ``limit`` [num_ranks] tiles per rank; None where whole cells cannot bring that about.

    With a ``local`` goal the tiling is only a start for local search, which counts costs and limits by it. The
    ``effort`` is by default what the number of ranks with room needs.
    """
    layout, home = problem.layout, problem.home
    room = limit - server_loads(home, TileAreaCost(granularity), layout.num_ranks)
    if (room >= 0).all():
        return home
    effort = effort or Effort.of(int((room > 0).sum()))
    excess = _find_excess(problem, room, granularity, effort.alternatives)
    choices = None if excess is None else _choices(problem, excess, room, granularity)
    if excess is None or choices is None:
        return None
    finish = _Finish(problem, excess.blocks, local or LocalGoal.of_tiles(limit, granularity))
    keep = min(effort.tilings, TILINGS_TO_MEND) if local is not None and local.rows else effort.tilings

    def search(seed: int, weight: float) -> Found | None:
        return finish.improve(hill_climb(choices, weight, seed, effort.looked_at, keep), effort.moves)

    first, *rest = effort.searches
    with ThreadPoolExecutor(max(1, len(rest))) as threads:
        others = [threads.submit(search, *other) for other in rest]
        found = [search(*first), *(other.result() for other in others)]
    plans = [plan for plan in found if plan is not None]
    if not plans:
        return None
    total, worst = max(1, plans[0].total), max(1, plans[0].worst)
    return finish.tasks(min(plans, key=lambda p: (p.level, p.total / total + WORST_RANK_WEIGHT * p.worst / worst)))


def _find_excess(problem: Problem, room: IntArray, granularity: int, alternatives: int) -> _Excess | None:
    """Alternatives for every rank whose ``room`` [num_ranks], in tiles, is negative; None if one cannot give enough."""
    runs = task_table(problem.layout, problem.home)
    runs = runs[np.lexsort((runs[:, Q_START] - runs[:, Q_END], runs[:, SERVER]))]
    first = np.searchsorted(runs[:, SERVER], np.arange(len(room) + 1))
    rooms = np.maximum(room, 0).astype(np.float64)
    typical = float((rooms**2).sum() / max(1.0, rooms.sum()))  # room of the helper of a typical pair
    if typical == 0:
        return None
    rules = Rules(granularity, problem.cell, problem.prices.query_bytes, problem.prices.kv_bytes)
    over = np.maximum(-room, 0)
    blocks, variants, first_variant = find_blocks(runs, first, over, typical, rules, alternatives)
    if len(blocks) == 0:
        return None
    count = variants[first_variant[1:] - 1, 1] - variants[first_variant[:-1], 0]
    return _Excess(blocks, np.repeat(np.arange(len(count)), count), variants, first_variant)


def _choices(problem: Problem, excess: _Excess, room: IntArray, granularity: int) -> Choices | None:
    """Return the blocks, the ranks with room and the prices; None if no rank has room for a cell."""
    cell, prices = problem.cell, problem.prices
    rooms = np.maximum(room, 0) // (cell // granularity) ** 2
    helpers = np.flatnonzero(rooms > 0)
    helpers = helpers[np.argsort(rooms[helpers], kind="stable")]
    if len(helpers) == 0:
        return None
    row_bytes, column_bytes = float(prices.query_bytes * cell), float(prices.kv_bytes * cell)
    ideal = 2 * np.sqrt(row_bytes * column_bytes)
    keys = key_needs(problem.layout, problem.home)
    return Choices(
        _blocks_to_tile(problem.layout, excess, cell),
        excess.variants,
        excess.first_variant,
        helpers,
        rooms,
        np.array([ideal, ideal / np.sqrt(rooms.max()), column_bytes]),
        row_bytes,
        np.stack([keys.rows_in(), keys.rows_out()], axis=1).astype(np.float64) * float(prices.kv_bytes),
    )


def _blocks_to_tile(layout: TokenLayout, excess: _Excess, cell: int) -> Blocks:
    """Return the blocks in cells, with the ranks that are home to their columns."""
    blocks = excess.blocks
    height = -(-blocks[:, Q_END] // cell) - blocks[:, Q_START] // cell
    start = layout.seg_start[layout.run_order]
    end = start + layout.seg_length[layout.run_order]
    base = layout.doc_offsets[blocks[:, DOC]]
    first = np.searchsorted(layout.run_start, base + blocks[:, KV_START], side="right") - 1
    stop = np.searchsorted(layout.run_start, base + blocks[:, KV_END], side="left")
    return Blocks(
        np.stack([height, (blocks[:, KV_END] - blocks[:, KV_START]) // cell], axis=1),
        np.ascontiguousarray(blocks[:, SERVER]),
        np.ascontiguousarray(blocks[:, DOC]),
        np.ascontiguousarray(blocks[:, FREES_KEYS]),
        excess.slots,
        np.stack([layout.run_rank, -(-start // cell), end // cell], axis=1),
        np.stack([first, stop, blocks[:, KV_START] // cell], axis=1),
    )


class _Finish:
    """Local search from tilings. Where only tiles count, documents that are short and stay at home are left alone."""

    def __init__(self, problem: Problem, blocks: IntArray, local: LocalGoal) -> None:
        layout, home = problem.layout, problem.home
        table, cost = task_table(layout, home), local.cost.cost(home)
        doc = table[:, DOC]
        looked_at = sum_by_index(doc, cost, len(layout.docs)) * SHORT >= local.levels[0, :, LOAD].mean()
        looked_at |= np.bincount(doc, minlength=len(layout.docs)) > 1
        looked_at[blocks[:, DOC]] = True
        ours = looked_at[doc]
        self._docs = layout.docs[looked_at]
        self._rest = home[~ours]
        self._loads = server_loads(self._rest, local.cost, layout.num_ranks)
        position = layout.doc_offsets[doc[ours]] + table[ours, Q_START]
        self._run = np.searchsorted(position, layout.doc_offsets[blocks[:, DOC]] + blocks[:, RUN])
        self._home = table[ours]
        self._home[:, DOC] = (np.cumsum(looked_at) - 1)[doc[ours]]
        self._blocks, self._cell = blocks, problem.cell
        self._search = LocalSearch(layout, problem.prices, problem.cell, local, np.flatnonzero(looked_at))

    def improve(self, tilings: list[IntArray], budget: int) -> Found | None:
        """Return the best plan found from the tilings, see ``search.hill_climb``; None if there are none."""
        starts = [assemble(self._home, self._blocks, self._run, tiling, self._cell) for tiling in tilings]
        return self._search.improve(starts, self._loads, budget) if starts else None

    def tasks(self, found: Found) -> TaskArray:
        """Tasks of all documents."""
        doc, *columns = found.tasks.T
        return merge_queries(np.concatenate([self._rest, make_tasks(self._docs[doc], *columns)]))
