# SPDX-License-Identifier: BSD-3-Clause
"""Certified lower bounds on the bytes of any plan within load limits.

docs/proofs.md derives them step by step, with the same names. All bounds come from one price: a server that
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
    concat_ranges,
    sum_by_index,
)
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape

SLACK = 1 - 1e-9
"""factor that covers the rounding of floating point, so that the bounds stay certificates"""

GROUPS = 8
"""documents whose homes are tried as a group for the bound on the worst rank"""


class Bounds(NamedTuple):
    """Lower bounds on the bytes of every plan in which no server executes more pairs than its limit."""

    total: int
    """Bytes over all ranks."""
    rank: int
    """Bytes in or out of the busiest rank."""
    forced: int
    """Bytes out of the rank that must send most because its own work exceeds its limit; at most ``rank``."""


class _Holdings(NamedTuple):
    """Tokens of documents by group of ranks, one entry per (group, document), sorted by group. All [entries].

    ``tokens`` is the number held by the group, ``pairs`` those of these queries with all their keys, ``end`` the
    position behind the last of them.
    """

    group: IntArray
    doc: IntArray
    tokens: IntArray
    pairs: IntArray
    end: IntArray

    @property
    def free(self) -> IntArray:
        """Keys on other ranks that precede the last query of a holding."""
        return self.end - self.tokens

    def chosen(self, entries: npt.NDArray) -> _Holdings:
        """Return the entries at these indices, or where a mask is True."""
        return _Holdings(*(column[entries] for column in self))


def lower_bounds(
    layout: TokenLayout, shape: AttentionShape, max_pairs: int | IntArray
) -> Bounds:
    """Return the bounds of plans in which rank r executes at most ``max_pairs[r]`` pairs; int: the same for all ranks.

    All bounds are 0 for layouts that leave queries out, and for attention in a window.
    """
    if not layout.seg_attends.all() or shape.window is not None:
        return Bounds(0, 0, 0)
    limit = np.broadcast_to(np.asarray(max_pairs, dtype=np.int64), layout.num_ranks)
    end = layout.seg_start + layout.seg_length
    pairs = _triangle(end) - _triangle(layout.seg_start)
    holdings = _merge(
        _Holdings(
            group=layout.seg_rank,
            doc=layout.doc_index(layout.seg_doc),
            tokens=layout.seg_length,
            pairs=pairs,
            end=end,
        )
    )
    total = int(_total_bytes(layout, shape, holdings, limit) * SLACK)
    alone = _export_bytes(shape, holdings, limit, int(limit.max()))
    forced = int(alone.max(initial=0) * SLACK)
    rank = max(
        -(-total // layout.num_ranks),
        forced,
        int(_group_bytes(layout, shape, holdings, limit) * SLACK),
    )
    return Bounds(total, rank, forced)


def _total_bytes(
    layout: TokenLayout, shape: AttentionShape, holdings: _Holdings, limit: IntArray
) -> float:
    """Bytes of all ranks' foreign pairs at their average prices, taking the cheapest pairs first."""
    local = _triangle(holdings.tokens)
    kept = np.minimum(sum_by_index(holdings.group, local, layout.num_ranks), limit)
    needed = int(_triangle(layout.doc_lengths).sum() - kept.sum())
    if needed <= 0:
        return 0.0
    capacity = np.minimum(limit - kept, needed)
    # Documents held in part: own queries with keys of other ranks, and other queries of the same document.
    is_part = holdings.tokens < layout.doc_lengths[holdings.doc]
    part = holdings.chosen(is_part)
    rank = part.group
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


def _export_bytes(
    shape: AttentionShape, holdings: _Holdings, limit: IntArray, most: int
) -> FloatArray:
    """Return [groups] bytes that each group must send because its queries' pairs exceed ``limit`` [groups].

    ``most`` is the largest limit of any rank.
    """
    pairs = sum_by_index(holdings.group, holdings.pairs, len(limit))
    over = np.maximum(pairs - limit, 0)
    holdings = holdings.chosen(over[holdings.group] > 0)
    exported = np.minimum(holdings.pairs, over[holdings.group])
    largest = np.minimum(exported, most)
    price = _unit_price(shape, largest, holdings.free, holdings.end)
    group, price, amount = _cheapest(holdings.group, price, holdings.pairs, over)
    sent = np.bincount(group, weights=price * amount, minlength=len(limit))
    return sent.astype(np.float64)


def _group_bytes(
    layout: TokenLayout, shape: AttentionShape, holdings: _Holdings, limit: IntArray
) -> float:
    """Bytes out of the busiest rank of the homes of one document, for the GROUPS documents with most work per home."""
    homes = np.bincount(holdings.doc, minlength=len(layout.docs))
    pairs_per_home = _triangle(layout.doc_lengths) / np.maximum(homes, 1)
    weight = np.where(homes > 1, pairs_per_home, 0.0)
    chosen = np.argsort(-weight, kind="stable")[:GROUPS]
    chosen = chosen[weight[chosen] > 0]
    number = np.full(len(layout.docs), -1)
    number[chosen] = np.arange(len(chosen))
    members = np.flatnonzero(number[holdings.doc] >= 0)
    group = number[holdings.doc[members]]
    rank = holdings.group[members]
    # All tokens of the members, also of other documents.
    first = np.searchsorted(holdings.group, np.arange(layout.num_ranks + 1))
    count = np.diff(first)[rank]
    held = concat_ranges(first[rank], count)
    in_groups = holdings.chosen(held)._replace(group=np.repeat(group, count))
    merged = _merge(in_groups)
    group_limit = sum_by_index(group, limit[rank], len(chosen))
    sent = _export_bytes(shape, merged, group_limit, int(limit.max()))
    return float((sent / homes[chosen]).max(initial=0))


def _merge(holdings: _Holdings) -> _Holdings:
    """Entries, with those of the same group and document added up."""
    holdings = holdings.chosen(np.lexsort((holdings.doc, holdings.group)))
    first = np.flatnonzero(begins_group(holdings.group, holdings.doc))
    if len(first) == 0:
        return holdings
    return _Holdings(
        group=holdings.group[first],
        doc=holdings.doc[first],
        tokens=np.add.reduceat(holdings.tokens, first),
        pairs=np.add.reduceat(holdings.pairs, first),
        end=np.maximum.reduceat(holdings.end, first),
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
