# SPDX-License-Identifier: BSD-3-Clause
"""Local search from a plan: first into the load limits, then to fewer bytes."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.exchange.traffic import BETWEEN_NODES, node_of_ranks
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import SERVER, TASK_COLUMNS
from torchtitan_cad.planning.planners.local_search.board import (
    BYTES_IN,
    BYTES_OUT,
    CUTS,
    DIRTY,
    DOC_COLUMNS,
    DOC_HEAD,
    EVALUATED,
    FIRST_RUN,
    FREE_PIECES,
    HEAD,
    LIMIT,
    LOAD,
    MAX_RESTS,
    NODE,
    PIECE_COLUMNS,
    PIECES,
    RANK_COLUMNS,
    Board,
    add_piece,
    book_piece,
    settle,
)
from torchtitan_cad.planning.planners.local_search.cuts import ALL_CUTS, CUTS_OF_ROWS
from torchtitan_cad.planning.planners.local_search.feasible import make_feasible
from torchtitan_cad.planning.planners.local_search.polish import polish


@jit_inner
def _lay_out(board: Board, tasks: IntArray, loads: IntArray) -> None:
    """Put the tasks [n, TASK_COLUMNS] on an empty board; ``loads`` [num_ranks] are those of these tasks and others."""
    for rank in range(len(board.ranks)):
        board.ranks[rank, HEAD] = -1
        board.ranks[rank, LOAD] = loads[rank]
    for doc in range(len(board.docs)):
        board.docs[doc, DOC_HEAD] = -1
        board.docs[doc, DIRTY] = 1
    for i in range(len(tasks)):
        book_piece(board, tasks[i], tasks[i, SERVER], -1, 0, 1)
        settle(board, True)
        add_piece(board, tasks[i], tasks[i, SERVER])
    board.counts[EVALUATED] = 0


@jit
def _search(
    board: Board,
    tasks: IntArray,
    loads: IntArray,
    patience: int,
    budget: int,
) -> None:
    _lay_out(board, tasks, loads)
    make_feasible(board, patience)
    for rank in range(len(loads)):
        board.ranks[rank, LIMIT] = max(
            board.ranks[rank, LIMIT], board.ranks[rank, LOAD]
        )
    board.counts[EVALUATED] = 0
    polish(board, budget)


class LocalSearch:
    """Local search over tasks of a layout."""

    def __init__(
        self,
        layout: TokenLayout,
        shape: AttentionShape,
        config: PlannerConfig,
        cost: TileAreaCost,
    ) -> None:
        order = layout.run_order
        start = layout.seg_start[order]
        end = start + layout.seg_length[order]
        self._runs = np.stack([start, end, layout.run_rank], axis=1)
        doc = layout.doc_index(layout.seg_doc[order])
        numbers = np.arange(len(layout.docs) + 1)
        self._docs = np.zeros((len(numbers), DOC_COLUMNS), dtype=np.int64)
        self._docs[:, FIRST_RUN] = np.searchsorted(doc, numbers)
        self._node = node_of_ranks(config, layout.num_ranks)
        prices = np.outer([shape.query_bytes, shape.kv_bytes], [1, BETWEEN_NODES])
        longest = int(layout.doc_lengths.max(initial=0))
        prefix = np.ascontiguousarray(cost.prefix_cost(longest))
        self._rules = prefix, prices, cost.granularity, config.min_shard
        self._cuts = ALL_CUTS if config.split_kv else CUTS_OF_ROWS

    def improve(
        self,
        start: IntArray,
        loads: IntArray,
        limit: int,
        *,
        guaranteed: int,
        patience: int,
        budget: int,
    ) -> tuple[IntArray, IntArray] | None:
        """Return tasks [n, TASK_COLUMNS] within the guaranteed loads, and [2, num_ranks] bytes in and out, or None.

        Args:
            start: int64 [n, TASK_COLUMNS] tasks to begin with.
            loads: int64 [num_ranks] loads of these tasks and of others, which stay as they are.
            limit: load of a rank to stay within if possible.
            guaranteed: load never to exceed.
            patience: most moves evaluated to get within the limit.
            budget: most moves evaluated for fewer bytes.
        """
        size = 2 * len(start) + 16 * len(loads) + 64
        while True:
            board = self._board(size, limit)
            _search(board, np.ascontiguousarray(start), loads, patience, budget)
            if (board.ranks[:, LOAD] <= guaranteed).all():
                break
            if board.counts[PIECES] + FREE_PIECES <= size or size > 2**24:
                return None
            size *= 2
        by_rank = board.ranks[:, [BYTES_IN, BYTES_OUT]].T.copy()
        return board.pieces[: board.counts[PIECES], :TASK_COLUMNS], by_rank

    def _board(self, size: int, limit: int) -> Board:
        ranks = np.zeros((len(self._node), RANK_COLUMNS), dtype=np.int64)
        ranks[:, LIMIT] = limit
        ranks[:, NODE] = self._node
        counts = np.zeros(5, dtype=np.int64)
        counts[CUTS] = self._cuts
        return Board(
            np.empty((size, PIECE_COLUMNS), dtype=np.int64),
            ranks,
            self._docs.copy(),
            self._runs,
            np.empty((1 + MAX_RESTS, TASK_COLUMNS), dtype=np.int64),
            counts,
            np.zeros(3),
            *self._rules,
        )
