# SPDX-License-Identifier: BSD-3-Clause
"""Kinds of attention: the layers of a model that attend in the same way, with one plan per batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, concat_ranges, exclusive_cumsum
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import MAX_TOKENS, TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.text import brief, is_integer, is_number


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention of a model.

    Attributes:
        name: "full": causal within documents. "chunked": within the fixed blocks of documents, too. "window": to the
            ``shape.window`` last keys.
        layers: of the whole model.
        block: columns of the row that documents were loaded in, at every multiple of which chunked attention cuts them.
        scale: factor on the scores; None: 1 / sqrt(head_dim).

    Raises:
        ValueError: a number that is not positive, or a name that does not fit ``block`` and ``shape.window``.
    """

    name: Literal["full", "chunked", "window"]
    layers: int
    shape: AttentionShape
    block: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for key, value in (("layers", self.layers), ("block", self.block)):
            if not is_integer(value, 1, MAX_TOKENS) and not (
                key == "block" and value is None
            ):
                raise ValueError(f"kind.{key} = {brief(value)}: set a positive integer")
        if self.scale is not None and not is_number(self.scale):
            raise ValueError(
                f"kind.scale = {brief(self.scale)}: set a finite number, or None"
            )
        wanted = {
            (False, False): "full",
            (True, False): "chunked",
            (False, True): "window",
        }
        if self.name != wanted.get(
            (self.block is not None, self.shape.window is not None)
        ):
            raise ValueError(
                f"kind.name = {self.name!r} with block = {self.block} and window = {self.shape.window}: set 'chunked' "
                "with a block, 'window' with a window, 'full' with neither"
            )

    @property
    def score_scale(self) -> float:
        """Factor on the scores."""
        return self.shape.head_dim**-0.5 if self.scale is None else self.scale

    def layout(self, layout: TokenLayout, columns: IntArray | None) -> TokenLayout:
        """Return the layout with documents as this kind cuts them; ``columns`` as for ``chunked_layout``."""
        if self.block is None:
            return layout
        if columns is None:
            raise ValueError(
                "columns = None: give the columns at which documents begin, from which chunks are counted"
            )
        return chunked_layout(layout, columns, self.block)

    def cut(self, lengths: IntArray) -> IntArray:
        """Return the lengths of the documents of one row, one after the other, as this kind cuts them."""
        if self.block is None:
            return lengths
        ends = np.cumsum(lengths)
        return np.diff(
            np.union1d(ends, np.arange(self.block, ends[-1], self.block)), prepend=0
        )


def spread(kinds: Sequence[AttentionKind], layers: int) -> IntArray:
    """Return the number of the kind of each of a model's first ``layers``, over which kinds are spread evenly."""
    places = np.concatenate(
        [(np.arange(kind.layers) + 0.5) / kind.layers for kind in kinds]
    )
    numbers = np.repeat(np.arange(len(kinds)), [kind.layers for kind in kinds])
    return np.resize(numbers[np.argsort(places, kind="stable")], layers)


def attention_work(
    rows: Sequence[Sequence[int]], kinds: Sequence[AttentionKind], tile: int
) -> float:
    """Return the attention of a model's mean layer to some rows, in tiles of ``tile`` x ``tile``.

    Args:
        rows: tokens of the documents of every row, one after the other.
    """
    work = 0
    for kind in kinds:
        lengths = np.concatenate([kind.cut(np.array(row)) for row in rows])
        cost = TileAreaCost(tile, kind.shape.window)
        of_length = cost.prefix_cost(int(lengths.max()))
        work += kind.layers * int(of_length[-(-lengths // tile)].sum())
    return work / sum(kind.layers for kind in kinds)


def chunked_layout(layout: TokenLayout, columns: IntArray, block: int) -> TokenLayout:
    """Cut documents at every multiple of ``block`` columns of their rows; all tokens keep their ranks and local rows.

    The pieces are documents of their own, numbered in the order of documents and positions. The layout itself is
    returned where no document is cut.

    Args:
        columns: the column of each document's first token in the row that it was loaded in, by document id.
    """
    first = columns[layout.docs]
    before = first // block
    pieces = (first + layout.doc_lengths - 1) // block - before + 1
    if (pieces == 1).all():
        return layout
    doc = layout.doc_index(layout.seg_doc)
    begin = first[doc] + layout.seg_start
    end = begin + layout.seg_length
    lower = begin // block
    count = (end - 1) // block - lower + 1
    segment = np.repeat(np.arange(len(doc)), count)
    number = concat_ranges(lower, count)
    start = np.maximum(begin[segment], number * block)
    length = np.minimum(end[segment], (number + 1) * block) - start
    doc = doc[segment]
    return TokenLayout.from_arrays(
        layout.num_ranks,
        layout.seg_rank[segment],
        exclusive_cumsum(pieces)[doc] + number - before[doc],
        start - np.maximum(first[doc], number * block),
        length,
        layout.seg_attends[segment],
    )
