"""Bytes of the plan that follows dealt chunks, estimated.

Every rank keeps its own work up to its limit, keys nearest the diagonal first. What is over goes to the ranks with
room: all rows of a chunk against early keys, which the rank then need not import, or its last rows against as many keys
as make the best rectangle. Ranks with room are alike: each takes pieces of the typical room.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.placement.dealing import Chunks, FloatArray, Ranks

QUERY_BYTES, KEY_BYTES, PER_PAIR = range(3)
"""Prices: bytes of a query and of a key, and work of a pair."""

GUESTS = 0.5
"""Part of the keys that ranks with room hold, of those given away, which they need not receive."""

POWER = 8
"""Of the ranks' bytes, whose sum stands for the worst rank."""


class Scratch(NamedTuple):
    """Of an estimate: [num_ranks] bytes in and out; [n] keys given away and strips of it; chunks by rank."""

    into: FloatArray
    out: FloatArray
    spare: FloatArray
    keys: FloatArray
    strips: FloatArray
    heights: FloatArray
    first: IntArray
    of_rank: IntArray


@jit_leaf
def _beside(excess: float, room: float, rows: float, keys: float, prices: FloatArray) -> tuple[float, float]:
    """(helpers side by side, strips) in which ``rows`` x ``keys`` cost the fewest bytes."""
    helpers = max(1.0, excess / room)
    best = np.sqrt(helpers * keys * prices[KEY_BYTES] / (rows * prices[QUERY_BYTES]))
    beside = min(helpers, max(1.0, best))
    return beside, helpers / beside


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
            height, spared = rows, width
        else:
            height = min(rows, max(1.0, np.sqrt(pairs * prices[KEY_BYTES] / prices[QUERY_BYTES])))
            reach = start + rows
            if height * (reach - height) < pairs:  # more rows, up to the middle of the triangle
                root = reach * reach / 4 - pairs
                height = min(rows, reach / 2 - np.sqrt(root) if root > 0 else reach / 2)
            width = min(pairs / height, reach - height)
            spared = 0.0
        if width <= 0:
            continue
        given = height * width * prices[PER_PAIR]
        beside, strips = _beside(given, room, height, width, prices)
        queries = height * beside * prices[QUERY_BYTES]
        keys = width * strips * prices[KEY_BYTES]
        value = (queries + keys - spared * prices[KEY_BYTES]) / given
        if given < 0.98 * excess:
            value *= 2
        if value < least:
            least = value
            best = (given, queries, queries + keys, spared, width, strips)
    return best


@jit_leaf
def estimate(
    chunks: Chunks, count: int, order: IntArray, load: FloatArray, ranks: Ranks, prices: FloatArray, scratch: Scratch
) -> tuple[float, float]:
    """(total bytes, mean of high order of the ranks' bytes in and out) for chunks, in ``order`` of (document, start).

    ``load`` [num_ranks] is the ranks' work, of short documents, too.
    """
    into, out, spare = scratch.into, scratch.out, scratch.spare
    keys, strips = scratch.keys, scratch.strips
    first, of_rank, num_ranks = scratch.first, scratch.of_rank, len(load)
    slack, roots, over = 0.0, 0.0, 0.0
    for rank in range(num_ranks):
        into[rank], out[rank] = 0.0, 0.0
        spare[rank] = ranks.limit[rank] - load[rank]
        room = ranks.limit[rank] - load[rank]
        if room > 0:
            slack += room
            roots += np.sqrt(room)
        over += max(0.0, -room)
    room = (slack / roots) ** 2 if roots > 0 else 1.0
    first[:] = 0
    for i in range(count):
        keys[i], strips[i] = 0.0, 0.0
        if chunks.rank[i] >= 0:
            first[chunks.rank[i] + 1] += 1
    for rank in range(num_ranks):
        first[rank + 1] += first[rank]
    for i in range(count):
        if chunks.rank[i] >= 0:
            of_rank[first[chunks.rank[i]]] = i
            first[chunks.rank[i]] += 1
    for rank in range(num_ranks, 0, -1):
        first[rank] = first[rank - 1]
    first[0] = 0
    moved = 0.0
    for rank in range(num_ranks):
        excess = load[rank] - ranks.limit[rank]
        for _ in range(first[rank + 1] - first[rank]):
            if excess <= 1e-9 * load[rank]:
                break
            chosen, least = -1, np.inf
            best = (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
            for k in range(first[rank], first[rank + 1]):
                i = of_rank[k]
                if strips[i] > 0:
                    continue
                way = _give_away(chunks, i, excess, room, prices)
                if way[0] <= 0:
                    continue
                value = (way[2] - way[3] * prices[KEY_BYTES]) / way[0] * (2 - way[0] / excess)
                if value < least:
                    chosen, least, best = i, value, way
            if chosen < 0:
                break
            excess -= best[0]
            out[rank] += best[1]
            moved += best[2]
            keys[chosen], strips[chosen] = best[4], best[5]
            scratch.heights[chosen] = best[0] / (best[4] * best[5] * prices[PER_PAIR])
            if best[3] == 0:
                keys[chosen] = -best[4]  # its rank imports them all the same
    begin, spared = 0, 0.0
    for turn in range(count):
        i = order[turn]
        if turn > 0 and chunks.doc[i] != chunks.doc[order[turn - 1]]:
            begin = turn
        read = abs(keys[i])
        kept = max(0.0, keys[i])
        for before in range(begin, turn + 1):
            j = order[before]
            start, end = float(chunks.start[j]), float(chunks.start[j] + chunks.length[j])
            if chunks.rank[j] < 0:
                continue
            common = max(0.0, min(end, read) - start)
            rows = strips[i] * common
            if spare[chunks.rank[j]] > 0 and common > 0:  # a helper that holds these keys attends to them
                per_key = scratch.heights[i] * prices[PER_PAIR]
                common = min(common, spare[chunks.rank[j]] / per_key)
                spare[chunks.rank[j]] -= common * per_key
                common *= GUESTS
                rows -= common
                spared += common * prices[KEY_BYTES]
            if chunks.rank[j] != chunks.rank[i]:
                own = max(0.0, end - max(start, kept))
                rows += own
                if chunks.rank[i] >= 0:
                    into[chunks.rank[i]] += own * prices[KEY_BYTES]
            out[chunks.rank[j]] += rows * prices[KEY_BYTES]
    moved = max(0.0, moved - spared)
    total, worst, powers = 0.0, 1.0, 0.0
    for rank in range(num_ranks):
        left = ranks.limit[rank] - load[rank]
        if left > 0 and roots > 0:
            into[rank] += moved * np.sqrt(left) / roots
        total += into[rank]
        worst = max(worst, into[rank], out[rank])
    for rank in range(num_ranks):
        powers += (into[rank] / worst) ** POWER + (out[rank] / worst) ** POWER
    return total, worst * powers ** (1 / POWER)
