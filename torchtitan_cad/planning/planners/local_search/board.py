"""A plan as a table of pieces whose loads and bytes are kept up to date, and ways to change it.

A *piece* is a task: queries [Q0, Q1) against keys [K0, K1) of a document, diagonal if K1 == Q1. A *move* gives a piece,
or a part cut off it, to another server. What a move saves or costs follows from the pieces that both servers have of
that document, so nothing else is looked at. Cuts lie at multiples of the cell, no part has less than a cell of rows.

The objective, to be lowered, is ``total / total_0 + weight / 8 sum_r ((in_r / worst)^8 + (out_r / worst)^8)``: the
sum stands for the worst rank, and tells moves apart where several ranks are nearly the worst.
"""

from __future__ import annotations

from typing import NamedTuple

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.planners.tiling.strips import FloatArray

# Columns of the piece table: the task, then the neighbours in the lists of its server's and its document's pieces.
DOC, Q0, Q1, K0, K1, SERVER, NEXT, PREVIOUS, DOC_NEXT, DOC_PREVIOUS = range(10)
TASK_COLUMNS = 6

# Columns of the ranks' tables (integers, bytes) and of the documents'; a list starts at its head, -1 if empty.
HEAD, LOAD, LIMIT, MARK = range(4)
IN, OUT, CHANGE_IN, CHANGE_OUT = range(4)
FIRST_RUN, DOC_HEAD, DIRTY = range(3)

# Columns of the runs: positions [start, end) of a document and their home.
START, END, HOME = range(3)

# Entries of the counts: pieces, moves evaluated, ranks with booked changes, stamps given out.
PIECES, EVALUATED, TOUCHED, STAMPS = range(4)

# Entries of the terms: 1 / total_0, weight / 8 of the worst rank, 1 / worst, bytes per query and per key.
PER_TOTAL, WEIGHT, PER_WORST, QUERY_BYTES, KEY_BYTES = range(5)

# Ways to cut: the whole piece; its first or last rows or columns; the last half, quarter, three quarters of a
# diagonal's rows against its first columns.
WHOLE, FIRST_ROWS, LAST_ROWS, FIRST_COLUMNS, LAST_COLUMNS, HALF_CORNER, FLAT_CORNER, TALL_CORNER = range(8)
CUTS = 8

MAX_RESTS = 2

PER_EVALUATION = 256
"""Ranks whose bytes change, or runs of a document, that take as long as evaluating a move."""


class Board(NamedTuple):
    """Pieces, and what they add up to; see the columns above. D documents, R runs, n ranks."""

    pieces: IntArray  # [capacity, 10]
    ranks: IntArray  # [n, 4]
    bytes: FloatArray  # [n, 4]
    docs: IntArray  # [D + 1, 3]
    runs: IntArray  # [R, 3] by document and position
    parts: IntArray  # [3, 1 + MAX_RESTS, TASK_COLUMNS] slots: the part cut off, then what remains; the third for copies
    touched: IntArray  # ranks with booked changes
    options: IntArray  # [n] servers found by find_options
    counts: IntArray
    terms: FloatArray
    tile: int
    cell: int


