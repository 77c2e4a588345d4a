# SPDX-License-Identifier: BSD-3-Clause
"""Layouts of a batch's microbatches over the ranks of a CAD group.

Documents are given by where they begin: per data-parallel rank the ascending flat positions (row * S + column) in its
batch of rows of S tokens; every row begins one.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.model.layout import TokenLayout, stack


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


def group_layout(
    starts: Sequence[np.ndarray], shape: BatchShape, microbatch: int, cp: int
) -> TokenLayout:
    """Lay out one microbatch over a CAD group of len(starts) data-parallel times ``cp`` context-parallel ranks.

    Every row is cut into ``cp`` contiguous slices; a rank's tokens are its slices of the rows, one row after another.
    Documents are numbered over the whole batch.

    Args:
        starts: per data-parallel rank, where the documents of its batch begin.
    """
    first = microbatch * shape.rows_per_microbatch * shape.seq_len
    last = first + shape.rows_per_microbatch * shape.seq_len
    slice_len = shape.seq_len // cp
    ranks = []
    docs = []
    begins = []
    lengths = []
    next_doc = 0
    for dp_rank, all_starts in enumerate(starts):
        before, after = np.searchsorted(all_starts, (first, last))
        doc_starts = all_starts[before:after]
        # Documents never cross rows, slices never cross rows: cutting at both gives the segments in token order.
        cuts = np.union1d(doc_starts, np.arange(first, last, slice_len))
        doc = np.searchsorted(doc_starts, cuts, side="right") - 1
        ranks.append(dp_rank * cp + cuts % shape.seq_len // slice_len)
        docs.append(next_doc + before + doc)
        begins.append(cuts - doc_starts[doc])
        lengths.append(np.diff(cuts, append=last))
        next_doc += len(all_starts)
    columns = (np.concatenate(column) for column in (ranks, docs, begins, lengths))
    return TokenLayout.from_arrays(len(starts) * cp, *columns)


def nano_layouts(
    starts: Sequence[np.ndarray],
    shape: BatchShape,
    microbatch: int,
    cp: int,
    nano_batches: int,
) -> list[TokenLayout]:
    """Lay out a microbatch's nano-batches: one, or two (see ``divides_by_row``).

    Later parts of rows attend to the earlier ones too. Their layout therefore holds all tokens of the
    microbatch, those of the earlier nano-batches first and as keys only. Arguments as for ``group_layout``.
    """
    if nano_batches == 1:
        return [group_layout(starts, shape, microbatch, cp)]
    if divides_by_row(shape.rows_per_microbatch):
        divided = dataclasses.replace(
            shape, rows_per_microbatch=shape.rows_per_microbatch // 2
        )
        return [
            group_layout(starts, divided, 2 * microbatch + nano, cp)
            for nano in range(2)
        ]
    # As over twice as many ranks, of which r and cp + r are one: see integration/loading/documents.py.
    sliced = group_layout(starts, shape, microbatch, 2 * cp)
    doc = sliced.seg_doc
    start = sliced.seg_start
    length = sliced.seg_length
    dp_rank, part = np.divmod(sliced.seg_rank, 2 * cp)
    rank = dp_rank * cp + part % cp
    later = part >= cp
    num_ranks = len(starts) * cp
    first = ~later
    earlier = TokenLayout.from_arrays(
        num_ranks, rank[first], doc[first], start[first], length[first]
    )
    return [
        earlier,
        TokenLayout.from_arrays(num_ranks, rank, doc, start, length, attends=later),
    ]


def step_layouts(
    starts: Sequence[np.ndarray],
    shapes: Sequence[BatchShape],
    cp: int,
    nano_batches: int,
) -> list[list[TokenLayout]]:
    """Return the ``nano_layouts`` of every microbatch, for batches whose ``shapes`` may differ between ranks.

    Args:
        starts, shapes: per data-parallel rank; all batches have as many microbatches.
    """
    microbatches = range(shapes[0].microbatches)
    if all(shape == shapes[0] for shape in shapes):
        return [
            nano_layouts(starts, shapes[0], number, cp, nano_batches)
            for number in microbatches
        ]
    firsts = np.cumsum([0, *(len(own) for own in starts[:-1])])
    layouts = []
    for number in microbatches:
        alone = [
            nano_layouts([own], shape, number, cp, nano_batches)
            for own, shape in zip(starts, shapes, strict=True)
        ]
        layouts.append(
            [_side_by_side(parts, firsts, cp) for parts in zip(*alone, strict=True)]
        )
    return layouts


def _side_by_side(
    layouts: Sequence[TokenLayout], firsts: np.ndarray, num_ranks: int
) -> TokenLayout:
    """Join layouts of ``num_ranks`` ranks each into one, in which their documents count from ``firsts``."""
    columns = [
        (
            part.seg_rank + place * num_ranks,
            part.seg_doc + first,
            part.seg_start,
            part.seg_length,
            part.seg_attends,
        )
        for place, (part, first) in enumerate(zip(layouts, firsts, strict=True))
    ]
    return TokenLayout.from_arrays(
        len(layouts) * num_ranks, *map(np.concatenate, zip(*columns, strict=True))
    )


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
