"""Hill climbing over the choices of the strip tiling: deterministic, with a number of trials fixed beforehand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray, exclusive_cumsum
from torchtitan_cad.planning.jit import jit, jit_inner, jit_leaf
from torchtitan_cad.planning.planners.tiling.strips import (
    BLOCK,
    COLUMN,
    COLUMN_BYTES,
    COLUMN_END,
    END_HOME,
    FIRST_HOME,
    HELPER,
    HOME_END,
    HOME_START,
    LOOKED_AT,
    LOST_FACTOR,
    ORDER,
    ORIGIN,
    PER_LOOK,
    RANK,
    ROW,
    ROW_END,
    ROW_FACTOR,
    SETTINGS,
    SKIP,
    USE_HOLDERS,
    VARIANT,
    Blocks,
    Helpers,
    copy_row,
    home_columns,
    make_helpers,
    refill,
    tile_blocks,
)
from torchtitan_cad.planning.sorting import order_of

MOST_TRIALS = 600

STARTS = 3
"""First trials, which differ in what room that is not used is taken to cost."""

WEIGHTED_TRIALS = 12
"""Trials in which the bytes of busy ranks become dearer, so that strips are chosen in favour of the worst ranks."""

GROWTH = 0.6
"""Growth of prices in these trials: a rank at the worst has its price multiplied by 2 ** (GROWTH / 4) per trial."""

# Columns of the bytes by rank, and of the block bytes by which strips are chosen.
IN, OUT = range(2)
ROW_PRICE, KEYS_PRICE = range(2)


class RankBytes(NamedTuple):
    """Bytes [num_ranks, 2] in and out, and scratch to compute them."""

    base: FloatArray  # of what is not dealt out: home tasks that import keys
    bytes: FloatArray
    last: IntArray  # [num_ranks] last piece of a rank
    previous: IntArray  # [capacity] piece before of the same rank


@jit_leaf
def _random(state: IntArray, below: int) -> int:
    """Next number in [0, below) of a 31-bit linear congruential sequence, the same on every machine."""
    state[0] = (state[0] * 1103515245 + 12345) % 2147483648
    return (state[0] // 65536) % below


@jit_leaf
def _new_rows(pieces: IntArray, i: int, previous: IntArray) -> int:
    """Rows of piece i that its helper does not get for an earlier piece of the block."""
    rows, k = pieces[i, ROW_END] - pieces[i, ROW], previous[i]
    while k >= 0:
        if pieces[k, BLOCK] == pieces[i, BLOCK]:
            rows -= max(0, min(pieces[i, ROW_END], pieces[k, ROW_END]) - max(pieces[i, ROW], pieces[k, ROW]))
        k = previous[k]
    return max(0, rows)


@jit_leaf
def _new_columns(blocks: Blocks, pieces: IntArray, i: int, previous: IntArray, start: int, end: int) -> int:
    """Columns [start, end) of piece i that its helper does not get for an earlier piece of the document."""
    columns, k = max(0, end - start), previous[i]
    while k >= 0 and columns > 0:
        if blocks.doc[pieces[k, BLOCK]] == blocks.doc[pieces[i, BLOCK]]:
            columns -= max(0, min(end, pieces[k, COLUMN_END]) - max(start, pieces[k, COLUMN]))
        k = previous[k]
    return max(0, columns)


@jit_leaf
def _home_at(blocks: Blocks, b: int, column: int) -> int:
    """First entry of block b's homes whose columns end after that one."""
    low, high, column = blocks.keys[b, FIRST_HOME], blocks.keys[b, END_HOME], column + blocks.keys[b, ORIGIN]
    while low < high:
        middle = (low + high) // 2
        if blocks.homes[middle, HOME_END] > column:
            high = middle
        else:
            low = middle + 1
    return low


