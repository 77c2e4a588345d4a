"""Bytes of the plan that follows dealt chunks, estimated, and kept up to date while chunks move.

Every rank keeps its own work up to its limit, keys nearest the diagonal first. What is over goes to the ranks with
room: all rows of a chunk against early keys, which the rank then need not import, or its last rows against as many keys
as make the best rectangle. Ranks with room are alike: each takes pieces of the typical room, of the best shape, for
which rows of several chunks may join; and none reads keys that it holds, as far as its room goes.

What a move changes is what two ranks give away, who reads the keys of its chunks, and what the chunks read whose rank
gives away something else: ``detach`` takes that out of the sums, ``attach`` puts it in again. What ranks had before is
noted, so that ``restore`` takes a move back without an estimate.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.placement.chunks import Chunks, Ranks
from torchtitan_cad.planning.placement.give_away import KEY_BYTES, PER_PAIR, give_away
from torchtitan_cad.planning.placement.scratch import (
    COUNT,
    EACH,
    FIGURES,
    HELPED,
    INTO,
    KEPT,
    MOVE,
    MOVED,
    OUT,
    POWER,
    POWERS,
    QUERIES,
    ROOM,
    ROOT,
    ROOTS,
    SAVED,
    SHARED,
    SLOPE,
    SUMS,
    TOTAL,
    WANTED,
    Scratch,
    link,
)

NEARLY = 0.01
"""By how much EACH may differ from that by which powers were taken."""


@jit_leaf
def _choose(chunks: Chunks, rank: int, load: float, limit: float, prices: FloatArray, scratch: Scratch) -> None:
    """Choose what the rank gives away, from its chunks one after the other."""
    queries, helped, excess = 0.0, 0.0, load - limit
    k = scratch.head[rank]
    while k >= 0:
        scratch.given[k, 0], scratch.given[k, 1] = scratch.keys[k], scratch.strips[k]
        scratch.given[k, 2] = scratch.heights[k]
        scratch.keys[k], scratch.strips[k], scratch.heights[k] = 0.0, 0.0, 0.0
        k = scratch.after[k]
    while excess > 1e-9 * load:
        chosen, least = -1, np.inf
        best = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        i = scratch.head[rank]
        while i >= 0:
            if scratch.strips[i] == 0:
                way = give_away(chunks, i, excess, scratch.sums[ROOM], prices)
                if way[0] > 0:
                    value = (way[2] - way[3] * prices[KEY_BYTES]) / way[0] * (2 - way[0] / excess)
                    if value < least or (value == least and i < chosen):
                        chosen, least, best = i, value, way
            i = scratch.after[i]
        if chosen < 0:
            break
        excess -= best[0]
        queries += best[1]
        helped += best[2]
        # Where none are spared, its rank imports the keys all the same.
        scratch.keys[chosen], scratch.strips[chosen] = best[4] if best[3] > 0 else -best[4], best[5]
        scratch.heights[chosen] = best[0] / (best[4] * best[5] * prices[PER_PAIR])
    root = np.sqrt(max(0.0, limit - load))
    scratch.sums[MOVED] += helped - scratch.figures[rank, HELPED]
    scratch.sums[ROOTS] += root - scratch.figures[rank, ROOT]
    scratch.figures[rank, QUERIES], scratch.figures[rank, HELPED], scratch.figures[rank, ROOT] = queries, helped, root


@jit_leaf
def _touch(rank: int, scratch: Scratch) -> None:
    """Note what a rank has, before a move changes it."""
    if scratch.stamp[rank] != scratch.marks[MOVE]:
        at = scratch.marks[COUNT]
        scratch.stamp[rank], scratch.touched[at], scratch.marks[COUNT] = scratch.marks[MOVE], rank, at + 1
        for column in range(FIGURES):
            scratch.before[at, column] = scratch.figures[rank, column]


@jit_leaf
def _read(chunks: Chunks, j: int, keys: float, strips: float, away: bool) -> tuple[float, float]:
    """Return how many of the keys of chunk ``j`` are read for what a chunk gives away, and for what it keeps."""
    start, end = float(chunks.start[j]), float(chunks.start[j] + chunks.length[j])
    given = strips * max(0.0, min(end, abs(keys)) - start)
    return given, max(0.0, end - max(start, keys)) if away else 0.0


@jit_leaf
def _read_by(
    chunks: Chunks,
    i: int,
    sign: float,
    keys: float,
    strips: float,
    heights: float,
    prices: FloatArray,
    scratch: Scratch,
    moved: bool,
) -> None:
    """Add ``sign`` times the bytes of keys that are read for chunk ``i``; those of ``moved`` chunks only on demand."""
    rank, into, j = chunks.rank[i], 0.0, i
    _touch(rank, scratch)
    key_bytes, pairs = sign * prices[KEY_BYTES], sign * heights * prices[PER_PAIR]
    while j >= 0:
        if moved or scratch.moves[j] == 0:
            home = chunks.rank[j]
            _touch(home, scratch)
            given, kept = _read(chunks, j, keys, strips, home != rank)
            if given > 0:
                scratch.figures[home, SHARED] += given * key_bytes
                scratch.figures[home, WANTED] += given * pairs
            scratch.figures[home, OUT] += (given + kept) * key_bytes
            into += kept
        j = scratch.left[j]
    scratch.figures[rank, INTO] += into * key_bytes


@jit_leaf
def _read_of(chunks: Chunks, i: int, sign: float, prices: FloatArray, scratch: Scratch) -> None:
    """Add ``sign`` times the bytes of keys of chunk ``i`` that are read for chunks that do not move."""
    home, shared, wanted, out = chunks.rank[i], 0.0, 0.0, 0.0
    key_bytes, per_pair = sign * prices[KEY_BYTES], sign * prices[PER_PAIR]
    k = scratch.right[i]
    while k >= 0:
        if scratch.moves[k] == 0:
            rank = chunks.rank[k]
            given, kept = _read(chunks, i, scratch.keys[k], scratch.strips[k], home != rank)
            shared += given
            wanted += given * scratch.heights[k]
            out += given + kept
            if kept > 0:
                _touch(rank, scratch)
                scratch.figures[rank, INTO] += kept * key_bytes
        k = scratch.right[k]
    _touch(home, scratch)
    scratch.figures[home, SHARED] += shared * key_bytes
    scratch.figures[home, WANTED] += wanted * per_pair
    scratch.figures[home, OUT] += out * key_bytes


@jit_leaf
def _sum(chunks: Chunks, i: int, sign: float, prices: FloatArray, scratch: Scratch) -> None:
    """Add ``sign`` times the bytes of keys that are read for chunk ``i``, and of it for chunks that do not move."""
    if chunks.rank[i] >= 0:
        _read_by(chunks, i, sign, scratch.keys[i], scratch.strips[i], scratch.heights[i], prices, scratch, True)
        _read_of(chunks, i, sign, prices, scratch)


@jit_leaf
def detach(chunks: Chunks, i: int, j: int, prices: FloatArray, scratch: Scratch) -> None:
    """Begin a move of chunk ``i`` and, unless it is -1, ``j``: take what is read for and of them out of the sums."""
    scratch.marks[COUNT] = 0
    scratch.marks[MOVE] += 1
    for entry in range(SUMS):
        scratch.sums_before[entry] = scratch.sums[entry]
    scratch.moves[i] = 1
    if j >= 0:
        scratch.moves[j] = 1
        _sum(chunks, j, -1.0, prices, scratch)
    _sum(chunks, i, -1.0, prices, scratch)


@jit_leaf
def attach(
    chunks: Chunks,
    i: int,
    j: int,
    one: int,
    other: int,
    ranks: Ranks,
    load: FloatArray,
    prices: FloatArray,
    scratch: Scratch,
) -> tuple[float, float]:
    """End a move of chunks ``i`` and, unless it is -1, ``j`` between two ranks; returns ``value`` after it, nearly."""
    scratch.moves[i] = 1
    if j >= 0:
        scratch.moves[j] = 1
    for side in range(2):
        rank = one if side == 0 else other
        _touch(rank, scratch)
        _choose(chunks, rank, load[rank], ranks.limit[rank], prices, scratch)
        k = scratch.head[rank]
        while k >= 0:
            keys, strips, heights = scratch.keys[k], scratch.strips[k], scratch.heights[k]
            was_keys, was_strips, was_heights = scratch.given[k, 0], scratch.given[k, 1], scratch.given[k, 2]
            if scratch.moves[k] == 0 and (keys != was_keys or strips != was_strips or heights != was_heights):
                _read_by(chunks, k, -1.0, was_keys, was_strips, was_heights, prices, scratch, False)
                _read_by(chunks, k, 1.0, keys, strips, heights, prices, scratch, False)
            k = scratch.after[k]
    _sum(chunks, i, 1.0, prices, scratch)
    if j >= 0:
        _sum(chunks, j, 1.0, prices, scratch)
        scratch.moves[j] = 0
    scratch.moves[i] = 0
    total, saved, powers = 0.0, 0.0, 0.0
    for at in range(scratch.marks[COUNT]):
        rank = scratch.touched[at]
        kept = _kept(rank, ranks, load, scratch)
        scratch.figures[rank, KEPT] = kept
        a, b, _ = _powers(rank, scratch)
        scratch.figures[rank, POWER] = a + b
        total += scratch.figures[rank, INTO] - scratch.before[at, INTO]
        saved += kept - scratch.before[at, KEPT]
        powers += a + b - scratch.before[at, POWER]
    scratch.sums[TOTAL] += total
    scratch.sums[SAVED] += saved
    scratch.sums[POWERS] += powers
    return _value(scratch)


@jit_leaf
def restore(one: int, other: int, scratch: Scratch) -> None:
    """Take a move between two ranks, which still have its chunks, out of the sums."""
    for side in range(2):
        k = scratch.head[one if side == 0 else other]
        while k >= 0:
            scratch.keys[k], scratch.strips[k] = scratch.given[k, 0], scratch.given[k, 1]
            scratch.heights[k] = scratch.given[k, 2]
            k = scratch.after[k]
    for at in range(scratch.marks[COUNT]):
        for column in range(FIGURES):
            scratch.figures[scratch.touched[at], column] = scratch.before[at, column]
    for entry in range(SUMS):
        scratch.sums[entry] = scratch.sums_before[entry]


@jit_leaf
def _kept(rank: int, ranks: Ranks, load: FloatArray, scratch: Scratch) -> float:
    """Return the bytes of keys that a rank need not send."""
    left, wanted = ranks.limit[rank] - load[rank], scratch.figures[rank, WANTED]
    if left <= 0 or wanted <= 0:
        return 0.0
    return scratch.figures[rank, SHARED] * min(1.0, left / wanted)


@jit_leaf
def _powers(rank: int, scratch: Scratch) -> tuple[float, float, float]:
    """Return the high powers of a rank's bytes in and out, and the bytes in."""
    into = scratch.figures[rank, INTO] + scratch.sums[EACH] * scratch.figures[rank, ROOT]
    out = scratch.figures[rank, OUT] + scratch.figures[rank, QUERIES] - scratch.figures[rank, KEPT]
    a, b = into * into, out * out
    a, b = a * a, b * b
    return a * a, b * b, into


