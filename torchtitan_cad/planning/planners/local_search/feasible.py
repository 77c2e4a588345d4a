# SPDX-License-Identifier: BSD-3-Clause
"""Bring a plan within the load limits: parts of pieces move from ranks over their limit to ranks with capacity.

The rank that exceeds its limit by most gives first, and gives the part that costs the fewest bytes per unit of excess
removed. The part fits the receiver's capacity or the giver's excess, whichever is smaller. Every move takes load from a
rank over its limit and brings no rank above its own. If cuts go along the queries alone and limits are the guaranteed
loads, such a move exists as long as a rank is over (``limits.py``).
"""

from __future__ import annotations

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.model.cost import LARGEST
from torchtitan_cad.planning.model.tasks import KV_END, KV_START, SERVER
from torchtitan_cad.planning.planners.local_search.board import (
    CUTS,
    EVALUATED,
    HEAD,
    KEY,
    LIMIT,
    NEW_IN,
    NEXT,
    NODE,
    OPTION,
    PIECES,
    PRICE,
    QUERY,
    STAMP,
    STAMPS,
    STUCK,
    UNKNOWN,
    Board,
    book_piece,
    capacity,
    find_options,
    is_full,
    piece_cost,
    relief,
    settle,
)
from torchtitan_cad.planning.planners.local_search.cuts import (
    ALL_CUTS,
    FIRST_ROWS,
    LAST_ROWS,
    WHOLE,
    best_rows,
    cut,
)
from torchtitan_cad.planning.planners.local_search.moves import move

PASSES = 6
"""passes over all ranks: a rank that was given up may find capacity in the next pass."""

LEAST_CAPACITY = 16
"""Parts are offered to ranks with capacity for at least limit / LEAST_CAPACITY, and to the rank with most capacity."""

MOST_OPTIONS = 16
"""ranks: maximum number that parts of a piece are offered to, besides the ranks with most capacity."""

WIDE = 3.0
"""A piece with more than WIDE times the columns of its best part gives away no full rows."""

PRICE_UNIT = 1024
"""price = PRICE_UNIT x bytes / load"""

# Entries of a choice: kind of cut, cost of the part wanted, whether the part may cost more, receiver.
HOW, WANTED, AT_LEAST, RECEIVER = range(4)


@jit_inner
def _add_roomiest(board: Board, rank: int, num: int, least: int) -> int:
    """Append to the options the rank with the most capacity on the node of ``rank``, and the one with the most of all.

    Returns the number of options; those that ``find_options`` has found have at least the capacity ``least``.
    """
    for everywhere in range(2):
        most = -1
        for other in range(len(board.ranks)):
            near = (
                everywhere == 1 or board.ranks[other, NODE] == board.ranks[rank, NODE]
            )
            if (
                other != rank
                and near
                and (most < 0 or capacity(board, other) > capacity(board, most))
            ):
                most = other
        is_option = most < 0 or (
            board.ranks[most, STAMP] == board.counts[STAMPS]
            and capacity(board, most) >= least
        )
        if not is_option and capacity(board, most) > 0:
            board.ranks[most, STAMP] = board.counts[STAMPS]
            board.ranks[num, OPTION] = most
            num += 1
            least = min(least, capacity(board, most))
    return num


@jit_inner
def _is_wide(board: Board, piece: IntArray, wanted: int) -> bool:
    columns = (
        best_rows(board, piece, wanted) * board.prices[QUERY, 0] / board.prices[KEY, 0]
    )
    return (
        board.counts[CUTS] == ALL_CUTS
        and piece[KV_END] - piece[KV_START] > WIDE * columns * board.tile
    )


