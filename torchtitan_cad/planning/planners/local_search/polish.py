"""Lowers the bytes of a finished tiling by local moves within the load limits (``board.py``).

1. *Shifts*: a piece, or as much of it as fits, goes to a server that has room and holds or uses some of its rows or
   keys. The room is what the tolerance leaves.
2. *Swaps*: a piece goes to such a server without regard to room, and the cheapest part of what that server has, large
   enough to make room for it, goes back.

Pieces are gone through document by document. A document is looked at again once one of its pieces has moved, or a
server that has pieces of it has gained room. The number of moves evaluated is bounded by a budget.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit, jit_leaf
from torchtitan_cad.planning.planners.local_search.board import (
    CUTS,
    DIRTY,
    DOC,
    DOC_HEAD,
    DOC_NEXT,
    EVALUATED,
    FIRST_RUN,
    HEAD,
    IN,
    KEY_BYTES,
    LIMIT,
    LOAD,
    MAX_RESTS,
    NEXT,
    OUT,
    PER_TOTAL,
    PER_WORST,
    PIECES,
    Q0,
    Q1,
    QUERY_BYTES,
    SERVER,
    TASK_COLUMNS,
    WEIGHT,
    WHOLE,
    Board,
    add_piece,
    book_piece,
    copy_task,
    cut,
    do_move,
    find_options,
    join,
    most_gain,
    piece_cost,
    price_move,
    settle,
    undo_move,
    worst_term,
)
from torchtitan_cad.planning.planners.tiling.assemble import assemble

POLISH_WEIGHT = 2.0
"""How much more the worst rank's bytes weigh in single moves than where finished plans are compared."""

LEAST_GAIN = 3e-5
"""Moves that lower the objective by less are not made."""

LEAST_WISH = 1e-3
"""Pieces whose move, room apart, lowers it by less are not swapped."""

LEAST_ROOM = 256
"""Servers with less room than their limit over this are not considered for shifts."""

SPARE_PIECES = 8
"""Free entries of the piece table that one step may need."""


@jit_leaf
def _soil(board: Board, doc: int, server: int) -> None:
    """Have the document looked at again, and all in which the server, which has more room now, has pieces."""
    board.docs[doc, DIRTY] = 1
    j = board.ranks[server, HEAD]
    while j >= 0:
        board.docs[board.pieces[j, DOC], DIRTY] = 1
        j = board.pieces[j, NEXT]


@jit_leaf
def _is_spent(board: Board, budget: int) -> bool:
    return board.counts[EVALUATED] >= budget or board.counts[PIECES] + SPARE_PIECES > len(board.pieces)


@jit_leaf
def _move(board: Board, i: int, slot: int, rests: int, server: int) -> None:
    """Carry out a move for good: join what can be joined, mark what to look at again."""
    doc, before, count = board.pieces[i, DOC], board.pieces[i, SERVER], board.counts[PIECES]
    do_move(board, i, slot, rests, server)
    _soil(board, doc, before)
    for k in range(rests - 1, -1, -1):  # the last ones first: joining may renumber those behind
        join(board, count + k)
    join(board, i)


