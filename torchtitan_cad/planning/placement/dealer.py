"""Deals the tokens of a layout: turns it into what the search takes, and chunks and short documents into a layout."""

from __future__ import annotations

from itertools import product

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray, exclusive_cumsum, split_at
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import Speeds
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.chunks import Chunks, Ranks, make_state
from torchtitan_cad.planning.placement.moves import Dealing, Documents
from torchtitan_cad.planning.placement.scratch import make_scratch
from torchtitan_cad.planning.placement.search import search

WORK = (0.7, 1.1)
"""Work of a chunk over the mean rank's, at most."""

LEAST_ROWS = (0.5, 0.75, 1.0, 1.25, 2.0)
"""Tokens of a chunk, at least, over those of the best rectangle of a rank's mean work."""

MOST_ROWS = (1.0, 1.5, 10.0)
"""The same, at most."""

FEWEST = 8
"""A chunk has at least one part in so many of the tokens of a rank."""

FEW = 16
"""Ranks up to which they are few: estimates are coarse, and plans are quickly made."""

CHOICES, DEALINGS, MOVES = 24, 48, 24_000
"""Choices tried, dealings with one document cut otherwise, and moves."""

FEWER_DEALINGS = 512
"""On r ranks above this, choices and dealings count sqrt(FEWER_DEALINGS / r) times."""

MORE_MOVES = 64
"""On r ranks above this, moves count (r / MORE_MOVES) ** (1 / 4) times."""

ALL_MOVES = 8
"""On r ranks below this, moves count r / ALL_MOVES times."""

FEWEST_CHOICES = 6
"""Choices tried, however many the ranks."""

SHARE = 0.96
"""Bytes of all ranks over those of the given homes, both as estimated, at most, where ranks are many."""

SHORTS = (4, 20)
"""Documents of less work than this part of the mean rank's are not cut, but to fill the last room. The second counts
where no dealing by the first is better than the given homes."""

WORST_WEIGHT = 0.5
"""Weight of the worst rank's bytes, relative to the least seen, against the total, likewise; on r ranks above
``MORE_MOVES`` sqrt(r / MORE_MOVES) times that."""


