# SPDX-License-Identifier: BSD-3-Clause
"""The search for homes: documents are cut into chunks, assigned by their work, and moved by threshold accepting."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import (
    IntArray,
    begins_group,
    end_to_end,
)
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.chunks import (
    Chunks,
    Work,
    assign,
    assign_short,
    change,
    cut_documents,
    has_room,
    make_chunks,
)
from torchtitan_cad.planning.placement.estimate import (
    Prices,
    estimate,
    estimate_ranks,
    objective,
)

SHORTEST = (0.5, 0.75, 1.0)
LONGEST = (0.75, 1.0, 1.5)
"""Bounds of the lengths of chunks, over the rows of the best rectangle of a rank's mean work: all pairs of the two are
tried."""

MOST_WORK = 1.1
"""Chunks have at most this share of a rank's mean work."""

FEWEST = 16
"""No chunk is shorter than the tokens of a rank / FEWEST."""

MOVES = 14_000
"""A search on r ranks tries MOVES (r / 64)^(1/4) moves, with fewer than 64 ranks MOVES (r / 64)^0.6."""

RISE = 0.15
"""The initial threshold of threshold accepting is RISE x objective / number of chunks."""


class Weights(NamedTuple):
    """What searches differ in.

    Attributes:
        short: documents with less than the mean work of a rank / short are not cut, except to fill the last capacity.
        worst_weight, spare: those of ``Prices``.
    """

    short: int
    worst_weight: float
    spare: float


WEIGHTS = (Weights(2, 0.4, 0.0), Weights(4, 0.4, 0.4), Weights(1, 0.9, 0.0))
"""The weights of searches, in turns."""