@jit_leaf
def measure(
    blocks: Blocks,
    order: IntArray,
    pieces: IntArray,
    count: int,
    row_bytes: float,
    column_bytes: float,
    to: RankBytes,
    size: IntArray,
) -> float:
    """Compute the bytes of every rank into ``to.bytes``; returns the sum of those in. Long searches count in
    ``size``.
    """
    total, homes = 0.0, blocks.homes
    for rank in range(len(to.base)):
        to.bytes[rank, IN], to.bytes[rank, OUT] = to.base[rank, IN], to.base[rank, OUT]
        to.last[rank] = -1
        total += to.base[rank, IN]
    for i in range(len(order)):
        b = order[i]
        if blocks.frees_keys[b]:
            for j in range(blocks.keys[b, FIRST_HOME], blocks.keys[b, END_HOME]):
                start, end = home_columns(blocks, b, j)
                amount = column_bytes * (end - start)
                to.bytes[homes[j, RANK], OUT] -= amount
                to.bytes[blocks.owner[b], IN] -= amount
                total -= amount
    for i in range(count):
        b, helper = pieces[i, BLOCK], pieces[i, HELPER]
        to.previous[i] = to.last[helper]
        to.last[helper] = i
        amount = row_bytes * _new_rows(pieces, i, to.previous)
        to.bytes[blocks.owner[b], OUT] += amount
        first = stop = _home_at(blocks, b, pieces[i, COLUMN])
        end_column = pieces[i, COLUMN_END] + blocks.keys[b, ORIGIN]
        while stop < blocks.keys[b, END_HOME] and homes[stop, HOME_START] < end_column:
            stop += 1
        size[LOOKED_AT] += (stop - first) // PER_LOOK
        for j in range(first, stop):
            if homes[j, RANK] == helper:
                continue
            start, end = home_columns(blocks, b, j)
            start, end = max(pieces[i, COLUMN], start), min(pieces[i, COLUMN_END], end)
            imported = column_bytes * _new_columns(blocks, pieces, i, to.previous, start, end)
            amount += imported
            to.bytes[homes[j, RANK], OUT] += imported
        to.bytes[helper, IN] += amount
        total += amount
    return total


@jit_leaf
def _perturb(settings: FloatArray, state: IntArray, owner: IntArray, worst: int) -> None:
    """Change one choice of one block, now and then of one whose owner moves the most bytes."""
    b = _random(state, len(settings))
    if _random(state, 4) == 0:
        start = _random(state, len(settings))
        for i in range(len(settings)):
            if owner[(start + i) % len(settings)] == worst:
                b = (start + i) % len(settings)
                break
    kind = _random(state, 12)
    if kind >= 8:
        settings[b, VARIANT] = _random(state, 64)
    elif kind < 2:
        other = _random(state, len(settings))
        settings[b, ORDER], settings[other, ORDER] = settings[other, ORDER], settings[b, ORDER]
    elif kind < 5:
        settings[b, ROW_FACTOR] = 2.0 ** ((_random(state, 13) - 6) / 4)
    elif kind == 5:
        settings[b, SKIP] = _random(state, 4)
    elif kind == 6:
        settings[b, LOST_FACTOR] = 2.0 ** (_random(state, 10) - 3)
    else:
        settings[b, USE_HOLDERS] = 1 - settings[b, USE_HOLDERS]


@jit_inner
def _order_blocks(settings: FloatArray, variants: IntArray, first_variant: IntArray, order: IntArray) -> int:
    """Blocks that the settings choose, in their order, into ``order``; returns how many."""
    used, places = 0, np.zeros(len(settings))
    for slot in range(len(settings)):
        places[slot] = settings[slot, ORDER]
    for slot in order_of(places, len(places)):
        choices = first_variant[slot + 1] - first_variant[slot]
        variant = first_variant[slot] + int(settings[slot, VARIANT]) % choices
        for b in range(variants[variant, 0], variants[variant, 1]):
            order[used] = b
            used += 1
    return used


