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
    LEAST_CHUNK,
    LENGTH,
    LOAD,
    PER_TOKEN,
    RANK,
    START,
    make_state,
    work_of,
)

ROWS = (0.5, 0.75, 1.0), (1.0, 1.5, 10.0)
"""shortest and longest initial chunks / rows of the best rectangle of the mean work of a rank: all pairs of the two
lists are tried. The first entry is also the shortest chunk that a move makes."""

MOST_WORK = 1.1
"""work of the largest initial chunk / mean work of a rank"""

FEWEST = 8
"""shortest initial chunk = tokens of a rank / FEWEST"""

MOVES = 14_000
"""moves tried on r ranks = MOVES (r / 64)^(1/4), with fewer than 64 ranks MOVES (r / 64)^0.6"""

RISE = 0.15
"""threshold accepting: initial threshold = RISE x objective / number of chunks"""

Weights = tuple[int, float, float]
WEIGHTS: tuple[Weights, ...] = (4, 0.3, 0.4), (2, 0.2, 0.0), (1, 0.3, 0.0)
"""(short, WORST_WEIGHT, SPARE) of searches, in turns. Documents with work < mean work of a
rank / short are not cut, except to fill the last capacity."""


class Assignment(NamedTuple):
    """Contents of the state before a search."""

    ints: IntArray
    reals: FloatArray
    prices: FloatArray


class HomeSearch:
    """Finds homes for the tokens of a layout; every call of :meth:`find` searches anew. Nodes are left to the plan."""

    def __init__(
        self, layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel, weights: Weights
    ) -> None:
        short, *of_prices = weights
        num_ranks, tile, grid = layout.num_ranks, cost.granularity, config.min_shard
        lengths, capacity = layout.doc_lengths, layout.tokens_per_rank
        prefix = cost.prefix_cost(int(lengths.max())).astype(np.float64)
        work, pairs = work_of(prefix, tile, 0, lengths), lengths.astype(np.float64) * (lengths + 1) / 2
        mean = float(work.sum()) / num_ranks
        most = max(grid, int(capacity.max()) // grid * grid)
        fewest = max(grid, most // FEWEST // grid * grid)
        is_long = (work * short > mean) | (lengths > most)
        long, whole = np.flatnonzero(is_long), np.flatnonzero(~is_long)

        best_rows = float(np.sqrt(pairs.sum() / num_ranks * shape.kv_bytes / shape.query_bytes))
        rows = np.clip((np.array(ROWS) * best_rows).astype(np.int64) // grid * grid, fewest, most)
        cuts = sorted(set(product(*rows.tolist())))
        sizes = np.array([tile, grid, rows.min()])
        speeds = Speeds.of(config, num_ranks)
        speed = np.array([float(value) for value in speeds.values])[speeds.index]
        per_token = float(work[whole].sum()) / max(1, int(lengths[whole].sum()))
        per_pair = work.sum() / pairs.sum()
        _, unit, _ = node_prices(config, num_ranks)  # of a byte in a node, as in the bytes of plans
        row_bytes = unit * shape.query_bytes, unit * shape.kv_bytes
        prices = np.array([*row_bytes, per_pair, per_token, 0.0, 0.0, *of_prices])
        size = int((lengths[long] // sizes[LEAST_CHUNK] + 3).sum()) + num_ranks
        self._state = make_state(size, (1 + config.tolerance) * mean * speed, speed, prefix, sizes, prices)
        self._layout, self._capacity = layout, capacity
        self._short = whole[np.argsort(-lengths[whole], kind="stable")]
        self._long, self._most_work = long, MOST_WORK * mean
        self._tries = int(MOVES * (num_ranks / 64) ** (0.25 if num_ranks > 64 else 0.6))
        _, shortest, longest = min((self._assign_long(*pair), *pair) for pair in cuts)
        self._assign_long(shortest, longest)
        self._initial = Assignment(self._state.ints.copy(), self._state.reals.copy(), self._state.prices.copy())

    def find(self, seed: int) -> TokenLayout:
        """Return the layout found with the pseudo-random numbers of ``seed``."""
        layout, state, first = self._layout, self._state, self._layout.num_ranks
        state.ints[:], state.reals[:], state.prices[:] = self._initial
        num_chunks = int(state.ints[-1, COUNT]) - first
        if num_chunks > 1:
            improve(state, RISE / num_chunks, self._tries, np.array([seed]))
        lengths, home = layout.doc_lengths[self._short], np.empty_like(self._short)
        load = state.reals[:first, LOAD] - state.prices[PER_TOKEN] * state.ints[:first, CAPACITY]
        assign_short(state, lengths, home, np.empty_like(self._capacity), load / state.speed)
        chunks = state.ints[first : state.ints[-1, COUNT]]
        short = {RANK: home, CHUNK_DOC: self._short, START: np.zeros_like(home), LENGTH: lengths}
        rank, doc, start, length = (np.append(chunks[:, column], values) for column, values in short.items())
        used, loose = rank >= 0, (rank < 0) & (length > 0)
        segments = np.stack([rank, doc, start, length])[:, used]
        if loose.any():
            source, gap, begin, end = end_to_end(length[loose], state.ints[:first, CAPACITY])
            rest = np.stack([gap, doc[loose][source], start[loose][source] + begin, end - begin])
            segments = np.concatenate([segments, rest], axis=1)
        rank, doc, start, length = _joined(segments)
        # Sorted and whole: ``TokenLayout.from_arrays`` would only check it.
        return TokenLayout(first, rank, layout.docs[doc], start, length, np.ones(len(rank), dtype=bool))

    def _assign_long(self, shortest: int, longest: int) -> float:
        """Assign long documents in chunks of ``shortest`` to ``longest`` tokens, and return the objective."""
        state, lengths = self._state, self._layout.doc_lengths[self._long]
        cut_long(state, self._capacity, self._long, lengths, self._most_work, shortest, longest)
        time = state.reals[: len(self._capacity), LOAD] / state.speed
        return begin_search(state, by_work(state), np.empty_like(self._capacity), time)


def _joined(segments: IntArray) -> IntArray:
    """Sort segments [4, n] by rank, document and start, and join those that touch."""
    rank, doc, start, length = segments = segments[:, np.lexsort((segments[2], segments[1], segments[0]))]
    joins = np.zeros(len(rank), dtype=bool)
    joins[1:] = (rank[1:] == rank[:-1]) & (doc[1:] == doc[:-1]) & (start[1:] == (start + length)[:-1])
    first = np.flatnonzero(~joins)
    return np.stack([rank[first], doc[first], start[first], np.add.reduceat(length, first)])
