"""Deals the tokens of a layout: turns it into what the search takes, and chunks and short documents into a layout."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.exchange.traffic import node_of_ranks
from torchtitan_cad.planning.intervals import FloatArray, IntArray, exclusive_cumsum, split_at
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import Speeds
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.dealing import Chunks, Ranks, make_state
from torchtitan_cad.planning.placement.scratch import make_scratch
from torchtitan_cad.planning.placement.search import Documents, SearchOptions, search

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

FEW_FACTOR = 3
"""On up to ``FEW`` ranks, dealings and moves count so many times."""

FEWER_DEALINGS = 512
"""On r ranks above this, choices and dealings count sqrt(FEWER_DEALINGS / r) times."""

MORE_MOVES = 64
"""On r ranks above this, moves count sqrt(r / MORE_MOVES) times."""

ALL_MOVES = 8
"""On r ranks below this, moves and changes count r / ALL_MOVES times."""

CHANGE_MOVES = 3000
"""Moves tried for a change."""

FEWEST_CHOICES = 6
"""Choices tried, however many the ranks."""

SHARE = 0.96
"""Bytes of all ranks over those of the given homes, both as estimated, at most, where ranks are many."""


class Aim(NamedTuple):
    """What to deal for."""

    short: int
    """Documents of less work than one part in so many of the mean rank's are not cut, but to fill the last room."""
    weight: float
    """Of the worst rank's bytes, relative to the best seen, over that of the bytes of all."""
    parts: float = 0.0
    """Weight of what work comes to that fills no rank's room, see ``estimate.py``."""


