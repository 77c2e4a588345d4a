# SPDX-License-Identifier: BSD-3-Clause
"""A certified lower bound on the bytes of any plan within load limits.

docs/proofs.md derives it step by step, with the same names. It comes from one price: a server that
computes ``F`` pairs of imported queries of one document, with ``free`` keys at no cost and at most ``width`` keys per
query, pays at least

    price(F) = min over b in [0, width - free] of  c_q F / (b + free) + c_kv b.

As a minimum of linear functions of F it is concave, so up to F pairs cost at least price(F) / F each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning.intervals import (
    FloatArray,
    IntArray,
    begins_group,
    sum_by_index,
)
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape

SLACK = 1 - 1e-9
"""factor that covers the rounding of floating point, so that the bound stays a certificate"""


class _Holdings(NamedTuple):
    """Tokens of documents by rank, one entry per (rank, document), sorted by rank. All [entries].

    ``tokens`` is the number that the rank holds, ``pairs`` those of these queries with all their keys.
    """

    rank: IntArray
    doc: IntArray
    tokens: IntArray
    pairs: IntArray

    def chosen(self, entries: npt.NDArray) -> _Holdings:
        """Return the entries at these indices, or where a mask is True."""
        return _Holdings(*(column[entries] for column in self))


def lower_bound(
    layout: TokenLayout, shape: AttentionShape, max_pairs: int | IntArray
) -> int:
    """Return a bound on the bytes of all ranks if rank r executes at most ``max_pairs[r]`` pairs; int: all the same.

    The bound is 0 for layouts that leave queries out, and for attention in a window.
    """
    if not layout.seg_attends.all() or shape.window is not None:
        return 0
    limit = np.broadcast_to(np.asarray(max_pairs, dtype=np.int64), layout.num_ranks)
    end = layout.seg_start + layout.seg_length
    holdings = _merge(
        _Holdings(
            rank=layout.seg_rank,
            doc=layout.doc_index(layout.seg_doc),
            tokens=layout.seg_length,
            pairs=_triangle(end) - _triangle(layout.seg_start),
        )
    )
    return int(_total_bytes(layout, shape, holdings, limit) * SLACK)


def _total_bytes(
    layout: TokenLayout, shape: AttentionShape, holdings: _Holdings, limit: IntArray
) -> float:
    """Bytes of all ranks' foreign pairs at their average prices, taking the cheapest pairs first."""
    local = _triangle(holdings.tokens)
    kept = np.minimum(sum_by_index(holdings.rank, local, layout.num_ranks), limit)
    needed = int(_triangle(layout.doc_lengths).sum() - kept.sum())
    if needed <= 0:
        return 0.0
    capacity = np.minimum(limit - kept, needed)
    # Documents held in part: own queries with keys of other ranks, and other queries of the same document.
    is_part = holdings.tokens < layout.doc_lengths[holdings.doc]
    part = holdings.chosen(is_part)
    rank = part.rank
    length = layout.doc_lengths[part.doc]
    foreign = part.pairs - _triangle(part.tokens)
    own = np.minimum(foreign, capacity[rank])
    own_price = shape.kv_bytes / part.tokens
    other = np.minimum(_triangle(length) - part.pairs, capacity[rank])
    other_price = _unit_price(
        shape,
        other,
        free=part.tokens + foreign / part.tokens,
        width=length,
    )
    # Documents without a token on the rank.
    far_price = _unit_price(
        shape,
        capacity,
        free=np.zeros(len(capacity)),
        width=layout.doc_lengths.max(),
    )
    price = np.concatenate([own_price, other_price, far_price])
    amount = np.concatenate([own, other, capacity])
    group = np.concatenate([rank, rank, np.arange(layout.num_ranks)])
    _, price, amount = _cheapest(group, price, amount, capacity)
    together = np.zeros_like(group)
    _, price, amount = _cheapest(together, price, amount, np.array([needed]))
    return float((price * amount).sum())


def _merge(holdings: _Holdings) -> _Holdings:
    """Entries, with those of the same rank and document added up."""
    holdings = holdings.chosen(np.lexsort((holdings.doc, holdings.rank)))
    first = np.flatnonzero(begins_group(holdings.rank, holdings.doc))
    if len(first) == 0:
        return holdings
    return _Holdings(
        rank=holdings.rank[first],
        doc=holdings.doc[first],
        tokens=np.add.reduceat(holdings.tokens, first),
        pairs=np.add.reduceat(holdings.pairs, first),
    )


def _unit_price(
    shape: AttentionShape,
    pairs: npt.NDArray,
    free: npt.NDArray,
    width: npt.NDArray,
) -> FloatArray:
    """price(pairs) / pairs as in the module's docstring, 0 without pairs. ``width`` is not below ``free``."""
    pairs = np.maximum(pairs, 1e-300)
    c_q = float(shape.query_bytes)
    c_kv = float(shape.kv_bytes)
    keys = np.clip(np.sqrt(pairs * (c_q / c_kv)), free, width)
    return c_q / np.maximum(keys, 1e-300) + c_kv * (keys - free) / pairs


def _cheapest(
    group: IntArray,
    price: FloatArray,
    amount: npt.NDArray,
    limit: IntArray,
) -> tuple[IntArray, FloatArray, FloatArray]:
    """(group, price, amount) sorted by group and price; amounts are cut where the group's sum reaches its limit."""
    order = np.lexsort((price, group))
    group = group[order]
    price = price[order]
    amount = amount[order].astype(np.float64)
    before = np.cumsum(amount) - amount
    before -= before[np.searchsorted(group, group)]
    return group, price, np.clip(limit[group] - before, 0.0, amount)


def _triangle(rows: IntArray) -> IntArray:
    """Pairs of the first ``rows`` queries of a document."""
    return rows * (rows + 1) // 2
