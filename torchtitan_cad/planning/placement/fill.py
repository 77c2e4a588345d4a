# SPDX-License-Identifier: BSD-3-Clause
"""Fill the microbatches of an optimizer step anew with its documents.

Where the ranks of a microbatch hold documents of the same lengths, they have the same work and nothing moves. So the
longest documents are assigned first: again and again, the rank of least work takes the longest that fits its capacity.
The last tokens of a microbatch are filled by short documents whose lengths add up to them exactly.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, end_to_end, sum_by_index
from torchtitan_cad.planning.model.layout import TokenLayout

FILLED = 0.25
"""tokens of a microbatch that short documents must add up to exactly / mean tokens of a rank"""

CANDIDATES = 64
"""documents: the shortest, at least these, are candidates for the exact sum"""

RETRIES = 8
"""attempts: each returns the shortest document taken, where no sum is exact"""


def fill(
    docs: IntArray,
    lengths: IntArray,
    capacities: Sequence[IntArray],
    *,
    together: int,
    less: Sequence[float] = (),
    filled: float = FILLED,
) -> list[TokenLayout]:
    """Assign whole documents to microbatches and ranks, and keep every rank's number of tokens in each microbatch.

    Args:
        docs, lengths: [D] ids and tokens of the step's documents.
        capacities: of every microbatch, [num_ranks] the tokens of each rank.
        together: microbatches that get the same work. One group after the other takes the longest documents that are
            left: the fewer microbatches in a group, the more equal are the lengths of the documents in it.
        less: of every microbatch, squared tokens that it gets less than others. If given, the sums of microbatches
            are to be right, before those of ranks.
        filled: see ``FILLED``.

    Returns:
        One layout per microbatch; none where no documents add up to the tokens of one.
    """
    order = np.argsort(lengths, kind="stable")
    docs = docs[order]
    lengths = lengths[order]
    unassigned = _Unassigned(lengths.tolist())
    microbatches = [
        _Microbatch(unassigned, of_ranks.tolist(), filled) for of_ranks in capacities
    ]
    for first in range(0, len(microbatches), together):
        group = microbatches[first : first + together]
        _assign_longest(unassigned, group, list(less[first : first + together]))
        if less:  # those with few documents first, as they have least choice
            group = sorted(group, key=lambda microbatch: len(microbatch.docs))
        for number, microbatch in enumerate(group, start=first + 1):
            if not microbatch.take_rest(all_left=number == len(microbatches)):
                return []
    return [microbatch.layout(docs, lengths) for microbatch in microbatches]


class _Unassigned:
    """Documents that no microbatch has taken, by ascending length.

    ``_below[i]`` is i where document i - 1 is left, and leads to a shorter one where it is not.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self._below = list(range(len(lengths) + 1))

    def longest(self, at_most: int) -> int | None:
        """Return the longest document that is left, of these tokens at most; None if there is none."""
        below = self._below
        i = bisect_right(self.lengths, at_most)
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
        self._below = [
            i if i == 0 or i - 1 in left else i - 1 for i in range(len(self._below))
        ]


def _assign_longest(
    unassigned: _Unassigned, microbatches: Sequence[_Microbatch], sums: list[float]
) -> None:
    """Assign the longest documents to the ranks of microbatches, until few tokens of each are left or none fits.

    With ``sums`` of squared tokens that the microbatches begin with, it is the turn of the microbatch with the least.
    """
    of_sums = bool(sums)
    sums = sums or [0.0] * len(microbatches)
    _spread_longest(unassigned, microbatches, sums, of_sums=of_sums)
    turns: list[tuple[float, int, int, int]] = []

    def queue_turn(number: int) -> None:
        microbatch = microbatches[number]
        if microbatch.queue and microbatch.left > microbatch.few:
            work, capacity, _ = microbatch.queue[0]
            heapq.heappush(turns, (sums[number], work, capacity, number))

    for number in range(len(microbatches)):
        queue_turn(number)
    while turns:
        number = heapq.heappop(turns)[-1]
        microbatch = microbatches[number]
        work, capacity, rank = heapq.heappop(microbatch.queue)
        doc = unassigned.longest(-capacity)
        if doc is not None:
            microbatch.take(doc, rank)
            length = unassigned.lengths[doc]
            sums[number] += of_sums * length**2
            heapq.heappush(
                microbatch.queue, (work + length**2, capacity + length, rank)
            )
        queue_turn(number)


def _spread_longest(
    unassigned: _Unassigned,
    microbatches: Sequence[_Microbatch],
    sums: list[float],
    *,
    of_sums: bool,
) -> None:
    """Spread the documents that are longer than any rank's capacity over several ranks."""
    widest = max(max(microbatch.capacities) for microbatch in microbatches)
    while True:
        doc = unassigned.longest(max(microbatch.left for microbatch in microbatches))
        if doc is None or unassigned.lengths[doc] <= widest:
            return
        length = unassigned.lengths[doc]
        roomy = [
            number
            for number, microbatch in enumerate(microbatches)
            if microbatch.left >= length
        ]
        chosen = min(
            roomy,
            key=lambda number: (
                sums[number] if of_sums else sum(microbatches[number].work)
            ),
        )
        microbatches[chosen].spread(doc)
        sums[chosen] += of_sums * length**2


