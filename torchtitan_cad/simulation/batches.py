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


def layouts(rows: Sequence[Sequence[IntArray]], cp: int, nano_batches: int) -> list[TokenLayout]:
    """Lay out a microbatch, or its halves: by rows if these are even, otherwise in the middle of every row.

    Ranks then hold a part of both halves of the sequence, and the later layout has the earlier tokens as keys only.

    Args:
        rows: tokens of the documents of every row, for every group of ``cp`` ranks that share its rows.
    """
    if nano_batches == 1:
        return [_contiguous(rows, cp)]
    half, odd = divmod(len(rows[0]), 2)
    if not odd:
        return [_contiguous([r[:half] for r in rows], cp), _contiguous([r[half:] for r in rows], cp)]
    fine = _contiguous(rows, 2 * cp)
    group, part = np.divmod(fine.seg_rank, 2 * cp)
    rank, later = group * cp + part % cp, part >= cp
    doc, start, length, first = fine.seg_doc, fine.seg_start, fine.seg_length, ~later
    return [
        TokenLayout.from_arrays(len(rows) * cp, rank[first], doc[first], start[first], length[first]),
        TokenLayout.from_arrays(len(rows) * cp, rank, doc, start, length, attends=later),
    ]


def _contiguous(rows: Sequence[Sequence[IntArray]], cp: int) -> TokenLayout:
    """Every row cut into ``cp`` contiguous slices."""
    columns: list[list[IntArray]] = [[], [], [], []]
    next_doc = 0
    for group, mine in enumerate(rows):
        for lengths in mine:
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
