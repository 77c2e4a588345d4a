"""Strip tiling: rectangles of work dealt out to servers with room, in pieces of nearly ideal shape.

A *block* is a rectangle of ``height`` x ``width`` cells (``min_shard`` queries x ``min_shard`` keys) that its owner
cannot compute. It is cut into horizontal strips, every strip side by side into one piece per helper. A strip of height
h over m helpers moves h m rows and the block's keys once; a helper with room F pays least, 2 sqrt(c_q c_kv F), for a
piece with width / height = c_q / c_kv. Which helpers share a strip, and how many, is chosen by bytes: what the strip
costs above the ideal cost of the room that it uses up. Room that is left at a helper is charged what it will cost to
use, or to lose.

A strip may have a *holder*: a helper that is home to some of the block's keys, or imports them for another piece. It
gets those columns, as far as it can, and pays nothing for them; the others share the columns to both sides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit, jit_leaf

# Columns of the piece table; rows and columns in cells from the block's corner.
BLOCK, ROW, ROW_END, COLUMN, COLUMN_END, HELPER = range(6)

# Columns of the homes: a rank and the columns [start, end) of the document that it is home to.
RANK, HOME_START, HOME_END = range(3)

# Columns of the blocks' keys: the first home and the one after the last, and the document's column that is the
# block's first.
FIRST_HOME, END_HOME, ORIGIN = range(3)

# Entries of the prices: ideal bytes per square root of cells, bytes per cell of room not used, per column, per row at
# one helper, and of all the block's keys.
IDEAL, LOST, COLUMN_BYTES, ROW_BYTES, BLOCK_BYTES = range(5)

# Entries of the best strip: bytes above the ideal per row, first helper, helpers besides the holder, the holder (-1 if
# none), height (0 if there is no strip), and the columns that the holder has.
SCORE, FIRST, COUNT, HOLDER, HEIGHT, START, END = range(7)

PARTNERS = 3  # pieces in the same document whose helpers are tried as holders
PARTNER_ROOM = 16  # if they have at least this fraction of the mean room left
MOST_BESIDE = 64  # helpers side by side, at most, besides a holder
MOST_HOLDERS = 64  # homes of the block's keys that are tried as holders for a strip
MISSES = 2  # numbers of helpers in a row that are no better, after which no more are tried
MANY = (
    5  # numbers of helpers near the ideal, and near what takes all rows left, are tried in any case if these are more
)
LOOK_AHEAD = 1.5  # strips that leave less than this many times their height are judged together with the last one


class Blocks(NamedTuple):
    """The blocks [B], and who has their keys.

    ``size`` [B, 2] height and width in cells; ``doc`` [B]. ``homes`` [n, 3] are those of whole documents, by document
    and position: where one spans many ranks, its blocks share them. ``keys`` [B, 3] says which of them have keys of a
    block; :func:`home_columns` in which columns of it.
    """

    size: IntArray
    doc: IntArray
    homes: IntArray
    keys: IntArray


class Helpers(NamedTuple):
    """Ranks with room while blocks are dealt out; ``size`` [1] entries of rooms and ids are in use."""

    rooms: IntArray  # [H] free cells, ascending
    ids: IntArray  # [H] the ranks
    sums: IntArray  # [H + 1] running sums of the rooms
    roots: FloatArray  # [H] square roots of the rooms
    left: IntArray  # [num_ranks] free cells by rank
    size: IntArray
    prices: FloatArray
    best: FloatArray  # strip


def make_helpers(ids: IntArray, rooms: IntArray, prices: FloatArray) -> Helpers:
    """Return the tables for ranks ``ids`` [H], by ascending room, of ``rooms`` [num_ranks] cells."""
    sums, size = np.zeros(len(ids) + 1, dtype=np.int64), np.array([len(ids)])
    return Helpers(rooms[ids], ids.copy(), sums, np.sqrt(rooms[ids]), rooms.copy(), size, prices, np.zeros(7))


@jit_leaf
def _fill(rooms: IntArray, first: int, count: int, holder: int, height: int) -> int:
    """Columns that a strip of that height gets from ``count`` helpers from ``first`` on, and the holder if >= 0.

    Helpers are entries of the ascending rooms; the holder's own entry is passed over in counting.
    """
    columns, tall = int(rooms[holder] / height) if holder >= 0 else 0, float(height)
    for i in range(first, first + count):
        columns += int(rooms[i + (0 <= holder <= i)] / tall)
    return columns


@jit_leaf
def _sum(rooms: IntArray, sums: IntArray, first: int, count: int, holder: int) -> int:
    """Room of these helpers together; ``sums`` are the running sums of the rooms, from 0."""
    if holder < 0 or holder >= first + count:
        return sums[first + count] - sums[first] + (rooms[holder] if holder >= 0 else 0)
    if holder <= first:
        return sums[first + count + 1] - sums[first + 1] + rooms[holder]
    return sums[first + count + 1] - sums[first]


@jit_leaf
def _tallest(rooms: IntArray, sums: IntArray, first: int, count: int, holder: int, width: int, limit: int) -> int:
    """Greatest height, at most ``limit``, at which these helpers can fill the width; 0 if none."""
    height = min(limit, _sum(rooms, sums, first, count, holder) // width)
    while height > 0 and _fill(rooms, first, count, holder, height) < width:
        height -= 1
    return height


@jit_leaf
def _tightest(rooms: IntArray, sums: IntArray, last: int, count: int, holder: int, width: int, height: int) -> int:
    """First of the least roomy ``count`` helpers that can fill the width at that height; those from ``last`` on can."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if _sum(rooms, sums, middle, count, holder) >= height * width:
            high = middle
        else:
            low = middle + 1
    while low < last and _fill(rooms, low, count, holder, height) < width:
        low += 1
    return low


