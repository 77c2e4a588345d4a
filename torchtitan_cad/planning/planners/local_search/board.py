# SPDX-License-Identifier: BSD-3-Clause
"""A plan as a table of pieces whose loads and bytes are updated with every change.

A *piece* is a task: queries [Q_START, Q_END) against keys [KV_START, KV_END) of a document, diagonal if both end alike.
A *move* gives a piece, or a part cut off it, to another server. The pieces that both servers have of that document
determine the change of bytes. Cuts lie at multiples of the cell.

The objective, to be minimised, is ``total / total_0 + weight / 8 sum_r ((in_r / worst)^8 + (out_r / worst)^8)``. The
sum stands for the worst rank, and also tells moves apart where several ranks are nearly the worst. A row that travels
between nodes counts ``BETWEEN_NODES`` times.
"""

from __future__ import annotations

from typing import NamedTuple

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.model.tasks import (
    DOC,
    KV_END,
    KV_START,
    Q_END,
    Q_START,
    SERVER,
    TASK_COLUMNS,
)

# Columns of the pieces behind the task's columns: the neighbours in the lists of pieces of the same server and of the
# same document, and the price of the piece's best part (``feasible.py``).
NEXT, PREVIOUS, DOC_NEXT, DOC_PREVIOUS, PRICE = range(6, 11)
PIECE_COLUMNS = 11
UNKNOWN = -1

# Columns of the ranks: load, most load, bytes in and out, booked changes of both, the head of the list of pieces (-1 if
# empty), its pieces, the last search for options that has seen the rank, whether (or when) the rank was given up, node,
# whether it has booked changes. The last two columns are lists: ranks with booked changes, and servers found by
# find_options.
(
    LOAD,
    LIMIT,
    BYTES_IN,
    BYTES_OUT,
    NEW_IN,
    NEW_OUT,
    HEAD,
    NUM_PIECES,
    STAMP,
    STUCK,
    NODE,
    IS_TOUCHED,
    TOUCHED,
    OPTION,
) = range(14)
RANK_COLUMNS = 14

# Columns of the documents and of the runs: positions [RUN_START, RUN_END) of a document and their home.
FIRST_RUN, DOC_HEAD, DOC_PIECES, DIRTY = range(4)
DOC_COLUMNS = 4
RUN_START, RUN_END, RUN_HOME = range(3)

# Entries of the counts: pieces, moves evaluated, ranks with booked changes, the last stamp, kinds of cuts allowed.
PIECES, EVALUATED, NUM_TOUCHED, STAMPS, CUTS = range(5)

# Entries of the terms: 1 / total_0, weight / 8 of the worst rank, 1 / worst.
PER_TOTAL, WEIGHT, PER_WORST = range(3)

# Rows of the prices, per query and per key: bytes inside a node and between nodes.
QUERY, KEY = range(2)

MAX_RESTS = 2
"""pieces: maximum number of rests where a part is cut off a piece."""

FREE_PIECES = 8
"""entries: free rows of the piece table that one step may need."""

PER_EVALUATION = 256
"""ranks whose bytes change, or runs of a document, that count as one evaluated move"""


class Board(NamedTuple):
    """Pieces and their sums over ranks; the constants above name the columns. D documents, R runs, n ranks."""

    pieces: IntArray  # [size, PIECE_COLUMNS]
    ranks: IntArray  # [n, RANK_COLUMNS]
    docs: IntArray  # [D + 1, DOC_COLUMNS]
    runs: IntArray  # [R, 3] by document and position
    parts: IntArray  # [1 + MAX_RESTS, TASK_COLUMNS] the part cut off a piece, then the rests
    counts: IntArray
    terms: FloatArray
    prefix: IntArray  # entry i: cost of one row of tiles against 1 key tile, one against 2, ... one against i
    prices: IntArray  # [2, 2] bytes of a query and of a key, inside a node and between nodes
    tile: int
    cell: int


@jit_inner
def rows_cost(board: Board, first: int, stop: int, width: int) -> int:
    """Return the cost of rows of tiles [first, stop), counted from the first key, against ``width`` key tiles.

    A width of 0 stands for a diagonal.
    """
    if width == 0:
        return board.prefix[stop] - board.prefix[first]
    return (stop - first) * (board.prefix[width] - board.prefix[width - 1])


