"""Strip tiling: rectangles of work dealt out to servers with room, in pieces of nearly ideal shape.

A *block* is a rectangle of ``height`` x ``width`` cells (``min_shard`` queries x ``min_shard`` keys) that its owner
cannot compute. It is cut into horizontal strips, every strip side by side into one piece per helper. A strip of height
h over m helpers moves h m rows and the block's keys once; a helper with room F pays least, 2 sqrt(c_q c_kv F), for a
piece with width / height = c_q / c_kv. Which helpers share a strip, and how many, is chosen by bytes: what the strip
costs above the ideal cost of the room that it uses up. Room that is left at a helper is charged what it will cost to
use, or to lose.

A strip may have a *guest*: a helper that is home to some of the block's keys, or imports them for another piece. It
gets those columns, as far as it can, and pays nothing for them; the others share the columns to both sides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..intervals import IntArray
from .jit import jit

FloatArray = npt.NDArray[np.float64]

# Columns of the piece table; rows and columns in cells from the block's corner.
BLOCK, ROW, ROW_END, COLUMN, COLUMN_END, HELPER = range(6)

# Columns of the genes, the choices per overloaded rank: its turn; factor on the bytes of a row, above 1 for wider
# pieces; roomiest helpers to leave alone; whether holders of keys are guests; factor on the cost of room that is not
# used; which of the alternative blocks to give away.
TURN, ROW_FACTOR, SKIP, USE_GUESTS, LOST_FACTOR, VARIANT = range(6)
GENES = 6

PARTNERS = 6  # pieces in the same document whose helpers are tried as guests
PARTNER_ROOM = 16  # if they have at least this fraction of the mean room left
LOOK_AHEAD = 1.5  # strips that leave less than this many times their height are judged together with the last one

# Entries of the prices: ideal bytes per square root of cells, bytes per cell of room not used, bytes per column.
IDEAL, LOST, COLUMN_BYTES = range(3)


@jit
def _fill(rooms: IntArray, first: int, count: int, guest: int, height: int) -> int:
    """Columns that a strip of that height gets from ``count`` helpers from ``first`` on, and the guest if >= 0.

    Helpers are entries of the ascending rooms; the guest's own entry is passed over in counting.
    """
    columns = rooms[guest] // height if guest >= 0 else 0
    for i in range(first, first + count):
        columns += rooms[i + (0 <= guest <= i)] // height
    return columns


@jit
def _sum(rooms: IntArray, sums: IntArray, first: int, count: int, guest: int) -> int:
    """Room of these helpers together; ``sums`` are the running sums of the rooms, from 0."""
    if guest < 0 or guest >= first + count:
        return sums[first + count] - sums[first] + (rooms[guest] if guest >= 0 else 0)
    if guest <= first:
        return sums[first + count + 1] - sums[first + 1] + rooms[guest]
    return sums[first + count + 1] - sums[first]


@jit
def _tallest(rooms: IntArray, sums: IntArray, first: int, count: int, guest: int, width: int, limit: int) -> int:
    """Greatest height, at most ``limit``, at which these helpers can fill the width; 0 if none."""
    height = min(limit, _sum(rooms, sums, first, count, guest) // width)
    while height > 0 and _fill(rooms, first, count, guest, height) < width:
        height -= 1
    return height


@jit
def _rest_cost(rest: int, prices: FloatArray) -> float:
    """Bytes to be paid for room that is left at a helper: to use it later, or to do without it."""
    return min(prices[IDEAL] * np.sqrt(rest), prices[LOST] * rest)


@jit
def _used_cost(room: int, used: int, prices: FloatArray) -> float:
    """Bytes that using this much of a helper's room would cost ideally."""
    return prices[IDEAL] * np.sqrt(room) - _rest_cost(room - used, prices)


@jit
def _overlap(start: int, end: int, begin: int, stop: int) -> int:
    return max(0, min(end, stop) - max(start, begin))


@jit
def guest_columns(share: int, start: int, width: int) -> int:
    """First column of a guest that holds columns from ``start`` on and takes ``share`` of them."""
    return max(0, min(start, width - share))