@jit_leaf
def _weigh(
    blocks: Blocks,
    order: IntArray,
    weights: FloatArray,
    row_bytes: float,
    column_bytes: float,
    block_bytes: FloatArray,
    size: IntArray,
) -> None:
    """Prices of the blocks' rows and keys where bytes of rank r count ``weights[r]`` times, into ``block_bytes``."""
    for i in range(len(order)):
        b = order[i]
        block_bytes[b, ROW_PRICE] = row_bytes * weights[blocks.owner[b]]
        block_bytes[b, KEYS_PRICE] = 0.0
        for j in range(blocks.keys[b, FIRST_HOME], blocks.keys[b, END_HOME]):
            start, end = home_columns(blocks, b, j)
            block_bytes[b, KEYS_PRICE] += column_bytes * (end - start) * weights[blocks.homes[j, RANK]]
        size[LOOKED_AT] += (blocks.keys[b, END_HOME] - blocks.keys[b, FIRST_HOME]) // PER_LOOK


def _first_settings(blocks: Blocks, variants: IntArray, first_variant: IntArray) -> tuple[FloatArray, IntArray]:
    """Return settings of the first trial, largest blocks first, and the owner of every slot."""
    first = variants[first_variant[:-1]]
    settings, area = np.ones((len(first), SETTINGS)), exclusive_cumsum(blocks.size[:, 0] * blocks.size[:, 1])
    settings[:, SKIP] = settings[:, VARIANT] = 0
    settings[:, ORDER] = area[first[:, 0]] - area[first[:, 1]]
    return settings, blocks.owner[first[:, 0]]


@jit_leaf
def _enter(kept: IntArray, sizes: IntArray, scores: FloatArray, pieces: IntArray, count: int, score: float) -> None:
    """Keep a tiling in the place of the worst one, unless it is no better or one with that score is kept."""
    worst = 0
    for k in range(len(scores)):
        if scores[k] == score:
            return
        if scores[k] > scores[worst]:
            worst = k
    if score >= scores[worst]:
        return
    for i in range(count):
        copy_row(kept[worst, i], pieces[i])
    sizes[worst], scores[worst] = count, score


@jit_leaf
def _most(ranks: FloatArray) -> tuple[float, int]:
    """Return the largest entry of a table [num_ranks, 2], and the first rank that has it."""
    most, worst = -np.inf, 0
    for r in range(len(ranks)):
        amount = max(ranks[r, IN], ranks[r, OUT])
        if amount > most:
            most, worst = amount, r
    return most, worst


class Trials(NamedTuple):
    """State of the trials: settings [slots, SETTINGS], weights [num_ranks], the best of both; the rest is scratch."""

    settings: FloatArray
    weights: FloatArray
    best_settings: FloatArray
    best_weights: FloatArray
    slot_owner: IntArray
    order: IntArray  # [B]
    block_bytes: FloatArray  # [B, 2]
    state: IntArray  # of the random numbers
    scores: FloatArray  # [K] of the tilings kept


