"""Brings a plan within the load limits: parts of pieces move from ranks over their limit to ranks with room.

Of all parts and receivers the one that costs the fewest bytes per unit of excess removed goes first. Every move takes
load from a rank over its limit and brings no rank above its own. Where cuts go along the queries alone and limits are
the guaranteed ones, there is such a move as long as a rank is over (``limits.py``).
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.planners.local_search.board import (
    CUTS,
    EVALUATED,
    HEAD,
    MARK,
    NEW_IN,
    NEXT,
    STAMPS,
    STUCK,
    Board,
    book_piece,
    find_options,
    is_full,
    piece_cost,
    relief,
    room,
    settle,
)
from torchtitan_cad.planning.planners.local_search.cuts import HALF_CORNER, WHOLE, cut
from torchtitan_cad.planning.planners.local_search.moves import move

PASSES = 6
"""Passes over all ranks: a rank that has given away a large part may receive one."""

ROOMIEST = 8
"""Ranks with the most room that are tried even if they have nothing of the document."""

# Entries of a choice: piece, kind of cut, cost of the part at most, receiver.
PIECE, HOW, WANTED, RECEIVER = range(4)


@jit_leaf
def _find_roomiest(board: Board, roomiest: IntArray) -> None:
    """List the ranks with the most room in ``roomiest``, -1 where there are no more ranks."""
    board.counts[STAMPS] += 1
    stamp = board.counts[STAMPS]
    for place in range(len(roomiest)):
        best, most = -1, 0
        for rank in range(len(board.ranks)):
            if board.ranks[rank, MARK] != stamp and (best < 0 or room(board, rank) > most):
                best, most = rank, room(board, rank)
        roomiest[place] = best
        if best >= 0:
            board.ranks[best, MARK] = stamp


@jit_leaf
def _find_receivers(board: Board, i: int, roomiest: IntArray) -> int:
    """List ranks that may take a part of piece i in ``board.options``; returns how many."""
    num = find_options(board, i, 1)
    for k in range(len(roomiest)):
        rank = roomiest[k]
        if rank >= 0 and board.ranks[rank, MARK] != board.counts[STAMPS]:
            board.options[num] = rank
            num += 1
    return num


@jit_leaf
def _most_over(board: Board) -> int:
    """Return the rank that exceeds its limit by most, of those not given up in this pass; -1 if there is none."""
    worst, most = -1, 0
    for rank in range(len(board.ranks)):
        if -room(board, rank) > most and board.ranks[rank, STUCK] == 0:
            worst, most = rank, -room(board, rank)
    return worst


@jit_leaf
def make_feasible(board: Board, budget: int, scratch: IntArray) -> None:
    """Move parts until no rank exceeds its limit, nothing helps, or ``budget`` moves are evaluated.

    Of the rank that exceeds its limit by most, parts are tried from whole pieces down to single cells of rows, each a
    quarter smaller than the one before. ``scratch`` is [ROOMIEST + 4].
    """
    roomiest, choice = scratch[:ROOMIEST], scratch[ROOMIEST:]
    for _ in range(PASSES):
        for rank in range(len(board.ranks)):
            board.ranks[rank, STUCK] = 0
        moved, rank = False, _most_over(board)
        while rank >= 0 and not is_full(board) and board.counts[EVALUATED] < budget:
            need, best, found = -room(board, rank), np.inf, False
            _find_roomiest(board, roomiest)
            j = board.ranks[rank, HEAD]
            while j >= 0:
                num = _find_receivers(board, j, roomiest)
                for how in range(min(board.counts[CUTS], HALF_CORNER)):
                    wanted = piece_cost(board, board.pieces[j])
                    while wanted > 0:
                        rests = cut(board, j, 0, how, wanted, False)
                        if rests < 0:
                            break
                        part = board.parts[0, 0]
                        work, relieved = piece_cost(board, part), relief(board, 0, rests, board.pieces[j])
                        if relieved <= 0:
                            break
                        book_piece(board, part, rank, j, 0, rests, -1)
                        saved = -board.ranks[rank, NEW_IN]
                        settle(board, False)
                        for o in range(num):
                            other = board.options[o]
                            if work > room(board, other):
                                continue
                            board.counts[EVALUATED] += 1
                            book_piece(board, part, other, -1, 0, 0, 1)
                            value = max(board.ranks[other, NEW_IN] - saved, 1) / min(need, relieved)
                            settle(board, False)
                            if value < best:
                                best, found = value, True
                                choice[PIECE], choice[HOW], choice[WANTED], choice[RECEIVER] = j, how, wanted, other
                        wanted = 0 if how == WHOLE else min(work - 1, wanted * 3 // 4)
                j = board.pieces[j, NEXT]
            if found:
                rests = cut(board, choice[PIECE], 0, choice[HOW], choice[WANTED], False)
                move(board, choice[PIECE], 0, rests, choice[RECEIVER])
                moved = True
            else:
                board.ranks[rank, STUCK] = 1
            rank = _most_over(board)
        if not moved:
            return
