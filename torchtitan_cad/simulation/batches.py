"""Batches of documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.simulation.inputs import Documents


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents of one step: of every row, int64 tokens of its documents, which add up to ``row_tokens``."""

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
