# SPDX-License-Identifier: BSD-3-Clause
"""Cutting a part off a piece of the board."""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_inner
from torchtitan_cad.planning.model.tasks import KV_END, KV_START, Q_END, Q_START
from torchtitan_cad.planning.planners.local_search.board import (
    KEY,
    QUERY,
    Board,
    copy_task,
    key_tiles,
    rows_cost,
)

# Kinds of cuts: the whole piece; its first or last rows or columns; its last rows against its first columns.
WHOLE, FIRST_ROWS, LAST_ROWS, FIRST_COLUMNS, LAST_COLUMNS, CORNER = range(6)
ALL_CUTS = 6
CUTS_OF_ROWS = 3


@jit_inner
def _row_to_cut(
    board: Board, piece: IntArray, first_rows: bool, wanted: int, at_least: bool
) -> int:
    """Return the row at which to cut off first or last rows of a cost of at most, or at least, ``wanted``; -1: none."""
    tile = board.tile
    cell = board.cell
    low = piece[Q_START] // cell + 1
    high = (piece[Q_END] - 1) // cell
    first = piece[Q_START] // tile
    stop = -(-piece[Q_END] // tile)
    first_key = piece[KV_START] // tile
    width = key_tiles(board, piece)
    found = -1
    while low <= high:
        middle = (low + high) // 2
        begin, end = (
            (first, middle * cell // tile)
            if first_rows
            else (middle * cell // tile, stop)
        )
        cost = rows_cost(board, begin - first_key, end - first_key, width)
        fits = cost >= wanted if at_least else cost <= wanted
        if fits:
            found = middle * cell
        if fits == (at_least == first_rows):
            high = middle - 1
        else:
            low = middle + 1
    return found


@jit_inner
def _columns_to_cut(
    board: Board, piece: IntArray, row: int, most: int, wanted: int, at_least: bool
) -> int:
    """Columns, in tokens, at most ``most``, to cut off the piece's rows from ``row`` on; 0 if there are none.

    These are the most columns that cost at most ``wanted`` or, with ``at_least``, the fewest that relieve the server
    of at least ``wanted``.
    """
    tile = board.tile
    first_key = piece[KV_START] // board.tile
    first = row // tile - first_key
    stop = -(-piece[Q_END] // tile) - first_key
    width = key_tiles(board, piece)
    per_cell = board.cell // tile
    before = rows_cost(board, first, stop, width)
    low = 1
    high = most // board.cell
    found = 0
    while low <= high:
        middle = (low + high) // 2
        gone = middle * per_cell
        if not at_least:
            fits = rows_cost(board, first, stop, gone) <= wanted
        elif width == 0:
            fits = before - rows_cost(board, first - gone, stop - gone, 0) >= wanted
        else:
            fits = before - rows_cost(board, first, stop, width - gone) >= wanted
        if fits:
            found = middle
        if fits == at_least:
            high = middle - 1
        else:
            low = middle + 1
    return found * board.cell


@jit_inner
def best_rows(board: Board, piece: IntArray, wanted: int) -> float:
    """Return the rows, in tiles, of the rectangle in the piece that costs ``wanted`` and moves the fewest bytes.

    Its columns / rows are c_q / c_kv.
    """
    width = -(-piece[KV_END] // board.tile) - piece[KV_START] // board.tile
    tiles = wanted * width / (board.prefix[width] - board.prefix[width - 1])
    return np.sqrt(tiles * board.prices[KEY, 0] / board.prices[QUERY, 0])


@jit_inner
def cut(board: Board, i: int, how: int, wanted: int, at_least: bool) -> int:
    """Cut a part off piece i into ``board.parts``; returns the number of rests, or -1 if no cut fits.

    The part costs at most ``wanted`` or, with ``at_least``, relieves the server of at least ``wanted``.
    """
    piece = board.pieces[i]
    cell = board.cell
    part = board.parts[0]
    rest = board.parts[1]
    second = board.parts[2]
    copy_task(part, piece)
    if how == WHOLE:
        return 0
    copy_task(rest, part)
    diagonal = piece[KV_END] == piece[Q_END]
    if how <= LAST_ROWS:
        row = _row_to_cut(board, piece, how == FIRST_ROWS, wanted, at_least)
        if row < 0:
            return -1
        above, below = (part, rest) if how == FIRST_ROWS else (rest, part)
        above[Q_END] = row
        below[Q_START] = row
        if diagonal:
            above[KV_END] = row
        return 1
    if how <= LAST_COLUMNS:
        if diagonal and how == LAST_COLUMNS:
            return -1
        most = piece[KV_END] - piece[KV_START] - cell
        if diagonal:
            most = piece[Q_START] // cell * cell - piece[KV_START]
        columns = _columns_to_cut(board, piece, piece[Q_START], most, wanted, at_least)
        if columns == 0:
            return -1
        column = (
            piece[KV_START] + columns
            if how == FIRST_COLUMNS
            else piece[KV_END] - columns
        )
        left, right = (part, rest) if how == FIRST_COLUMNS else (rest, part)
        left[KV_END] = column
        right[KV_START] = column
        return 1
    rows = max(1, int(best_rows(board, piece, wanted) * board.tile))
    row = (piece[Q_END] - rows) // cell * cell
    if row < piece[Q_START] + cell:
        return -1
    most = (row if diagonal else piece[KV_END] - cell) - piece[KV_START]
    columns = _columns_to_cut(board, piece, row, most, wanted, at_least)
    if columns == 0:
        return -1
    column = piece[KV_START] + columns
    part[Q_START] = row
    part[KV_END] = column
    rest[Q_END] = row
    if diagonal:
        rest[KV_END] = row
    copy_task(second, piece)
    second[Q_START] = row
    second[KV_START] = column
    return 2
