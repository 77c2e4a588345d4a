# SPDX-License-Identifier: BSD-3-Clause
"""Bytes of backward, and positions of a layout's rows."""

from dataclasses import asdict

import numpy as np

from torchtitan_cad.planning import AttentionShape, TokenLayout
from torchtitan_cad.planning.intervals import concat_ranges
from torchtitan_cad.planning.model.shape import RowBytes


class BackwardShape(AttentionShape):
    """Bytes of an attention layer's backward if servers receive Q, K and V again (``backward = "resend"``)."""

    @property
    def query_bytes(self) -> int:
        rows = RowBytes.of(self)
        return rows.backward_queries + rows.query_gradients

    @property
    def kv_bytes(self) -> int:
        rows = RowBytes.of(self)
        return rows.keys + rows.key_gradients


def backward_shape(shape: AttentionShape) -> BackwardShape:
    """The shape with the prices of the layer's backward."""
    return BackwardShape(**asdict(shape))


def rank_positions(
    layout: TokenLayout, rank: int, *, queries: bool = False
) -> np.ndarray:
    """[rows] global position of each local row, with ``queries`` of each local query row."""
    chosen = (layout.seg_rank == rank) & (layout.seg_attends | (not queries))
    start = layout.global_position(layout.seg_doc[chosen], layout.seg_start[chosen])
    return concat_ranges(start, layout.seg_length[chosen])