@jit_leaf
def piece_cost(piece: IntArray, tile: int) -> int:
    """Tiles of a piece, as ``TileAreaCost`` counts them."""
    first, stop, first_key = piece[Q0] // tile, -(-piece[Q1] // tile), piece[K0] // tile
    rows = stop - first
    if piece[K1] == piece[Q1]:
        return rows * (first + stop + 1) // 2 - rows * first_key
    return rows * (-(-piece[K1] // tile) - first_key)


@jit_leaf
def copy_task(target: IntArray, source: IntArray) -> None:
    """Copy the columns of the task; a loop, because slices are slow in compiled code."""
    for column in range(TASK_COLUMNS):
        target[column] = source[column]


@jit_leaf
def link(board: Board, i: int) -> None:
    """Put piece i at the head of the lists of its server and document."""
    pieces = board.pieces
    server, doc = pieces[i, SERVER], pieces[i, DOC]
    head, doc_head = board.ranks[server, HEAD], board.docs[doc, DOC_HEAD]
    pieces[i, NEXT], pieces[i, PREVIOUS] = head, -1
    pieces[i, DOC_NEXT], pieces[i, DOC_PREVIOUS] = doc_head, -1
    if head >= 0:
        pieces[head, PREVIOUS] = i
    if doc_head >= 0:
        pieces[doc_head, DOC_PREVIOUS] = i
    board.ranks[server, HEAD], board.docs[doc, DOC_HEAD] = i, i


@jit_leaf
def unlink(board: Board, i: int) -> None:
    """Take piece i out of the lists."""
    pieces = board.pieces
    before, after = pieces[i, PREVIOUS], pieces[i, NEXT]
    if before >= 0:
        pieces[before, NEXT] = after
    else:
        board.ranks[pieces[i, SERVER], HEAD] = after
    if after >= 0:
        pieces[after, PREVIOUS] = before
    before, after = pieces[i, DOC_PREVIOUS], pieces[i, DOC_NEXT]
    if before >= 0:
        pieces[before, DOC_NEXT] = after
    else:
        board.docs[pieces[i, DOC], DOC_HEAD] = after
    if after >= 0:
        pieces[after, DOC_PREVIOUS] = before


@jit_leaf
def _touch(board: Board, rank: int) -> None:
    if board.bytes[rank, CHANGE_IN] == 0 and board.bytes[rank, CHANGE_OUT] == 0:
        board.touched[board.counts[TOUCHED]] = rank
        board.counts[TOUCHED] += 1


@jit_leaf
def find_run(board: Board, doc: int, at: int) -> int:
    """The run of the document that holds the position."""
    low, high = board.docs[doc, FIRST_RUN], board.docs[doc + 1, FIRST_RUN] - 1
    while low < high:
        middle = (low + high) // 2
        if board.runs[middle, END] > at:
            high = middle
        else:
            low = middle + 1
    return low


@jit_leaf
def _book(
    board: Board, piece: IntArray, column: int, server: int, skip: int, slot: int, rests: int, price: float
) -> None:
    """Book what the piece's queries (column Q0) or keys (K0) cost the server: those that it has for nothing else.

    Left out are positions it is home to or that others of its pieces use, or the ``rests`` of ``slot``; piece ``skip``
    does not count as one of them.
    """
    doc, at, end = piece[DOC], piece[column], piece[column + 1]
    while at < end:
        reach, nearest = at, end  # how far pieces that cover ``at`` go, and where the next one begins
        j = board.ranks[server, HEAD]
        while j >= 0:
            if j != skip and board.pieces[j, DOC] == doc:
                if board.pieces[j, column] <= at:
                    reach = max(reach, board.pieces[j, column + 1])
                else:
                    nearest = min(nearest, board.pieces[j, column])
            j = board.pieces[j, NEXT]
        for k in range(1, rests + 1):
            if board.parts[slot, k, column] <= at:
                reach = max(reach, board.parts[slot, k, column + 1])
            else:
                nearest = min(nearest, board.parts[slot, k, column])
        if reach > at:
            at = reach
            continue
        run = find_run(board, doc, at)
        while at < nearest:
            stop, home = min(nearest, board.runs[run, END]), board.runs[run, HOME]
            if home != server:
                _touch(board, server)
                _touch(board, home)
                board.bytes[server, CHANGE_IN] += price * (stop - at)
                board.bytes[home, CHANGE_OUT] += price * (stop - at)
            at = stop
            run += 1


@jit_leaf
def worst_term(board: Board, amount: float) -> float:
    power = amount * board.terms[PER_WORST]
    power *= power
    power *= power
    return board.terms[WEIGHT] * power * power


@jit_leaf
def settle(board: Board, keep: bool) -> float:
    """Change of the objective by what is booked; enters it if ``keep``, and empties the book."""
    change = 0.0
    board.counts[EVALUATED] += board.counts[TOUCHED] // PER_EVALUATION
    for t in range(board.counts[TOUCHED]):
        rank = board.touched[t]
        for side in range(2):
            amount = board.bytes[rank, CHANGE_IN + side]
            if amount == 0:
                continue
            now = board.bytes[rank, side]
            change += worst_term(board, now + amount) - worst_term(board, now)
            if side == IN:
                change += amount * board.terms[PER_TOTAL]
            if keep:
                board.bytes[rank, side] = now + amount
            board.bytes[rank, CHANGE_IN + side] = 0.0
    board.counts[TOUCHED] = 0
    return change


@jit_leaf
def book_piece(board: Board, piece: IntArray, server: int, skip: int, slot: int, rests: int, sign: float) -> None:
    """Book the piece's bytes on the server, as coming (sign 1) or going (-1)."""
    for side in range(2):  # a loop, so that there is one call to compile
        column, price = (Q0, QUERY_BYTES) if side == 0 else (K0, KEY_BYTES)
        _book(board, piece, column, server, skip, slot, rests, sign * board.terms[price])


@jit_leaf
def _book_move(
    board: Board, part: IntArray, i: int, before: int, server: int, slot: int, rests: int, sign: float
) -> None:
    """Book the move (sign 1) of a part from the server of piece i to another one, or the way back (-1)."""
    for side in range(2):
        holder, skip, remain = (before, i, rests) if side == 0 else (server, -1, 0)
        book_piece(board, part, holder, skip, slot, remain, -sign if side == 0 else sign)


@jit_leaf
def price_move(board: Board, i: int, slot: int, rests: int, server: int) -> float:
    """Change of the objective if the part in ``slot``, cut off piece i with so many rests, goes to ``server``."""
    board.counts[EVALUATED] += 1
    part = board.parts[slot, 0]
    _book_move(board, part, i, board.pieces[i, SERVER], server, slot, rests, 1.0)
    return settle(board, False)


@jit_leaf
def most_gain(board: Board, i: int) -> float:
    """Bound on what any move of piece i, or of a part of it, can lower the objective by: what having it costs."""
    book_piece(board, board.pieces[i], board.pieces[i, SERVER], i, 0, 0, -1.0)
    return -settle(board, False)


@jit_leaf
def add_piece(board: Board, piece: IntArray, server: int) -> None:
    """Append a piece to the table and the lists."""
    i = board.counts[PIECES]
    copy_task(board.pieces[i], piece)
    board.pieces[i, SERVER] = server
    link(board, i)
    board.counts[PIECES] += 1


@jit_leaf
def do_move(board: Board, i: int, slot: int, rests: int, server: int) -> None:
    """Carry the move out: piece i becomes the part, what remains is appended."""
    part, before = board.parts[slot, 0], board.pieces[i, SERVER]
    _book_move(board, part, i, before, server, slot, rests, 1.0)
    settle(board, True)
    cost = piece_cost(part, board.tile)
    board.ranks[before, LOAD] -= cost
    board.ranks[server, LOAD] += cost
    unlink(board, i)
    copy_task(board.pieces[i], part)
    board.pieces[i, SERVER] = server
    link(board, i)
    for k in range(1, rests + 1):
        add_piece(board, board.parts[slot, k], before)


@jit_leaf
def undo_move(board: Board, i: int, slot: int, rests: int, whole: IntArray) -> None:
    """Take back the last move, which cut piece i off ``whole``."""
    part, server, before = board.parts[slot, 0], board.pieces[i, SERVER], whole[SERVER]
    for _ in range(rests):
        board.counts[PIECES] -= 1
        unlink(board, board.counts[PIECES])
    unlink(board, i)
    copy_task(board.pieces[i], whole)
    link(board, i)
    _book_move(board, part, i, before, server, slot, rests, -1.0)
    settle(board, True)
    cost = piece_cost(part, board.tile)
    board.ranks[before, LOAD] += cost
    board.ranks[server, LOAD] -= cost


@jit_leaf
def _row_to_cut(piece: IntArray, first_rows: bool, wanted: int, at_least: bool, tile: int, cell: int) -> int:
    """Where to cut off first or last rows that cost at most, or at least, what is wanted; -1 if nowhere."""
    low, high = -(-piece[Q0] // cell) + 1, piece[Q1] // cell - 1
    if piece[Q0] % cell == 0:
        low = piece[Q0] // cell + 1
    first, stop, first_key = piece[Q0] // tile, -(-piece[Q1] // tile), piece[K0] // tile
    diagonal, keys = piece[K1] == piece[Q1], -(-piece[K1] // tile) - first_key
    found = -1
    while low <= high:
        middle = (low + high) // 2
        begin, end = (first, middle * cell // tile) if first_rows else (middle * cell // tile, stop)
        rows = end - begin
        cost = rows * (begin + end + 1) // 2 - rows * first_key if diagonal else rows * keys
        fits = cost >= wanted if at_least else cost <= wanted
        if fits:
            found = middle * cell
        if fits == (at_least == first_rows):
            high = middle - 1
        else:
            low = middle + 1
    return found


@jit_leaf
def _columns_to_cut(rows: int, wanted: int, at_least: bool, tile: int, cell: int) -> int:
    """Columns, in tokens, that cost at most, or at least, what is wanted with so many rows of tiles."""
    if at_least:
        tiles = -(-wanted // rows)
        return -(-tiles * tile // cell) * cell
    return wanted // rows * tile // cell * cell


@jit_leaf
def cut(board: Board, i: int, slot: int, how: int, wanted: int, at_least: bool) -> int:
    """Cut a part that costs at most, or at least, what is wanted off piece i, into ``slot``; number of rests or -1."""
    piece, tile, cell = board.pieces[i], board.tile, board.cell
    part, rest, second = board.parts[slot, 0], board.parts[slot, 1], board.parts[slot, 2]
    copy_task(part, piece)
    if how == WHOLE:
        return 0
    copy_task(rest, part)
    diagonal = piece[K1] == piece[Q1]
    if how <= LAST_ROWS:
        row = _row_to_cut(piece, how == FIRST_ROWS, wanted, at_least, tile, cell)
        if row < 0:
            return -1
        above, below = (part, rest) if how == FIRST_ROWS else (rest, part)
        above[Q1], below[Q0] = row, row
        if diagonal:
            above[K1] = row
        return 1
    if how <= LAST_COLUMNS:
        if diagonal and how == LAST_COLUMNS:
            return -1
        rows = -(-piece[Q1] // tile) - piece[Q0] // tile
        columns = _columns_to_cut(rows, wanted, at_least, tile, cell)
        most = piece[Q0] // cell * cell - piece[K0] if diagonal else piece[K1] - piece[K0] - cell
        if columns < cell or columns > most:
            return -1
        column = piece[K0] + columns if how == FIRST_COLUMNS else piece[K1] - columns
        left, right = (part, rest) if how == FIRST_COLUMNS else (rest, part)
        left[K1], right[K0] = column, column
        return 1
    if not diagonal:
        return -1
    quarters = 2 if how == HALF_CORNER else (1 if how == FLAT_CORNER else 3)
    row = (piece[Q1] - (piece[Q1] - piece[Q0]) * quarters // 4) // cell * cell
    if row < piece[Q0] + cell or row + cell > piece[Q1]:
        return -1
    columns = _columns_to_cut(-(-piece[Q1] // tile) - row // tile, wanted, at_least, tile, cell)
    if columns < cell or (at_least and piece[K0] + columns > row):
        return -1
    column = min(piece[K0] + columns, row)
    part[Q0], part[K1] = row, column
    rest[Q1], rest[K1] = row, row
    copy_task(second, piece)
    second[Q0], second[K0] = row, column
    return 2


@jit_leaf
def _can_join(a: IntArray, b: IntArray, cell: int) -> bool:
    if a[DOC] != b[DOC]:
        return False
    if a[Q0] == b[Q0] and a[Q1] == b[Q1]:
        return a[K1] == b[K0] or b[K1] == a[K0]
    diagonal = a[K1] == a[Q1]
    if a[K0] != b[K0] or diagonal != (b[K1] == b[Q1]) or not (diagonal or a[K1] == b[K1]):
        return False
    return (a[Q1] == b[Q0] and b[Q0] % cell == 0) or (b[Q1] == a[Q0] and a[Q0] % cell == 0)


@jit_leaf
def join(board: Board, i: int) -> None:
    """Join piece i with others of its server as long as two make one task; nothing if there is no piece i any more.

    Pieces may change their numbers: the last ones take the place of those that were joined.
    """
    pieces = board.pieces
    if i >= board.counts[PIECES]:
        return
    j = board.ranks[pieces[i, SERVER], HEAD]
    while j >= 0:
        if j == i or not _can_join(pieces[i], pieces[j], board.cell):
            j = pieces[j, NEXT]
            continue
        pieces[i, Q0], pieces[i, Q1] = min(pieces[i, Q0], pieces[j, Q0]), max(pieces[i, Q1], pieces[j, Q1])
        pieces[i, K0], pieces[i, K1] = min(pieces[i, K0], pieces[j, K0]), max(pieces[i, K1], pieces[j, K1])
        unlink(board, j)
        board.counts[PIECES] -= 1
        last = board.counts[PIECES]
        if j != last:
            unlink(board, last)
            copy_task(pieces[j], pieces[last])
            link(board, j)
            i = j if i == last else i
        j = board.ranks[pieces[i, SERVER], HEAD]


@jit_leaf
def find_options(board: Board, i: int, least: int) -> int:
    """Servers that hold or use queries or keys of piece i and have ``least`` room, into ``options``; their number."""
    piece, ranks = board.pieces[i], board.ranks
    doc, num = piece[DOC], 0
    board.counts[STAMPS] += 1
    stamp = board.counts[STAMPS]
    ranks[piece[SERVER], MARK] = stamp
    board.counts[EVALUATED] += (board.docs[doc + 1, FIRST_RUN] - board.docs[doc, FIRST_RUN]) // PER_EVALUATION
    for r in range(board.docs[doc, FIRST_RUN], board.docs[doc + 1, FIRST_RUN]):
        start, end, rank = board.runs[r, START], board.runs[r, END], board.runs[r, HOME]
        if start >= piece[Q1]:
            break
        if (end > piece[Q0] or (start < piece[K1] and piece[K0] < end)) and ranks[rank, MARK] != stamp:
            ranks[rank, MARK] = stamp
            if ranks[rank, LIMIT] - ranks[rank, LOAD] >= least:
                board.options[num] = rank
                num += 1
    j = board.docs[doc, DOC_HEAD]
    while j >= 0:
        other = board.pieces[j]
        rank = other[SERVER]
        if ranks[rank, MARK] != stamp and (
            (other[Q0] < piece[Q1] and piece[Q0] < other[Q1]) or (other[K0] < piece[K1] and piece[K0] < other[K1])
        ):
            ranks[rank, MARK] = stamp
            if ranks[rank, LIMIT] - ranks[rank, LOAD] >= least:
                board.options[num] = rank
                num += 1
        j = other[DOC_NEXT]
    return num
