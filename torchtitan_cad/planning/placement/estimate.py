"""Bytes of the plan that follows dealt chunks, estimated, and kept up to date while chunks move.

Every rank keeps its own work up to its limit, keys nearest the diagonal first. What is over goes to the ranks with
room: all rows of a chunk against early keys, which the rank then need not import, or its last rows against as many keys
as make the best rectangle. Ranks with room are alike: each takes pieces of the typical room, of the best shape, for
which rows of several chunks may join; and none reads keys that it holds, as far as its room goes.

What a move changes is what two ranks give away, and who reads the keys of their chunks: ``detach`` takes the bytes of
these chunks out of the sums, ``attach`` puts them in again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.placement.dealing import Chunks, Ranks

QUERY_BYTES, KEY_BYTES, PER_PAIR = range(3)
"""Prices: bytes of a query and of a key, and work of a pair."""

ROOM, ROOTS, MOVED, SAVED, SCALE = range(5)
"""Sums: the typical room of a rank with room; of the square roots of the rooms; bytes into ranks with room, for what
others give away, if they held none of the keys; what they hold of these; and bytes of a rank relative to which high
powers are taken."""

SPARE = 0.4
"""Helpers side by side beyond those that pieces of the best shape need, as pieces do not fill rooms exactly; fitted to
plans."""


class Scratch(NamedTuple):
    """Of an estimate. By rank [num_ranks]: bytes in and out, bytes of queries given away, bytes into those that get
    what is given away; bytes of the rank's keys that are read for what others give away, and the work of that; and the
    first of its chunks, -1 for none.

    By chunk [n]: keys given away (negative where the rank imports them all the same), strips and height of what is, the
    next chunk of the rank, -1 for none, its place in the order of (document, start), and the range of the document's
    chunks in that order. ``sums`` as above.
    """

    into: FloatArray
    out: FloatArray
    queries: FloatArray
    moved: FloatArray
    shared: FloatArray
    wanted: FloatArray
    head: IntArray
    keys: FloatArray
    strips: FloatArray
    heights: FloatArray
    after: IntArray
    place: IntArray
    first: IntArray
    end: IntArray
    sums: FloatArray


@jit_leaf
def _beside(excess: float, room: float, rows: float, keys: float, prices: FloatArray) -> tuple[float, float]:
    """(helpers side by side, strips) in which ``rows`` x ``keys`` cost the fewest bytes.

    Less than one strip where rows of other chunks join these in a piece, so that its keys are read once for all.
    """
    helpers = max(1.0, excess / room)
    best = np.sqrt(helpers * keys * prices[KEY_BYTES] / (rows * prices[QUERY_BYTES]))
    return max(1.0, best + SPARE), helpers / max(1.0, best)


@jit_leaf
def _give_away(chunks: Chunks, i: int, excess: float, room: float, prices: FloatArray) -> tuple[float, ...]:
    """(work, bytes out of queries, bytes into helpers, keys not imported, keys read, strips) of giving work away.

    At most the work ``excess`` is given, as one block of chunk ``i``.
    """
    start, rows = float(chunks.start[i]), float(chunks.length[i])
    pairs = excess / prices[PER_PAIR]
    best = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    least = np.inf
    for way in range(2):
        if way == 0:  # all rows
            width = min(start, pairs / rows)
            height, roomd = rows, width
        else:
            height = min(rows, max(1.0, np.sqrt(pairs * prices[KEY_BYTES] / prices[QUERY_BYTES])))
            reach = start + rows
            if height * (reach - height) < pairs:  # more rows, up to the middle of the triangle
                root = reach * reach / 4 - pairs
                height = min(rows, reach / 2 - np.sqrt(root) if root > 0 else reach / 2)
            width = min(pairs / height, reach - height)
            roomd = 0.0
        if width <= 0:
            continue
        given = height * width * prices[PER_PAIR]
        beside, strips = _beside(given, room, height, width, prices)
        queries = height * beside * prices[QUERY_BYTES]
        keys = width * strips * prices[KEY_BYTES]
        value = (queries + keys - roomd * prices[KEY_BYTES]) / given
        if given < 0.98 * excess:
            value *= 2
        if value < least:
            least = value
            best = (given, queries, queries + keys, roomd, width, strips)
    return best


@jit_leaf
def _choose(chunks: Chunks, rank: int, load: float, limit: float, prices: FloatArray, scratch: Scratch) -> None:
    """Choose what the rank gives away, from its chunks one after the other."""
    queries, moved, excess = 0.0, 0.0, load - limit
    k = scratch.head[rank]
    while k >= 0:
        scratch.keys[k], scratch.strips[k] = 0.0, 0.0
        k = scratch.after[k]
    while excess > 1e-9 * load:
        chosen, least = -1, np.inf
        best = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        i = scratch.head[rank]
        while i >= 0:
            if scratch.strips[i] == 0:
                way = _give_away(chunks, i, excess, scratch.sums[ROOM], prices)
                if way[0] > 0:
                    value = (way[2] - way[3] * prices[KEY_BYTES]) / way[0] * (2 - way[0] / excess)
                    if value < least or (value == least and i < chosen):
                        chosen, least, best = i, value, way
            i = scratch.after[i]
        if chosen < 0:
            break
        excess -= best[0]
        queries += best[1]
        moved += best[2]
        # Where none are roomd, its rank imports the keys all the same.
        scratch.keys[chosen], scratch.strips[chosen] = best[4] if best[3] > 0 else -best[4], best[5]
        scratch.heights[chosen] = best[0] / (best[4] * best[5] * prices[PER_PAIR])
    scratch.queries[rank], scratch.moved[rank] = queries, moved


@jit_leaf
def _read(chunks: Chunks, i: int, j: int, sign: float, prices: FloatArray, scratch: Scratch) -> None:
    """Add ``sign`` times the bytes of keys of chunk ``j`` that are read for chunk ``i``, of the same document."""
    start, end = float(chunks.start[j]), float(chunks.start[j] + chunks.length[j])
    common, rows = min(end, abs(scratch.keys[i])) - start, 0.0
    if common > 0:
        rows = scratch.strips[i] * common
        scratch.shared[chunks.rank[j]] += sign * rows * prices[KEY_BYTES]
        scratch.wanted[chunks.rank[j]] += sign * rows * scratch.heights[i] * prices[PER_PAIR]
    if chunks.rank[j] != chunks.rank[i]:
        own = end - max(start, scratch.keys[i])
        if own > 0:
            rows += own
            scratch.into[chunks.rank[i]] += sign * own * prices[KEY_BYTES]
    scratch.out[chunks.rank[j]] += sign * rows * prices[KEY_BYTES]


@jit_leaf
def _sum(
    chunks: Chunks, order: IntArray, one: int, other: int, sign: float, prices: FloatArray, scratch: Scratch
) -> None:
    """Add ``sign`` times the bytes of keys that the chunks of two ranks read, and that are read of them."""
    for side in range(2):
        i = scratch.head[one if side == 0 else other]
        while i >= 0:
            at = scratch.place[i]
            for k in range(scratch.first[i], at + 1):
                if chunks.rank[order[k]] >= 0:
                    _read(chunks, i, order[k], sign, prices, scratch)
            for k in range(at + 1, scratch.end[i]):
                rank = chunks.rank[order[k]]
                if rank >= 0 and rank != one and rank != other:
                    _read(chunks, order[k], i, sign, prices, scratch)
            i = scratch.after[i]


@jit_leaf
def _own(rank: int, sign: float, ranks: Ranks, load: FloatArray, scratch: Scratch) -> None:
    """Add ``sign`` times what a rank gives away, and its room."""
    scratch.out[rank] += sign * scratch.queries[rank]
    scratch.sums[MOVED] += sign * scratch.moved[rank]
    scratch.sums[ROOTS] += sign * np.sqrt(max(0.0, ranks.limit[rank] - load[rank]))


@jit_leaf
def detach(
    chunks: Chunks,
    order: IntArray,
    one: int,
    other: int,
    ranks: Ranks,
    load: FloatArray,
    prices: FloatArray,
    scratch: Scratch,
) -> None:
    """Take the chunks of two ranks out of the sums."""
    _sum(chunks, order, one, other, -1.0, prices, scratch)
    _own(one, -1.0, ranks, load, scratch)
    _own(other, -1.0, ranks, load, scratch)


@jit_leaf
def attach(
    chunks: Chunks,
    order: IntArray,
    one: int,
    other: int,
    ranks: Ranks,
    load: FloatArray,
    prices: FloatArray,
    scratch: Scratch,
) -> None:
    """Add the chunks that two ranks now have to the sums."""
    _choose(chunks, one, load[one], ranks.limit[one], prices, scratch)
    _choose(chunks, other, load[other], ranks.limit[other], prices, scratch)
    _sum(chunks, order, one, other, 1.0, prices, scratch)
    _own(one, 1.0, ranks, load, scratch)
    _own(other, 1.0, ranks, load, scratch)


@jit_leaf
def link(scratch: Scratch, i: int, rank: int) -> None:
    """Make chunk ``i`` the first of a rank's."""
    scratch.after[i] = scratch.head[rank]
    scratch.head[rank] = i


