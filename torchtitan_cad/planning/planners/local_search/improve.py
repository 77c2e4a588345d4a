"""Local search from one or more finished plans: within the limits first, then for fewer bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit, jit_leaf
from torchtitan_cad.planning.model.cost import CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import LARGEST
from torchtitan_cad.planning.model.shape import RowPrices
from torchtitan_cad.planning.model.tasks import SERVER, TASK_COLUMNS
from torchtitan_cad.planning.planners.local_search.board import (
    DIRTY,
    DOC_HEAD,
    EVALUATED,
    FIRST_RUN,
    HEAD,
    LOAD,
    MAX_RESTS,
    OUT,
    PIECE_COLUMNS,
    PIECES,
    RANK_COLUMNS,
    RESOURCES,
    Board,
    add_piece,
    book_piece,
    bytes_in,
    copy_task,
    piece_cost,
    settle,
)
from torchtitan_cad.planning.planners.local_search.cuts import ALL_WAYS, WAYS_OF_ROWS
from torchtitan_cad.planning.planners.local_search.feasible import ROOMIEST, excess, make_feasible
from torchtitan_cad.planning.planners.local_search.polish import polish

WORST_RANK_WEIGHT = 0.75
"""By how many percent of the total one percent of the worst rank's bytes is traded."""

ALLOWED_EXCESS = (0.05, 0.2)
"""By how many mean loads a rank may exceed its limit for the time being where rows are limited, tried in this order."""

PATIENCE = 6000
"""Moves evaluated per rank, at most, in one attempt to bring plans within limits; starts share them."""

PER_LEVEL, PER_EXCESS = 1e3, 1e6
"""Weights, against bytes, of a level of limits that cannot be kept, and of exceeding the last one by all of it."""


@dataclass(frozen=True)
class LocalGoal:
    """Limits that local search is to keep, and how costs are counted.

    Attributes:
        levels: int64 [L, num_ranks, RESOURCES] load, query and key rows that a rank may have at most. The first level
            that can be kept is.
        split_kv: whether pieces may be cut along the keys.
    """

    cost: CostModel
    levels: IntArray
    split_kv: bool = True

    @classmethod
    def of_tiles(cls, tiles: IntArray, granularity: int) -> LocalGoal:
        """Allow at most so many tiles per rank [num_ranks], and any number of rows."""
        levels = np.full((1, len(tiles), RESOURCES), LARGEST)
        levels[0, :, LOAD] = tiles
        return cls(TileAreaCost(granularity), levels)

    @property
    def rows(self) -> bool:
        """Whether rows are limited."""
        return bool((self.levels[:, :, LOAD + 1 :] < LARGEST).any())


@dataclass(frozen=True)
class Found:
    """The best plan found: tasks int64 [n, TASK_COLUMNS], and what it moves.

    Attributes:
        level: of the limits that it keeps; the number of levels if it keeps none.
        total, worst: bytes of all ranks, and of the worst, in or out.
    """

    tasks: IntArray
    level: int
    total: int
    worst: int


@jit_leaf
def _worst_bytes(board: Board) -> int:
    """Largest of all ranks' bytes in and out."""
    worst = 0
    for rank in range(len(board.ranks)):
        worst = max(worst, bytes_in(board, rank), board.ranks[rank, OUT])
    return worst


@jit_leaf
def _total_bytes(board: Board) -> int:
    """Sum of all ranks' bytes in."""
    total = 0
    for rank in range(len(board.ranks)):
        total += bytes_in(board, rank)
    return total


@jit_leaf
def _lay_out(board: Board, tasks: IntArray, limits: IntArray, loads: IntArray) -> None:
    """Start anew from the tasks [n, TASK_COLUMNS]; ``loads`` [num_ranks] come on top."""
    board.counts[PIECES] = 0
    for rank in range(len(board.ranks)):
        for column in range(RANK_COLUMNS):
            board.ranks[rank, column] = 0
        board.ranks[rank, HEAD], board.ranks[rank, LOAD] = -1, loads[rank]
        for kind in range(RESOURCES):
            board.limits[rank, kind] = limits[rank, kind]
    for doc in range(len(board.docs)):
        board.docs[doc, DOC_HEAD], board.docs[doc, DIRTY] = -1, 1
    for i in range(len(tasks)):
        book_piece(board, tasks[i], tasks[i, SERVER], -1, 0, 0, 1)
        settle(board, True)
        add_piece(board, tasks[i], tasks[i, SERVER])
        board.ranks[tasks[i, SERVER], LOAD] += piece_cost(board, tasks[i])
    board.counts[EVALUATED] = 0


@jit_leaf
def _reach(
    board: Board,
    tasks: IntArray,
    levels: IntArray,
    loads: IntArray,
    allowed: IntArray,
    patience: int,
    scratch: IntArray,
) -> int:
    """Lay the tasks out and bring them within the first level of limits that can be kept; returns its number."""
    for level in range(len(levels)):
        for attempt in range(len(allowed)):
            _lay_out(board, tasks, levels[level], loads)
            if excess(board) == 0.0 or make_feasible(board, allowed[attempt], patience, scratch):
                board.counts[EVALUATED] = 0
                return level
    return len(levels)