class _Microbatch:
    """Documents of a microbatch: most are on one rank each, the others in the capacity that these leave.

    Attributes:
        docs: documents so far, each with its rank or -1.
        capacities: tokens of every rank less those of spread documents; ``_assign_longest`` counts those of whole
            documents.
        work: squared lengths of the spread documents on every rank.
        left: tokens of the microbatch that no document has.
        few: tokens that may be left when the longest documents are assigned.
        queue: heap of (squared lengths on a rank, -tokens of capacity, rank), of the ranks with capacity.
    """

    def __init__(
        self, unassigned: _Unassigned, capacities: list[int], filled: float
    ) -> None:
        self._unassigned = unassigned
        self._tokens = capacities
        self.docs: list[tuple[int, int]] = []
        self.capacities = capacities.copy()
        self.work = [0] * len(capacities)
        self.left = sum(capacities)
        self.few = filled * self.left / len(capacities)
        self.queue = [
            (0, -capacity, rank) for rank, capacity in enumerate(capacities) if capacity
        ]
        heapq.heapify(self.queue)

    def take(self, doc: int, rank: int = -1) -> None:
        """Take a document, which lies on one rank or in the capacity that others leave."""
        self._unassigned.take(doc)
        self.docs.append((doc, rank))
        self.left -= self._unassigned.lengths[doc]

    def spread(self, doc: int) -> None:
        """Take a document longer than any rank's capacity, and count it on the ranks of least work."""
        self.take(doc)
        length = left = self._unassigned.lengths[doc]
        changed = []
        while left:
            *_, rank = heapq.heappop(self.queue)
            part = min(self.capacities[rank], left)
            self.capacities[rank] -= part
            self.work[rank] += part * length
            left -= part
            changed.append((self.work[rank], -self.capacities[rank], rank))
        for entry in changed:
            if entry[1]:  # without capacity a rank gets no more
                heapq.heappush(self.queue, entry)

    def take_rest(self, *, all_left: bool) -> bool:
        """Take documents that fill what is left exactly, or all; returns False where none are found that do."""
        unassigned = self._unassigned
        for _ in range(RETRIES):
            docs = [
                doc
                for doc in unassigned.left()
                if all_left or unassigned.lengths[doc] <= self.left
            ]
            lengths = [unassigned.lengths[doc] for doc in docs]
            enough = bisect_right(list(accumulate(lengths)), 2 * self.left) + 1
            chosen = (
                range(len(docs))
                if all_left
                else add_up(lengths[: max(CANDIDATES, enough)], self.left)
            )
            if chosen is not None:
                for i in chosen:
                    self.take(docs[i])
                return not self.left
            if not self.docs:
                break
            shortest = min(self.docs)
            self.docs.remove(shortest)
            self.left += unassigned.lengths[shortest[0]]
            unassigned.give_back(shortest[0])
        return False

    def layout(self, ids: IntArray, lengths: IntArray) -> TokenLayout:
        """Return the documents' homes; ``ids`` and ``lengths`` are those of the step's documents."""
        doc, rank = np.array(self.docs, dtype=np.int64).reshape(-1, 2).T
        placed = rank >= 0
        loose = doc[rank < 0]
        gaps = np.array(self._tokens) - sum_by_index(
            rank[placed], lengths[doc[placed]], len(self._tokens)
        )
        source, gap, start, end = end_to_end(lengths[loose], gaps)
        columns = (
            np.append(rank[placed], gap),
            ids[np.append(doc[placed], loose[source])],
            np.append(np.zeros_like(doc[placed]), start),
            np.append(lengths[doc[placed]], end - start),
        )
        # that of tasks, so that a rank that serves no other copies no rows
        order = np.lexsort(columns[2:0:-1])
        rank, doc, start, length = (column[order] for column in columns)
        return TokenLayout.from_arrays(len(self._tokens), rank, doc, start, length)


def add_up(lengths: Sequence[int], total: int) -> list[int] | None:
    """Return indices of lengths, which ascend, that add up to ``total``; None if none do.

    Where there is a choice, the last ones are taken. Memory is that of one sum for each distinct length.
    """
    groups = _equal_lengths(lengths)
    # bit t of sums[n]: some of the documents in the first n groups add up to t
    sums = [1]
    for group in groups:
        sums.append(_with_group(sums[-1], lengths[group[0]], len(group), total=total))
    if not sums[-1] >> total & 1:
        return None
    chosen: list[int] = []
    for group, without in zip(reversed(groups), sums[-2::-1], strict=True):
        length = lengths[group[0]]
        count = min(len(group), total // length)
        while not without >> (total - count * length) & 1:
            count -= 1
        chosen += reversed(group[len(group) - count :])
        total -= count * length
    return chosen


def _equal_lengths(lengths: Sequence[int]) -> list[range]:
    """Return the index ranges of equal lengths."""
    groups = []
    begin = 0
    while begin < len(lengths):
        end = bisect_right(lengths, lengths[begin], begin)
        groups.append(range(begin, end))
        begin = end
    return groups


def _with_group(sums: int, length: int, count: int, total: int) -> int:
    """Return the sums, as bits up to ``total``, with up to ``count`` documents of one length: 1, 2, 4, ... of them."""
    step = 1
    while count:
        step = min(step, count)
        sums = (sums | sums << step * length) & ((2 << total) - 1)
        count -= step
        step *= 2
    return sums