@jit_leaf
def unlink(scratch: Scratch, i: int, rank: int) -> None:
    """Take chunk ``i`` out of a rank's."""
    k = scratch.head[rank]
    if k == i:
        scratch.head[rank] = scratch.after[i]
        return
    while scratch.after[k] != i:
        k = scratch.after[k]
    scratch.after[k] = scratch.after[i]


@jit_leaf
def _saved(rank: int, ranks: Ranks, load: FloatArray, scratch: Scratch) -> float:
    """Return the bytes of keys that a rank need not send, as it attends to them itself."""
    left = ranks.limit[rank] - load[rank]
    if left <= 0 or scratch.wanted[rank] <= 0:
        return 0.0
    return scratch.shared[rank] * min(1.0, left / scratch.wanted[rank])


@jit_leaf
def busy(rank: int, ranks: Ranks, load: FloatArray, scratch: Scratch) -> tuple[float, float]:
    """Return the bytes into a rank, with its share of what others give away, and out of it."""
    into, left = scratch.into[rank], ranks.limit[rank] - load[rank]
    if left > 0:
        into += max(0.0, scratch.sums[MOVED] - scratch.sums[SAVED]) * np.sqrt(left) / scratch.sums[ROOTS]
    return into, scratch.out[rank] - _saved(rank, ranks, load, scratch)