@jit_leaf
def _shift(board: Board, i: int) -> bool:
    """Make the best shift of piece i; False if none is worth it."""
    if most_gain(board, i) < LEAST_GAIN:
        return False
    whole = piece_cost(board.pieces[i], board.tile)
    limit = board.ranks[board.pieces[i, SERVER], LIMIT]
    best, target, best_cut = -LEAST_GAIN, -1, WHOLE
    for o in range(find_options(board, i, min(whole, 1 + limit // LEAST_ROOM))):
        option = board.options[o]
        room = board.ranks[option, LIMIT] - board.ranks[option, LOAD]
        first, stop = (WHOLE, WHOLE + 1) if whole <= room else (WHOLE + 1, CUTS)
        for how in range(first, stop):
            rests = cut(board, i, 0, how, room, False)
            if rests < 0:
                continue
            change = price_move(board, i, 0, rests, option)
            if change < best:
                best, target, best_cut = change, option, how
    if target < 0:
        return False
    room = board.ranks[target, LIMIT] - board.ranks[target, LOAD]
    rests = cut(board, i, 0, best_cut, room, False)
    _move(board, i, 0, rests, target)
    return True


@jit_leaf
def shift_all(board: Board, budget: int) -> int:
    """Shifts until nothing is gained; returns how many were made."""
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
def _relief(board: Board, server: int, target: int, skip: int, best: float) -> tuple[int, int]:
    """(piece, cut) of the cheapest move, below ``best``, from the server down to its limit; piece -1 if none."""
    need = board.ranks[server, LOAD] - board.ranks[server, LIMIT]
    room = board.ranks[target, LIMIT] - board.ranks[target, LOAD]
    piece, best_cut = -1, WHOLE
    j = board.ranks[server, HEAD]
    while j >= 0:
        if j != skip and piece_cost(board.pieces[j], board.tile) >= need:
            for how in range(CUTS):
                rests = cut(board, j, 1, how, need, True)
                if rests < 0 or piece_cost(board.parts[1, 0], board.tile) > room:
                    continue
                change = price_move(board, j, 1, rests, target)
                if change < best:
                    best, piece, best_cut = change, j, how
        j = board.pieces[j, NEXT]
    return piece, best_cut


@jit_leaf
def _swap(board: Board, i: int) -> bool:
    """Make the first swap of piece i that gains; False if there is none."""
    if most_gain(board, i) < LEAST_WISH:
        return False
    source = board.pieces[i, SERVER]
    cost = piece_cost(board.pieces[i], board.tile)
    whole = board.parts[2, 0]
    copy_task(whole, board.pieces[i])
    for o in range(find_options(board, i, -(2**62))):
        option = board.options[o]
        if board.ranks[option, LOAD] + cost <= board.ranks[option, LIMIT]:
            continue
        cut(board, i, 0, WHOLE, 0, False)
        gain = -price_move(board, i, 0, 0, option)
        if gain < LEAST_WISH:
            continue
        do_move(board, i, 0, 0, option)
        piece, how = _relief(board, option, source, i, gain - LEAST_GAIN)
        if piece < 0:
            undo_move(board, i, 0, 0, whole)
            continue
        rests = cut(board, piece, 1, how, board.ranks[option, LOAD] - board.ranks[option, LIMIT], True)
        _soil(board, whole[DOC], source)
        _move(board, piece, 1, rests, source)
        join(board, i)
        return True
    return False


@jit_leaf
def swap_all(board: Board, budget: int) -> int:
    """One swap per piece at most; returns how many were made."""
    done, i = 0, 0
    while i < board.counts[PIECES] and not _is_spent(board, budget):
        done += _swap(board, i)
        i += 1
    return done


@jit_leaf
def worst_bytes(board: Board) -> float:
    """Largest of all ranks' bytes in and out."""
    worst = 0.0
    for rank in range(len(board.bytes)):
        worst = max(worst, board.bytes[rank, IN], board.bytes[rank, OUT])
    return worst


@jit_leaf
def total_bytes(board: Board) -> float:
    """Sum of all ranks' bytes in."""
    total = 0.0
    for rank in range(len(board.bytes)):
        total += board.bytes[rank, IN]
    return total


def _make_board(capacity: int, home: IntArray, first_run: IntArray, limits: IntArray, units: IntArray) -> Board:
    """Empty tables; ``units`` are the tile, the cell and the bytes per query and key. See :func:`lay_out`."""
    n = len(limits)
    docs, ranks, terms = np.zeros((len(first_run), 3), dtype=np.int64), np.zeros((n, 4), dtype=np.int64), np.zeros(5)
    docs[:, FIRST_RUN], ranks[:, LIMIT] = first_run, limits
    terms[QUERY_BYTES], terms[KEY_BYTES] = units[2], units[3]
    return Board(
        np.empty((capacity, 10), dtype=np.int64),
        ranks,
        np.zeros((n, 4)),
        docs,
        np.ascontiguousarray(home[:, [Q0, Q1, SERVER]]),
        np.empty((3, 1 + MAX_RESTS, TASK_COLUMNS), dtype=np.int64),
        np.empty(2 * n + 64, dtype=np.int64),
        np.empty(n, dtype=np.int64),
        np.zeros(4, dtype=np.int64),
        terms,
        int(units[0]),
        int(units[1]),
    )


@jit_leaf
def lay_out(board: Board, tasks: IntArray, count: int, loads: IntArray) -> None:
    """Start anew from the first ``count`` tasks [n, 6]; ``loads`` [num_ranks] come on top."""
    board.counts[PIECES] = 0
    for rank in range(len(board.ranks)):
        board.ranks[rank, HEAD], board.ranks[rank, LOAD] = -1, loads[rank]
        board.bytes[rank, IN] = board.bytes[rank, OUT] = 0.0
    for doc in range(len(board.docs)):
        board.docs[doc, DOC_HEAD], board.docs[doc, DIRTY] = -1, 1
    for i in range(count):
        book_piece(board, tasks[i], tasks[i, SERVER], -1, 0, 0, 1.0)
        settle(board, True)
        add_piece(board, tasks[i], tasks[i, SERVER])
        board.ranks[tasks[i, SERVER], LOAD] += piece_cost(tasks[i], board.tile)
    board.counts[EVALUATED] = 0


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
        busy += worst_term(board, board.bytes[rank, IN]) + worst_term(board, board.bytes[rank, OUT])
    root = np.sqrt(max(1.0, busy))
    board.terms[WEIGHT] = POLISH_WEIGHT * weight / 8 / (root * np.sqrt(root))
    shift_all(board, budget)
    while not _is_spent(board, budget) and swap_all(board, budget) > 0:
        shift_all(board, budget)


@jit
def _polish_each(
    board: Board,
    home: IntArray,
    blocks: IntArray,
    run: IntArray,
    pool: IntArray,
    sizes: IntArray,
    loads: IntArray,
    weight: float,
    budget: int,
    tasks: IntArray,
    out: IntArray,
) -> tuple[int, float, float]:
    """See :func:`polish_best`; ``tasks`` is scratch of the shape of ``out``."""
    best, found, total, worst = np.inf, -1, 0.0, 0.0
    best_total, best_worst = 0.0, 0.0
    for k in range(len(pool)):
        if sizes[k] < 0:
            continue
        count = assemble(home, blocks, run, pool[k, : sizes[k]], board.cell, tasks)
        lay_out(board, tasks, count, loads)
        if total == 0.0:
            total, worst = total_bytes(board), worst_bytes(board)
        polish(board, total, worst, weight, budget)
        moved, most = total_bytes(board), worst_bytes(board)
        score = moved / total + weight * most / worst
        if score < best:
            best, best_total, best_worst, found = score, moved, most, board.counts[PIECES]
            for i in range(found):
                copy_task(out[i], board.pieces[i])
    return found, best_total, best_worst


def polish_best(
    home: IntArray,
    blocks: IntArray,
    run: IntArray,
    pool: IntArray,
    sizes: IntArray,
    first_run: IntArray,
    limits: IntArray,
    loads: IntArray,
    units: IntArray,
    weight: float,
    budget: int,
    out: IntArray,
) -> tuple[int, float, float]:
    """Polish every tiling of the pool and write the best plan's tasks to ``out`` [capacity, 6].

    Returns how many they are, and the total and the worst rank's bytes that they move among the ranks.

    Args:
        home: [R, 6] home tasks of the documents to be looked at, by document and position; first_run [D + 1].
        blocks, run: see :func:`assemble`; pool, sizes: see ``search.climb``.
        limits, loads: [num_ranks] of tiles; the loads are those of documents not looked at.
        budget: evaluations per tiling.
    """
    board = _make_board(len(out), home, first_run, limits, units)
    return _polish_each(board, home, blocks, run, pool, sizes, loads, weight, budget, np.empty_like(out), out)
