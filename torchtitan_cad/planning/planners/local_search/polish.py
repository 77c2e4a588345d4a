# SPDX-License-Identifier: BSD-3-Clause
"""Lower the bytes of a plan by local moves within the limits of its ranks (``board.py``).

1. *Shifts*: a piece, or as much of it as fits, goes to a server that has capacity and holds or uses some of its rows.
2. *Swaps*: a piece goes to such a server whatever that server's load, and the server's cheapest part that is large
   enough to make room for the piece goes back.

The search visits pieces document by document, then the pieces that the ranks with the most bytes serve or send. It
visits a document again after one of its pieces has moved, or a server of its pieces has gained capacity. A budget
bounds the number of evaluated moves.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.model.tasks import (
    DOC,
    KV_END,
    KV_START,
    Q_END,
    Q_START,
    SERVER,
)
from torchtitan_cad.planning.planners.local_search.board import (
    BYTES_IN,
    BYTES_OUT,
    CUTS,
    DIRTY,
    DOC_HEAD,
    DOC_NEXT,
    EVALUATED,
    FIRST_RUN,
    HEAD,
    LIMIT,
    NEXT,
    OPTION,
    PER_TOTAL,
    PER_WORST,
    PIECES,
    RUN_END,
    RUN_HOME,
    RUN_START,
    STAMPS,
    STUCK,
    WEIGHT,
    Board,
    capacity,
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
from torchtitan_cad.planning.planners.local_search.moves import (
    do_move,
    join,
    look_again,
    move,
    undo_move,
)

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

GIVE_UP = 8
"""After this many busy ranks without an improving move, the pass over busy ranks ends."""


@jit_inner
def _is_spent(board: Board, budget: int) -> bool:
    return board.counts[EVALUATED] >= budget or is_full(board)


@jit_inner
def _shift(board: Board, i: int) -> bool:
    """Make the best shift of piece i; returns False if no shift gains ``LEAST_GAIN``."""
    if most_gain(board, i) < LEAST_GAIN:
        return False
    whole = piece_cost(board, board.pieces[i])
    limit = board.ranks[board.pieces[i, SERVER], LIMIT]
    best = -LEAST_GAIN
    target = -1
    best_cut = WHOLE
    for o in range(
        find_options(
            board, i, min(whole, 1 + limit // LEAST_CAPACITY), len(board.ranks)
        )
    ):
        option = board.ranks[o, OPTION]
        fits = whole <= capacity(board, option)
        for how in range(
            WHOLE if fits else WHOLE + 1, WHOLE + 1 if fits else board.counts[CUTS]
        ):
            rests = cut(board, i, 0, how, capacity(board, option), False)
            if rests < 0:
                continue
            change = price_move(board, i, 0, rests, option)
            if change < best:
                best = change
                target = option
                best_cut = how
    if target < 0:
        return False
    rests = cut(board, i, 0, best_cut, capacity(board, target), False)
    move(board, i, 0, rests, target)
    return True


@jit_inner
def _swap(board: Board, i: int) -> bool:
    """Make the first swap of piece i that gains ``LEAST_GAIN``; returns False if there is none.

    The cheapest part that brings the other server down to its limit goes back.
    """
    if most_gain(board, i) < LEAST_SWAP_GAIN:
        return False
    source = board.pieces[i, SERVER]
    cost = piece_cost(board, board.pieces[i])
    whole = board.parts[2, 0]
    copy_task(whole, board.pieces[i])
    for o in range(find_options(board, i, ANY_CAPACITY, len(board.ranks))):
        option = board.ranks[o, OPTION]
        if cost <= capacity(board, option):
            continue
        cut(board, i, 0, WHOLE, 0, False)
        gain = -price_move(board, i, 0, 0, option)
        if gain < LEAST_SWAP_GAIN:
            continue
        do_move(board, i, 0, 0, option)
        need = -capacity(board, option)
        most = capacity(board, source)
        best = gain - LEAST_GAIN
        piece = -1
        best_cut = WHOLE
        j = board.ranks[option, HEAD]
        while j >= 0:
            if j != i and piece_cost(board, board.pieces[j]) >= need:
                for how in range(board.counts[CUTS]):
                    rests = cut(board, j, 1, how, need, True)
                    if rests < 0 or piece_cost(board, board.parts[1, 0]) > most:
                        continue
                    change = price_move(board, j, 1, rests, source)
                    if (
                        change < best
                        and relief(board, 1, rests, board.pieces[j]) >= need
                    ):
                        best = change
                        piece = j
                        best_cut = how
            j = board.pieces[j, NEXT]
        if piece < 0:
            undo_move(board, i, whole)
            continue
        rests = cut(board, piece, 1, best_cut, need, True)
        look_again(board, whole[DOC], source)
        move(board, piece, 1, rests, source)
        join(board, i)
        return True
    return False


@jit_inner
def _busiest(board: Board, stamp: int) -> int:
    """Return the rank with the most bytes in or out that is not given up; -1 if there is none."""
    found = -1
    most = 0
    for rank in range(len(board.ranks)):
        busy = max(board.ranks[rank, BYTES_IN], board.ranks[rank, BYTES_OUT])
        if busy > most and board.ranks[rank, STUCK] != stamp:
            found = rank
            most = busy
    return found


@jit_inner
def _uses(board: Board, piece: IntArray, home: int) -> bool:
    """Tell whether the piece uses rows of the rank ``home``."""
    doc = piece[DOC]
    for r in range(board.docs[doc, FIRST_RUN], board.docs[doc + 1, FIRST_RUN]):
        start = board.runs[r, RUN_START]
        end = board.runs[r, RUN_END]
        if start >= piece[Q_END]:
            break
        if board.runs[r, RUN_HOME] == home and (
            end > piece[Q_START] or (start < piece[KV_END] and piece[KV_START] < end)
        ):
            return True
    return False


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
def _relieve(board: Board, rank: int, budget: int) -> bool:
    """Move one piece that a busy rank serves or, if it sends more, that uses its rows; False if no move helps."""
    is_in = board.ranks[rank, BYTES_IN] >= board.ranks[rank, BYTES_OUT]
    i = 0
    while i < board.counts[PIECES] and not _is_spent(board, budget):
        piece = board.pieces[i]
        relieves = (piece[SERVER] == rank) == is_in and (
            is_in or _uses(board, piece, rank)
        )
        if relieves and (_shift(board, i) or _swap(board, i)):
            return True
        i += 1
    return False


@jit_inner
def polish(board: Board, budget: int) -> None:
    """Shift and swap until nothing is gained or the budget of evaluations is spent."""
    _set_weights(board)
    while True:
        _shift_documents(board, budget)
        board.counts[STAMPS] += 1
        stamp = board.counts[STAMPS]
        given_up = 0
        while given_up < GIVE_UP and not _is_spent(board, budget):
            rank = _busiest(board, stamp)
            if rank < 0:
                break
            if not _relieve(board, rank, budget):
                board.ranks[rank, STUCK] = stamp
                given_up += 1
        swaps = 0
        i = 0
        while i < board.counts[PIECES] and not _is_spent(board, budget):
            swaps += _swap(board, i)
            i += 1
        if swaps == 0:
            return