class Dealer:
    """Deals the tokens of a layout, as often as asked."""

    def __init__(
        self, layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel, aim: Aim
    ) -> None:
        num_ranks, tile, grid = layout.num_ranks, cost.granularity, config.min_shard
        lengths, room = layout.doc_lengths, layout.tokens_per_rank
        prefix = cost.prefix_cost(int(lengths.max())).astype(np.float64)
        work, pairs = prefix[-(-lengths // tile)], lengths.astype(np.float64) * (lengths + 1) / 2
        mean = float(work.sum()) / num_ranks
        speeds = Speeds.of(config, num_ranks)
        speed = np.array([float(value) for value in speeds.values])[speeds.index]
        self._layout, self._weight = layout, aim.weight
        self._ranks = Ranks(room, (1 + config.tolerance) * mean * speed, speed, node_of_ranks(config, num_ranks))
        few, per_pair = num_ranks <= FEW, work.sum() / pairs.sum()
        # On few ranks short documents rather balance what chunks leave uneven, and so they must where speeds differ.
        self._evenly = not few and bool((speed == speed[0]).all())
        self._prices = np.array([shape.query_bytes, shape.kv_bytes, per_pair, aim.parts], dtype=np.float64)
        most = max(grid, int(room.max()) // grid * grid)
        fewest = max(grid, most // FEWEST // grid * grid)
        best_rows = float(np.sqrt(pairs.sum() / num_ranks * shape.kv_bytes / shape.query_bytes))
        fewer = float(np.sqrt(FEWER_DEALINGS / max(FEWER_DEALINGS, num_ranks)))
        most_choices, dealings = int(fewer * CHOICES), int(fewer * DEALINGS)
        moves = int(MOVES * np.sqrt(max(MORE_MOVES, num_ranks) / MORE_MOVES))
        dealings, moves = (FEW_FACTOR * each if few else each for each in (dealings, moves))
        self.part_of_moves = min(1.0, num_ranks / ALL_MOVES)
        self._tries = np.array([dealings, int(self.part_of_moves * moves)], dtype=np.int64)
        self._choices = _choices(mean, best_rows, fewest, most, grid, max(FEWEST_CHOICES, most_choices))
        is_long = (work * aim.short > mean) | (lengths > most)
        whole = np.flatnonzero(~is_long)
        self._density = float(work[whole].sum()) / max(1, int(lengths[whole].sum()))
        self._documents = Documents(
            np.ascontiguousarray(lengths),
            layout.doc_offsets.astype(np.float64),
            np.flatnonzero(is_long),
            whole[np.argsort(-lengths[whole], kind="stable")],
            prefix,
            np.array([tile, grid, fewest, most]),
        )
        self._given, self._load = _given_chunks(layout, is_long, prefix, tile)
        chunks = max(int((lengths[is_long] // fewest + 3).sum()) + num_ranks, len(self._given.doc))
        self._chunks = Chunks(*_tables(chunks, "iiifi"))
        self._weights = np.zeros(3)
        self._state = make_state(num_ranks)
        self._scratch = make_scratch(num_ranks, chunks)

    def deal(self, by_node: bool, seed: int = 0, before: Chunks | None = None) -> tuple[TokenLayout, Chunks]:
        """Return the best layout found, and its chunks.

        With ``by_node`` documents stay in one node where they can. With chunks that the same dealer dealt ``before``
        these are changed by a few moves.
        """
        num_before, tries = 0, self._tries
        if before is not None:
            num_before, tries = len(before.doc), np.array([0, int(self.part_of_moves * CHANGE_MOVES)])
            for column, had in zip(self._chunks, before, strict=True):
                column[:num_before] = had
        ranks = self._ranks if by_node else self._ranks._replace(node=np.zeros_like(self._ranks.node))
        share = np.inf if len(ranks.room) <= FEW else SHARE
        given, how = (self._given, self._load), (self._choices, self._density, self._evenly, self._prices)
        random = np.array([seed])
        options = SearchOptions(*how, float(self._weight), share, *given, tries, self._weights, num_before, random)
        count, home = search(self._documents, options, ranks, self._state, self._chunks, self._scratch)
        doc, start, length, rank = (
            column[:count] for column in (self._chunks.doc, self._chunks.start, self._chunks.length, self._chunks.rank)
        )
        whole, loose = np.flatnonzero(home >= 0), np.flatnonzero(home == -1)
        dealt, undealt = rank >= 0, (rank < 0) & (length > 0)
        lengths = self._documents.lengths
        parts = [
            np.stack([rank[dealt], doc[dealt], start[dealt], length[dealt]]),
            np.stack([home[whole], whole, np.zeros_like(whole), lengths[whole]]),
            self._fill_gaps(
                np.append(doc[undealt], loose),
                np.append(start[undealt], np.zeros_like(loose)),
                np.append(length[undealt], lengths[loose]),
            ),
        ]
        chunks = Chunks(doc.copy(), start.copy(), length.copy(), self._chunks.work[:count].copy(), rank.copy())
        return self._build(np.concatenate(parts, axis=1)), chunks

    def _fill_gaps(self, doc: IntArray, start: IntArray, length: IntArray) -> IntArray:
        """Fill the remaining room with the remaining tokens, end to end; [4, n] rank, document, start, length."""
        if not len(doc):
            return np.empty((4, 0), dtype=np.int64)
        gaps = np.flatnonzero(self._state.left)
        begin = exclusive_cumsum(length)
        source, gap, first, end = split_at(begin[:-1], begin[1:], exclusive_cumsum(self._state.left[gaps])[:-1])
        return np.stack([gaps[gap], doc[source], start[source] + first - begin[source], end - first])

    def _build(self, parts: IntArray) -> TokenLayout:
        """Return a layout of parts [4, n], neighbours joined."""
        rank, doc, start, length = parts[:, np.lexsort((parts[2], parts[1], parts[0]))]
        joins = np.zeros(len(rank), dtype=bool)
        joins[1:] = (rank[1:] == rank[:-1]) & (doc[1:] == doc[:-1]) & (start[1:] == (start + length)[:-1])
        first = np.flatnonzero(~joins)
        columns = rank[first], self._layout.docs[doc[first]], start[first], np.add.reduceat(length, first)
        return TokenLayout.from_arrays(self._layout.num_ranks, *columns)


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
