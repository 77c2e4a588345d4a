# SPDX-License-Identifier: BSD-3-Clause
"""The search for homes: from a layout to the state that is searched, and from the state to a layout."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.exchange.traffic import node_prices
from torchtitan_cad.planning.intervals import (
    FloatArray,
    IntArray,
    begins_group,
    end_to_end,
)
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.assign import assign_short, by_work, cut_long
from torchtitan_cad.planning.placement.search import begin_search, improve
from torchtitan_cad.planning.placement.state import (
    CAPACITY,
    CHUNK_DOC,
    COUNT,
    KEY_BYTES,
    LENGTH,
    LOAD,
    PER_PAIR,
    PER_TOKEN,
    QUERY_BYTES,
    RANK,
    SPARE,
    START,
    WORST_WEIGHT,
    make_state,
    work_of,
)

SHORTEST = (0.5, 0.75, 1.0)
LONGEST = (1.0, 1.5, 10.0)
"""Bounds of the lengths of initial chunks, over the rows of the best rectangle of a rank's mean work: all pairs of the
two are tried. The least of the shortest is also the shortest chunk that a move makes."""

MOST_WORK = 1.1
"""Initial chunks have at most this share of a rank's mean work."""

FEWEST = 8
"""No initial chunk is shorter than the tokens of a rank / FEWEST."""

MOVES = 14_000
"""A search on r ranks tries MOVES (r / 64)^(1/4) moves, with fewer than 64 ranks MOVES (r / 64)^0.6."""

RISE = 0.15
"""The initial threshold of threshold accepting is RISE x objective / number of chunks."""


class Weights(NamedTuple):
    """What searches differ in.

    Attributes:
        short: documents with less than the mean work of a rank / short are not cut, except to fill the last capacity.
        worst_weight, spare: the prices WORST_WEIGHT and SPARE of the state.
    """

    short: int
    worst_weight: float
    spare: float


WEIGHTS = (Weights(4, 0.3, 0.4), Weights(2, 0.2, 0.0), Weights(1, 0.3, 0.0))
"""The weights of searches, in turns."""


