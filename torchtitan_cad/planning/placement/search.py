"""The search for a dealing of few bytes.

1. A number of choices, how long chunks are at least and at most, and how much work, are dealt and estimated.
2. Moves improve the best, or what was dealt before: chunks change places, go elsewhere, give tokens to the next chunk
   of the document or join it, or give their first tokens to another rank.
3. Short documents fill the room that is left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.jit import jit, jit_inner, jit_leaf
from torchtitan_cad.planning.placement.dealing import (
    MOST_CHUNKS,
    Chunks,
    FloatArray,
    Ranks,
    State,
    cut_document,
    deal_chunks,
    deal_short,
    give,
    take_up,
    work_of,
)
from torchtitan_cad.planning.placement.estimate import (
    attach,
    detach,
    estimate,
    is_near,
    restore,
    value,
    worst_rank,
)
from torchtitan_cad.planning.placement.scratch import Scratch, insert, link, remove, unlink
from torchtitan_cad.planning.sorting import order_of

RISE = 0.2
"""By how much a move may raise what is to get small, times the number of chunks, at first; later by less, in the end by
nothing."""

OVER = 20.0
"""Weight of exceeding the most bytes by as many again."""

OTHERS = 8
"""Choices tried for a single document."""

SWAP, RELOCATE, SPLIT, SHIFT, JOIN, KINDS = range(6)
"""Kinds of moves."""

MOST_WORK, LEAST, MOST = range(3)
"""Columns of the choices: work of a chunk, at most, and tokens, at least and at most."""


class Documents(NamedTuple):
    """Documents to deal.

    ``lengths`` and ``offsets`` (position of the first token) of all; ``long`` and ``short`` are indices, the latter
    longest first; ``prefix`` is the work of the first rows of a document. ``units`` are (tile, grid, least, most): the
    search sets the last two, a chunk's tokens by the choice it tries; one that goes on finds those of the one before.
    """

    lengths: IntArray
    offsets: FloatArray
    long: IntArray
    short: IntArray
    prefix: FloatArray
    units: IntArray


@jit_leaf
def _cut(documents: Documents, choices: FloatArray, chosen: IntArray, chunks: Chunks) -> int:
    """Chunks of all long documents, each by its ``chosen`` [long] choice; returns their number."""
    count = 0
    for number in range(len(documents.long)):
        doc, choice = documents.long[number], choices[chosen[number]]
        documents.units[2], documents.units[3] = int(choice[LEAST]), int(choice[MOST])
        length = documents.lengths[doc]
        count = cut_document(documents.prefix, documents.units, doc, length, choice[MOST_WORK], chunks, count)
    return count


@jit_leaf
def _random(state: IntArray, below: int) -> int:
    """Return the next pseudo-random number below a bound of at most 2^31."""
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return (state[0] >> 8) * below >> 23


@jit_leaf
def _relocate(chunks: Chunks, i: int, rank: int, density: float, ranks: Ranks, state: State, scratch: Scratch) -> None:
    """Give chunk ``i`` to another rank."""
    unlink(scratch, i, chunks.rank[i])
    link(scratch, i, rank)
    own = chunks.work[i] - density * chunks.length[i]
    give(state, ranks, chunks.rank[i], -chunks.length[i], -own)
    give(state, ranks, rank, chunks.length[i], own)
    state.chunks[chunks.rank[i]] -= 1
    state.chunks[rank] += 1
    chunks.rank[i] = rank


@jit_leaf
def _resize(
    documents: Documents, chunks: Chunks, i: int, start: int, end: int, density: float, ranks: Ranks, state: State
) -> None:
    """Let chunk ``i`` be [start, end)."""
    work = work_of(documents.prefix, documents.units[0], start, end)
    more = end - start - chunks.length[i]
    give(state, ranks, chunks.rank[i], more, work - chunks.work[i] - density * more)
    chunks.start[i], chunks.length[i], chunks.work[i] = start, end - start, work


@jit_leaf
def _add(chunks: Chunks, j: int, i: int, rank: int, state: State, scratch: Scratch) -> None:
    """Let chunk ``j``, of no tokens yet, follow chunk ``i`` in its document, on a rank."""
    chunks.doc[j], chunks.rank[j] = chunks.doc[i], rank
    chunks.start[j], chunks.length[j], chunks.work[j] = chunks.start[i] + chunks.length[i], 0, 0.0
    state.chunks[rank] += 1
    link(scratch, j, rank)
    insert(scratch, j, i)


@jit_leaf
def _drop(chunks: Chunks, j: int, state: State, scratch: Scratch) -> None:
    """Take back what ``_add`` did."""
    state.chunks[chunks.rank[j]] -= 1
    unlink(scratch, j, chunks.rank[j])
    remove(scratch, j)
    chunks.rank[j] = -1


@jit_leaf
def _weigh(total: float, worst: float, weights: FloatArray) -> float:
    """Return what is to get small: ``weights`` [3] are those of both figures, and the total at most."""
    return weights[0] * total + weights[1] * worst + OVER * max(0.0, total / weights[2] - 1)


@jit_leaf
def _improve(
    documents: Documents,
    density: float,
    prices: FloatArray,
    ranks: Ranks,
    state: State,
    chunks: Chunks,
    count: int,
    order: IntArray,
    scratch: Scratch,
    weights: FloatArray,
    tries: int,
    random: IntArray,
) -> int:
    """Try so many moves, and keep those that lower what ``weights`` make of the bytes; returns the number of chunks.

    Chunks without tokens are among them, of rank -1.
    """
    if count < 2:
        return count
    total, worst = estimate(chunks, count, order, state.load, ranks, prices, scratch)
    best = _weigh(total, worst, weights)
    grid, num_ranks, hot = documents.units[1], len(state.load), -1
    for number in range(tries):
        i = _random(random, count)
        if number % 2 == 0:  # of the worst rank
            if hot < 0:
                hot = worst_rank(scratch)
            if state.chunks[hot] > 0:
                i = scratch.head[hot]
                for _ in range(_random(random, state.chunks[hot])):
                    i = scratch.after[i]
        if chunks.rank[i] < 0:
            continue
        kind = _random(random, KINDS)
        j, home = -1, chunks.rank[i]
        start, end = chunks.start[i], chunks.start[i] + chunks.length[i]
        middle, cut, other = start, start, home
        if kind <= SWAP:
            j = _random(random, count)
            other = chunks.rank[j]
            more = chunks.length[i] - chunks.length[j]
            if other < 0 or ranks.node[other] != ranks.node[home]:
                continue
            if other == home or state.left[other] < more or state.left[home] < -more:
                continue
            if state.chunks[home] == 1 and state.chunks[other] == 1:  # as if ranks changed names
                continue
        elif kind <= SPLIT:
            other = _random(random, num_ranks)
            if other == home or ranks.node[other] != ranks.node[home]:
                continue
            if state.left[other] < grid or state.chunks[other] >= MOST_CHUNKS:
                continue
            if kind == RELOCATE and state.left[other] < chunks.length[i]:
                continue
            if kind == RELOCATE and state.chunks[home] == 1 and state.chunks[other] == 0:  # the same
                continue
            if kind == SPLIT:
                fewest = documents.units[2]
                cells = (min(state.left[other], chunks.length[i] - fewest) - fewest) // grid + 1
                if cells <= 0 or count == len(chunks.doc) or state.chunks[home] >= MOST_CHUNKS:
                    continue
                cut = start + fewest + _random(random, cells) * grid
        else:
            j = scratch.right[i]
            if j < 0 or chunks.start[j] != end:
                continue
            other = chunks.rank[j]
            middle, end = end, chunks.start[j] + chunks.length[j]
            cut = end
            if kind == SHIFT:
                cut = middle + (_random(random, 33) - 16) * max(1, chunks.length[i] // (40 * grid)) * grid
            more = cut - middle
            if other == home or cut - start < grid or end - cut < (kind == SHIFT) * grid or more == 0:
                continue
            if state.left[home] < more or state.left[other] < -more:
                continue
        moved = count if kind == SPLIT else j
        detach(chunks, i, j, prices, scratch)
        for way in range(2):  # the move, and back if it gains nothing
            if kind == SPLIT and way == 0:
                _add(chunks, count, i, home, state, scratch)
                _resize(documents, chunks, i, start, cut, density, ranks, state)
                _resize(documents, chunks, count, cut, end, density, ranks, state)
            if kind <= SPLIT:
                _relocate(chunks, i, other if way == 0 else home, density, ranks, state, scratch)
                if kind <= SWAP:
                    _relocate(chunks, j, home if way == 0 else other, density, ranks, state, scratch)
            else:
                if kind == JOIN and way == 1:
                    _add(chunks, j, i, other, state, scratch)
                at = cut if way == 0 else middle
                _resize(documents, chunks, i, start, at, density, ranks, state)
                _resize(documents, chunks, j, at, end, density, ranks, state)
                if kind == JOIN and way == 0:
                    _drop(chunks, j, state, scratch)
            if way == 1:
                if kind == SPLIT:
                    _resize(documents, chunks, count, end, end, density, ranks, state)
                    _resize(documents, chunks, i, start, end, density, ranks, state)
                    _drop(chunks, count, state, scratch)
                break
            total, worst = attach(chunks, i, moved, home, other, ranks, state.load, prices, scratch)
            now = _weigh(total, worst, weights)
            if now < best + RISE * (tries - number) / (tries * count):
                if not is_near(scratch):
                    total, worst = value(ranks, state.load, scratch)
                    now = _weigh(total, worst, weights)
                best, hot = now, -1
                count += kind == SPLIT
                break
            restore(home, other, scratch)
    return count


@jit_inner
def _count_up(count: int) -> IntArray:
    """Return 0 .. count - 1: numba takes long to compile numpy's."""
    order = np.zeros(count, dtype=np.int64)
    for i in range(count):
        order[i] = i
    return order