class HomeSearch:
    """Finds homes for the tokens of a layout; every call of :meth:`find` searches anew. Nodes are left to the plan."""

    def __init__(
        self,
        layout: TokenLayout,
        shape: AttentionShape,
        config: PlannerConfig,
        cost: TileAreaCost,
        weights: Weights,
    ) -> None:
        lengths = layout.doc_lengths
        capacities = layout.tokens_per_rank
        grid = config.min_shard
        prefix = cost.prefix_cost(int(lengths.max())).astype(np.float64)
        work = prefix[-(-lengths // cost.granularity)]
        mean_work = work.sum() / layout.num_ranks
        pairs = (lengths.astype(np.float64) * (lengths + 1) / 2).sum()
        longest = max(grid, int(capacities.max()) // grid * grid)
        is_long = (work * weights.short > mean_work) | (lengths > longest)
        short = np.flatnonzero(~is_long)
        self._layout = layout
        self._grid = grid
        self._long = np.flatnonzero(is_long)
        self._short = short[np.argsort(-lengths[short], kind="stable")]
        self._work = Work(
            tile=cost.granularity,
            prefix=prefix,
            per_pair=work.sum() / pairs,
            per_token=work[short].sum() / max(1, lengths[short].sum()),
        )
        self._most_work = MOST_WORK * mean_work
        limit = (1 + config.tolerance) * mean_work
        self._prices = _prices(shape, weights, limit, per_pair=self._work.per_pair)
        bounds = _chunk_bounds(pairs / layout.num_ranks, shape, grid, most=longest)
        candidates = [self._assign_long(*lengths) for lengths in bounds]
        _, self._segments = min(candidates, key=lambda candidate: candidate[0])

    def find(self, seed: int) -> TokenLayout:
        """Return the layout found with the pseudo-random numbers of ``seed``."""
        layout = self._layout
        is_held = self._segments[0] >= 0
        chunks, prices = self._begin(self._segments[:, is_held])
        num_chunks = len(chunks.doc)
        if num_chunks > 1:
            tries = _num_moves(layout.num_ranks)
            improve(
                chunks,
                self._work,
                prices,
                RISE / num_chunks,
                tries,
                self._grid,
                np.array([seed]),
                np.zeros((2, 2, 3), dtype=np.int64),
            )
        home = np.empty_like(self._short)
        lengths = layout.doc_lengths[self._short]
        assign_short(lengths, self._work, chunks, home, np.empty_like(chunks.free))
        long = np.stack([chunks.rank, chunks.doc, chunks.start, chunks.length])
        short = np.stack([home, self._short, np.zeros_like(home), lengths])
        segments = np.concatenate([long, self._segments[:, ~is_held], short], axis=1)
        is_placed = segments[0] >= 0
        loose = segments[:, ~is_placed & (segments[3] > 0)]
        placed = np.concatenate(
            [segments[:, is_placed], _laid_out(loose, chunks.free)], axis=1
        )
        rank, doc, start, length = _joined(placed)
        # Sorted and whole: ``TokenLayout.from_arrays`` would only check it.
        return TokenLayout(
            layout.num_ranks,
            rank,
            layout.docs[doc],
            start,
            length,
            np.ones(len(rank), dtype=bool),
        )

    def _assign_long(self, shortest: int, longest: int) -> tuple[float, IntArray]:
        """Return the objective and the segments [4, n] of long documents cut into chunks of these lengths."""
        capacities = self._layout.tokens_per_rank
        lengths = self._layout.doc_lengths[self._long]
        rows = int((lengths // shortest + 3).sum()) + len(capacities)
        segments = np.zeros((rows, 4), dtype=np.int64)
        bounds = np.array([self._grid, shortest, longest])
        count = cut_documents(
            self._long, lengths, self._work, bounds, self._most_work, segments
        )
        ends = segments[:count, 2] + segments[:count, 3]
        tile = self._work.tile
        prefix = self._work.prefix
        work = prefix[-(-ends // tile)] - prefix[segments[:count, 2] // tile]
        count = assign(
            segments,
            np.argsort(-work, kind="stable"),
            count,
            self._work,
            self._grid,
            capacities.copy(),
            self._work.per_token * capacities,
            np.zeros((2, len(capacities)), dtype=np.int64),
        )
        segments = segments[:count].T
        segments = segments[:, np.lexsort((segments[2], segments[1]))]
        chunks, prices = self._begin(segments[:, segments[0] >= 0])
        return estimate(chunks, prices), segments

    def _begin(self, segments: IntArray) -> tuple[Chunks, Prices]:
        """Return chunks of these segments, and prices for their estimate."""
        chunks = make_chunks(segments.copy(), self._layout.tokens_per_rank, self._work)
        capacity = np.maximum(0.0, self._prices.limit - chunks.load)
        roots = np.sqrt(capacity).sum()
        typical = float(capacity.sum() / roots) ** 2 if roots > 0 else 1.0
        return chunks, self._prices._replace(typical=typical, help=np.zeros(1))


@jit_inner
def random(state: IntArray, below: int) -> int:
    """Return the next pseudo-random number in [0, ``below``), ``below`` at most 2^31; updates ``state`` [1]."""
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return (state[0] >> 8) * below >> 23


@jit_inner
def _worst_rank(chunks: Chunks) -> int:
    """Return the rank with the largest estimated bytes in or out."""
    found = 0
    for rank in range(1, len(chunks.power)):
        if chunks.power[rank] > chunks.power[found]:
            found = rank
    return found


@jit_inner
def _describe(chunks: Chunks, i: int, j: int, homes: IntArray) -> None:
    """Write the (rank, start, length) of chunks ``i`` and ``j`` into ``homes`` [2, 3]."""
    homes[0, 0] = chunks.rank[i]
    homes[0, 1] = chunks.start[i]
    homes[0, 2] = chunks.length[i]
    homes[1, 0] = chunks.rank[j]
    homes[1, 1] = chunks.start[j]
    homes[1, 2] = chunks.length[j]


@jit_inner
def _apply(chunks: Chunks, work: Work, i: int, j: int, homes: IntArray) -> None:
    """Give chunks ``i`` and ``j`` the (rank, start, length) in ``homes`` [2, 3]."""
    change(chunks, work, i, homes[0, 0], homes[0, 1], homes[0, 2])
    change(chunks, work, j, homes[1, 0], homes[1, 1], homes[1, 2])


@jit_inner
def _draw(chunks: Chunks, numbers: IntArray, grid: int, i: int, homes: IntArray) -> int:
    """Draw a move of chunk ``i`` and return the other chunk that takes part, ``i`` itself if the move is not possible.

    Two chunks are swapped, a chunk goes to a random rank, or the boundary with the next chunk shifts. ``homes`` [2, 3]
    gets the (rank, start, length) of both.
    """
    num_chunks = len(chunks.doc)
    kind = random(numbers, 5)
    j = random(numbers, num_chunks) if kind == 0 else (i + 1) % num_chunks
    _describe(chunks, i, j, homes)
    if kind == 0:
        homes[0, 0] = chunks.rank[j]
        homes[1, 0] = chunks.rank[i]
        return j
    if kind <= 2:
        homes[0, 0] = random(numbers, len(chunks.num_held))
        return j
    cells = (random(numbers, 33) - 16) * max(1, chunks.length[i] // (40 * grid))
    shifted = cells * grid
    homes[0, 2] += shifted
    homes[1, 1] += shifted
    homes[1, 2] -= shifted
    is_possible = (
        chunks.doc[i] == chunks.doc[j]
        and chunks.start[i] + chunks.length[i] == chunks.start[j]
        and min(homes[0, 2], homes[1, 2]) >= grid
    )
    return j if is_possible else i


@jit
def improve(
    chunks: Chunks,
    work: Work,
    prices: Prices,
    rise: float,
    tries: int,
    grid: int,
    numbers: IntArray,
    scratch: IntArray,
) -> None:
    """Try ``tries`` moves, half of them with chunks of the worst rank.

    A move is undone if it raises the objective by more than a threshold, which falls linearly to 0.

    Args:
        rise: initial threshold / objective.
        grid: of the boundaries of chunks, in tokens.
        numbers: [1] state of the pseudo-random numbers.
        scratch: [2, 2, 3] homes of two chunks after and before a move.
    """
    after = scratch[0]
    before = scratch[1]
    best = estimate(chunks, prices)
    worst = _worst_rank(chunks)
    accepted = 0
    rise *= best
    for number in range(tries):
        i = random(numbers, len(chunks.doc))
        if number % 2 == 0 and chunks.num_held[worst] > 0:
            i = chunks.members[worst, random(numbers, chunks.num_held[worst])]
        j = _draw(chunks, numbers, grid, i, after)
        if j == i:
            continue
        _describe(chunks, i, j, before)
        _apply(chunks, work, i, j, after)
        if not has_room(chunks, after[:, 0]):
            _apply(chunks, work, i, j, before)
            continue
        estimate_ranks(chunks, prices, scratch)
        value = objective(chunks, prices)
        if value < best + rise * (tries - number) / tries:
            best = value
            worst = _worst_rank(chunks)
            accepted += 1
            if accepted % len(chunks.num_held) == 0:
                best = estimate(chunks, prices)
        else:
            _apply(chunks, work, i, j, before)
            estimate_ranks(chunks, prices, scratch)


def _prices(
    shape: AttentionShape, weights: Weights, limit: float, per_pair: float
) -> Prices:
    """Return the prices of a search, without those that depend on chunks."""
    return Prices(
        limit=limit,
        per_pair=per_pair,
        query_bytes=float(shape.query_bytes),
        key_bytes=float(shape.kv_bytes),
        typical=1.0,
        help=np.zeros(1),
        worst_weight=weights.worst_weight,
        spare=weights.spare,
    )


def _chunk_bounds(
    mean_pairs: float, shape: AttentionShape, grid: int, most: int
) -> list[tuple[int, int]]:
    """Return the pairs of shortest and longest chunks that are tried, of ``most`` tokens; see ``SHORTEST``."""
    best_rows = np.sqrt(mean_pairs * shape.kv_bytes / shape.query_bytes)
    rows = (np.array([SHORTEST, LONGEST]) * best_rows).astype(np.int64) // grid * grid
    fewest = max(grid, most // FEWEST // grid * grid)
    shortest, longest = np.clip(rows, fewest, most).tolist()
    return sorted(set(product(shortest, longest)))


def _num_moves(num_ranks: int) -> int:
    """Return the moves that a search tries, see ``MOVES``."""
    power = 0.25 if num_ranks > 64 else 0.6
    return int(MOVES * (num_ranks / 64) ** power)


def _laid_out(segments: IntArray, capacities: IntArray) -> IntArray:
    """Lay segments [4, n] without a rank end to end over the ranks' capacities."""
    _, doc, start, length = segments
    source, rank, begin, end = end_to_end(length, capacities)
    return np.stack([rank, doc[source], start[source] + begin, end - begin])


def _joined(segments: IntArray) -> IntArray:
    """Sort segments [4, n] by rank, document and start, and join those that touch."""
    segments = segments[:, np.lexsort((segments[2], segments[1], segments[0]))]
    rank, doc, start, length = segments
    is_first = begins_group(rank, doc)
    is_first[1:] |= start[1:] != (start + length)[:-1]
    first = np.flatnonzero(is_first)
    return np.stack(
        [rank[first], doc[first], start[first], np.add.reduceat(length, first)]
    )