class Dealer:
    """Deals the tokens of a layout, as often as asked. Nodes are left to the plan."""

    def __init__(
        self, layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel, short: int = SHORTS[0]
    ) -> None:
        num_ranks, tile, grid = layout.num_ranks, cost.granularity, config.min_shard
        lengths, room = layout.doc_lengths, layout.tokens_per_rank
        prefix = cost.prefix_cost(int(lengths.max())).astype(np.float64)
        work, pairs = prefix[-(-lengths // tile)], lengths.astype(np.float64) * (lengths + 1) / 2
        mean, few = float(work.sum()) / num_ranks, num_ranks <= FEW
        speeds = Speeds.of(config, num_ranks)
        speed = np.array([float(value) for value in speeds.values])[speeds.index]
        ranks = Ranks(room, (1 + config.tolerance) * mean * speed, speed)
        # On few ranks short documents rather balance what chunks leave uneven, and so they must where speeds differ.
        self._evenly = not few and bool((speed == speed[0]).all())
        most = max(grid, int(room.max()) // grid * grid)
        fewest = max(grid, most // FEWEST // grid * grid)
        best_rows = float(np.sqrt(pairs.sum() / num_ranks * shape.kv_bytes / shape.query_bytes))
        fewer = float(np.sqrt(FEWER_DEALINGS / max(FEWER_DEALINGS, num_ranks)))
        more = float(np.sqrt(max(MORE_MOVES, num_ranks) / MORE_MOVES))
        moves = MOVES * np.sqrt(more) * min(1.0, num_ranks / ALL_MOVES)
        self._tries = np.array([int(fewer * DEALINGS), int(moves)], dtype=np.int64)
        self._choices = _choices(mean, best_rows, fewest, most, grid, max(FEWEST_CHOICES, int(fewer * CHOICES)))
        is_long = (work * short > mean) | (lengths > most)
        whole = np.flatnonzero(~is_long)
        documents = Documents(
            np.ascontiguousarray(lengths),
            layout.doc_offsets.astype(np.float64),
            np.flatnonzero(is_long),
            whole[np.argsort(-lengths[whole], kind="stable")],
            prefix,
            np.array([tile, grid, fewest, most]),
            np.array([float(work[whole].sum()) / max(1, int(lengths[whole].sum()))]),
        )
        self._layout, self._share = layout, np.inf if few else SHARE
        self._given, self._load = _given_chunks(layout, is_long, prefix, tile)
        size = max(int((lengths[is_long] // fewest + 3).sum()) + num_ranks, len(self._given.doc))
        prices = np.array([shape.query_bytes, shape.kv_bytes, work.sum() / pairs.sum()], dtype=np.float64)
        scratch = make_scratch(num_ranks, size)
        self._dealing = Dealing(
            documents, ranks, make_state(num_ranks), Chunks(*_tables(size, "iiifi")), scratch, prices
        )
        self._weights = np.array([1.0, WORST_WEIGHT * more, np.inf])
        count, self._home = self._search(0, 0)
        self._begun = self._copy(count)

    def deal(self, seed: int) -> TokenLayout:
        """Return the best layout found with these pseudo-random numbers."""
        count, home = len(self._begun.doc), self._home
        if count:
            for column, begun in zip(self._dealing.chunks, self._begun, strict=True):
                column[:count] = begun
            count, home = self._search(count, seed)
        return self._build(self._copy(count), home)

    def _search(self, num_before: int, seed: int) -> tuple[int, IntArray]:
        """Begin, or go on from so many chunks; returns how many there are, and the ranks of short documents."""
        home = np.full(len(self._dealing.documents.lengths), -2)
        aims = self._given, self._load, float(self._share), self._weights, self._tries
        count = search(self._dealing, self._choices, *aims, num_before, self._evenly, np.array([seed]), home)
        return count, home

    def _copy(self, count: int) -> Chunks:
        return Chunks(*[column[:count].copy() for column in self._dealing.chunks])  # type: ignore[arg-type]

    def _build(self, chunks: Chunks, home: IntArray) -> TokenLayout:
        """Return a layout of the chunks and the short documents; what found no rank fills the gaps."""
        whole, loose = np.flatnonzero(home >= 0), np.flatnonzero(home == -1)
        doc, start, length, _, rank = chunks
        dealt, undealt = rank >= 0, (rank < 0) & (length > 0)
        lengths = self._dealing.documents.lengths
        parts = [
            np.stack([rank[dealt], doc[dealt], start[dealt], length[dealt]]),
            np.stack([home[whole], whole, np.zeros_like(whole), lengths[whole]]),
            self._fill_gaps(
                np.append(doc[undealt], loose),
                np.append(start[undealt], np.zeros_like(loose)),
                np.append(length[undealt], lengths[loose]),
            ),
        ]
        rank, doc, start, length = _sorted(np.concatenate(parts, axis=1))
        joins = np.zeros(len(rank), dtype=bool)
        joins[1:] = (rank[1:] == rank[:-1]) & (doc[1:] == doc[:-1]) & (start[1:] == (start + length)[:-1])
        first = np.flatnonzero(~joins)
        columns = rank[first], self._layout.docs[doc[first]], start[first], np.add.reduceat(length, first)
        return TokenLayout.from_arrays(self._layout.num_ranks, *columns)

    def _fill_gaps(self, doc: IntArray, start: IntArray, length: IntArray) -> IntArray:
        """Fill the remaining room with the remaining tokens, end to end; [4, n] rank, document, start, length."""
        if not len(doc):
            return np.empty((4, 0), dtype=np.int64)
        left = self._dealing.state.left
        gaps = np.flatnonzero(left)
        begin = exclusive_cumsum(length)
        source, gap, first, end = split_at(begin[:-1], begin[1:], exclusive_cumsum(left[gaps])[:-1])
        return np.stack([gaps[gap], doc[source], start[source] + first - begin[source], end - first])


def _sorted(parts: IntArray) -> IntArray:
    """Sort parts [4, n] by rank, document and start."""
    return parts[:, np.lexsort((parts[2], parts[1], parts[0]))]


def _given_chunks(layout: TokenLayout, is_long: np.ndarray, prefix: FloatArray, tile: int) -> tuple[Chunks, FloatArray]:
    """Return what the given homes have of documents that are long or on several ranks, and [num_ranks] their work."""
    order = layout.run_order
    start, length, rank = (column[order] for column in (layout.seg_start, layout.seg_length, layout.seg_rank))
    doc = layout.doc_index(layout.seg_doc[order])
    work = prefix[-(-(start + length) // tile)] - prefix[start // tile]
    cut = (is_long | (np.bincount(doc) > 1))[doc]
    chunks = Chunks(doc[cut], start[cut], length[cut], work[cut], rank[cut])
    return chunks, np.bincount(rank, work, layout.num_ranks).astype(np.float64)


def _tables(size: int, kinds: str) -> list[np.ndarray]:
    """Arrays [size], of int64 for every i, of float64 for every f."""
    return [np.empty(size, dtype=np.int64 if kind == "i" else np.float64) for kind in kinds]


def _choices(mean: float, best_rows: float, fewest: int, most: int, grid: int, count: int) -> FloatArray:
    """[n, 3], at most ``count``: work of a chunk, at most, and its tokens, at least and at most."""
    choices = set()
    for work, least, longest in product(WORK, LEAST_ROWS, MOST_ROWS):
        if least <= longest:
            lower = min(most, max(fewest, int(least * best_rows) // grid * grid))
            choices.add((work * mean, lower, min(most, max(lower, int(longest * best_rows) // grid * grid))))
    every = np.array(sorted(choices), dtype=np.float64)
    return every[np.linspace(0, len(every) - 1, min(count, len(every))).astype(np.int64)]
