# SPDX-License-Identifier: BSD-3-Clause
"""Homes for the halves of a batch that attend one after the other.

Where rows are cut in the middle, the later half attends to keys of the earlier half, and the plan moves these keys
again. The keys of a document that lies in one half move once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, end_to_end
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.place import Placed, place_and_plan
from torchtitan_cad.planning.plan import make_plan, moved_by

Halves = tuple[TokenLayout, TokenLayout]


def place_microbatch(
    given: Sequence[TokenLayout], shape: AttentionShape, config: PlannerConfig, cost: CostModel | None = None
) -> list[Placed]:
    """Place and plan a microbatch: one layout, two halves by rows, or two halves that attend one after the other."""
    if not given[-1].seg_attends.all():
        return list(place_halves((given[0], given[1]), shape, config, cost))
    return [place_and_plan(layout, shape, config, cost) for layout in given]


def place_halves(
    halves: Halves, shape: AttentionShape, config: PlannerConfig | None = None, cost: CostModel | None = None
) -> tuple[Placed, Placed]:
    """Place the two halves of a batch: documents are divided between the halves first, then placed within each half.

    Args:
        halves: the layout of the earlier half, and the layout of all tokens, in which the earlier half's tokens come
            first on every rank and are keys only.

    Returns:
        Two such layouts with as many tokens of each half on every rank, and their plans. At most one document lies in
        both halves, the longest that fits in neither. The given layouts are kept if no better ones are found.

    Raises:
        ValueError: as ``make_plan``.
    """
    earlier, every = halves
    lengths, rooms = every.doc_lengths, (earlier.tokens_per_rank, every.queries_per_rank)
    begun = halve(lengths, int(rooms[0].sum()))
    # Within a half, the tokens of a document that is cut count as a document of their own.
    first, second = (
        place_and_plan(_end_to_end(every.docs, tokens, room), shape, config, cost)
        for tokens, room in zip((begun, lengths - begun), rooms, strict=True)
    )
    joined = _joined(first.layout, second.layout, begun[every.doc_index(second.layout.seg_doc)])
    new = first.plan, make_plan(joined, shape, config, cost)
    old = make_plan(earlier, shape, config, cost), make_plan(every, shape, config, cost)
    before = moved_by(*old)
    best = new if before.worst and moved_by(*new).score(before) < before.score(before) else old
    return Placed(best[0].layout, best[0], old[0]), Placed(best[1].layout, best[1], old[1])


def join(first: Placed, second: Placed, shape: AttentionShape, cost: CostModel | None = None) -> Placed:
    """Return the later half with all tokens, from two halves that have no document in common."""
    joined = _joined(first.layout, second.layout, np.zeros_like(second.layout.seg_doc))
    plan = make_plan(joined, shape, second.plan.config, cost)
    return Placed(joined, plan, plan)


def halve(lengths: IntArray, room: int) -> IntArray:
    """Return int64 [D]: how many first tokens of every document are in the earlier half, which has ``room`` tokens.

    Documents go, the longest first, to the half with less attention among those with room. The first document that
    fits in neither half is cut such that the earlier half is full.
    """
    begun = np.zeros_like(lengths)
    rooms, work = [room, int(lengths.sum()) - room], [0, 0]
    for doc in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[doc])
        fits = [half for half in (0, 1) if length <= rooms[half]]
        cut = {0: length, 1: 0, None: rooms[0]}[min(fits, key=work.__getitem__, default=None)]
        begun[doc] = cut
        for half, (start, end) in enumerate(((0, cut), (cut, length))):
            rooms[half] -= end - start
            work[half] += end**2 - start**2
    return begun


def _end_to_end(docs: IntArray, lengths: IntArray, rooms: IntArray) -> TokenLayout:
    """Lay documents of these ids and lengths end to end over ranks with ``rooms`` [num_ranks] tokens."""
    docs, lengths = docs[lengths > 0], lengths[lengths > 0]
    source, rank, start, end = end_to_end(lengths, rooms)
    return TokenLayout.from_arrays(len(rooms), rank, docs[source], start, end - start)


def _joined(first: TokenLayout, second: TokenLayout, shift: IntArray) -> TokenLayout:
    """Join both halves, ``first`` as keys only; segments of ``second`` begin ``shift`` [S] tokens later."""
    columns = (
        np.append(first.seg_rank, second.seg_rank),
        np.append(first.seg_doc, second.seg_doc),
        np.append(first.seg_start, second.seg_start + shift),
        np.append(first.seg_length, second.seg_length),
    )
    attends = np.repeat([False, True], [len(first.seg_rank), len(second.seg_rank)])
    return TokenLayout.from_arrays(first.num_ranks, *columns, attends)
