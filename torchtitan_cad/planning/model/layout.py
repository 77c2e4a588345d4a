# SPDX-License-Identifier: BSD-3-Clause
"""Layouts: the tokens that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning.intervals import (
    BoolArray,
    IntArray,
    begins_group,
    exclusive_cumsum,
    sum_by_index,
)
from torchtitan_cad.planning.text import brief, is_integer

Segment = tuple[int, int, int]

WIDEST = 2**62
"""bound on the absolute numbers of a segment, so that int64 holds the sum of two"""

MAX_TOKENS = 2**31
"""tokens: maximum of a layout; int64 holds all pairs of one document of this length."""

MAX_RANKS = 2**16
"""ranks: maximum of a layout, some 16 times the largest context-parallel groups in use."""


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The tokens of a batch and their home ranks. Build it with :meth:`from_segments` or :meth:`from_arrays`.

    A *run* is a segment that holds tokens. Tokens also have a *global position*: documents laid end to end in order
    of their ids, so that position p of document ``docs[i]`` is ``doc_offsets[i] + p``. Runs tile the global positions
    exactly, and sorting by global position is sorting by (document, position).

    A layout has at most ``MAX_TOKENS`` = 2^31 tokens and ``MAX_RANKS`` = 2^16 ranks.

    A layout may leave queries out: the tokens of some runs are keys only, as when the earlier nano-batch of every
    document has attended already. A plan then covers the pairs of the remaining queries (``seg_attends``) with all
    their keys.

    Attributes (int64, but ``seg_attends``):
        num_ranks: ranks, including those without tokens.
        seg_rank, seg_doc, seg_start, seg_length: [S] the runs in layout order: by rank, then in token order.
        seg_attends: bool [S] whether the run's tokens are queries too.
    """

    num_ranks: int
    seg_rank: IntArray
    seg_doc: IntArray
    seg_start: IntArray
    seg_length: IntArray
    seg_attends: BoolArray

    @classmethod
    def from_segments(
        cls, ranks: Sequence[Iterable[Segment]], attends: Sequence[bool] | None = None
    ) -> TokenLayout:
        """Return the layout from one list of (document, start, length) per rank, in the order of the rank's tokens.

        Segments of length 0 hold no token and are dropped. ``attends`` has one entry per segment, one rank after the
        other: True for those that hold queries, by default all.

        Raises:
            ValueError: a segment is malformed, a document has an overlap or a gap or does not start at 0, there are
                no ranks, or more ranks or tokens than a layout may have; the message names the rank and the document.
        """
        per_rank = [list(segments) for segments in ranks]
        for rank, segments in enumerate(per_rank):
            for segment in segments:
                _check_segment(rank, segment)
        counts = [len(segments) for segments in per_rank]
        rank_of = np.repeat(np.arange(len(per_rank)), counts)
        table = np.array([*chain(*per_rank)], dtype=np.int64).reshape(-1, 3)
        return cls.from_arrays(
            len(per_rank), rank_of, table[:, 0], table[:, 1], table[:, 2], attends
        )

    @classmethod
    def from_arrays(
        cls,
        num_ranks: int,
        rank: IntArray,
        doc: IntArray,
        start: IntArray,
        length: IntArray,
        attends: BoolArray | Sequence[bool] | None = None,
    ) -> TokenLayout:
        """Return the layout of segments given as arrays [S]; the segments of a rank keep the order of the arrays.

        ``attends`` tells which segments hold queries, by default all. The arrays must already be of integers or bools.

        Raises:
            ValueError: as :meth:`from_segments`, or for arrays of another type or shape, or a number of ranks outside
                [1, ``MAX_RANKS``].
        """
        if not is_integer(num_ranks, 1, MAX_RANKS):
            raise ValueError(
                f"a layout needs at least one rank and at most {MAX_RANKS}, got {brief(num_ranks)}"
            )
        columns = {"rank": rank, "document": doc, "start": start, "length": length}
        rank, doc, start, length = (
            _integers(name, column) for name, column in columns.items()
        )
        attends = (
            np.ones(rank.shape, dtype=bool) if attends is None else _bools(attends)
        )
        shapes = [column.shape for column in (rank, doc, start, length, attends)]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1:
            raise ValueError(
                f"segment arrays must be one-dimensional and equally long, got {shapes}"
            )
        if len(rank) and (rank.min() < 0 or rank.max() >= num_ranks):
            raise ValueError(
                f"segment ranks must lie in [0, {num_ranks}), got {rank.min()}..{rank.max()}"
            )
        for name, column in (("start", start), ("length", length)):
            _check_range(name, column, rank=rank, doc=doc)
        if (tokens := int(length.sum())) > MAX_TOKENS:
            raise ValueError(
                f"the layout has {tokens} tokens, more than {MAX_TOKENS}: plan fewer tokens at a time"
            )
        order = np.argsort(rank, kind="stable")
        order = order[length[order] > 0]
        layout = cls(
            num_ranks,
            rank[order],
            doc[order],
            start[order],
            length[order],
            attends[order],
        )
        layout._check_documents()
        return layout

    def _check_documents(self) -> None:
        """Raise ValueError unless every document is tiled exactly, from position 0, by its runs."""
        order = self.run_order
        doc = self.seg_doc[order]
        start = self.seg_start[order]
        rank = self.seg_rank[order]
        end = start + self.seg_length[order]
        expected = np.roll(end, 1)
        expected[self._doc_run] = 0
        wrong = np.flatnonzero(start != expected)
        if len(wrong) == 0:
            return
        i = int(wrong[0])
        here = f"document {doc[i]}: segment [{start[i]}, {end[i]}) on rank {rank[i]}"
        if i in self._doc_run:
            raise ValueError(
                f"{here} is its first, but a document starts at position 0 of the layout"
            )
        before = f"segment [{start[i - 1]}, {end[i - 1]}) on rank {rank[i - 1]}"
        problem = "overlaps" if start[i] < expected[i] else "leaves a gap after"
        raise ValueError(f"{here} {problem} {before}; every token has exactly one home")

    @cached_property
    def docs(self) -> IntArray:
        """[D] document ids, ascending."""
        return self.seg_doc[self.run_order[self._doc_run]]

    @cached_property
    def doc_lengths(self) -> IntArray:
        """[D] tokens of each document of :attr:`docs`."""
        return np.diff(self.doc_offsets)

    @cached_property
    def doc_offsets(self) -> IntArray:
        """[D + 1] global position of each document's first token, the number of tokens last."""
        return np.append(self.run_start[self._doc_run], self.seg_length.sum())

    @cached_property
    def tokens_per_rank(self) -> IntArray:
        """[num_ranks] tokens each rank is home to."""
        return sum_by_index(self.seg_rank, self.seg_length, self.num_ranks)

    @cached_property
    def queries_per_rank(self) -> IntArray:
        """[num_ranks] tokens of each rank that are queries."""
        return sum_by_index(self.seg_rank, self._seg_queries, self.num_ranks)

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks."""
        return int(self.doc_offsets[-1])

    @property
    def _seg_queries(self) -> IntArray:
        return np.where(self.seg_attends, self.seg_length, 0)

    def _rows_before(self, seg_rows: IntArray) -> IntArray:
        """[S] rows of the same rank before each run of :attr:`run_start`; in layout order runs have ``seg_rows``."""
        before = exclusive_cumsum(seg_rows)[:-1]
        first_of_rank = np.searchsorted(self.seg_rank, self.seg_rank)
        return (before - before[first_of_rank])[self.run_order]

    @cached_property
    def run_order(self) -> IntArray:
        """[S] permutation that sorts the runs by global position, that is by (document, position)."""
        return np.lexsort((self.seg_start, self.seg_doc))

    @cached_property
    def run_start(self) -> IntArray:
        """[S] global position of each run's first token, ascending; runs in :attr:`run_order`."""
        return exclusive_cumsum(self.seg_length[self.run_order])[:-1]

    @cached_property
    def _doc_run(self) -> IntArray:
        """[D] the first run of each document, as an index into :attr:`run_start`."""
        return np.flatnonzero(begins_group(self.seg_doc[self.run_order]))

    @cached_property
    def run_rank(self) -> IntArray:
        """[S] home of each run of :attr:`run_start`."""
        return self.seg_rank[self.run_order]

    @cached_property
    def run_row(self) -> IntArray:
        """[S] local row, on its home, of the first token of each run of :attr:`run_start`."""
        return self._rows_before(self.seg_length)

    @cached_property
    def run_query_row(self) -> IntArray:
        """[S] like :attr:`run_row`, counting only rows that are queries; meaningless for runs that do not attend."""
        return self._rows_before(self._seg_queries)

    @cached_property
    def run_attends(self) -> BoolArray:
        """[S] True for the runs of :attr:`run_start` that hold queries."""
        return self.seg_attends[self.run_order]

    def doc_index(self, doc: IntArray) -> IntArray:
        """Return each document id's index into :attr:`docs`. Raises ValueError for an id that is not in the layout."""
        index = np.searchsorted(self.docs, doc)
        known = index < len(self.docs)
        known[known] = self.docs[index[known]] == doc[known]
        if not known.all():
            raise ValueError(
                f"document {doc[int(np.argmin(known))]} is not in the layout"
            )
        return index

    def global_position(self, doc: IntArray, position: IntArray) -> IntArray:
        """Return the global position of ``position`` in document ``doc``, both [n]; a document's end is valid, too."""
        return self.doc_offsets[self.doc_index(doc)] + position

    def home_of(self, doc: IntArray, start: IntArray, end: IntArray) -> IntArray:
        """Return [n] the rank that holds tokens [start, end) of document ``doc``, -1 if several do; none is empty."""
        begin = self.global_position(doc, start)
        stop = self.global_position(doc, end)
        first = np.searchsorted(self.run_start, begin, side="right") - 1
        last = np.searchsorted(self.run_start, stop, side="left") - 1
        # The number of changes of home up to a run is equal at both ends of a range with one home.
        changes = np.cumsum(begins_group(self.run_rank))
        has_one = changes[first] == changes[last]
        return np.where(has_one, self.run_rank[first], -1)

    def segments(self) -> list[list[Segment]]:
        """Return one list of (document, start, length) per rank, as :meth:`from_segments` takes them."""
        ranks: list[list[Segment]] = [[] for _ in range(self.num_ranks)]
        columns = (self.seg_rank, self.seg_doc, self.seg_start, self.seg_length)
        for rank, doc, start, length in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            ranks[rank].append((doc, start, length))
        return ranks


