# SPDX-License-Identifier: BSD-3-Clause
"""Layouts of a batch's microbatches over the ranks of a CAD group.

Documents are given by where they begin: per data-parallel rank the ascending flat positions (row * S + column) in its
batch of rows of S tokens; every row begins one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, exclusive_cumsum
from torchtitan_cad.planning.model.layout import TokenLayout, side_by_side, stack


@dataclass(frozen=True)
class BatchShape:
    """Rows, tokens per row, and rows that go through the model together (fewer than rows under pipelining)."""

    rows: int
    seq_len: int
    rows_per_microbatch: int

    @property
    def microbatches(self) -> int:
        """Microbatches that the rows of one batch make."""
        return self.rows // self.rows_per_microbatch


def divides_by_row(rows: int) -> bool:
    """Tell whether ``nano_batches = 2`` divides by rows: an even number; it cuts rows of an odd one in the middle."""
    return rows % 2 == 0


def _segments(
    starts: IntArray, shape: BatchShape, microbatch: int, slices: int
) -> IntArray:
    """Return [5, n] (slice, document, start, length, 1) of a microbatch's segments in token order.

    Every row is cut into contiguous ``slices``; documents are numbered over the whole batch, where they begin at
    ``starts``.
    """
    tokens = shape.rows_per_microbatch * shape.seq_len
    first = microbatch * tokens
    last = first + tokens
    slice_len = shape.seq_len // slices
    is_inside = (starts >= first) & (starts < last)
    # Documents never cross rows, slices never cross rows: cutting at both gives the segments.
    cuts = np.union1d(starts[is_inside], np.arange(first, last, slice_len))
    doc = np.searchsorted(starts, cuts, side="right") - 1
    return np.stack(
        [
            cuts % shape.seq_len // slice_len,
            doc,
            cuts - starts[doc],
            np.diff(cuts, append=last),
            np.ones_like(cuts),
        ]
    )


def _nano_tables(
    starts: IntArray, shape: BatchShape, microbatch: int, cp: int, nano_batches: int
) -> list[IntArray]:
    """Return a data-parallel rank's part of ``nano_layouts``, as tables for ``side_by_side``."""
    if nano_batches == 1:
        return [_segments(starts, shape, microbatch, cp)]
    rows = shape.rows_per_microbatch
    if divides_by_row(rows):
        divided = replace(shape, rows_per_microbatch=rows // 2)
        numbers = (2 * microbatch, 2 * microbatch + 1)
        return [_segments(starts, divided, number, cp) for number in numbers]
    # As over twice as many ranks, of which r and cp + r are one: see integration/loading/documents.py.
    both = _segments(starts, shape, microbatch, 2 * cp)
    both = both[:, np.argsort(both[0], kind="stable")]
    is_later = both[0] >= cp
    both[0] %= cp
    earlier = both[:, ~is_later]
    both[-1] = is_later
    return [earlier, both]


def nano_layouts(
    starts: Sequence[IntArray],
    shapes: Sequence[BatchShape],
    microbatch: int,
    cp: int,
    nano_batches: int,
) -> list[TokenLayout]:
    """Lay out a microbatch's nano-batches: one, or two (see ``divides_by_row``).

    They lie over a CAD group of len(starts) data-parallel times ``cp`` context-parallel ranks. Every row is cut into
    ``cp`` contiguous slices; a rank's tokens are its slices of the rows, one row after another. Documents are numbered
    over the whole batch.

    Later parts of rows attend to the earlier ones too. Their layout therefore holds all tokens of the
    microbatch, those of the earlier nano-batches first and as keys only.

    Args:
        starts, shapes: per data-parallel rank, where the documents of its batch begin, and its shape.
    """
    of_ranks = [
        _nano_tables(own, shape, microbatch, cp, nano_batches)
        for own, shape in zip(starts, shapes, strict=True)
    ]
    first_docs = exclusive_cumsum(np.array([len(own) for own in starts]))[:-1]
    return [
        side_by_side(tables, cp, first_docs) for tables in zip(*of_ranks, strict=True)
    ]


def step_layouts(
    starts: Sequence[IntArray],
    shapes: Sequence[BatchShape],
    cp: int,
    nano_batches: int,
) -> list[list[TokenLayout]]:
    """Return the ``nano_layouts`` of every microbatch; all batches have as many microbatches."""
    return [
        nano_layouts(starts, shapes, number, cp, nano_batches)
        for number in range(shapes[0].microbatches)
    ]


def slots_of_nano_batches(
    shape: BatchShape, microbatch: int, cp: int, nano_batches: int
) -> list[np.ndarray]:
    """Find the tokens of ``nano_layouts`` in a data-parallel rank's batch, for layouts that hold all between them.

    Returns:
        Per layout [cp, tokens]: flat positions (row * S + column) of each context-parallel rank's tokens, in its order.
        Rows divided in the middle have one layout, the later nano-batch's, which holds the earlier nano-batch's tokens,
        too.
    """
    rows = np.arange(shape.rows_per_microbatch * shape.seq_len).reshape(
        shape.rows_per_microbatch, -1
    )
    rows += microbatch * rows.size
    if nano_batches == 2 and not divides_by_row(len(rows)):
        return [
            rows.reshape(len(rows), 2, cp, -1).transpose(2, 1, 0, 3).reshape(cp, -1)
        ]
    parts = rows.reshape(nano_batches, -1, cp, shape.seq_len // cp)
    return [part.swapaxes(0, 1).reshape(cp, -1) for part in parts]


def pool_layouts(
    layouts: Sequence[Sequence[TokenLayout]],
    microbatches: Sequence[int | None],
    per_stage: int,
) -> list[TokenLayout]:
    """Lay out what the ranks of a pipeline attend to together, one layout per nano-batch, stages slowest.

    Args:
        layouts: of every microbatch, those of its nano-batches, over the ``per_stage`` ranks of a stage.
        microbatches: per pipeline rank; None for ranks without tokens.
    """
    return [
        stack(
            [
                None if number is None else layouts[number][nano]
                for number in microbatches
            ],
            per_stage,
        )
        for nano in range(len(layouts[0]))
    ]
