"""The search for a dealing of few bytes.

1. A number of choices, how long chunks are at least and at most, and how much work, are dealt and estimated.
2. Threshold accepting improves the best: a move is taken back if it raises what is to be small by more than a
   threshold, which falls from ``RISE`` / number of chunks to 0.
3. Short documents fill the room that is left.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit, jit_inner, jit_leaf
from torchtitan_cad.planning.placement.chunks import Chunks, cut_document, deal_chunks, deal_short, take_up
from torchtitan_cad.planning.placement.estimate import attach, detach, estimate, is_near, restore, value, worst_rank
from torchtitan_cad.planning.placement.moves import (
    ENTRIES,
    FROM,
    OTHER,
    SPLIT,
    TO,
    Dealing,
    carry_out,
    draw,
    random,
    take_back,
)
from torchtitan_cad.planning.placement.moves import KIND as MOVE_KIND
from torchtitan_cad.planning.sorting import order_of

RISE = 0.2
"""Threshold, at first, times the number of chunks."""

OVER = 20.0
"""Weight of the total's excess over the most bytes, relative to these."""

OTHERS = 8
"""Choices tried for a single document."""

MOST_WORK, LEAST, MOST = range(3)
"""Columns of the choices: work of a chunk, at most, and tokens, at least and at most."""


@jit_leaf
def _cut(dealing: Dealing, choices: FloatArray, chosen: IntArray) -> int:
    """Cut all long documents, each by its ``chosen`` [long] choice; returns the number of chunks."""
    count, documents = 0, dealing.documents
    for number in range(len(documents.long)):
        doc, choice = documents.long[number], choices[chosen[number]]
        documents.units[2], documents.units[3] = int(choice[LEAST]), int(choice[MOST])
        length = documents.lengths[doc]
        count = cut_document(documents.prefix, documents.units, doc, length, choice[MOST_WORK], dealing.chunks, count)
    return count


@jit_leaf
def _weigh(total: float, worst: float, weights: FloatArray) -> float:
    """Return what is to be small: ``weights`` [3] are those of both figures, and the total at most."""
    return weights[0] * total + weights[1] * worst + OVER * max(0.0, total / weights[2] - 1)


@jit_leaf
def accept(
    dealing: Dealing,
    count: int,
    order: IntArray,
    weights: FloatArray,
    tries: int,
    numbers: IntArray,
    move: IntArray,
) -> int:
    """Try so many moves, half of them of the worst rank's chunks; returns the number of chunks.

    Chunks without tokens are among them, of rank -1. ``move`` [ENTRIES] is scratch.
    """
    if count < 2:
        return count
    ranks, load, chunks = dealing.ranks, dealing.state.load, dealing.chunks
    prices, scratch = dealing.prices, dealing.scratch
    total, worst = estimate(chunks, count, order, load, ranks, prices, scratch)
    best, hot = _weigh(total, worst, weights), -1
    for number in range(tries):
        i = random(numbers, count)
        if number % 2 == 0:
            if hot < 0:
                hot = worst_rank(scratch)
            if dealing.state.chunks[hot] > 0:
                i = scratch.head[hot]
                for _ in range(random(numbers, dealing.state.chunks[hot])):
                    i = scratch.after[i]
        if chunks.rank[i] < 0 or not draw(dealing, count, i, move, numbers):
            continue
        splits = move[MOVE_KIND] == SPLIT
        detach(chunks, i, -1 if splits else move[OTHER], prices, scratch)
        carry_out(dealing, move)
        total, worst = attach(chunks, i, move[OTHER], move[FROM], move[TO], ranks, load, prices, scratch)
        now = _weigh(total, worst, weights)
        if now < best + RISE * (tries - number) / (tries * count):
            if not is_near(scratch):
                total, worst = value(ranks, load, scratch)
                now = _weigh(total, worst, weights)
            best, hot = now, -1
            count += splits
        else:
            restore(move[FROM], move[TO], scratch)
            take_back(dealing, move)
    return count


@jit_inner
def _by_position(dealing: Dealing, count: int, keys: FloatArray) -> IntArray:
    """Return the order of the chunks by document and start; ``keys`` is scratch."""
    order, is_sorted = np.zeros(count, dtype=np.int64), True
    for i in range(count):
        order[i] = i
        keys[i] = dealing.documents.offsets[dealing.chunks.doc[i]] + dealing.chunks.start[i]
        is_sorted = is_sorted and (i == 0 or keys[i - 1] < keys[i])
    return order if is_sorted else order_of(keys, count)