@jit
def _search(
    documents: Documents,
    choices: FloatArray,
    density: float,
    evenly: bool,
    prices: FloatArray,
    weight: float,
    share: float,
    given: Chunks,
    load: FloatArray,
    tries: IntArray,
    weights: FloatArray,
    num_before: int,
    random: IntArray,
    ranks: Ranks,
    state: State,
    chunks: Chunks,
    scratch: Scratch,
    home: IntArray,
) -> int:
    long, count, tried = len(documents.long), num_before, 0
    short, lengths = documents.short, documents.lengths
    chosen = np.zeros(max(1, long), dtype=np.int64)
    nearby = np.empty(len(documents.lengths), dtype=np.int64)
    figures, keys = np.zeros((len(choices), 2)), np.zeros(max(long, len(chunks.work)))
    least_total, least_worst, shortest = np.inf, np.inf, np.inf
    if num_before > 0:
        take_up(chunks, count, density, ranks, state)
        for i in range(count):
            keys[i] = documents.offsets[chunks.doc[i]] + chunks.start[i]
        order = order_of(keys, count)
        count = _improve(
            documents, density, prices, ranks, state, chunks, count, order, scratch, weights, tries[1], random
        )
        deal_short(short, lengths, documents.prefix, documents.units, density, evenly, ranks, state, home)
        return count
    weights[2] = np.inf
    if share < np.inf:
        order = _count_up(len(given.doc))
        weights[2] = share * estimate(given, len(given.doc), order, load, ranks, prices, scratch)[0]
    for each in range(long):
        keys[each] = -documents.prefix[documents.lengths[documents.long[each]] // documents.units[0]]
    heaviest = order_of(keys, long)
    others = min(OTHERS, len(choices))
    redeals = min(tries[0], long * others)
    best, before = np.inf, 0
    for number in range(len(choices) + redeals + 1):
        final = number == len(choices) + redeals
        if number < len(choices):
            chosen[:] = number
        elif not final:
            doc = heaviest[(number - len(choices)) // others]
            before = chosen[doc]
            chosen[doc] = (number - len(choices)) % others * len(choices) // others
        count = _cut(documents, choices, chosen, chunks)
        cut = count
        for i in range(count):
            keys[i] = -chunks.work[i]
        order = order_of(keys, count)
        count = deal_chunks(chunks, count, order, documents.prefix, documents.units, density, ranks, state, nearby)
        order = _count_up(count)
        if count > cut:  # parts for which no rank had room come last
            for i in range(count):
                keys[i] = documents.offsets[chunks.doc[i]] + chunks.start[i]
            order = order_of(keys, count)
        if final:
            documents.units[2] = int(shortest)
            count = _improve(
                documents, density, prices, ranks, state, chunks, count, order, scratch, weights, tries[1], random
            )
            break
        total, worst = estimate(chunks, count, order, state.load, ranks, prices, scratch)
        if number < len(choices):
            figures[number, 0], figures[number, 1] = total, worst
            least_total, least_worst = min(least_total, total), min(least_worst, worst)
            shortest = min(shortest, choices[number, LEAST])
            if number == len(choices) - 1:
                weights[0], weights[1] = 1 / max(1.0, least_total), weight / max(1.0, least_worst)
                for i in range(len(choices)):
                    now = _weigh(figures[i, 0], figures[i, 1], weights)
                    if now < best:
                        best, tried = now, i
                chosen[:] = tried
        else:
            now = _weigh(total, worst, weights)
            if now < best:
                best = now
            else:
                chosen[doc] = before
    deal_short(short, lengths, documents.prefix, documents.units, density, evenly, ranks, state, home)
    return count


class SearchOptions(NamedTuple):
    """Aims of a search, and how long it may take."""

    choices: FloatArray
    """[n, 3] how to cut long documents, of which the best is taken."""
    density: float
    """Work of a token of short documents."""
    evenly: bool
    """See ``deal_short``."""
    prices: FloatArray
    """See ``estimate.py``."""
    weight: float
    """Of the worst rank's bytes over the total, both relative to the best of the choices."""
    share: float
    """Bytes of all ranks over those of the given homes, as estimated, beyond which they count more."""
    given: Chunks
    """What the given homes have of documents that are long, or on several ranks."""
    load: FloatArray
    """[num_ranks] work of the given homes."""
    tries: IntArray
    """[2] how often documents are dealt anew with one of them cut otherwise, and moves tried, at most."""
    weights: FloatArray
    """[3] see ``_weigh``; set by a search that deals, kept by one that goes on."""
    num_before: int
    """Number of chunks, dealt already, from which to go on; 0 to deal."""
    random: IntArray
    """[1] state of the pseudo-random numbers."""


def search(
    documents: Documents, options: SearchOptions, ranks: Ranks, state: State, chunks: Chunks, scratch: Scratch
) -> tuple[int, IntArray]:
    """Deal all documents; returns the number of chunks, and every short document's rank, -1 for none."""
    home = np.full(len(documents.lengths), -2)
    count = _search(documents, *options, ranks, state, chunks, scratch, home)
    return count, home