class Assignment(NamedTuple):
    """Contents of the state before a search."""

    ints: IntArray
    reals: FloatArray
    prices: FloatArray


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
        num_ranks = layout.num_ranks
        lengths = layout.doc_lengths
        grid = config.min_shard
        prefix = cost.prefix_cost(int(lengths.max())).astype(np.float64)
        work = work_of(prefix, cost.granularity, 0, lengths)
        total_work = work.sum()
        mean_work = total_work / num_ranks
        longest_chunk = max(grid, int(layout.tokens_per_rank.max()) // grid * grid)
        is_long = (work * weights.short > mean_work) | (lengths > longest_chunk)
        whole = np.flatnonzero(~is_long)
        self._layout = layout
        self._short = whole[np.argsort(-lengths[whole], kind="stable")]
        self._long = np.flatnonzero(is_long)
        self._most_work = MOST_WORK * mean_work

        pairs = _pairs(lengths).sum()
        bounds = _chunk_bounds(pairs / num_ranks, shape, grid, most=longest_chunk)
        shortest = bounds.min()
        prices = _prices(shape, config, num_ranks, weights=weights)
        prices[PER_PAIR] = total_work / pairs
        prices[PER_TOKEN] = work[whole].sum() / max(1, lengths[whole].sum())
        self._state = make_state(
            self._most_chunks(shortest),
            limit=np.full(num_ranks, (1 + config.tolerance) * mean_work),
            prefix=prefix,
            sizes=np.array([cost.granularity, grid, shortest]),
            prices=prices,
        )
        self._initial = self._assign_best(bounds)

    def find(self, seed: int) -> TokenLayout:
        """Return the layout found with the pseudo-random numbers of ``seed``."""
        layout = self._layout
        state = self._state
        state.ints[:] = self._initial.ints
        state.reals[:] = self._initial.reals
        state.prices[:] = self._initial.prices
        num_chunks = int(state.ints[-1, COUNT]) - layout.num_ranks
        if num_chunks > 1:
            tries = _num_moves(layout.num_ranks)
            improve(state, RISE / num_chunks, tries, np.array([seed]))
        home = self._assign_short()
        chunks = state.ints[layout.num_ranks : state.ints[-1, COUNT]]
        rank = np.append(chunks[:, RANK], home)
        doc = np.append(chunks[:, CHUNK_DOC], self._short)
        start = np.append(chunks[:, START], np.zeros_like(home))
        length = np.append(chunks[:, LENGTH], layout.doc_lengths[self._short])
        segments = np.stack([rank, doc, start, length])
        placed = segments[:, rank >= 0]
        loose = segments[:, (rank < 0) & (length > 0)]
        if loose.size:
            laid_out = _laid_out(loose, state.ints[: layout.num_ranks, CAPACITY])
            placed = np.concatenate([placed, laid_out], axis=1)
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

    def _most_chunks(self, shortest: int) -> int:
        """Return how many chunks moves can make of at least ``shortest`` tokens."""
        of_documents = self._layout.doc_lengths[self._long] // shortest + 3
        return int(of_documents.sum()) + self._layout.num_ranks

    def _assign_best(self, bounds: IntArray) -> Assignment:
        """Assign long documents in chunks of those ``bounds`` [2, n] that give the least objective."""
        pairs = sorted(set(product(*bounds.tolist())))
        best = min(pairs, key=lambda pair: self._assign_long(*pair))
        self._assign_long(*best)
        state = self._state
        return Assignment(state.ints.copy(), state.reals.copy(), state.prices.copy())

    def _assign_short(self) -> IntArray:
        """Assign short documents to what the chunks leave; returns the rank of each, or -1."""
        state = self._state
        ranks = slice(self._layout.num_ranks)
        expected = state.prices[PER_TOKEN] * state.ints[ranks, CAPACITY]
        time = state.reals[ranks, LOAD] - expected
        home = np.empty_like(self._short)
        heap = np.empty_like(self._layout.tokens_per_rank)
        lengths = self._layout.doc_lengths[self._short]
        assign_short(state, lengths, home, heap, time)
        return home

    def _assign_long(self, shortest: int, longest: int) -> float:
        """Assign long documents in chunks of ``shortest`` to ``longest`` tokens, and return the objective."""
        state = self._state
        capacity = self._layout.tokens_per_rank
        cut_long(
            state,
            capacity,
            self._long,
            self._layout.doc_lengths[self._long],
            self._most_work,
            shortest,
            longest,
        )
        time = state.reals[: len(capacity), LOAD].copy()
        return begin_search(state, by_work(state), np.empty_like(capacity), time)


def _num_moves(num_ranks: int) -> int:
    """Return the moves that a search tries, see ``MOVES``."""
    power = 0.25 if num_ranks > 64 else 0.6
    return int(MOVES * (num_ranks / 64) ** power)


def _prices(
    shape: AttentionShape, config: PlannerConfig, num_ranks: int, weights: Weights
) -> FloatArray:
    """Return the prices of the state that do not depend on documents, others 0."""
    # of a byte in a node, as in the bytes of plans
    _, price, _ = node_prices(config, num_ranks)
    prices = np.zeros(8)
    prices[QUERY_BYTES] = price * shape.query_bytes
    prices[KEY_BYTES] = price * shape.kv_bytes
    prices[WORST_WEIGHT] = weights.worst_weight
    prices[SPARE] = weights.spare
    return prices


def _chunk_bounds(
    mean_pairs: float, shape: AttentionShape, grid: int, most: int
) -> IntArray:
    """Return [2, 3] shortest and longest chunks that are tried, of ``most`` tokens; see ``SHORTEST``."""
    best_rows = float(np.sqrt(mean_pairs * shape.kv_bytes / shape.query_bytes))
    rows = (np.array([SHORTEST, LONGEST]) * best_rows).astype(np.int64) // grid * grid
    return np.clip(rows, max(grid, most // FEWEST // grid * grid), most)


def _pairs(lengths: IntArray) -> FloatArray:
    """Return the (query, key) pairs of documents."""
    return lengths.astype(np.float64) * (lengths + 1) / 2


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
