"""Lowers the bytes of a plan by local moves within the limits of its ranks (``board.py``).

1. *Shifts*: a piece, or as much of it as fits, goes to a server that has room and holds or uses some of its rows or
   keys. The room is what the tolerance leaves.
2. *Swaps*: a piece goes to such a server without regard to its load, and the cheapest part of what that server has,
   large enough to make room for it, goes back.

Pieces are gone through document by document. A document is looked at again once one of its pieces has moved, or a
server that has pieces of it has gained room. The number of moves evaluated is bounded by a budget.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.model.tasks import DOC, SERVER
from torchtitan_cad.planning.planners.local_search.board import (
    DIRTY,
    DOC_HEAD,
    DOC_NEXT,
    EVALUATED,
    HEAD,
    LOAD,
    NEXT,
    OUT,
    PER_TOTAL,
    PER_WORST,
    PIECES,
    WEIGHT,
    Board,
    bytes_in,
    copy_task,
    find_options,
    is_full,
    most_gain,
    piece_cost,
    price_move,
    relief,
    worst_term,
)
from torchtitan_cad.planning.planners.local_search.cuts import WHOLE, cut
from torchtitan_cad.planning.planners.local_search.moves import do_move, join, look_again, move, undo_move

POLISH_WEIGHT = 2.0
"""Factor on the weight of the worst rank's bytes in single moves, over that where finished plans are compared."""

LEAST_GAIN = 3e-5
"""Moves that lower the objective by less are not made."""

LEAST_WISH = 1e-3
"""Pieces whose move, room apart, lowers it by less are not swapped."""

LEAST_ROOM = 256
"""Servers with less room than their limit over this are not considered for shifts."""

ANY_ROOM = -(2**62)
"""No server has less."""


@jit_leaf
def _room(board: Board, rank: int) -> int:
    """Load that the rank may still take."""
    return board.limits[rank, LOAD] - board.ranks[rank, LOAD]


@jit_leaf
def _is_spent(board: Board, budget: int) -> bool:
    return board.counts[EVALUATED] >= budget or is_full(board)


@jit_leaf
def _shift(board: Board, i: int) -> bool:
    """Make the best shift of piece i; False if none is worth it."""
    if most_gain(board, i) < LEAST_GAIN:
        return False
    whole = piece_cost(board, board.pieces[i])
    limit = board.limits[board.pieces[i, SERVER], LOAD]
    best, target, best_cut = -LEAST_GAIN, -1, WHOLE
    for o in range(find_options(board, i, min(whole, 1 + limit // LEAST_ROOM))):
        option = board.options[o]
        room = _room(board, option)
        fits = whole <= room
        for how in range(WHOLE if fits else WHOLE + 1, WHOLE + 1 if fits else board.ways):
            rests = cut(board, i, 0, how, room, False)
            if rests < 0:
                continue
            change = price_move(board, i, 0, rests, option)
            if change < best:
                best, target, best_cut = change, option, how
    if target < 0:
        return False
    room = _room(board, target)
    rests = cut(board, i, 0, best_cut, room, False)
    move(board, i, 0, rests, target)
    return True


@jit_leaf
def shift_all(board: Board, budget: int) -> int:
    """Shift until nothing is gained; returns how many were made."""
    done = 0
    for doc in range(len(board.docs) - 1):
        while board.docs[doc, DIRTY] > 0:
            board.docs[doc, DIRTY] = 0
            i = board.docs[doc, DOC_HEAD]
            while i >= 0:
                if _is_spent(board, budget):
                    return done
                after = board.pieces[i, DOC_NEXT]
                if _shift(board, i):
                    done += 1
                    break
                i = after
    return done


@jit_leaf
def _find_return(board: Board, server: int, target: int, skip: int, best: float) -> tuple[int, int]:
    """(piece, cut) of the cheapest move, below ``best``, from the server down to its limit; piece -1 if none."""
    need = -_room(board, server)
    room = _room(board, target)
    piece, best_cut = -1, WHOLE
    j = board.ranks[server, HEAD]
    while j >= 0:
        if j != skip and piece_cost(board, board.pieces[j]) >= need:
            for how in range(board.ways):
                rests = cut(board, j, 1, how, need, True)
                if rests < 0 or piece_cost(board, board.parts[1, 0]) > room:
                    continue
                change = price_move(board, j, 1, rests, target)
                if change < best and relief(board, 1, rests, board.pieces[j]) >= need:
                    best, piece, best_cut = change, j, how
        j = board.pieces[j, NEXT]
    return piece, best_cut


@jit_leaf
def _swap(board: Board, i: int) -> bool:
    """Make the first swap of piece i that gains; False if there is none."""
    if most_gain(board, i) < LEAST_WISH:
        return False
    source = board.pieces[i, SERVER]
    cost = piece_cost(board, board.pieces[i])
    whole = board.parts[2, 0]
    copy_task(whole, board.pieces[i])
    for o in range(find_options(board, i, ANY_ROOM)):
        option = board.options[o]
        if cost <= _room(board, option):
            continue
        cut(board, i, 0, WHOLE, 0, False)
        gain = -price_move(board, i, 0, 0, option)
        if gain < LEAST_WISH:
            continue
        do_move(board, i, 0, 0, option)
        piece, how = _find_return(board, option, source, i, gain - LEAST_GAIN)
        if piece < 0:
            undo_move(board, i, whole)
            continue
        rests = cut(board, piece, 1, how, -_room(board, option), True)
        look_again(board, whole[DOC], source)
        move(board, piece, 1, rests, source)
        join(board, i)
        return True
    return False


@jit_leaf
def swap_all(board: Board, budget: int) -> int:
    """Make one swap per piece at most; returns how many were made."""
    done, i = 0, 0
    while i < board.counts[PIECES] and not _is_spent(board, budget):
        done += _swap(board, i)
        i += 1
    return done


@jit_leaf
def polish(board: Board, total: float, worst: float, weight: float, budget: int) -> None:
    """Shift and swap until nothing is gained or the budget of evaluations is spent.

    The objective weighs bytes over ``total`` and the worst rank's over ``worst``. For the worst rank stands a sum of
    eighth powers, to which every busy rank adds: the more of them, the less each counts.
    """
    board.terms[PER_TOTAL], board.terms[PER_WORST] = 1 / total, 1 / worst
    board.terms[WEIGHT] = 1.0
    busy = 0.0
    for rank in range(len(board.ranks)):
        busy += worst_term(board, bytes_in(board, rank)) + worst_term(board, board.ranks[rank, OUT])
    root = np.sqrt(max(1.0, busy))
    board.terms[WEIGHT] = POLISH_WEIGHT * weight / 8 / (root * np.sqrt(root))
    shift_all(board, budget)
    while not _is_spent(board, budget) and swap_all(board, budget) > 0:
        shift_all(board, budget)