@jit
def _hill_climb(
    blocks: Blocks,
    variants: IntArray,
    first_variant: IntArray,
    ids: IntArray,
    rooms: IntArray,
    prices: FloatArray,
    row_bytes: float,
    weight: float,
    effort: int,
    kept: IntArray,
    sizes: IntArray,
    trials: Trials,
    helpers: Helpers,
    to: RankBytes,
    pieces: IntArray,
) -> None:
    """See :func:`hill_climb`."""
    settings, weights, state = trials.settings, trials.weights, trials.state
    best, scale, worst = np.inf, 0.0, 0
    for trial in range(MOST_TRIALS):
        if helpers.size[LOOKED_AT] >= effort:
            break
        if trial > WEIGHTED_TRIALS:
            copy_row(weights, trials.best_weights)
        for slot in range(len(settings)):
            copy_row(settings[slot], trials.best_settings[slot])
        if trial < STARTS:
            for r in range(len(weights)):
                weights[r] = 1.0
            for slot in range(len(settings)):
                settings[slot, LOST_FACTOR] = 4.0**trial
        if trial > WEIGHTED_TRIALS:
            if _random(state, 2) == 0:
                weights[worst] *= 2.0 ** (_random(state, 5) / 8 - 0.125)
            for _ in range(1 + _random(state, 3)):
                _perturb(settings, state, trials.slot_owner, worst)
        chosen = trials.order[: _order_blocks(settings, variants, first_variant, trials.order)]
        _weigh(blocks, chosen, weights, row_bytes, prices[COLUMN_BYTES], trials.block_bytes, helpers.size)
        refill(helpers, ids, rooms)
        count = tile_blocks(blocks, trials.block_bytes, chosen, settings, prices, helpers, pieces)
        if count < 0:
            continue
        total = measure(blocks, chosen, pieces, count, row_bytes, prices[COLUMN_BYTES], to, helpers.size)
        most, busiest = _most(to.bytes)
        if scale == 0.0:
            scale = weight * total / most
        score = total + scale * most
        _enter(kept, sizes, trials.scores, pieces, count, score)
        if score < best:
            best, worst = score, busiest
            copy_row(trials.best_weights, weights)
            for slot in range(len(settings)):
                copy_row(trials.best_settings[slot], settings[slot])
        if trial <= WEIGHTED_TRIALS:
            for r in range(len(weights)):
                busy = max(to.bytes[r, IN], to.bytes[r, OUT]) / most
                weights[r] = max(1.0, weights[r] * 2.0 ** (GROWTH * (busy - 0.75)))


class Choices(NamedTuple):
    """Blocks, ranks with room and prices that tilings are made of.

    Attributes:
        variants: [V, 2] the alternatives as ranges of blocks; first_variant [slots + 1], see ``surplus.find_blocks``.
        ids: [H] ranks with room, by ascending room; rooms [num_ranks] cells.
        prices: see ``strips``; row_bytes are those of a row of cells.
        base: [num_ranks, 2] bytes in and out before anything is dealt out.
    """

    blocks: Blocks
    variants: IntArray
    first_variant: IntArray
    ids: IntArray
    rooms: IntArray
    prices: FloatArray
    row_bytes: float
    base: FloatArray


def hill_climb(choices: Choices, weight: float, seed: int, effort: int, keep: int) -> list[IntArray]:
    """Return the best tilings found that differ, at most ``keep`` of them: piece tables [n, 6] of ``strips``.

    Args:
        weight: of the worst rank's bytes against the total, both relative to those of the first tiling.
        seed: of the variations.
        effort: helpers looked at after which no trial begins, so that the time does not depend on the layout.
    """
    blocks, variants, first_variant, ids, rooms, prices, row_bytes, base = choices
    num_ranks, capacity = len(rooms), 4 * len(rooms) + 64 * len(first_variant)
    kept, sizes = np.empty((keep, capacity, 6), dtype=np.int64), np.full(keep, -1)
    settings, slot_owner = _first_settings(blocks, variants, first_variant)
    weights = np.ones(num_ranks)
    trials = Trials(
        settings,
        weights,
        settings.copy(),
        weights.copy(),
        slot_owner,
        np.empty(len(blocks.size), dtype=np.int64),
        np.empty((len(blocks.size), 2)),
        np.array([seed]),
        np.full(keep, np.inf),
    )
    to = RankBytes(base, base.copy(), np.empty(num_ranks, dtype=np.int64), np.empty(capacity, dtype=np.int64))
    given = (blocks, variants, first_variant, ids, rooms, prices, row_bytes, weight, effort)
    _hill_climb(*given, kept, sizes, trials, make_helpers(ids, rooms), to, np.empty_like(kept[0]))
    return [tiling[:size] for tiling, size in zip(kept, sizes.tolist(), strict=True) if size >= 0]
