# SPDX-License-Identifier: BSD-3-Clause
"""Lower the bytes of a plan by local moves within the limits of its ranks (``board.py``).

1. *Shifts*: a piece, or as much of it as fits, goes to a server that has capacity and holds or uses some of its rows.
2. *Swaps*: a piece goes to such a server whatever that server's load, and the server's cheapest part that is large
   enough to make room for the piece goes back.

The search shifts pieces document by document, then swaps pieces. It visits a document again after one of its pieces has
moved, or a server of its pieces has gained capacity. A budget bounds the number of evaluated moves.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.model.tasks import DOC, SERVER
from torchtitan_cad.planning.planners.local_search.board import (
    BYTES_IN,
    BYTES_OUT,
    CUTS,
    DIRTY,
    DOC_HEAD,
    DOC_NEXT,
    EVALUATED,
    HEAD,
    LIMIT,
    NEXT,
    OPTION,
    PER_TOTAL,
    PER_WORST,
    PIECES,
    WEIGHT,
    Board,
    capacity,
    do_move,
    find_options,
    is_full,
    look_again,
    most_gain,
    piece_cost,
    price_move,
    relief,
    worst_term,
)
from torchtitan_cad.planning.planners.local_search.cuts import WHOLE, cut

WORST_WEIGHT = 1.5
"""The objective is about total / initial total + WORST_WEIGHT x worst rank's bytes / initial worst rank's bytes."""

LEAST_GAIN = 3e-5
"""A move must lower the objective by at least this."""

LEAST_SWAP_GAIN = 1e-3
"""The first half of a swap must lower the objective by at least this."""

LEAST_CAPACITY = 256
"""Shifts go to servers with capacity for at least limit / LEAST_CAPACITY."""

ANY_CAPACITY = -(2**62)
"""Unit: load. No server has less capacity."""


@jit_inner
def _is_spent(board: Board, budget: int) -> bool:
    return board.counts[EVALUATED] >= budget or is_full(board)


@jit_inner
def _shift(board: Board, i: int) -> bool:
    """Make the best shift of piece i; returns False if no shift gains ``LEAST_GAIN``."""
    if most_gain(board, i) < LEAST_GAIN:
        return False
    doc = board.pieces[i, DOC]
    source = board.pieces[i, SERVER]
    whole = piece_cost(board, board.pieces[i])
    least = min(whole, 1 + board.ranks[source, LIMIT] // LEAST_CAPACITY)
    best = -LEAST_GAIN
    target = -1
    best_cut = WHOLE
    for o in range(find_options(board, i, least, len(board.ranks))):
        option = board.ranks[o, OPTION]
        free = capacity(board, option)
        first_cut = WHOLE
        stop = WHOLE + 1
        if whole > free:
            first_cut = WHOLE + 1
            stop = board.counts[CUTS]
        for how in range(first_cut, stop):
            rests = cut(board, i, how, free, False)
            if rests < 0:
                continue
            change = price_move(board, i, rests, option)
            if change < best:
                best = change
                target = option
                best_cut = how
    if target < 0:
        return False
    rests = cut(board, i, best_cut, capacity(board, target), False)
    do_move(board, i, rests, target)
    look_again(board, doc, source)
    return True


@jit_inner
def _swap(board: Board, i: int) -> bool:
    """Make the first swap of piece i that gains ``LEAST_GAIN``; returns False if there is none."""
    if most_gain(board, i) < LEAST_SWAP_GAIN:
        return False
    doc = board.pieces[i, DOC]
    source = board.pieces[i, SERVER]
    cost = piece_cost(board, board.pieces[i])
    for o in range(find_options(board, i, ANY_CAPACITY, len(board.ranks))):
        option = board.ranks[o, OPTION]
        if cost <= capacity(board, option):
            continue
        cut(board, i, WHOLE, cost, False)
        gain = -price_move(board, i, 0, option)
        if gain < LEAST_SWAP_GAIN:
            continue
        do_move(board, i, 0, option)
        if _give_back(board, i, source, gain - LEAST_GAIN):
            look_again(board, doc, source)
            return True
        cut(board, i, WHOLE, cost, False)
        do_move(board, i, 0, source)
    return False


@jit_inner
def _give_back(board: Board, i: int, source: int, most: float) -> bool:
    """Move a part of another piece of piece i's server, which is over its limit, to the server ``source``.

    The part brings the server down to its limit and raises the objective by the least, less than ``most``. Returns
    False if there is none.
    """
    server = board.pieces[i, SERVER]
    need = -capacity(board, server)
    free = capacity(board, source)
    best = most
    best_piece = -1
    best_cut = WHOLE
    j = board.ranks[server, HEAD]
    while j >= 0:
        if j != i and piece_cost(board, board.pieces[j]) >= need:
            for how in range(board.counts[CUTS]):
                rests = cut(board, j, how, need, True)
                if rests < 0 or piece_cost(board, board.parts[0]) > free:
                    continue
                change = price_move(board, j, rests, source)
                if change < best and relief(board, j, rests) >= need:
                    best = change
                    best_piece = j
                    best_cut = how
        j = board.pieces[j, NEXT]
    if best_piece < 0:
        return False
    doc = board.pieces[best_piece, DOC]
    rests = cut(board, best_piece, best_cut, need, True)
    do_move(board, best_piece, rests, source)
    look_again(board, doc, server)
    return True


@jit_inner
def _set_weights(board: Board) -> None:
    """Set the weights of the objective.

    The weight of the worst rank is divided by (sum of all ranks' eighth powers)^(3/4), initially, so that many equally
    busy ranks do not outweigh the total.
    """
    total = 0
    worst = 0
    for rank in range(len(board.ranks)):
        total += board.ranks[rank, BYTES_IN]
        worst = max(worst, board.ranks[rank, BYTES_IN], board.ranks[rank, BYTES_OUT])
    board.terms[PER_TOTAL] = 1 / max(1, total)
    board.terms[PER_WORST] = 1 / max(1, worst)
    board.terms[WEIGHT] = 1.0
    busy = 0.0
    for rank in range(len(board.ranks)):
        busy += worst_term(board, board.ranks[rank, BYTES_IN]) + worst_term(
            board, board.ranks[rank, BYTES_OUT]
        )
    root = np.sqrt(max(1.0, busy))
    board.terms[WEIGHT] = WORST_WEIGHT / 8 / (root * np.sqrt(root))


@jit_inner
def _shift_documents(board: Board, budget: int) -> None:
    """Shift pieces of the dirty documents until no shift gains."""
    for doc in range(len(board.docs) - 1):
        while board.docs[doc, DIRTY] > 0 and not _is_spent(board, budget):
            board.docs[doc, DIRTY] = 0
            i = board.docs[doc, DOC_HEAD]
            while i >= 0 and not _is_spent(board, budget):
                after = board.pieces[i, DOC_NEXT]
                if _shift(board, i):
                    break
                i = after


@jit_inner
def _swap_pieces(board: Board, budget: int) -> bool:
    """Swap every piece for which a swap gains; returns False if there is none."""
    swapped = False
    i = 0
    while i < board.counts[PIECES] and not _is_spent(board, budget):
        if _swap(board, i):
            swapped = True
        i += 1
    return swapped


@jit_inner
def polish(board: Board, budget: int) -> None:
    """Shift and swap until nothing is gained or the budget of evaluations is spent."""
    _set_weights(board)
    _shift_documents(board, budget)
    while _swap_pieces(board, budget):
        _shift_documents(board, budget)
