# SPDX-License-Identifier: BSD-3-Clause
"""Carrying out moves on the board, undoing them, and joining the pieces of a server."""

from __future__ import annotations

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
    DIRTY,
    HEAD,
    LOAD,
    NEXT,
    PIECES,
    PRICE,
    UNKNOWN,
    Board,
    add_piece,
    book_move,
    copy_task,
    link,
    piece_cost,
    relief,
    settle,
    shorter_list,
    unlink,
)


@jit_inner
def do_move(board: Board, i: int, entry: int, rests: int, server: int) -> None:
    """Carry out a move: piece i becomes the part, and the rests are appended."""
    part = board.parts[entry, 0]
    before = board.pieces[i, SERVER]
    book_move(board, part, i, before, server, entry, rests, 1)
    settle(board, True)
    board.ranks[before, LOAD] -= relief(board, entry, rests, board.pieces[i])
    board.ranks[server, LOAD] += piece_cost(board, part)
    unlink(board, i)
    copy_task(board.pieces[i], part)
    board.pieces[i, SERVER] = server
    link(board, i)
    for k in range(1, rests + 1):
        add_piece(board, board.parts[entry, k], before)


@jit_inner
def undo_move(board: Board, i: int, whole: IntArray) -> None:
    """Undo the last move, which moved all of piece i."""
    server = board.pieces[i, SERVER]
    before = whole[SERVER]
    unlink(board, i)
    copy_task(board.pieces[i], whole)
    link(board, i)
    book_move(board, whole, i, before, server, 0, 0, -1)
    settle(board, True)
    board.ranks[before, LOAD] += piece_cost(board, whole)
    board.ranks[server, LOAD] -= piece_cost(board, whole)


@jit_inner
def _can_join(a: IntArray, b: IntArray, cell: int) -> bool:
    if a[DOC] != b[DOC] or a[SERVER] != b[SERVER]:
        return False
    if a[Q_START] == b[Q_START] and a[Q_END] == b[Q_END]:
        return a[KV_END] == b[KV_START] or b[KV_END] == a[KV_START]
    diagonal = a[KV_END] == a[Q_END]
    if (
        a[KV_START] != b[KV_START]
        or diagonal != (b[KV_END] == b[Q_END])
        or not (diagonal or a[KV_END] == b[KV_END])
    ):
        return False
    return (a[Q_END] == b[Q_START] and b[Q_START] % cell == 0) or (
        b[Q_END] == a[Q_START] and a[Q_START] % cell == 0
    )


@jit_inner
def join(board: Board, i: int) -> None:
    """Join piece i with others of its server as long as two make one task of no higher cost.

    Does nothing if piece i no longer exists. Pieces may change their numbers: the last pieces fill the gaps.
    """
    pieces = board.pieces
    joined = board.parts[2, 1]
    if i >= board.counts[PIECES]:
        return
    j, following = shorter_list(board, pieces[i, DOC], pieces[i, SERVER])
    while j >= 0:
        if j == i or not _can_join(pieces[i], pieces[j], board.cell):
            j = pieces[j, following]
            continue
        copy_task(joined, pieces[i])
        joined[Q_START] = min(pieces[i, Q_START], pieces[j, Q_START])
        joined[Q_END] = max(pieces[i, Q_END], pieces[j, Q_END])
        joined[KV_START] = min(pieces[i, KV_START], pieces[j, KV_START])
        joined[KV_END] = max(pieces[i, KV_END], pieces[j, KV_END])
        saved = (
            piece_cost(board, pieces[i])
            + piece_cost(board, pieces[j])
            - piece_cost(board, joined)
        )
        if saved < 0:
            j = pieces[j, following]
            continue
        board.ranks[pieces[i, SERVER], LOAD] -= saved
        copy_task(pieces[i], joined)
        pieces[i, PRICE] = UNKNOWN
        unlink(board, j)
        board.counts[PIECES] -= 1
        last = board.counts[PIECES]
        if j != last:
            unlink(board, last)
            copy_task(pieces[j], pieces[last])
            link(board, j)
            i = j if i == last else i
        j, following = shorter_list(board, pieces[i, DOC], pieces[i, SERVER])


@jit_inner
def look_again(board: Board, doc: int, server: int) -> None:
    """Mark as dirty the document, and every document with a piece on ``server``, which has gained capacity."""
    board.docs[doc, DIRTY] = 1
    j = board.ranks[server, HEAD]
    while j >= 0:
        board.docs[board.pieces[j, DOC], DIRTY] = 1
        j = board.pieces[j, NEXT]


@jit_inner
def move(board: Board, i: int, entry: int, rests: int, server: int) -> None:
    """Carry out a move that stays: join pieces where possible, and mark documents to look at again."""
    doc = board.pieces[i, DOC]
    before = board.pieces[i, SERVER]
    count = board.counts[PIECES]
    do_move(board, i, entry, rests, server)
    look_again(board, doc, before)
    # the last rest first: joining may renumber the pieces behind
    for k in range(rests - 1, -1, -1):
        join(board, count + k)
    join(board, i)
