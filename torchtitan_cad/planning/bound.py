"""A certified lower bound on the bytes of any plan within a load limit. Imports numpy only.

Derivation. Let no server execute more than ``cap`` pairs, and call a pair *foreign* to its server when the server is
not home to both its tokens. Server s can execute at most min(local_s, cap) pairs that are not foreign, so

    sum_s foreign_s >= all pairs - sum_s min(local_s, cap).

A server that holds l tokens of a document and imports a queries and b keys of it can execute at most
(a + l)(b + l) - l^2 = ab + l(a + b) foreign pairs of it. That expression only grows when several documents are merged
into one with their a and b added and the largest l, so F foreign pairs cost a server at least

    price(F) = min { c_q a + c_kv b : (a + l)(b + l) >= F + l^2, a, b >= 0 },

l being its largest number of tokens of a document that it holds in part (0 for a document it holds in full: nothing of
that is foreign). price(F) / F does not increase with F, so up to its room, R_s = cap - min(local_s, cap), a server pays
at least price(R_s) / R_s per pair; going beyond the room costs no less than price(R_s) and gives up local pairs.
Buying the needed pairs where they are cheapest gives the bound.

Worst rank. Bytes in and bytes out both sum to the total, so some rank has at least the total's bound over the ranks.
And of the W_r pairs whose query is at home on rank r, at most ``cap`` are computed there, so W_r - cap are computed by
others, to which r sends the query. A query at position p sent to one server lets it compute at most p + 1 of them, and
what two servers compute for it is disjoint; hence r sends at least as many (query, server) copies as it takes of its
queries, those with the most keys first, to have W_r - cap keys together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .intervals import IntArray, sum_by_index
from .layout import TokenLayout
from .shape import AttentionShape

FloatArray = npt.NDArray[np.float64]


def lower_bound_bytes(layout: TokenLayout, shape: AttentionShape, max_pairs: int) -> int:
    """Bytes that every plan moves in which no server executes more than ``max_pairs`` (query, key) pairs."""
    local, largest_part = _held(layout)
    kept = np.minimum(local, max_pairs)
    lengths = layout.doc_lengths
    needed = int((lengths * (lengths + 1) // 2).sum()) - int(kept.sum())
    if needed <= 0:
        return 0
    room = np.minimum(max_pairs - kept, needed).astype(np.float64)
    buyers = room > 0
    room = room[buyers]
    price = _price(room, largest_part[buyers].astype(np.float64), shape) / room
    order = np.argsort(price, kind="stable")
    before = np.cumsum(room[order]) - room[order]
    bought = np.clip(needed - before, 0.0, room[order])
    # The slack of 1e-9 covers the rounding of floating point, so that the certificate stays one.
    return int(float((bought * price[order]).sum()) * (1 - 1e-9))


def forced_export_bytes(layout: TokenLayout, shape: AttentionShape, max_pairs: int) -> IntArray:
    """[num_ranks] bytes of queries that each rank must send if no server executes more than ``max_pairs`` pairs."""
    start, end = layout.seg_start, layout.seg_start + layout.seg_length
    rank, num_ranks = layout.seg_rank, layout.num_ranks
    pairs = sum_by_index(rank, _triangle(end) - _triangle(start), num_ranks)
    over = np.maximum(pairs - max_pairs, 0)
    # Bisection for the last threshold from which on the queries have enough keys; above it they have too few.
    low = np.zeros(num_ranks, dtype=np.int64)
    high = np.full(num_ranks, int(end.max(initial=0)), dtype=np.int64)
    while (low < high).any():
        middle = (low + high + 1) // 2
        first = np.clip(middle[rank], start, end)
        enough = sum_by_index(rank, _triangle(end) - _triangle(first), num_ranks) >= over
        low, high = np.where(enough, middle, low), np.where(enough, high, middle - 1)
    first = np.clip(low[rank] + 1, start, end)
    missing = over - sum_by_index(rank, _triangle(end) - _triangle(first), num_ranks)
    queries = sum_by_index(rank, end - first, num_ranks) + -(-np.maximum(missing, 0) // (low + 1))
    return np.where(over > 0, queries, 0) * shape.query_bytes


def rank_bound_bytes(layout: TokenLayout, shape: AttentionShape, max_pairs: int, total_bytes: int) -> int:
    """Bytes, in or out, of the busiest rank of every such plan; ``total_bytes`` is the bound on the total."""
    forced = int(forced_export_bytes(layout, shape, max_pairs).max())
    return max(-(-total_bytes // layout.num_ranks), forced)


def _triangle(rows: IntArray) -> IntArray:
    """Pairs of the first ``rows`` queries of a document."""
    return rows * (rows + 1) // 2


def _held(layout: TokenLayout) -> tuple[IntArray, IntArray]:
    """Per rank: causal pairs with both tokens there; most tokens there of a document that is not there in full."""
    doc = layout.doc_index(layout.seg_doc)
    order = np.lexsort((doc, layout.seg_rank))
    rank, doc, length = layout.seg_rank[order], doc[order], layout.seg_length[order]
    first = np.append(True, (rank[1:] != rank[:-1]) | (doc[1:] != doc[:-1]))[: len(rank)]
    tokens = sum_by_index(np.cumsum(first) - 1, length, int(first.sum()))
    rank, doc = rank[first], doc[first]
    pairs = sum_by_index(rank, tokens * (tokens + 1) // 2, layout.num_ranks)
    largest = np.zeros(layout.num_ranks, dtype=np.int64)
    np.maximum.at(largest, rank, np.where(tokens < layout.doc_lengths[doc], tokens, 0))
    return pairs, largest


def _price(pairs: FloatArray, held: FloatArray, shape: AttentionShape) -> FloatArray:
    """Least c_q a + c_kv b with (a + held)(b + held) >= pairs + held^2 and a, b >= 0."""
    c_q, c_kv = float(shape.query_bytes), float(shape.kv_bytes)
    area = pairs + held**2
    queries = np.sqrt(area * c_kv / c_q) - held
    keys = np.sqrt(area * c_q / c_kv) - held
    with np.errstate(divide="ignore"):
        only = np.where(held > 0, pairs / held, np.inf)
    return np.select([queries < 0, keys < 0], [c_kv * only, c_q * only], c_q * queries + c_kv * keys)