@jit_leaf
def _each(scratch: Scratch) -> float:
    """Return EACH as it is now."""
    return max(0.0, scratch.sums[MOVED] - scratch.sums[SAVED]) / max(1e-9, scratch.sums[ROOTS])


@jit_leaf
def _value(scratch: Scratch) -> tuple[float, float]:
    """Return (total bytes, mean of high order of the ranks' bytes in and out) by the sums."""
    total = scratch.sums[TOTAL] + max(0.0, scratch.sums[MOVED] - scratch.sums[SAVED])
    worst = np.sqrt(np.sqrt(np.sqrt(max(0.0, scratch.sums[POWERS]))))
    return total, worst * (1 + scratch.sums[SLOPE] * (_each(scratch) - scratch.sums[EACH]))


@jit_leaf
def is_near(scratch: Scratch) -> bool:
    """Tell whether what ``attach`` has returned is as good as ``value``."""
    return abs(_each(scratch) - scratch.sums[EACH]) <= NEARLY * scratch.sums[EACH]


@jit_leaf
def value(ranks: Ranks, load: FloatArray, scratch: Scratch) -> tuple[float, float]:
    """Return (total bytes, mean of high order of the ranks' bytes in and out), summed anew."""
    roots, moved, saved, total, powers, slope = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for rank in range(len(load)):
        kept = _kept(rank, ranks, load, scratch)
        scratch.figures[rank, KEPT] = kept
        saved += kept
        roots += scratch.figures[rank, ROOT]
        moved += scratch.figures[rank, HELPED]
        total += scratch.figures[rank, INTO]
    scratch.sums[ROOTS], scratch.sums[MOVED], scratch.sums[SAVED], scratch.sums[TOTAL] = roots, moved, saved, total
    scratch.sums[EACH] = _each(scratch)
    for rank in range(len(load)):
        a, b, into = _powers(rank, scratch)
        scratch.figures[rank, POWER] = a + b
        powers += a + b
        slope += a / max(1.0, into) * scratch.figures[rank, ROOT]
    scratch.sums[POWERS], scratch.sums[SLOPE] = powers, slope / max(1.0, powers)
    return _value(scratch)