@jit_leaf
def _rest_cost(rest: int, prices: FloatArray) -> float:
    """Bytes to be paid for room that is left at a helper: to use it later, or to do without it."""
    lost = prices[LOST] * rest
    return lost if lost * prices[LOST] <= prices[IDEAL] * prices[IDEAL] else prices[IDEAL] * np.sqrt(rest)


@jit_leaf
def _used_cost(room: int, root: float, used: int, prices: FloatArray) -> float:
    """Bytes that using this much of a helper's room, of that square root, would cost ideally."""
    return prices[IDEAL] * root - _rest_cost(room - used, prices)


@jit_leaf
def _overlap(start: int, end: int, begin: int, stop: int) -> int:
    return max(0, min(end, stop) - max(start, begin))


@jit_leaf
def _holder_column(share: int, start: int, width: int) -> int:
    """First column of a holder that has columns from ``start`` on and takes ``share`` of them."""
    return max(0, min(start, width - share))


@jit_leaf
def _score(
    helpers: Helpers, first: int, count: int, holder: int, start: int, end: int, height: int, width: int
) -> float:
    """Bytes above the ideal of a strip, per row; [start, end) are the columns that the holder has."""
    rooms, roots, prices = helpers.rooms, helpers.roots, helpers.prices
    score, tall = prices[BLOCK_BYTES], float(height)
    left, users = width, 0
    if holder >= 0:
        share = min(left, rooms[holder] // height)
        begin = _holder_column(share, start, width)
        score -= prices[COLUMN_BYTES] * _overlap(begin, begin + share, start, min(end, width))
        score -= _used_cost(rooms[holder], roots[holder], share * height, prices)
        left -= share
        users += share > 0
    for i in range(first, first + count):
        at = i + (0 <= holder <= i)
        share = min(left, int(rooms[at] / tall))
        if share > 0:
            score -= _used_cost(rooms[at], roots[at], share * height, prices)
            users += 1
        left -= share
    return (score + height * users * prices[ROW_BYTES]) / height


@jit_leaf
def _last_strip(room: int, height: int, width: int, prices: FloatArray) -> float:
    """Bytes above the ideal of a last strip of that height on helpers with this much room, estimated."""
    full = height * width // room
    part = height * width - full * room
    root = np.sqrt(room)
    used = full * prices[IDEAL] * root + _used_cost(room, root, part, prices)
    return prices[BLOCK_BYTES] + height * (full + (part > 0)) * prices[ROW_BYTES] - used


@jit_leaf
def _try_strips(helpers: Helpers, rows: int, width: int, holder: int, start: int, end: int) -> None:
    """Improve ``helpers.best`` by the strips with this holder, which has columns [start, end), or none if holder < 0.

    Candidates per number of helpers: the roomiest, which make a full strip, and the tightest run of
    helpers that holds all ``rows`` left. Scores are per row, and that of a strip which leaves little includes the last
    one.
    """
    rooms, sums, prices, best = helpers.rooms, helpers.sums, helpers.prices, helpers.best
    size = helpers.size[0]
    others, most, near, last = size - (holder >= 0), MOST_BESIDE, 0, 0
    if others > 0:
        roomiest = rooms[size - 1 - (holder == size - 1)]
        ideal = width / np.sqrt(roomiest * prices[ROW_BYTES] / prices[COLUMN_BYTES])
        most = min(most, 3 + int(2 * ideal))
        every = rows * width / roomiest
        if min(every, ideal) >= MANY:
            near, last = int(min(every, ideal)) - 2, int(ideal if every > 2 * ideal else max(every, ideal)) + 2
    fewest, most = 1, min(most, others)
    if holder >= 0:
        fewest = 0
        if best[HEIGHT] > 0:
            alone = int(best[COUNT]) + (best[HOLDER] >= 0)
            fewest, most = max(0, alone - 2), min(most, alone + 1)
    misses, count = 0, fewest - 1
    while count < most:
        count += 1
        first = max(0, others - count)
        height = _tallest(rooms, sums, first, count, holder, width, rows)
        if height == 0:
            continue
        if height == rows:
            first = _tightest(rooms, sums, first, count, holder, width, rows)
        score = _score(helpers, first, count, holder, start, end, height, width)
        rest = rows - height
        if 0 < rest < LOOK_AHEAD * height:
            score = (score * height + _last_strip(rooms[others - 1], rest, width, prices)) / rows
        if score < best[SCORE]:
            best[SCORE], best[FIRST], best[COUNT], best[HOLDER], best[HEIGHT] = score, first, count, holder, height
            best[START], best[END] = start, end
            misses = 0
        else:
            misses += 1
            if misses >= MISSES and count >= last:
                return
            if misses == MISSES:
                count = max(count, near - 1)


@jit_leaf
def home_columns(blocks: Blocks, b: int, j: int) -> tuple[int, int]:
    """Return the columns [start, end) of block b that entry j of its homes has; end below start if it has none.

    They are whole cells: the home of less than a cell may have none.
    """
    origin = blocks.keys[b, ORIGIN]
    return max(0, blocks.homes[j, HOME_START] - origin), min(blocks.size[b, 1], blocks.homes[j, HOME_END] - origin)


@jit_leaf
def _find(ids: IntArray, size: int, helper: int) -> int:
    for i in range(size):
        if ids[i] == helper:
            return i
    return -1


@jit_leaf
def _take(helpers: Helpers, helper: int, used: int) -> None:
    """Use room of a helper; the rooms stay sorted, and a helper without room is dropped."""
    rooms, roots, ids, size = helpers.rooms, helpers.roots, helpers.ids, helpers.size[0]
    i = _find(ids, size, helper)
    room = rooms[i] - used
    helpers.left[helper] = room
    if room == 0:
        for j in range(i, size - 1):
            rooms[j], roots[j], ids[j] = rooms[j + 1], roots[j + 1], ids[j + 1]
        helpers.size[0] = size - 1
        return
    while i > 0 and rooms[i - 1] > room:
        rooms[i], roots[i], ids[i] = rooms[i - 1], roots[i - 1], ids[i - 1]
        i -= 1
    rooms[i], roots[i], ids[i] = room, np.sqrt(room), helper


@jit_leaf
def _lay(helpers: Helpers, block: int, row: int, width: int, pieces: IntArray, size: int) -> int:
    """Write the best strip's pieces; returns the new number of pieces. Columns beside a holder continue behind it."""
    rooms, ids, best = helpers.rooms, helpers.ids, helpers.best
    first, count, holder, height = int(best[FIRST]), int(best[COUNT]), int(best[HOLDER]), int(best[HEIGHT])
    hole, hole_end, begin = width, width, size
    if holder >= 0:
        share = min(width, rooms[holder] // height)
        if share > 0:
            hole = _holder_column(share, int(best[START]), width)
            hole_end = hole + share
            pieces[size, COLUMN], pieces[size, COLUMN_END], pieces[size, HELPER] = hole, hole_end, ids[holder]
            size += 1
    column = 0 if hole > 0 else hole_end
    for i in range(first, first + count):
        at = i + (0 <= holder <= i)
        share = rooms[at] // height
        while share > 0 and column < width:
            stop = min(column + share, hole if column < hole else width)
            pieces[size, COLUMN], pieces[size, COLUMN_END], pieces[size, HELPER] = column, stop, ids[at]
            size += 1
            share -= stop - column
            column = hole_end if stop == hole else stop
    for k in range(begin, size):
        pieces[k, BLOCK], pieces[k, ROW], pieces[k, ROW_END] = block, row, row + height
    return size


@jit_leaf
def _choose_strip(blocks: Blocks, helpers: Helpers, b: int, rows: int, pieces: IntArray, count: int) -> None:
    """Find the best strip for the ``rows`` left of block b, into ``helpers.best``.

    Homes of its keys and partners are tried as holders.
    """
    width, size = blocks.size[b, 1], helpers.size[0]
    helpers.best[SCORE], helpers.best[HEIGHT] = np.inf, 0
    for i in range(size):
        helpers.sums[i + 1] = helpers.sums[i] + helpers.rooms[i]
    _try_strips(helpers, rows, width, -1, 0, 0)
    holders = 0
    for j in range(blocks.keys[b, FIRST_HOME], blocks.keys[b, END_HOME]):
        helper = blocks.homes[j, RANK]
        start, end = home_columns(blocks, b, j)
        if helpers.left[helper] == 0 or start >= end:
            continue
        holders += 1
        if holders > MOST_HOLDERS:
            break
        _try_strips(helpers, rows, width, _find(helpers.ids, size, helper), start, end)
    tried, least = 0, helpers.sums[size] // max(1, size)
    for k in range(count - 1, -1, -1):
        helper = pieces[k, HELPER]
        if (
            helpers.left[helper] * PARTNER_ROOM < least
            or helpers.left[helper] == 0
            or blocks.doc[pieces[k, BLOCK]] != blocks.doc[b]
            or pieces[k, COLUMN] >= width
        ):
            continue
        tried += 1
        if tried > PARTNERS:
            break
        at = _find(helpers.ids, size, helper)
        _try_strips(helpers, rows, width, at, pieces[k, COLUMN], pieces[k, COLUMN_END])


@jit
def tile_blocks(blocks: Blocks, order: IntArray, helpers: Helpers, pieces: IntArray) -> int:
    """Deal out the blocks in ``order``, as pieces [capacity, 6].

    Returns how many pieces there are, or -1 if the room or the table does not suffice.
    """
    count = 0
    for place in range(len(order)):
        b = order[place]
        row, height, width = 0, blocks.size[b, 0], blocks.size[b, 1]
        helpers.prices[BLOCK_BYTES] = 0.0
        for j in range(blocks.keys[b, FIRST_HOME], blocks.keys[b, END_HOME]):
            start, end = home_columns(blocks, b, j)
            helpers.prices[BLOCK_BYTES] += helpers.prices[COLUMN_BYTES] * (end - start)
        while row < height:
            _choose_strip(blocks, helpers, b, height - row, pieces, count)
            tall = int(helpers.best[HEIGHT])
            if tall == 0 or count + 2 * int(helpers.best[COUNT]) + 3 > len(pieces):
                return -1
            begin = count
            count = _lay(helpers, b, row, width, pieces, count)
            for k in range(begin, count):
                _take(helpers, pieces[k, HELPER], tall * (pieces[k, COLUMN_END] - pieces[k, COLUMN]))
            row += tall
    return count
