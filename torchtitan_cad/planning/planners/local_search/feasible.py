# SPDX-License-Identifier: BSD-3-Clause
"""Bring a plan within the load limits: parts of pieces move from ranks over their limit to ranks with capacity.

The rank that exceeds its limit by most gives first, and gives the part that costs the fewest bytes per unit of excess
removed. The part fits the receiver's capacity or the giver's excess, whichever is smaller. Every move takes load from a
rank over its limit and brings no rank above its own. If cuts go along the queries alone and limits are the guaranteed
loads, such a move exists as long as a rank is over (``limits.py``).
"""

from __future__ import annotations

from typing import NamedTuple

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
    book_move,
    capacity,
    do_move,
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


class Offer(NamedTuple):
    """A part of a piece for another rank: the kind of cut and the cost wanted, which the part may exceed."""

    price: int
    how: int
    wanted: int
    at_least: bool
    receiver: int


NO_OFFER = Offer(LARGEST, WHOLE, 0, False, -1)


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
def _find_part(board: Board, j: int) -> Offer:
    """Return the cheapest part of piece j, of price ``LARGEST`` if none fits."""
    piece = board.pieces[j]
    rank = piece[SERVER]
    best = NO_OFFER
    need = -capacity(board, rank)
    whole = piece_cost(board, piece)
    least = min(need, 1 + board.ranks[rank, LIMIT] // LEAST_CAPACITY)
    num = _add_roomiest(board, rank, find_options(board, j, least, MOST_OPTIONS), least)
    is_wide = num > 0 and _is_wide(
        board, piece, min(need, capacity(board, board.ranks[num - 1, OPTION]))
    )
    for how in range(board.counts[CUTS]):
        if is_wide and FIRST_ROWS <= how <= LAST_ROWS:
            continue
        for o in range(num):
            receiver = board.ranks[o, OPTION]
            free = capacity(board, receiver)
            if how == WHOLE and whole > free:
                continue
            wanted = min(free, need)
            at_least = free >= need
            rests = cut(board, j, how, wanted, at_least)
            if at_least and rests > 0 and piece_cost(board, board.parts[0]) > free:
                at_least = False
                rests = cut(board, j, how, need, False)
            if rests < 0 or piece_cost(board, board.parts[0]) > free:
                continue
            relieved = min(need, relief(board, j, rests))
            if relieved <= 0:
                continue
            board.counts[EVALUATED] += 1
            book_move(board, j, rests, receiver)
            more = board.ranks[receiver, NEW_IN] + board.ranks[rank, NEW_IN]
            settle(board, False)
            price = max(more, 1) * PRICE_UNIT // relieved
            if price < best.price:
                best = Offer(price, how, wanted, at_least, receiver)
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
def make_feasible(board: Board, budget: int) -> None:
    """Move parts until no rank exceeds its limit, nothing helps, or ``budget`` moves are evaluated.

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
                    pieces[j, PRICE] = _find_part(board, j).price
                j = pieces[j, NEXT]
            j, second = _cheapest(board, rank)
            if j < 0:
                board.ranks[rank, STUCK] = 1
            else:
                offer = _find_part(board, j)
                pieces[j, PRICE] = offer.price
                if offer.price <= second and offer.price < LARGEST:
                    rests = cut(board, j, offer.how, offer.wanted, offer.at_least)
                    do_move(board, j, rests, offer.receiver)
                    moved = True
            rank = _most_over(board)
        if not moved:
            return