@jit
def _score(
    rooms: IntArray,
    first: int,
    count: int,
    guest: int,
    held: IntArray,
    height: int,
    width: int,
    row_bytes: float,
    key_bytes: float,
    prices: FloatArray,
) -> float:
    """Bytes above the ideal of a strip, per row; ``held`` are the columns [start, end) that the guest holds."""
    score = key_bytes
    left, users = width, 0
    if guest >= 0:
        share = min(left, rooms[guest] // height)
        begin = guest_columns(share, held[0], width)
        score -= prices[COLUMN_BYTES] * _overlap(begin, begin + share, held[0], min(held[1], width))
        score -= _used_cost(rooms[guest], share * height, prices)
        left -= share
        users += share > 0
    for i in range(first, first + count):
        room = rooms[i + (0 <= guest <= i)]
        share = min(left, room // height)
        if share > 0:
            score -= _used_cost(room, share * height, prices)
            users += 1
        left -= share
    return (score + height * users * row_bytes) / height


@jit
def _last_strip(room: int, height: int, width: int, row_bytes: float, key_bytes: float, prices: FloatArray) -> float:
    """Bytes above the ideal of a last strip of that height on helpers with this much room, estimated."""
    full = height * width // room
    part = height * width - full * room
    used = full * prices[IDEAL] * np.sqrt(room) + _used_cost(room, part, prices)
    return key_bytes + height * (full + (part > 0)) * row_bytes - used


@jit
def _best_strip(
    rooms: IntArray,
    sums: IntArray,
    size: int,
    left: int,
    width: int,
    row_bytes: float,
    key_bytes: float,
    prices: FloatArray,
    guest: int,
    held: IntArray,
    skip: int,
    most: int,
    best: FloatArray,
) -> None:
    """Improve ``best`` = (score, first, count, guest, height) by the strips with this guest, or none if guest < 0.

    Candidates per number of helpers: the roomiest but ``skip``, which make a full strip, and the tightest run of
    helpers that holds all ``left`` rows. Scores are per row, and that of a strip which leaves little includes the last
    one.
    """
    others = size - (guest >= 0)
    if others > 0:
        roomiest = rooms[size - 1 - (guest == size - 1)]
        most = min(most, 3 + int(2 * width / np.sqrt(roomiest * row_bytes / prices[COLUMN_BYTES])))
    fewest, most = 1, min(most, others)
    if guest >= 0:
        fewest = 0
        if best[4] > 0:
            alone = int(best[2]) + (best[3] >= 0)
            fewest, most = max(0, alone - 2), min(most, alone + 1)
    for count in range(fewest, most + 1):
        first = max(0, others - count - skip)
        height = _tallest(rooms, sums, first, count, guest, width, left)
        if height == 0:
            continue
        if height == left:
            low, high = 0, first
            while low < high:
                middle = (low + high) // 2
                if _sum(rooms, sums, middle, count, guest) >= left * width:
                    high = middle
                else:
                    low = middle + 1
            while low < first and _fill(rooms, low, count, guest, left) < width:
                low += 1
            first = low
        score = _score(rooms, first, count, guest, held, height, width, row_bytes, key_bytes, prices)
        rest = left - height
        if 0 < rest < LOOK_AHEAD * height:
            last = _last_strip(rooms[others - 1], rest, width, row_bytes, key_bytes, prices)
            score = (score * height + last) / left
        if score < best[0]:
            best[0], best[1], best[2], best[3], best[4] = score, first, count, guest, height


@jit
def _take(rooms: IntArray, ids: IntArray, size: int, at: int, room: int) -> int:
    """Lower entry ``at`` of the ascending rooms to ``room``, or drop it if that is 0; returns the new size."""
    helper = ids[at]
    if room == 0:
        for j in range(at, size - 1):
            rooms[j], ids[j] = rooms[j + 1], ids[j + 1]
        return size - 1
    i = at
    while i > 0 and rooms[i - 1] > room:
        rooms[i], ids[i] = rooms[i - 1], ids[i - 1]
        i -= 1
    rooms[i], ids[i] = room, helper
    return size


@jit
def _find(ids: IntArray, size: int, helper: int) -> int:
    for i in range(size):
        if ids[i] == helper:
            return i
    return -1


@jit
def _lay(
    rooms: IntArray,
    ids: IntArray,
    first: int,
    count: int,
    guest: int,
    held: IntArray,
    block: int,
    row: int,
    height: int,
    width: int,
    pieces: IntArray,
    size: int,
) -> int:
    """Write the strip's pieces; returns the new number of pieces. Columns beside a guest continue behind it."""
    hole, hole_end = width, width
    if guest >= 0:
        share = min(width, rooms[guest] // height)
        if share > 0:
            hole = guest_columns(share, held[0], width)
            hole_end = hole + share
            pieces[size, COLUMN], pieces[size, COLUMN_END], pieces[size, HELPER] = hole, hole_end, ids[guest]
            size += 1
    column = 0 if hole > 0 else hole_end
    begin = size - (hole_end > hole)
    for i in range(first, first + count):
        at = i + (0 <= guest <= i)
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


@jit
def tile_blocks(
    blocks: IntArray,
    block_bytes: FloatArray,
    order: IntArray,
    genes: FloatArray,
    slots: IntArray,
    sorted_rooms: IntArray,
    sorted_ids: IntArray,
    guests: IntArray,
    first_guest: IntArray,
    docs: IntArray,
    prices: FloatArray,
    most: int,
    pieces: IntArray,
) -> int:
    """Deal out all blocks, in ``order``; returns the number of pieces, or -1 if the room or the table does not suffice.

    Args:
        blocks: [B, 2] height and width, cells.
        block_bytes: [B, 2] bytes by which strips are chosen: of a row at one helper, of all the block's keys.
        genes: [slots, GENES] choices, see above; slots [B] says which are a block's.
        sorted_rooms, sorted_ids: [H] free cells, ascending, and the helpers they belong to.
        guests: [G, 3] helper and the columns [start, end) it holds, by block; first_guest [B + 1] delimits the blocks.
        prices: see IDEAL, LOST, COLUMN_BYTES.
        most: helpers side by side, at most, besides a guest.
        pieces: [capacity, 6] is filled.
    """
    rooms, ids = sorted_rooms.copy(), sorted_ids.copy()
    best = np.empty(5)
    sums = np.zeros(len(rooms) + 1, dtype=np.int64)
    size, count = len(rooms), 0
    nobody = np.zeros(2, dtype=np.int64)
    price = prices.copy()
    left = np.zeros(1 + (ids.max() if size > 0 else 0), dtype=np.int64)
    left[ids] = rooms
    for b in order:
        row, height, width = 0, blocks[b, 0], blocks[b, 1]
        row_bytes, key_bytes = block_bytes[b, 0] * genes[slots[b], ROW_FACTOR], block_bytes[b, 1]
        price[LOST] = prices[LOST] * genes[slots[b], LOST_FACTOR]
        price[IDEAL] = prices[IDEAL] * np.sqrt(genes[slots[b], ROW_FACTOR])
        skip = int(genes[slots[b], SKIP])
        last_guest = first_guest[b + 1] if genes[slots[b], USE_GUESTS] > 0 else first_guest[b]
        while row < height:
            best[0], best[4] = np.inf, 0
            for i in range(size):
                sums[i + 1] = sums[i] + rooms[i]
            _best_strip(
                rooms, sums, size, height - row, width, row_bytes, key_bytes, price, -1, nobody, skip, most, best
            )
            held = nobody
            for g in range(first_guest[b], last_guest):
                at = _find(ids, size, guests[g, 0]) if guests[g, 0] < len(left) and left[guests[g, 0]] > 0 else -1
                if at >= 0:
                    before = best[0]
                    _best_strip(
                        rooms,
                        sums,
                        size,
                        height - row,
                        width,
                        row_bytes,
                        key_bytes,
                        price,
                        at,
                        guests[g, 1:],
                        skip,
                        most,
                        best,
                    )
                    if best[0] < before:
                        held = guests[g, 1:]
            tried = 0
            for k in range(count - 1, -1, -1):
                helper = pieces[k, HELPER]
                if (
                    left[helper] * PARTNER_ROOM < sums[size] // size
                    or docs[pieces[k, BLOCK]] != docs[b]
                    or pieces[k, COLUMN] >= width
                ):
                    continue
                tried += 1
                if tried > PARTNERS:
                    break
                at = _find(ids, size, helper)
                before = best[0]
                _best_strip(
                    rooms,
                    sums,
                    size,
                    height - row,
                    width,
                    row_bytes,
                    key_bytes,
                    price,
                    at,
                    pieces[k, COLUMN:],
                    skip,
                    most,
                    best,
                )
                if best[0] < before:
                    held = pieces[k, COLUMN : COLUMN_END + 1].copy()
            first, helpers, guest, tall = int(best[1]), int(best[2]), int(best[3]), int(best[4])
            if tall == 0 or count + 2 * helpers + 3 > len(pieces):
                return -1
            begin = count
            count = _lay(rooms, ids, first, helpers, guest, held, b, row, tall, width, pieces, count)
            for k in range(begin, count):
                at = _find(ids, size, pieces[k, HELPER])
                used = tall * (pieces[k, COLUMN_END] - pieces[k, COLUMN])
                left[pieces[k, HELPER]] -= used
                size = _take(rooms, ids, size, at, rooms[at] - used)
            row += tall
    return count