@jit_inner
def _find_part(board: Board, j: int, choice: IntArray) -> int:
    """Set ``choice`` to the cheapest part of piece j and its receiver; returns its price, ``LARGEST`` if none fits."""
    rank = board.pieces[j, SERVER]
    best = LARGEST
    need = -capacity(board, rank)
    whole = piece_cost(board, board.pieces[j])
    least = min(need, 1 + board.ranks[rank, LIMIT] // LEAST_CAPACITY)
    num = _add_roomiest(board, rank, find_options(board, j, least, MOST_OPTIONS), least)
    is_wide = num > 0 and _is_wide(
        board, board.pieces[j], min(need, capacity(board, board.ranks[num - 1, OPTION]))
    )
    for how in range(board.counts[CUTS]):
        if is_wide and FIRST_ROWS <= how <= LAST_ROWS:
            continue
        for o in range(num):
            other = board.ranks[o, OPTION]
            free = capacity(board, other)
            if how == WHOLE and whole > free:
                continue
            part = board.parts[0, 0]
            at_least = free >= need
            rests = cut(board, j, 0, how, min(free, need), at_least)
            if at_least and rests > 0 and piece_cost(board, part) > free:
                at_least = False
                rests = cut(board, j, 0, how, need, False)
            if rests < 0 or piece_cost(board, part) > free:
                continue
            relieved = min(need, relief(board, 0, rests, board.pieces[j]))
            if relieved <= 0:
                continue
            board.counts[EVALUATED] += 1
            book_piece(board, part, rank, j, 0, rests, -1)
            book_piece(board, part, other, -1, 0, 0, 1)
            price = (
                max(board.ranks[other, NEW_IN] + board.ranks[rank, NEW_IN], 1)
                * PRICE_UNIT
                // relieved
            )
            settle(board, False)
            if price < best:
                best = price
                choice[HOW] = how
                choice[WANTED] = min(free, need)
                choice[AT_LEAST] = at_least
                choice[RECEIVER] = other
    return best


@jit_inner
def _most_over(board: Board) -> int:
    """Return the rank that exceeds its limit by most and is not given up in this pass; -1 if there is none."""
    worst = -1
    most = 0
    for rank in range(len(board.ranks)):
        if -capacity(board, rank) > most and board.ranks[rank, STUCK] == 0:
            worst = rank
            most = -capacity(board, rank)
    return worst


@jit_inner
def _cheapest(board: Board, rank: int) -> tuple[int, int]:
    """Return the rank's piece with the lowest known price (-1 if no piece has one) and the second lowest price."""
    best = -1
    least = LARGEST
    second = LARGEST
    j = board.ranks[rank, HEAD]
    while j >= 0:
        price = board.pieces[j, PRICE]
        if price < least:
            best, least, second = j, price, least
        elif price < second:
            second = price
        j = board.pieces[j, NEXT]
    return best, second


@jit_inner
def make_feasible(board: Board, budget: int, choice: IntArray) -> None:
    """Move parts until no rank exceeds its limit, nothing helps, or ``budget`` moves are evaluated; ``choice`` [4].

    Prices of pieces are kept between moves. Rooms change with every move, so the price of the cheapest piece is
    computed again before it is used.
    """
    pieces = board.pieces
    for _ in range(PASSES):
        for rank in range(len(board.ranks)):
            board.ranks[rank, STUCK] = 0
        for i in range(board.counts[PIECES]):
            pieces[i, PRICE] = UNKNOWN
        moved = False
        rank = _most_over(board)
        while rank >= 0 and not is_full(board) and board.counts[EVALUATED] < budget:
            j = board.ranks[rank, HEAD]
            while j >= 0:
                if pieces[j, PRICE] == UNKNOWN:
                    pieces[j, PRICE] = _find_part(board, j, choice)
                j = pieces[j, NEXT]
            j, second = _cheapest(board, rank)
            if j < 0:
                board.ranks[rank, STUCK] = 1
            else:
                pieces[j, PRICE] = _find_part(board, j, choice)
                if pieces[j, PRICE] <= second and pieces[j, PRICE] < LARGEST:
                    rests = cut(
                        board, j, 0, choice[HOW], choice[WANTED], choice[AT_LEAST] > 0
                    )
                    move(board, j, 0, rests, choice[RECEIVER])
                    moved = True
            rank = _most_over(board)
        if not moved:
            return
