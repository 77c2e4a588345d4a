# SPDX-License-Identifier: BSD-3-Clause
"""Fill the microbatches of an optimizer step anew with its documents.

Where the ranks of a microbatch hold documents of the same lengths, they have the same work and nothing moves. So the
longest documents are assigned first: again and again, the rank of least work takes the longest that fits its capacity.
The last tokens of a microbatch are filled by short documents whose lengths add up to them exactly.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, end_to_end, sum_by_index
from torchtitan_cad.planning.model.layout import TokenLayout

Unassigned = list[tuple[int, int]]
"""(tokens, number) of the documents that no microbatch has taken, ascending"""

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
    unassigned = sorted(zip(lengths.tolist(), range(len(lengths)), strict=True))
    squares = less or [0.0] * len(capacities)
    microbatches = [
        _Microbatch(of_ranks.tolist(), begun, filled)
        for of_ranks, begun in zip(capacities, squares, strict=True)
    ]
    for first in range(0, len(microbatches), together):
        group = microbatches[first : first + together]
        _spread_longest(unassigned, group)
        _assign_longest(unassigned, group, by_sums=bool(less))
        if less:  # those with few documents first, as they have least choice
            group = sorted(group, key=lambda microbatch: len(microbatch.docs))
        for number, microbatch in enumerate(group, start=first + 1):
            all_left = number == len(microbatches)
            if not microbatch.take_rest(unassigned, all_left=all_left):
                return []
    return [microbatch.layout(docs, lengths) for microbatch in microbatches]


def _spread_longest(
    unassigned: Unassigned, microbatches: Sequence[_Microbatch]
) -> None:
    """Spread the documents that are longer than any rank's capacity over several ranks."""
    widest = max(max(microbatch.tokens) for microbatch in microbatches)
    while True:
        most = max(microbatch.left for microbatch in microbatches)
        at = bisect_right(unassigned, (most, math.inf)) - 1
        if at < 0 or unassigned[at][0] <= widest:
            return
        length, doc = unassigned.pop(at)
        roomy = [microbatch for microbatch in microbatches if microbatch.left >= length]
        min(roomy, key=lambda microbatch: microbatch.squares).spread(length, doc)


def _assign_longest(
    unassigned: Unassigned, microbatches: Sequence[_Microbatch], *, by_sums: bool
) -> None:
    """Assign the longest documents to the ranks of microbatches, until few tokens of each are left or none fits.

    It is the turn of the rank with the least work, with ``by_sums`` in the microbatch with the least squared tokens.
    """
    turns: list[tuple[float, int, int, int]] = []

    def queue_turn(number: int) -> None:
        microbatch = microbatches[number]
        if microbatch.queue and microbatch.left > microbatch.few:
            work, capacity, _ = microbatch.queue[0]
            squares = microbatch.squares if by_sums else 0.0
            heapq.heappush(turns, (squares, work, capacity, number))

    for number in range(len(microbatches)):
        queue_turn(number)
    while turns:
        number = heapq.heappop(turns)[-1]
        microbatches[number].take_longest(unassigned)
        queue_turn(number)


class _Microbatch:
    """Documents of a microbatch: most are on one rank each, the others in the capacity that these leave.

    Attributes:
        tokens: of every rank.
        docs: (tokens, number, rank or -1) of its documents.
        left: tokens that no document has.
        few: tokens that may be left when the longest documents are assigned.
        squares: squared tokens of its documents, and those that it begins with.
        queue: heap of (squared tokens on a rank, -tokens of capacity, rank), of the ranks with capacity.
    """

    def __init__(self, tokens: list[int], squares: float, filled: float) -> None:
        self.tokens = tokens
        self.docs: list[tuple[int, int, int]] = []
        self.left = sum(tokens)
        self.few = filled * self.left / len(tokens)
        self.squares = squares
        self.queue = [
            (0, -capacity, rank) for rank, capacity in enumerate(tokens) if capacity
        ]
        heapq.heapify(self.queue)

    def _take(self, length: int, doc: int, rank: int = -1) -> None:
        """Take a document, which lies on one rank or in the capacity that others leave."""
        self.docs.append((length, doc, rank))
        self.left -= length
        self.squares += length**2

    def spread(self, length: int, doc: int) -> None:
        """Take a document longer than any rank's capacity, and count it on the ranks of least work."""
        self._take(length, doc)
        left = length
        while left:
            work, capacity, rank = heapq.heappop(self.queue)
            part = min(-capacity, left)
            left -= part
            capacity += part
            if capacity:  # that of the last of the ranks
                heapq.heappush(self.queue, (work + part * length, capacity, rank))

    def take_longest(self, unassigned: Unassigned) -> None:
        """Take the longest document that fits the rank of least work, which gets no more if none does."""
        work, capacity, rank = heapq.heappop(self.queue)
        at = bisect_right(unassigned, (-capacity, math.inf)) - 1
        if at >= 0:
            length, doc = unassigned.pop(at)
            self._take(length, doc, rank)
            heapq.heappush(self.queue, (work + length**2, capacity + length, rank))

    def take_rest(self, unassigned: Unassigned, *, all_left: bool) -> bool:
        """Take documents that fill what is left exactly, or all; returns False where none are found that do."""
        if all_left:
            for length, doc in unassigned:
                self._take(length, doc)
            return not self.left
        for _ in range(RETRIES):
            fitting = bisect_right(unassigned, (self.left, math.inf))
            lengths = [length for length, _ in unassigned[:fitting]]
            totals = list(accumulate(lengths))
            enough = bisect_right(totals, 2 * self.left) + 1
            candidates = lengths[: max(CANDIDATES, enough)]
            chosen = add_up(candidates, self.left)
            if chosen is not None:
                for i in chosen:
                    self._take(*unassigned.pop(i))
                return True
            if not self.docs:
                break
            length, doc, rank = min(self.docs)
            self.docs.remove((length, doc, rank))
            self.left += length
            insort(unassigned, (length, doc))
        return False

    def layout(self, ids: IntArray, lengths: IntArray) -> TokenLayout:
        """Return the documents' homes; ``ids`` and ``lengths`` are those of the step's documents."""
        _, doc, rank = np.array(self.docs, dtype=np.int64).reshape(-1, 3).T
        is_whole = rank >= 0
        whole = doc[is_whole]
        loose = doc[~is_whole]
        on_ranks = sum_by_index(rank[is_whole], lengths[whole], len(self.tokens))
        gaps = np.array(self.tokens) - on_ranks
        source, gap, start, end = end_to_end(lengths[loose], gaps)
        pieces = np.append(whole, loose[source])
        columns = (
            np.append(rank[is_whole], gap),
            ids[pieces],
            np.append(np.zeros_like(whole), start),
            np.append(lengths[whole], end - start),
        )
        # that of tasks, so that a rank that serves no other copies no rows
        order = np.lexsort(columns[2:0:-1])
        rank, doc, start, length = (column[order] for column in columns)
        return TokenLayout.from_arrays(len(self.tokens), rank, doc, start, length)


def add_up(lengths: Sequence[int], total: int) -> list[int] | None:
    """Return indices of lengths, which ascend, that add up to ``total``, in descending order; None if none do.

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
        while True:
            rest = total - count * length
            if without >> rest & 1:
                break
            count -= 1
        last_ones = group[len(group) - count :]
        chosen += reversed(last_ones)
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
    up_to_total = (2 << total) - 1
    step = 1
    while count:
        step = min(step, count)
        with_more = sums << step * length
        sums = (sums | with_more) & up_to_total
        count -= step
        step *= 2
    return sums
