"""Hill climbing over the choices of the strip tiling: deterministic, with a number of trials fixed beforehand."""

from __future__ import annotations

import numpy as np

from ..intervals import IntArray
from .jit import jit
from .strips import (
    BLOCK,
    COLUMN,
    COLUMN_BYTES,
    COLUMN_END,
    GENES,
    HELPER,
    LOST_FACTOR,
    ROW,
    ROW_END,
    ROW_FACTOR,
    SKIP,
    TURN,
    USE_GUESTS,
    VARIANT,
    FloatArray,
    tile_blocks,
)

STARTS = 3
"""First trials, which differ in what room that is not used is taken to cost."""

WARM = 12
"""Trials in which the bytes of busy ranks become dearer, so that strips are chosen in favour of the worst ranks."""

HEAT = 0.6
"""Speed of that: a rank at the worst has its price multiplied by 2 ** (HEAT / 4) per trial."""


@jit
def _random(state: IntArray, below: int) -> int:
    """Next number in [0, below) of a 31-bit linear congruential sequence, the same on every machine."""
    state[0] = (state[0] * 1103515245 + 12345) % 2147483648
    return (state[0] // 65536) % below


@jit
def traffic(
    order: IntArray,
    pieces: IntArray,
    count: int,
    owner: IntArray,
    spares: IntArray,
    holders: IntArray,
    first_holder: IntArray,
    docs: IntArray,
    row_bytes: float,
    column_bytes: float,
    bytes_in: FloatArray,
    bytes_out: FloatArray,
) -> float:
    """Add the bytes of the pieces to those of every rank; returns their sum.

    ``holders`` [n, 3] are, by block, the ranks that hold its columns [start, end); first_holder [B + 1] delimits them.
    """
    total = 0.0
    for b in order:
        if spares[b]:
            for j in range(first_holder[b], first_holder[b + 1]):
                amount = column_bytes * (holders[j, 2] - holders[j, 1])
                bytes_out[holders[j, 0]] -= amount
                bytes_in[owner[b]] -= amount
                total -= amount
    last = np.full(len(bytes_in), -1)
    previous = np.empty(count, dtype=np.int64)
    for i in range(count):
        b, helper = pieces[i, BLOCK], pieces[i, HELPER]
        previous[i] = last[helper]
        last[helper] = i
        rows = pieces[i, ROW_END] - pieces[i, ROW]
        k = previous[i]
        while k >= 0:
            if pieces[k, BLOCK] == b:
                rows -= max(0, min(pieces[i, ROW_END], pieces[k, ROW_END]) - max(pieces[i, ROW], pieces[k, ROW]))
            k = previous[k]
        amount = row_bytes * max(0, rows)
        bytes_out[owner[b]] += amount
        for j in range(first_holder[b], first_holder[b + 1]):
            if holders[j, 0] == helper:
                continue
            start, end = max(pieces[i, COLUMN], holders[j, 1]), min(pieces[i, COLUMN_END], holders[j, 2])
            cells = max(0, end - start)
            k = previous[i]
            while k >= 0 and cells > 0:
                if docs[pieces[k, BLOCK]] == docs[b]:
                    cells -= max(0, min(end, pieces[k, COLUMN_END]) - max(start, pieces[k, COLUMN]))
                k = previous[k]
            if cells > 0:
                amount += column_bytes * cells
                bytes_out[holders[j, 0]] += column_bytes * cells
        bytes_in[helper] += amount
        total += amount
    return total


@jit
def _mutate(genes: FloatArray, state: IntArray, owner: IntArray, worst: int) -> None:
    """Change one choice of one block, now and then of one whose owner moves the most bytes."""
    b = _random(state, len(genes))
    if _random(state, 4) == 0:
        start = _random(state, len(genes))
        for i in range(len(genes)):
            if owner[(start + i) % len(genes)] == worst:
                b = (start + i) % len(genes)
                break
    kind = _random(state, 12)
    if kind >= 8:
        genes[b, VARIANT] = _random(state, 64)
        return
    if kind < 2:
        other = _random(state, len(genes))
        genes[b, TURN], genes[other, TURN] = genes[other, TURN], genes[b, TURN]
    elif kind < 5:
        genes[b, ROW_FACTOR] = 2.0 ** ((_random(state, 13) - 6) / 4)
    elif kind == 5:
        genes[b, SKIP] = _random(state, 4)
    elif kind == 6:
        genes[b, LOST_FACTOR] = 2.0 ** (_random(state, 10) - 3)
    else:
        genes[b, USE_GUESTS] = 1 - genes[b, USE_GUESTS]


@jit
def climb(
    blocks: IntArray,
    block_bytes: FloatArray,
    owner: IntArray,
    spares: IntArray,
    slots: IntArray,
    variants: IntArray,
    first_variant: IntArray,
    holders: IntArray,
    first_holder: IntArray,
    sorted_rooms: IntArray,
    sorted_ids: IntArray,
    guests: IntArray,
    first_guest: IntArray,
    docs: IntArray,
    prices: FloatArray,
    base_in: FloatArray,
    base_out: FloatArray,
    theta: float,
    trials: int,
    best_pieces: IntArray,
) -> int:
    """Fill ``best_pieces`` by the best tiling found; returns the number of pieces, -1 if none was found."""
    state = np.array([20251118])
    num = len(first_variant) - 1
    genes = np.ones((num, GENES))
    genes[:, SKIP] = 0
    genes[:, VARIANT] = 0
    slot_owner = np.empty(num, dtype=np.int64)
    for slot in range(num):
        start, end = variants[first_variant[slot]]
        slot_owner[slot] = owner[start]
        genes[slot, TURN] = -np.sum(blocks[start:end, 0] * blocks[start:end, 1])
    order = np.empty(len(blocks), dtype=np.int64)
    weights = np.ones(len(base_in))
    best_weights = weights.copy()
    weighted = np.empty((len(blocks), 2))
    best_genes = genes.copy()
    pieces = np.empty_like(best_pieces)
    best, best_count, scale, worst = np.inf, -1, 0.0, 0
    for trial in range(trials):
        if trial > WARM:
            weights[:] = best_weights
        genes[:] = best_genes
        if trial < STARTS:
            weights[:] = 1.0
            genes[:, LOST_FACTOR] = 4.0**trial
        if trial > WARM:
            if _random(state, 2) == 0:
                weights[worst] *= 2.0 ** (_random(state, 5) / 8 - 0.125)
            for _ in range(1 + _random(state, 3)):
                _mutate(genes, state, slot_owner, worst)
        used = 0
        for slot in np.argsort(genes[:, TURN]):
            choices = first_variant[slot + 1] - first_variant[slot]
            start, end = variants[first_variant[slot] + int(genes[slot, VARIANT]) % choices]
            for b in range(start, end):
                order[used] = b
                used += 1
        for b in order[:used]:
            weighted[b, 0] = block_bytes[b, 0] * weights[owner[b]]
            weighted[b, 1] = 0.0
            for j in range(first_holder[b], first_holder[b + 1]):
                weighted[b, 1] += prices[COLUMN_BYTES] * (holders[j, 2] - holders[j, 1]) * weights[holders[j, 0]]
        count = tile_blocks(
            blocks,
            weighted,
            order[:used],
            genes,
            slots,
            sorted_rooms,
            sorted_ids,
            guests,
            first_guest,
            docs,
            prices,
            64,
            pieces,
        )
        if count < 0:
            continue
        bytes_in, bytes_out = base_in.copy(), base_out.copy()
        total = traffic(
            order[:used],
            pieces,
            count,
            owner,
            spares,
            holders,
            first_holder,
            docs,
            block_bytes[0, 0],
            prices[COLUMN_BYTES],
            bytes_in,
            bytes_out,
        )
        most = max(bytes_in.max(), bytes_out.max())
        if scale == 0.0:
            scale = theta * (total + base_in.sum()) / most
        score = total + scale * most
        if score < best:
            best, best_count = score, count
            best_genes[:] = genes
            best_weights[:] = weights
            best_pieces[:count] = pieces[:count]
            worst = int(np.argmax(np.maximum(bytes_in, bytes_out)))
        if trial <= WARM:
            for r in range(len(weights)):
                weights[r] = max(1.0, weights[r] * 2.0 ** (HEAT * (max(bytes_in[r], bytes_out[r]) / most - 0.75)))
    return best_count
