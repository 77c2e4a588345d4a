"""Brings a plan within the limits of its ranks: parts of pieces move from ranks over a limit to ranks with room.

Of all parts and receivers the one that costs the fewest bytes per unit of excess removed goes first. Where rows are to
be moved, a receiver's load may exceed its limit for a while, by an *allowed excess*: that is given away in turn, so
that ranks swap.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.planners.local_search.board import (
    BOOKED,
    EVALUATED,
    HEAD,
    KEYS,
    LOAD,
    MARK,
    NEXT,
    QUERIES,
    RESOURCES,
    STAMPS,
    STUCK,
    Board,
    book_piece,
    find_options,
    is_full,
    piece_cost,
    relief,
    settle,
)
from torchtitan_cad.planning.planners.local_search.cuts import HALF_CORNER, WHOLE, cut
from torchtitan_cad.planning.planners.local_search.moves import move

PASSES = 18
"""Passes over all ranks, by resource in turn."""

ROOMIEST = 8
"""Ranks with the most room for load that are tried even if they have nothing of the document."""

# Entries of a choice: piece, way to cut, cost of the part at most, receiver.
PIECE, HOW, WANTED, RECEIVER = range(4)


@jit_leaf
def excess(board: Board) -> float:
    """Measure by how much some rank exceeds a limit, relative to that limit, at worst; 0 if none does."""
    most = 0.0
    for rank in range(len(board.ranks)):
        for kind in range(RESOURCES):
            over = board.ranks[rank, kind] - board.limits[rank, kind]
            if over > 0:
                most = max(most, over / max(1, board.limits[rank, kind]))
    return most


@jit_leaf
def _find_roomiest(board: Board, roomiest: IntArray) -> None:
    """List the ranks with the most room for load in ``roomiest``, -1 where there are no more ranks."""
    board.counts[STAMPS] += 1
    stamp = board.counts[STAMPS]
    for place in range(len(roomiest)):
        best, most = -1, 0
        for rank in range(len(board.ranks)):
            room = board.limits[rank, LOAD] - board.ranks[rank, LOAD]
            if board.ranks[rank, MARK] != stamp and (best < 0 or room > most):
                best, most = rank, room
        roomiest[place] = best
        if best >= 0:
            board.ranks[best, MARK] = stamp


@jit_leaf
def _find_receivers(board: Board, i: int, allowed_excess: int, roomiest: IntArray) -> int:
    """List ranks that may take a part of piece i in ``board.options``; returns how many."""
    num = find_options(board, i, 1 - allowed_excess)
    for k in range(len(roomiest)):
        rank = roomiest[k]
        if rank >= 0 and board.ranks[rank, MARK] != board.counts[STAMPS]:
            board.options[num] = rank
            num += 1
    return num


@jit_leaf
def _choose(board: Board, rank: int, kind: int, allowed_excess: int, roomiest: IntArray, choice: IntArray) -> bool:
    """Find the part of the rank's pieces that lowers its excess of that kind for the fewest bytes, if there is one.

    Fills ``choice``, see PIECE. The receiver's load may then exceed its limit by ``allowed_excess``. Returns whether a
    part was found.
    """
    need, best, found = board.ranks[rank, kind] - board.limits[rank, kind], np.inf, False
    _find_roomiest(board, roomiest)
    j = board.ranks[rank, HEAD]
    while j >= 0:
        num = _find_receivers(board, j, allowed_excess, roomiest)
        for how in range(min(board.ways, HALF_CORNER)):
            wanted = piece_cost(board, board.pieces[j])
            while wanted > 0:
                rests = cut(board, j, 0, how, wanted, False)
                if rests < 0:
                    break
                part = board.parts[0, 0]
                work = piece_cost(board, part)
                book_piece(board, part, rank, j, 0, rests, -1)
                queries, keys = -board.ranks[rank, QUERIES + BOOKED], -board.ranks[rank, KEYS + BOOKED]
                settle(board, False)
                saved = queries if kind == QUERIES else keys
                if kind == LOAD:
                    saved = relief(board, 0, rests, board.pieces[j])
                if saved <= 0:
                    break
                for o in range(num):
                    other = board.options[o]
                    if work > board.limits[other, LOAD] - board.ranks[other, LOAD] + allowed_excess:
                        continue
                    board.counts[EVALUATED] += 1
                    book_piece(board, part, other, -1, 0, 0, 1)
                    more_queries, more_keys = board.ranks[other, QUERIES + BOOKED], board.ranks[other, KEYS + BOOKED]
                    if settle(board, False) == np.inf:
                        continue
                    change = board.query_bytes * (more_queries - queries) + board.kv_bytes * (more_keys - keys)
                    value = max(change, 1) / min(need, saved)
                    if value < best:
                        best, found = value, True
                        choice[PIECE], choice[HOW], choice[WANTED], choice[RECEIVER] = j, how, wanted, other
                wanted = 0 if how == WHOLE else min(work - 1, wanted * 3 // 4)
        j = board.pieces[j, NEXT]
    return found


@jit_leaf
def _most_over(board: Board, kind: int, number: int) -> int:
    """Return the rank that exceeds that limit by most, of those not done in this pass; -1 if there is none."""
    worst, most = -1, 0
    for rank in range(len(board.ranks)):
        over = board.ranks[rank, kind] - board.limits[rank, kind]
        if over > most and board.ranks[rank, STUCK] != number:
            worst, most = rank, over
    return worst


@jit_leaf
def make_feasible(board: Board, allowed_excess: int, budget: int, scratch: IntArray) -> bool:
    """Move parts until no rank exceeds a limit, nothing helps, or ``budget`` moves are evaluated.

    Returns whether no rank exceeds a limit. ``scratch`` is [ROOMIEST + 4].
    """
    roomiest, choice = scratch[:ROOMIEST], scratch[ROOMIEST:]
    moved = True
    for rank in range(len(board.ranks)):
        board.ranks[rank, STUCK] = -1
    for number in range(PASSES):
        kind = number % RESOURCES
        if kind == LOAD:
            if not moved:
                break
            moved = False
        rank = _most_over(board, kind, number)
        while rank >= 0 and not is_full(board) and board.counts[EVALUATED] < budget:
            if not _choose(board, rank, kind, 0 if kind == LOAD else allowed_excess, roomiest, choice):
                board.ranks[rank, STUCK] = number
            else:
                rests = cut(board, choice[PIECE], 0, choice[HOW], choice[WANTED], False)
                move(board, choice[PIECE], 0, rests, choice[RECEIVER])
                moved = True
            rank = _most_over(board, kind, number)
        if excess(board) == 0.0:
            return True
    return False
