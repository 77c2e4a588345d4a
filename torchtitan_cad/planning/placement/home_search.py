# SPDX-License-Identifier: BSD-3-Clause
"""The search for homes: from a layout to the state that is searched, and from the state to a layout."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.exchange.traffic import node_prices
from torchtitan_cad.planning.intervals import FloatArray, IntArray, end_to_end
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import Speeds
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.assign import assign_short, by_work, cut_long
from torchtitan_cad.planning.placement.search import begin_search, improve
from torchtitan_cad.planning.placement.state import (
    CAPACITY,
    CHUNK_DOC,
    COUNT,
    KEY_BYTES,
    LEAST_CHUNK,
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
        cost: CostModel,
        weights: Weights,
    ) -> None:
        lengths = layout.doc_lengths
        grid = config.min_shard
        prefix = cost.prefix_cost(int(lengths.max())).astype(np.float64)
        work = work_of(prefix, cost.granularity, 0, lengths)
        mean_work = float(work.sum()) / layout.num_ranks
        longest_chunk = max(grid, int(layout.tokens_per_rank.max()) // grid * grid)
        is_long = (work * weights.short > mean_work) | (lengths > longest_chunk)
        whole = np.flatnonzero(~is_long)
        self._layout = layout
        self._capacity = layout.tokens_per_rank
        self._short = whole[np.argsort(-lengths[whole], kind="stable")]
        self._long = np.flatnonzero(is_long)
        self._most_work = MOST_WORK * mean_work
        self._tries = int(
            MOVES * (layout.num_ranks / 64) ** (0.25 if layout.num_ranks > 64 else 0.6)
        )

        rows = _chunk_bounds(
            _pairs(lengths).sum() / layout.num_ranks, shape, grid, longest_chunk
        )
        sizes = np.array([cost.granularity, grid, rows.min()])
        # of a byte in a node, as in the bytes of plans
        _, price, _ = node_prices(config, layout.num_ranks)
        prices = np.zeros(8)
        prices[QUERY_BYTES] = price * shape.query_bytes
        prices[KEY_BYTES] = price * shape.kv_bytes
        prices[PER_PAIR] = work.sum() / _pairs(lengths).sum()
        prices[PER_TOKEN] = float(work[whole].sum()) / max(1, int(lengths[whole].sum()))
        prices[WORST_WEIGHT] = weights.worst_weight
        prices[SPARE] = weights.spare
        speeds = Speeds.of(config, layout.num_ranks)
        speed = np.array([float(value) for value in speeds.values])[speeds.index]
        limit = (1 + config.tolerance) * mean_work * speed
        most_chunks = (
            int((lengths[self._long] // sizes[LEAST_CHUNK] + 3).sum())
            + layout.num_ranks
        )
        self._state = make_state(most_chunks, limit, speed, prefix, sizes, prices)

        bounds = sorted(set(product(*rows.tolist())))
        _, shortest, longest = min((self._assign_long(*pair), *pair) for pair in bounds)
        self._assign_long(shortest, longest)
        self._initial = Assignment(
            self._state.ints.copy(), self._state.reals.copy(), self._state.prices.copy()
        )

    def find(self, seed: int) -> TokenLayout:
        """Return the layout found with the pseudo-random numbers of ``seed``."""
        layout = self._layout
        state = self._state
        state.ints[:] = self._initial.ints
        state.reals[:] = self._initial.reals
        state.prices[:] = self._initial.prices
        num_chunks = int(state.ints[-1, COUNT]) - layout.num_ranks
        if num_chunks > 1:
            improve(state, RISE / num_chunks, self._tries, np.array([seed]))
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
            placed = np.concatenate(
                [placed, _laid_out(loose, state.ints[: layout.num_ranks, CAPACITY])],
                axis=1,
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

    def _assign_short(self) -> IntArray:
        """Assign short documents to what the chunks leave; returns the rank of each, or -1."""
        state = self._state
        ranks = slice(self._layout.num_ranks)
        load = (
            state.reals[ranks, LOAD]
            - state.prices[PER_TOKEN] * state.ints[ranks, CAPACITY]
        )
        home = np.empty_like(self._short)
        heap = np.empty_like(self._capacity)
        assign_short(
            state, self._layout.doc_lengths[self._short], home, heap, load / state.speed
        )
        return home

    def _assign_long(self, shortest: int, longest: int) -> float:
        """Assign long documents in chunks of ``shortest`` to ``longest`` tokens, and return the objective."""
        state, lengths = self._state, self._layout.doc_lengths[self._long]
        cut_long(
            state,
            self._capacity,
            self._long,
            lengths,
            self._most_work,
            shortest,
            longest,
        )
        time = state.reals[: len(self._capacity), LOAD] / state.speed
        return begin_search(state, by_work(state), np.empty_like(self._capacity), time)


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
    is_same = (rank[1:] == rank[:-1]) & (doc[1:] == doc[:-1])
    joins = np.zeros(len(rank), dtype=bool)
    joins[1:] = is_same & (start[1:] == (start + length)[:-1])
    first = np.flatnonzero(~joins)
    return np.stack(
        [rank[first], doc[first], start[first], np.add.reduceat(length, first)]
    )
