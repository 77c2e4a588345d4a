"""Homes over all microbatches of an optimizer step: which microbatch, and then which rank, holds which documents.

The loss of a step is a sum over its tokens, so that a document may be in any of its microbatches. Where the ranks of a
microbatch hold documents of the same lengths, they have the same work and nothing moves. So each microbatch in turn
takes the longest documents that are left: again and again, the rank of least work takes the longest that fits its room.
The last tokens of a microbatch are filled by short documents whose lengths add up to them exactly.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, end_to_end, sum_by_index
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.placement.place import Placed, place_and_plan
from torchtitan_cad.planning.plan import make_plan, moved_by

FILLED = 0.25
"""tokens of a microbatch that short documents must add up to exactly / mean tokens of a rank"""

CANDIDATES = 64
"""documents: the shortest, at least these, are candidates for the exact sum"""

RETRIES = 8
"""attempts: each returns the shortest document taken, where no sum is exact"""

SURE = 0.35
"""score / score of the given homes: above it, microbatches are placed alone as well"""


def place_step(
    layouts: Sequence[TokenLayout],
    shape: AttentionShape,
    config: PlannerConfig | None = None,
    cost: CostModel | None = None,
) -> list[TokenLayout]:
    """Return the homes of :func:`place_and_plan_step`."""
    return [placed.layout for placed in place_and_plan_step(layouts, shape, config, cost)]


def place_and_plan_step(
    layouts: Sequence[TokenLayout],
    shape: AttentionShape,
    config: PlannerConfig | None = None,
    cost: CostModel | None = None,
) -> list[Placed]:
    """Assign the documents of an optimizer step to its microbatches and ranks anew, and plan each microbatch.

    Every rank has as many tokens in every microbatch as before, and every document lies in one microbatch. Equal inputs
    give equal homes on every rank. Microbatches keep their documents, and are placed alone, where no others of the same
    number of tokens are found, or where that is better by the ``score`` of all plans.

    Args:
        layouts: one per microbatch, over the same ranks; no document is in two of them.

    Raises:
        ValueError: as ``make_plan``, no microbatch, unequal numbers of ranks, or a document in two microbatches.
    """
    _check(layouts)
    given = [make_plan(layout, shape, config, cost) for layout in layouts]
    before, together = moved_by(*given), []
    if before.worst and len(layouts) > 1 and all(layout.seg_attends.all() for layout in layouts):
        together = [place_and_plan(layout, shape, config, cost) for layout in _fill(layouts)]
    moved = moved_by(*(placed.plan for placed in together))
    if not together or moved.score(before) > SURE * before.score(before):
        alone = [place_and_plan(layout, shape, config, cost) for layout in layouts]
        if not together or moved_by(*(placed.plan for placed in alone)).score(before) <= moved.score(before):
            return alone
    return [Placed(placed.layout, placed.plan, plan) for placed, plan in zip(together, given, strict=True)]


def _check(layouts: Sequence[TokenLayout]) -> None:
    if len(ranks := {layout.num_ranks for layout in layouts}) != 1:
        raise ValueError(f"microbatches of a step need the same ranks, got numbers of ranks {sorted(ranks)}")
    docs, counts = np.unique(np.concatenate([layout.docs for layout in layouts]), return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"document {docs[counts > 1][0]} is in two microbatches: give the documents of a step ids of their own"
        )


def _fill(layouts: Sequence[TokenLayout]) -> list[TokenLayout]:
    """Return the microbatches with other documents; none where no documents add up to the tokens of one."""
    docs = np.concatenate([layout.docs for layout in layouts])
    lengths = np.concatenate([layout.doc_lengths for layout in layouts])
    order = np.argsort(lengths, kind="stable")
    docs, lengths = docs[order], lengths[order]
    pool, filled = _Pool(lengths.tolist()), []
    for number, layout in enumerate(layouts):
        microbatch = _Microbatch(pool, layout.tokens_per_rank.tolist())
        microbatch.take_longest()
        if not microbatch.take_rest(all_left=number == len(layouts) - 1):
            return []
        filled.append(microbatch.layout(docs, lengths))
    return filled


class _Pool:
    """Documents that no microbatch has taken, by ascending length.

    ``_below[i]`` is i where document i - 1 is left, and leads to a shorter one where it is not.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._below = list(range(len(lengths) + 1))

    def longest(self, at_most: int) -> int | None:
        """Return the longest document that is left, of these tokens at most; None if there is none."""
        below, i = self._below, bisect_right(self.lengths, at_most)
        while below[i] != i:
            below[i] = below[below[i]]
            i = below[i]
        return i - 1 if i else None

    def left(self) -> list[int]:
        """Return the documents that are left, by ascending length."""
        return [i - 1 for i, below in enumerate(self._below) if i and below == i]

    def take(self, doc: int) -> None:
        """Take a document out."""
        self._below[doc + 1] = doc

    def give_back(self, doc: int) -> None:
        """Put a document back, which happens a few times a microbatch at most."""
        left = {*self.left(), doc}
        self._below = [i if i == 0 or i - 1 in left else i - 1 for i in range(len(self._below))]