@jit_leaf
def worst_rank(scratch: Scratch) -> int:
    """Return the rank of the largest powers."""
    found, most = 0, -1.0
    for rank in range(len(scratch.stamp)):
        power = scratch.figures[rank, POWER]
        if power > most:
            found, most = rank, power
    return found


@jit_leaf
def lay_out(
    chunks: Chunks, count: int, order: IntArray, load: FloatArray, ranks: Ranks, prices: FloatArray, scratch: Scratch
) -> None:
    """Add up what all chunks move, where ranks with room have the typical room of the sums."""
    scratch.marks[COUNT] = 0
    scratch.marks[MOVE] += 1
    for rank in range(len(load)):
        scratch.head[rank] = -1
        for column in range(FIGURES):
            scratch.figures[rank, column] = 0.0
    last = -1
    for at in range(count):
        i = order[at]
        if chunks.rank[i] < 0:
            continue
        link(scratch, i, chunks.rank[i])
        scratch.left[i], scratch.right[i], scratch.moves[i] = -1, -1, 0
        if last >= 0 and chunks.doc[i] == chunks.doc[last]:
            scratch.left[i], scratch.right[last] = last, i
        last = i
    for rank in range(len(load)):
        _choose(chunks, rank, load[rank], ranks.limit[rank], prices, scratch)
    for i in range(count):
        if chunks.rank[i] >= 0:
            _read_by(chunks, i, 1.0, scratch.keys[i], scratch.strips[i], scratch.heights[i], prices, scratch, True)


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
    scratch.sums[ROOM] = (slack / roots) * (slack / roots) if roots > 0 else 1.0
    lay_out(chunks, count, order, load, ranks, prices, scratch)
    return value(ranks, load, scratch)