@jit_leaf
def value(ranks: Ranks, load: FloatArray, scratch: Scratch) -> tuple[float, float]:
    """Return (total bytes, mean of high order of the ranks' bytes in and out)."""
    total, powers, scale = 0.0, 0.0, scratch.sums[SCALE]
    scratch.sums[SAVED] = 0.0
    for rank in range(len(load)):
        scratch.sums[SAVED] += _saved(rank, ranks, load, scratch)
    for rank in range(len(load)):
        into, out = busy(rank, ranks, load, scratch)
        total += into
        a, b = (into / scale) ** 2, (out / scale) ** 2
        a, b = a * a, b * b
        powers += a * a + b * b
    return total, scale * np.sqrt(np.sqrt(np.sqrt(powers)))


@jit_leaf
def lay_out(
    chunks: Chunks, count: int, order: IntArray, load: FloatArray, ranks: Ranks, prices: FloatArray, scratch: Scratch
) -> None:
    """Add up what all chunks move, where ranks with room have the typical room of the sums."""
    scratch.sums[MOVED], scratch.sums[ROOTS] = 0.0, 0.0
    for rank in range(len(load)):
        scratch.into[rank], scratch.out[rank], scratch.head[rank] = 0.0, 0.0, -1
        scratch.shared[rank], scratch.wanted[rank] = 0.0, 0.0
    first = 0
    for at in range(count):
        i = order[at]
        if chunks.doc[i] != chunks.doc[order[first]]:
            first = at
        scratch.place[i], scratch.first[i] = at, first
        for k in range(first, at + 1):
            scratch.end[order[k]] = at + 1
        if chunks.rank[i] >= 0:
            link(scratch, i, chunks.rank[i])
    for rank in range(len(load)):
        _choose(chunks, rank, load[rank], ranks.limit[rank], prices, scratch)
        _own(rank, 1.0, ranks, load, scratch)
    for at in range(count):
        i = order[at]
        for k in range(scratch.first[i], at + 1):
            if chunks.rank[i] >= 0 and chunks.rank[order[k]] >= 0:
                _read(chunks, i, order[k], 1.0, prices, scratch)


@jit_leaf
def estimate(
    chunks: Chunks, count: int, order: IntArray, load: FloatArray, ranks: Ranks, prices: FloatArray, scratch: Scratch
) -> tuple[float, float]:
    """Return ``value`` of chunks, in ``order`` of (document, start); the sums are those to be kept up to date from then
    on.

    ``load`` [num_ranks] is the ranks' work, of short documents, too.
    """
    slack, roots = 0.0, 0.0
    for rank in range(len(load)):
        room = ranks.limit[rank] - load[rank]
        if room > 0:
            slack += room
            roots += np.sqrt(room)
    scratch.sums[ROOM] = (slack / roots) ** 2 if roots > 0 else 1.0
    lay_out(chunks, count, order, load, ranks, prices, scratch)
    scratch.sums[SCALE], scratch.sums[SAVED] = 1.0, 0.0
    for rank in range(len(load)):
        into, out = busy(rank, ranks, load, scratch)
        scratch.sums[SCALE] = max(scratch.sums[SCALE], into, out)
    return value(ranks, load, scratch)
