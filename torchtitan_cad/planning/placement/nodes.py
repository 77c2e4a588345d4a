# SPDX-License-Identifier: BSD-3-Clause
"""Divide documents among the nodes of a group, before each node's documents are placed on its ranks.

Links between nodes are many times slower than those inside. Where documents are far shorter than a node's tokens,
nodes of whole documents and equal work move few bytes between them; where some are not, more than other homes do.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, end_to_end, sum_by_index
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.placement.reorder import deal_under_cap


def place_in_nodes(layout: TokenLayout, per_node: int, place: Callable[[TokenLayout], TokenLayout]) -> TokenLayout:
    """Return homes for which documents are whole on a node, but for a few of the shortest, and nodes have equal work.

    ``place`` returns homes on the ranks of one node, for documents that are end to end there.
    """
    rooms, columns = layout.tokens_per_rank.reshape(-1, per_node), []
    lengths, left = layout.doc_lengths, rooms.sum(axis=1)
    dealt = deal_under_cap(lengths.astype(float) ** 2, lengths, left)
    whole, loose = np.flatnonzero(dealt >= 0), np.flatnonzero(dealt < 0)
    left = left - sum_by_index(dealt[whole], lengths[whole], len(left))
    source, gap, start, end = end_to_end(lengths[loose], left)  # what fits nowhere fills what is left
    parts = np.stack([np.append(dealt[whole], gap), np.append(whole, loose[source]),
                      np.append(0 * whole, start), np.append(lengths[whole], end - start)])  # fmt: skip
    for node in range(len(rooms)):
        doc, start, length = parts[1:, parts[0] == node][:, np.argsort(parts[1, parts[0] == node])]
        # Tokens of a document that is cut count as a document of their own.
        homes = place(lay_end_to_end(layout.docs[doc], length, rooms[node]))
        shift = start[np.searchsorted(layout.docs[doc], homes.seg_doc)]
        columns.append((homes.seg_rank + node * per_node, homes.seg_doc, homes.seg_start + shift, homes.seg_length))
    return TokenLayout.from_arrays(layout.num_ranks, *(np.concatenate(each) for each in zip(*columns, strict=True)))


def lay_end_to_end(docs: IntArray, lengths: IntArray, rooms: IntArray) -> TokenLayout:
    """Lay documents of these ids and lengths end to end over ranks with ``rooms`` [num_ranks] tokens."""
    docs, lengths = docs[lengths > 0], lengths[lengths > 0]
    source, rank, start, end = end_to_end(lengths, rooms)
    return TokenLayout.from_arrays(len(rooms), rank, docs[source], start, end - start)
