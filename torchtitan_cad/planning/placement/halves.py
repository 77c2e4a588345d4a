"""Homes for the halves of a batch that attend one after the other.

Where rows are cut in the middle, the later half attends to keys of the earlier one, and the plan moves these keys
again. Documents that lie in one half need none of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, exclusive_cumsum, split_at
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.place import Placed, place_and_plan
from torchtitan_cad.planning.plan import make_plan
from torchtitan_cad.planning.score import Moved

Halves = tuple[TokenLayout, TokenLayout]


def place_microbatch(
    given: Sequence[TokenLayout], shape: AttentionShape, config: PlannerConfig, cost: CostModel | None = None
) -> list[Placed]:
    """Place a microbatch's layouts, and plan: itself, its halves by rows, or those that attend one after the other."""
    if not given[-1].seg_attends.all():
        return list(place_halves((given[0], given[1]), shape, config, cost))
    return [place_and_plan(layout, shape, config, cost) for layout in given]


def place_halves(
    halves: Halves, shape: AttentionShape, config: PlannerConfig | None = None, cost: CostModel | None = None
) -> tuple[Placed, Placed]:
    """Place the two halves of a batch: documents are dealt to halves first, and then to ranks within each.

    Args:
        halves: the layout of the earlier half, and that of all tokens, of which the earlier half's come first on every
            rank and as keys only.

    Returns:
        Layouts alike: every rank has as many tokens of each half. At most one document lies in both halves, the
        longest that fits in neither. The given ones if these move no more.

    Raises:
        ValueError: as ``make_plan``.
    """
    config = config or PlannerConfig()
    earlier, every = halves
    lengths, rooms = every.doc_lengths, (earlier.tokens_per_rank, every.queries_per_rank)
    begun = halve(lengths, int(rooms[0].sum()))
    # Here, what the later half has of a document is a document.
    first, second = (
        place_and_plan(_end_to_end(every.docs, part, room), shape, config, cost)
        for part, room in zip((begun, lengths - begun), rooms, strict=True)
    )
    joined = _joined(first.layout, second.layout, begun[every.doc_index(second.layout.seg_doc)])
    new = first.plan, make_plan(joined, shape, config, cost)
    old = make_plan(earlier, shape, config, cost), make_plan(every, shape, config, cost)
    before = Moved.by(*old)
    best = new if before.worst and Moved.by(*new).score(before) < before.score(before) else old
    return Placed(best[0].layout, best[0], old[0]), Placed(best[1].layout, best[1], old[1])


def halve(lengths: IntArray, room: int) -> IntArray:
    """Return [D] tokens of every document, from its first, that make an earlier half of ``room`` tokens.

    The longest first, documents go to the half of less attention that has room. The first one that fits in neither is
    cut such that the earlier half is full.
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
    """Documents of these ids and lengths, one after the other, on ranks with these numbers of tokens."""
    docs, lengths = docs[lengths > 0], lengths[lengths > 0]
    begin = exclusive_cumsum(lengths)
    source, rank, start, end = split_at(begin[:-1], begin[1:], exclusive_cumsum(rooms)[:-1])
    return TokenLayout.from_arrays(len(rooms), rank, docs[source], start - begin[source], end - start)


def _joined(first: TokenLayout, second: TokenLayout, shift: IntArray) -> TokenLayout:
    """All tokens, those of ``first`` as keys only; segments of ``second`` begin ``shift`` tokens later."""
    columns = (
        np.append(first.seg_rank, second.seg_rank),
        np.append(first.seg_doc, second.seg_doc),
        np.append(first.seg_start, second.seg_start + shift),
        np.append(first.seg_length, second.seg_length),
    )
    attends = np.repeat([False, True], [len(first.seg_rank), len(second.seg_rank)])
    return TokenLayout.from_arrays(first.num_ranks, *columns, attends)