@jit
def _improve_each(
    board: Board,
    starts: IntArray,
    first: IntArray,
    levels: IntArray,
    loads: IntArray,
    allowed: IntArray,
    budget: int,
    scratch: IntArray,
    out: IntArray,
) -> tuple[int, int, int, int]:
    """Improve the plans starts[first[k] : first[k + 1]] and write the best one's tasks to ``out`` [capacity, 6].

    Returns how many they are, the level of limits that they keep, and the total and the worst rank's bytes.
    """
    best, found, best_level, best_total, best_worst = np.inf, 0, 0, 0, 0
    total, worst, patience = 0, 0, PATIENCE * len(board.ranks) // (len(first) - 1)
    for k in range(len(first) - 1):
        level = _reach(board, starts[first[k] : first[k + 1]], levels, loads, allowed, patience, scratch)
        if k == 0:
            total, worst = max(1, _total_bytes(board)), max(1, _worst_bytes(board))
        penalty = PER_LEVEL * level
        if level < len(levels):
            polish(board, total, worst, WORST_RANK_WEIGHT, budget)
        else:
            penalty += PER_EXCESS * excess(board)
        moved, most = _total_bytes(board), _worst_bytes(board)
        score = moved / total + WORST_RANK_WEIGHT * most / worst + penalty
        if score < best:
            best, best_level, best_total, best_worst, found = score, level, moved, most, board.counts[PIECES]
            for i in range(found):
                copy_task(out[i], board.pieces[i])
    return found, best_level, best_total, best_worst


class LocalSearch:
    """Local search over tasks of some documents; the others stay with their homes, and only their loads count."""

    def __init__(self, layout: TokenLayout, prices: RowPrices, cell: int, goal: LocalGoal, chosen: IntArray) -> None:
        """``chosen`` [D] are the documents to look at, ascending indices into ``layout.docs``; cuts are at multiples of
        ``cell`` tokens."""
        self._goal = goal
        number = np.full(len(layout.docs), -1)
        number[chosen] = np.arange(len(chosen))
        doc = number[layout.doc_index(layout.seg_doc[layout.run_order])]
        start = layout.seg_start[layout.run_order]
        runs = np.stack([start, start + layout.seg_length[layout.run_order], layout.run_rank], axis=1)[doc >= 0]
        docs = np.zeros((len(chosen) + 1, 3), dtype=np.int64)
        docs[:, FIRST_RUN] = np.searchsorted(doc[doc >= 0], np.arange(len(chosen) + 1))
        self._tables = docs, runs
        longest = int(layout.doc_lengths[chosen].max(initial=0))
        ways = ALL_WAYS if goal.split_kv else WAYS_OF_ROWS
        prefix = np.ascontiguousarray(goal.cost.prefix_cost(longest))
        self._rules = prefix, prices.query_bytes, prices.kv_bytes, goal.cost.granularity, cell, ways

    def improve(self, starts: list[IntArray], loads: IntArray, budget: int) -> Found:
        """Return the best plan found from any of the starts: tasks [n, TASK_COLUMNS] of the documents looked at.

        Args:
            loads: int64 [num_ranks] of all other documents.
            budget: moves evaluated per start for fewer bytes.
        """
        goal, n = self._goal, len(loads)
        first = np.cumsum([0, *map(len, starts)])
        capacity = 2 * int(np.diff(first).max()) + 16 * n + 64
        board = Board(
            np.empty((capacity, PIECE_COLUMNS), dtype=np.int64),
            np.zeros((n, RANK_COLUMNS), dtype=np.int64),
            np.empty((n, RESOURCES), dtype=np.int64),
            self._tables[0].copy(),
            self._tables[1],
            np.empty((3, 1 + MAX_RESTS, TASK_COLUMNS), dtype=np.int64),
            np.empty(4 * n + 64, dtype=np.int64),
            np.empty(n, dtype=np.int64),
            np.zeros(4, dtype=np.int64),
            np.zeros(3),
            *self._rules,
        )
        share = int(np.minimum(goal.levels[0, :, LOAD], LARGEST // n).mean())
        attempts = ALLOWED_EXCESS if goal.rows else ALLOWED_EXCESS[:1]
        allowed = np.array([int(each * share) for each in attempts], dtype=np.int64)
        out, scratch = np.empty((capacity, TASK_COLUMNS), dtype=np.int64), np.empty(ROOMIEST + 4, dtype=np.int64)
        table = np.ascontiguousarray(np.concatenate(starts))
        found, *figures = _improve_each(board, table, first, goal.levels, loads, allowed, budget, scratch, out)
        return Found(out[:found], *figures)
