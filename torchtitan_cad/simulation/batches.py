"""Batches of documents and their layouts over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchtitan_cad.planning import TokenLayout
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.simulation.inputs import Documents


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents of one step.

    Attributes:
        rows: of every row, int64 tokens of its documents; they add up to ``row_tokens``.
    """

    rows: tuple[IntArray, ...]
    row_tokens: int

    @cached_property
    def lengths(self) -> IntArray:
        """int64 tokens of all documents."""
        return np.concatenate(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.rows) * self.row_tokens


def draw_batches(documents: Documents) -> list[Batch]:
    """Return the batches that are given, or draw some by the seed; what a row's end cuts off begins the next row."""
    row = documents.row_tokens
    if documents.given:
        return [Batch(rows, row) for rows in documents.given]
    rng = np.random.default_rng(documents.seed)
    batches = []
    for _ in range(documents.batches):
        ends, last = [], 0
        while last < documents.step_tokens:
            drawn = rng.choice(documents.lengths, size=max(64, documents.step_tokens // 4096))
            ends.append(last + np.cumsum(drawn))
            last = int(ends[-1][-1])
        cuts = np.union1d(np.concatenate(ends), np.arange(row, documents.step_tokens + 1, row))
        cuts = cuts[cuts <= documents.step_tokens]
        lengths, of_row = np.diff(cuts, prepend=0), (cuts - 1) // row
        batches.append(Batch(tuple(np.split(lengths, np.flatnonzero(np.diff(of_row)) + 1)), row))
    return batches


@dataclass(frozen=True)
class Split:
    """Division of a batch into ``microbatches``, each over ``ranks`` of which ``cp`` share a row."""

    microbatches: int
    ranks: int
    cp: int
    rows_per_rank: int
    """Rows of a microbatch that a group of ``cp`` ranks holds."""

    @classmethod
    def of(cls, batch: Batch, ranks: int, microbatches: int, cp: int | None) -> Split | None:
        """Divide a batch over ranks; None if it cannot be; ``cp`` None: as many ranks share a row as have to."""
        tokens, rest = divmod(batch.tokens, ranks * microbatches)
        if rest or not tokens:
            return None
        share = cp or max(1, batch.row_tokens // tokens)
        rows, rest = divmod(tokens * share, batch.row_tokens)
        if rest or not rows or ranks % share or batch.row_tokens % (2 * share):
            return None
        return cls(microbatches, ranks, share, rows)

    def rows(self, batch: Batch, microbatch: int) -> list[list[IntArray]]:
        """List a microbatch's rows, for every group of ``cp`` ranks; a group reads its rows one after the other."""
        per_group = self.rows_per_rank * self.microbatches
        first = microbatch * self.rows_per_rank
        return [
            list(batch.rows[group * per_group + first : group * per_group + first + self.rows_per_rank])
            for group in range(self.ranks // self.cp)
        ]


def layouts(batch: Batch, split: Split, microbatch: int, nano_batches: int) -> list[TokenLayout]:
    """Lay out a microbatch, or its halves: by rows if these are even, otherwise in the middle of every row.

    In the latter case ranks hold a part of both halves of the sequence, and the later half's layout has all tokens, of
    which the earlier ones are keys only.
    """
    rows = split.rows(batch, microbatch)
    if nano_batches == 1:
        return [_contiguous(rows, split.cp)]
    if split.rows_per_rank % 2 == 0:
        half = split.rows_per_rank // 2
        return [_contiguous([r[:half] for r in rows], split.cp), _contiguous([r[half:] for r in rows], split.cp)]
    fine = _contiguous(rows, 2 * split.cp)
    group, part = np.divmod(fine.seg_rank, 2 * split.cp)
    rank, later = group * split.cp + part % split.cp, part >= split.cp
    doc, start, length, first = fine.seg_doc, fine.seg_start, fine.seg_length, ~later
    return [
        TokenLayout.from_arrays(split.ranks, rank[first], doc[first], start[first], length[first]),
        TokenLayout.from_arrays(split.ranks, rank, doc, start, length, attends=later),
    ]


def _contiguous(rows: Sequence[Sequence[IntArray]], cp: int) -> TokenLayout:
    """Every row cut into ``cp`` contiguous slices."""
    columns: list[list[IntArray]] = [[], [], [], []]
    next_doc = 0
    for group, of_group in enumerate(rows):
        for lengths in of_group:
            ends = np.cumsum(lengths)
            slice_tokens = int(ends[-1]) // cp
            cuts = np.union1d(ends, np.arange(slice_tokens, int(ends[-1]) + 1, slice_tokens))
            begin = np.append(0, cuts[:-1])
            doc = np.searchsorted(ends, begin, side="right")
            found = (group * cp + begin // slice_tokens, next_doc + doc, begin - (ends - lengths)[doc], cuts - begin)
            for column, values in zip(columns, found, strict=True):
                column.append(values)
            next_doc += len(lengths)
    rank, document, start, length = map(np.concatenate, columns)
    return TokenLayout.from_arrays(len(rows) * cp, rank, document, start, length)