class _Microbatch:
    """Documents of a microbatch: most are on one rank each, the others in the room that these leave."""

    def __init__(self, pool: _Pool, rooms: list[int]) -> None:
        self._pool, self._rooms = pool, rooms
        self._docs: list[tuple[int, int]] = []  # (document, its rank, or -1)
        self._left = sum(rooms)

    def take_longest(self) -> None:
        """Take the longest documents that fit, until few tokens are left or none fits."""
        pool, rooms = self._pool, self._rooms.copy()
        ranks = [(0, -room, rank) for rank, room in enumerate(rooms)]
        few = FILLED * self._left / len(rooms)
        while (doc := pool.longest(self._left)) is not None and pool.lengths[doc] > max(rooms):
            self._take(doc, -1)
            ranks = _spread(pool.lengths[doc], ranks)
        heapq.heapify(ranks)
        while ranks and self._left > few:
            work, room, rank = heapq.heappop(ranks)
            doc = pool.longest(-room)
            if doc is not None:
                self._take(doc, rank)
                length = pool.lengths[doc]
                heapq.heappush(ranks, (work + length**2, room + length, rank))

    def take_rest(self, *, all_left: bool) -> bool:
        """Take documents that fill what is left exactly, or all; returns False where none are found that do."""
        pool = self._pool
        for _ in range(RETRIES):
            docs = [doc for doc in pool.left() if all_left or pool.lengths[doc] <= self._left]
            lengths = [pool.lengths[doc] for doc in docs]
            enough = bisect_right(list(accumulate(lengths)), 2 * self._left) + 1
            chosen = range(len(docs)) if all_left else add_up(lengths[: max(CANDIDATES, enough)], self._left)
            if chosen is not None:
                for i in chosen:
                    self._take(docs[i], -1)
                return not self._left
            if not self._docs:
                break
            shortest = min(self._docs)
            self._docs.remove(shortest)
            self._left += pool.lengths[shortest[0]]
            pool.give_back(shortest[0])
        return False

    def layout(self, ids: IntArray, lengths: IntArray) -> TokenLayout:
        """Return the documents' homes; ``ids`` and ``lengths`` are those of the step's documents."""
        doc, rank = np.array(self._docs, dtype=np.int64).T
        placed, loose = rank >= 0, doc[rank < 0]
        gaps = np.array(self._rooms) - sum_by_index(rank[placed], lengths[doc[placed]], len(self._rooms))
        source, gap, start, end = end_to_end(lengths[loose], gaps)
        return TokenLayout.from_arrays(
            len(self._rooms),
            np.append(rank[placed], gap),
            ids[np.append(doc[placed], loose[source])],
            np.append(np.zeros_like(doc[placed]), start),
            np.append(lengths[doc[placed]], end - start),
        )

    def _take(self, doc: int, rank: int) -> None:
        self._pool.take(doc)
        self._docs.append((doc, rank))
        self._left -= self._pool.lengths[doc]


def _spread(length: int, ranks: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Give a document longer than any rank's room to the ranks of least work; returns (work, -room, rank) of each."""
    spread = []
    for work, room, rank in sorted(ranks):
        part = min(-room, length)
        spread.append((work + part * length, room + part, rank))
        length -= part
    return spread


def add_up(lengths: Sequence[int], total: int) -> list[int] | None:
    """Return indices of lengths that add up to ``total``, the last ones where there is a choice; None if none do."""
    sums = [1]  # bit t of sums[n]: some of the first n lengths add up to t
    for length in lengths:
        sums.append((sums[-1] | sums[-1] << length) & ((2 << total) - 1))
    if not sums[-1] >> total & 1:
        return None
    chosen = []
    for i in reversed(range(len(lengths))):
        if total >= lengths[i] and sums[i] >> (total - lengths[i]) & 1:
            chosen.append(i)
            total -= lengths[i]
    return chosen