def _check_segment(rank: int, segment: Segment) -> None:
    """Raise ValueError unless the segment is three integers."""
    is_row = isinstance(segment, (Sequence, np.ndarray))
    is_triple = is_row and len(segment) == 3
    if is_triple and all(_fits(value) for value in segment):
        return
    raise ValueError(
        f"rank {rank}: a segment is three integers (document, start, length) of 62 bits, got {brief(segment)}"
    )


def _fits(value: object) -> bool:
    """Tell whether the value is an integer of 62 bits."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return False
    return bool(-WIDEST < value < WIDEST)


def _check_range(name: str, column: IntArray, *, rank: IntArray, doc: IntArray) -> None:
    """Raise ValueError unless a column of segments is in [0, ``MAX_TOKENS``]."""
    is_wrong = (column < 0) | (column > MAX_TOKENS)
    if is_wrong.any():
        i = int(np.argmax(is_wrong))
        raise ValueError(
            f"rank {rank[i]}: segment of document {doc[i]} has {name} {column[i]}: give a number from 0 to {MAX_TOKENS}"
        )


def _integers(name: str, column: npt.ArrayLike) -> IntArray:
    """Return the column as int64. Raises ValueError if it is of another type, or has a number that is too large."""
    values = np.asarray(column)
    if values.size == 0:  # of any type: an empty list becomes float64
        return values.astype(np.int64)
    if (
        values.dtype.kind not in "iu"
        or int(values.min()) <= -WIDEST
        or int(values.max()) >= WIDEST
    ):
        raise ValueError(
            f"the {name}s of segments must be integers of 62 bits, got {values.dtype}, {brief(column)}"
        )
    return values.astype(np.int64, copy=False)


def _bools(column: npt.ArrayLike) -> BoolArray:
    values = np.asarray(column)
    if values.size and values.dtype != np.bool_:
        raise ValueError(
            f"attends must be booleans, got {values.dtype}, {brief(column)}"
        )
    return values.astype(np.bool_, copy=False)


def side_by_side(
    tables: Sequence[IntArray], num_ranks: int, first_docs: Sequence[int] | IntArray
) -> TokenLayout:
    """Join segments over ``num_ranks`` ranks each into one layout: ranks one after the other, no document in common.

    Args:
        tables: [5, n] of (rank, document, start, length, attends).
        first_docs: added to the documents of every table.
    """
    shifted = []
    for index, (table, first_doc) in enumerate(zip(tables, first_docs, strict=True)):
        shift = np.array([index * num_ranks, first_doc, 0, 0, 0])
        shifted.append(table + shift[:, np.newaxis])
    rank, doc, start, length, attends = np.concatenate(shifted, axis=1)
    return TokenLayout.from_arrays(
        len(tables) * num_ranks, rank, doc, start, length, attends.astype(bool)
    )


def stack(layouts: Sequence[TokenLayout | None], num_ranks: int) -> TokenLayout:
    """Join layouts of ``num_ranks`` ranks each, see ``side_by_side``.

    None stands for ranks without tokens, such as an idle pipeline stage.
    """
    tables = []
    for layout in layouts:
        if layout is None:
            tables.append(np.zeros((5, 0), dtype=np.int64))
            continue
        columns = (layout.seg_rank, layout.seg_doc, layout.seg_start, layout.seg_length)
        tables.append(np.stack([*columns, layout.seg_attends]))
    num_docs = np.array([table[1].max(initial=-1) + 1 for table in tables])
    return side_by_side(tables, num_ranks, exclusive_cumsum(num_docs)[:-1])
