# SPDX-License-Identifier: BSD-3-Clause
"""Model FLOPs of attention, by (query, key) pairs."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_cad.planning.intervals import causal_pairs
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape

STEP_OVER_FORWARD = 3
"""A step over its forward: backward has twice the operations; what backward computes again is no model FLOP."""


def layout_pairs(layout: TokenLayout, window: int | None = None) -> int:
    """Return the (query, key) pairs of all queries of a layout."""
    start = layout.seg_start
    end = start + layout.seg_length
    pairs = causal_pairs(end, window) - causal_pairs(start, window)
    attending = pairs[layout.seg_attends]
    return int(attending.sum())


def flops_of_pair(shape: AttentionShape) -> int:
    """Return the model FLOPs of a pair in one layer of these heads: QK^T and PV, forward and backward."""
    of_head = 2 * (shape.head_dim + shape.out_dim)
    return STEP_OVER_FORWARD * shape.num_heads * of_head


def attention_flops(kinds: Sequence[AttentionKind], pairs: Sequence[float]) -> float:
    """Return the model FLOPs of all layers' attention, given the pairs of a layer of each kind."""
    total = 0.0
    for kind, of_layer in zip(kinds, pairs, strict=True):
        of_pair = flops_of_pair(kind.shape)
        total += kind.layers * of_pair * of_layer
    return total