@jit_inner
def _deal(dealing: Dealing, choices: FloatArray, chosen: IntArray, keys: FloatArray) -> int:
    """Cut the long documents and deal the chunks, the heaviest first; returns their number."""
    count = _cut(dealing, choices, chosen)
    for i in range(count):
        keys[i] = -dealing.chunks.work[i]
    documents = dealing.documents
    order = order_of(keys, count)
    rules = documents.prefix, documents.units, documents.density[0]
    return deal_chunks(dealing.chunks, count, order, *rules, dealing.ranks, dealing.state)


@jit_inner
def _begin(dealing: Dealing, choices: FloatArray, redeals: int, weights: FloatArray, keys: FloatArray) -> int:
    """Deal by the best of the choices, and then of other choices for the heaviest documents; returns how many chunks.

    ``weights`` begin as (1, weight of the worst rank, most bytes) and become relative to the least of the choices.
    """
    documents, ranks, chunks = dealing.documents, dealing.ranks, dealing.chunks
    long, num = len(documents.long), len(choices)
    chosen, figures = np.zeros(max(1, long), dtype=np.int64), np.zeros((num, 2))
    for each in range(long):
        keys[each] = -documents.prefix[documents.lengths[documents.long[each]] // documents.units[0]]
    heaviest, others = order_of(keys, long), min(OTHERS, num)
    shortest, least_total, least_worst, best, before, tried = np.inf, np.inf, np.inf, np.inf, 0, 0
    for number in range(num + min(redeals, long * others) + 1):
        last = number == num + min(redeals, long * others)
        doc = heaviest[min(long - 1, max(0, number - num) // others)] if long > 0 else 0
        if number < num:
            chosen[:] = number
        elif not last:
            before = chosen[doc]
            chosen[doc] = (number - num) % others * num // others
        count = _deal(dealing, choices, chosen, keys)
        if last:
            break
        order = _by_position(dealing, count, keys)
        total, worst = estimate(chunks, count, order, dealing.state.load, ranks, dealing.prices, dealing.scratch)
        if number < num:
            figures[number, 0], figures[number, 1] = total, worst
            shortest = min(shortest, choices[number, LEAST])
            least_total, least_worst = min(least_total, total), min(least_worst, worst)
            if number == num - 1:
                weights[0] /= max(1.0, least_total)
                weights[1] /= max(1.0, least_worst)
                for i in range(num):
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
    documents.units[2] = int(shortest)
    return count


@jit
def search(
    dealing: Dealing,
    choices: FloatArray,
    given: Chunks,
    load: FloatArray,
    share: float,
    weights: FloatArray,
    tries: IntArray,
    num_before: int,
    evenly: bool,
    numbers: IntArray,
    home: IntArray,
) -> int:
    """Deal all documents, or improve what was dealt before; returns the number of chunks.

    Args:
        choices: [n, 3] how to cut long documents.
        given: what the given homes have of documents that are long, or on several ranks; load [num_ranks] their work.
        share: bytes of all ranks over those of the given homes, as estimated, beyond which they count more.
        weights: [3] see ``_begin``; kept by a search that goes on.
        tries: [2] dealings with one document cut otherwise, and moves.
        num_before: chunks dealt before, from which to go on; 0 to deal.
        evenly: see ``deal_short``.
        numbers: [1] state of the pseudo-random numbers.
        home: [documents] becomes every short document's rank, -1 for none.
    """
    documents, chunks, state, ranks = dealing.documents, dealing.chunks, dealing.state, dealing.ranks
    keys = np.zeros(max(len(documents.long), len(chunks.work)))
    density = documents.density[0]
    if num_before > 0:
        count = num_before
        take_up(chunks, count, density, ranks, state)
        order = _by_position(dealing, count, keys)
        count = accept(dealing, count, order, weights, tries[1], numbers, np.zeros(ENTRIES, dtype=np.int64))
    else:
        if share < np.inf:
            order = np.zeros(len(given.doc), dtype=np.int64)
            for i in range(len(order)):
                order[i] = i
            weights[2] = share * estimate(given, len(order), order, load, ranks, dealing.prices, dealing.scratch)[0]
        count = _begin(dealing, choices, tries[0], weights, keys)
    lengths = documents.lengths
    deal_short(documents.short, lengths, documents.prefix, documents.units, density, evenly, ranks, state, home)
    return count