@jit_inner
def key_tiles(board: Board, piece: IntArray) -> int:
    """Return the key tiles of a row of a rectangle, 0 for a diagonal."""
    if piece[KV_END] == piece[Q_END]:
        return 0
    return -(-piece[KV_END] // board.tile) - piece[KV_START] // board.tile


@jit_inner
def piece_cost(board: Board, piece: IntArray) -> int:
    """Return the cost of a piece by the cost model."""
    first_key = piece[KV_START] // board.tile
    first = piece[Q_START] // board.tile - first_key
    stop = -(-piece[Q_END] // board.tile) - first_key
    return rows_cost(board, first, stop, key_tiles(board, piece))


@jit_inner
def copy_task(target: IntArray, source: IntArray) -> None:
    """Copy the columns of the task; a loop, because slices are slow in compiled code."""
    for column in range(TASK_COLUMNS):
        target[column] = source[column]


@jit_inner
def link(board: Board, i: int) -> None:
    """Put piece i at the head of the lists of its server and document."""
    pieces = board.pieces
    server = pieces[i, SERVER]
    doc = pieces[i, DOC]
    head = board.ranks[server, HEAD]
    doc_head = board.docs[doc, DOC_HEAD]
    pieces[i, NEXT] = head
    pieces[i, PREVIOUS] = -1
    pieces[i, DOC_NEXT] = doc_head
    pieces[i, DOC_PREVIOUS] = -1
    pieces[i, PRICE] = UNKNOWN
    if head >= 0:
        pieces[head, PREVIOUS] = i
    if doc_head >= 0:
        pieces[doc_head, DOC_PREVIOUS] = i
    board.ranks[server, HEAD] = i
    board.docs[doc, DOC_HEAD] = i
    board.ranks[server, NUM_PIECES] += 1
    board.docs[doc, DOC_PIECES] += 1


@jit_inner
def unlink(board: Board, i: int) -> None:
    """Take piece i out of the lists."""
    pieces = board.pieces
    board.ranks[pieces[i, SERVER], NUM_PIECES] -= 1
    board.docs[pieces[i, DOC], DOC_PIECES] -= 1
    before = pieces[i, PREVIOUS]
    after = pieces[i, NEXT]
    if before >= 0:
        pieces[before, NEXT] = after
    else:
        board.ranks[pieces[i, SERVER], HEAD] = after
    if after >= 0:
        pieces[after, PREVIOUS] = before
    before = pieces[i, DOC_PREVIOUS]
    after = pieces[i, DOC_NEXT]
    if before >= 0:
        pieces[before, DOC_NEXT] = after
    else:
        board.docs[pieces[i, DOC], DOC_HEAD] = after
    if after >= 0:
        pieces[after, DOC_PREVIOUS] = before


@jit_inner
def shorter_list(board: Board, doc: int, server: int) -> tuple[int, int]:
    """Return the head of the list of the document's or of the server's pieces, whichever has fewer, and its column."""
    if board.docs[doc, DOC_PIECES] < board.ranks[server, NUM_PIECES]:
        return board.docs[doc, DOC_HEAD], DOC_NEXT
    return board.ranks[server, HEAD], NEXT


@jit_inner
def _touch(board: Board, rank: int) -> None:
    if board.ranks[rank, IS_TOUCHED] == 0:
        board.ranks[rank, IS_TOUCHED] = 1
        board.ranks[board.counts[NUM_TOUCHED], TOUCHED] = rank
        board.counts[NUM_TOUCHED] += 1


@jit_inner
def find_run(board: Board, doc: int, at: int) -> int:
    """Return the run of the document that holds the position."""
    low = board.docs[doc, FIRST_RUN]
    high = board.docs[doc + 1, FIRST_RUN] - 1
    while low < high:
        middle = (low + high) // 2
        if board.runs[middle, RUN_END] > at:
            high = middle
        else:
            low = middle + 1
    return low


@jit_inner
def _book(
    board: Board,
    piece: IntArray,
    kind: int,
    server: int,
    skip: int,
    rests: int,
    sign: int,
) -> None:
    """Book the piece's queries or keys that the server receives for this piece alone.

    Positions do not count that the server is home to, or that its other pieces but ``skip``, or the ``rests``, use.
    """
    doc = piece[DOC]
    column = Q_START if kind == QUERY else KV_START
    at = piece[column]
    end = piece[column + 1]
    while at < end:
        # how far pieces that cover ``at`` go, and where the next one begins
        reach = at
        nearest = end
        j, following = shorter_list(board, doc, server)
        while j >= 0:
            other = board.pieces[j]
            if j != skip and other[DOC] == doc and other[SERVER] == server:
                if other[column] <= at:
                    reach = max(reach, other[column + 1])
                else:
                    nearest = min(nearest, other[column])
            j = other[following]
        for k in range(1, rests + 1):
            if board.parts[k, column] <= at:
                reach = max(reach, board.parts[k, column + 1])
            else:
                nearest = min(nearest, board.parts[k, column])
        if reach > at:
            at = reach
            continue
        run = find_run(board, doc, at)
        while at < nearest:
            stop = min(nearest, board.runs[run, RUN_END])
            home = board.runs[run, RUN_HOME]
            if home != server:
                _touch(board, server)
                _touch(board, home)
                between = int(board.ranks[home, NODE] != board.ranks[server, NODE])
                amount = sign * board.prices[kind, between] * (stop - at)
                board.ranks[server, NEW_IN] += amount
                board.ranks[home, NEW_OUT] += amount
            at = stop
            run += 1


@jit_inner
def worst_term(board: Board, amount: float) -> float:
    """Return the term of the objective for a rank's bytes in or out."""
    power = amount * board.terms[PER_WORST]
    power *= power
    power *= power
    return board.terms[WEIGHT] * power * power


@jit_inner
def settle(board: Board, enter: bool) -> float:
    """Return the change of the objective by the booked changes, apply them if ``enter``, and clear them."""
    change = 0.0
    board.counts[EVALUATED] += board.counts[NUM_TOUCHED] // PER_EVALUATION
    for t in range(board.counts[NUM_TOUCHED]):
        row = board.ranks[board.ranks[t, TOUCHED]]
        into = row[NEW_IN]
        out = row[NEW_OUT]
        if into != 0:
            change += worst_term(board, row[BYTES_IN] + into) - worst_term(
                board, row[BYTES_IN]
            )
            change += into * board.terms[PER_TOTAL]
        if out != 0:
            change += worst_term(board, row[BYTES_OUT] + out) - worst_term(
                board, row[BYTES_OUT]
            )
        if enter:
            row[BYTES_IN] += into
            row[BYTES_OUT] += out
        row[NEW_IN] = 0
        row[NEW_OUT] = 0
        row[IS_TOUCHED] = 0
    board.counts[NUM_TOUCHED] = 0
    return change


@jit_inner
def book_piece(
    board: Board,
    piece: IntArray,
    server: int,
    skip: int,
    rests: int,
    sign: int,
) -> None:
    """Book the piece's rows as received by the server (sign 1) or no longer received (-1)."""
    for kind in range(2):  # a loop, so that there is one call to compile
        _book(board, piece, kind, server, skip, rests, sign)


@jit_inner
def book_move(board: Board, i: int, rests: int, server: int) -> None:
    """Book the move of the part cut off piece i to another server."""
    part = board.parts[0]
    for leaves in (1, 0):  # a loop, so that there is one call to compile
        holder = board.pieces[i, SERVER] if leaves else server
        skip = i if leaves else -1
        book_piece(board, part, holder, skip, rests * leaves, 1 - 2 * leaves)


@jit_inner
def price_move(board: Board, i: int, rests: int, server: int) -> float:
    """Return the change of the objective if the part cut off piece i goes to a server."""
    board.counts[EVALUATED] += 1
    book_move(board, i, rests, server)
    return settle(board, False)


@jit_inner
def most_gain(board: Board, i: int) -> float:
    """Return an upper bound on the gain of moving piece i or a part of it: the price of the rows that only it needs."""
    book_piece(board, board.pieces[i], board.pieces[i, SERVER], i, 0, -1)
    return -settle(board, False)


@jit_inner
def add_piece(board: Board, piece: IntArray, server: int) -> None:
    """Append a piece to the table and the lists."""
    i = board.counts[PIECES]
    copy_task(board.pieces[i], piece)
    board.pieces[i, SERVER] = server
    link(board, i)
    board.counts[PIECES] += 1


@jit_inner
def relief(board: Board, i: int, rests: int) -> int:
    """Return the load that a server loses with the part cut off piece i; this may exceed the part's cost."""
    load = piece_cost(board, board.pieces[i])
    for k in range(1, rests + 1):
        load -= piece_cost(board, board.parts[k])
    return load


@jit_inner
def do_move(board: Board, i: int, rests: int, server: int) -> None:
    """Carry out the move of the part cut off piece i, which becomes the part; the rests are appended."""
    before = board.pieces[i, SERVER]
    book_move(board, i, rests, server)
    settle(board, True)
    board.ranks[before, LOAD] -= relief(board, i, rests)
    board.ranks[server, LOAD] += piece_cost(board, board.parts[0])
    unlink(board, i)
    copy_task(board.pieces[i], board.parts[0])
    board.pieces[i, SERVER] = server
    link(board, i)
    for k in range(1, rests + 1):
        add_piece(board, board.parts[k], before)


@jit_inner
def look_again(board: Board, doc: int, server: int) -> None:
    """Mark as dirty the document, and every document with a piece on ``server``, which has gained capacity."""
    board.docs[doc, DIRTY] = 1
    j = board.ranks[server, HEAD]
    while j >= 0:
        board.docs[board.pieces[j, DOC], DIRTY] = 1
        j = board.pieces[j, NEXT]


@jit_inner
def capacity(board: Board, rank: int) -> int:
    """Return the load that the rank may still take; negative if it is over its limit."""
    return board.ranks[rank, LIMIT] - board.ranks[rank, LOAD]


@jit_inner
def is_full(board: Board) -> bool:
    """Tell whether the table of pieces may lack room for one more step."""
    return board.counts[PIECES] + FREE_PIECES > len(board.pieces)


@jit_inner
def _add_option(board: Board, rank: int, least: int, num: int) -> int:
    """Append the rank to the options if this search has not seen it and it has ``least`` capacity; returns their
    number."""
    if board.ranks[rank, STAMP] == board.counts[STAMPS]:
        return num
    board.ranks[rank, STAMP] = board.counts[STAMPS]
    if capacity(board, rank) < least:
        return num
    board.ranks[num, OPTION] = rank
    return num + 1


@jit_inner
def find_options(board: Board, i: int, least: int, most: int) -> int:
    """List in column OPTION up to ``most`` servers with ``least`` capacity that hold or use rows of piece i.

    Homes come first, by position. Returns the number of options.
    """
    piece = board.pieces[i]
    doc = piece[DOC]
    num = 0
    board.counts[STAMPS] += 1
    board.ranks[piece[SERVER], STAMP] = board.counts[STAMPS]
    board.counts[EVALUATED] += (
        board.docs[doc + 1, FIRST_RUN] - board.docs[doc, FIRST_RUN]
    ) // PER_EVALUATION
    for r in range(board.docs[doc, FIRST_RUN], board.docs[doc + 1, FIRST_RUN]):
        start = board.runs[r, RUN_START]
        end = board.runs[r, RUN_END]
        if start >= piece[Q_END] or num >= most:
            break
        if end > piece[Q_START] or (start < piece[KV_END] and piece[KV_START] < end):
            num = _add_option(board, board.runs[r, RUN_HOME], least, num)
    j = board.docs[doc, DOC_HEAD]
    while j >= 0 and num < most:
        other = board.pieces[j]
        if (other[Q_START] < piece[Q_END] and piece[Q_START] < other[Q_END]) or (
            other[KV_START] < piece[KV_END] and piece[KV_START] < other[KV_END]
        ):
            num = _add_option(board, other[SERVER], least, num)
        j = other[DOC_NEXT]
    return num
