# SPDX-License-Identifier: BSD-3-Clause
"""Chunks of documents, and the ranks that hold them: the state of the search for homes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit, jit_inner
from torchtitan_cad.planning.sorting import pop, push

MOST_CHUNKS = 16
"""chunks: maximum per rank."""


class Work(NamedTuple):
    """The work of documents.

    Attributes:
        tile: rows of a tile.
        prefix: prefix[i] is the work of the first i rows of tiles of a document.
        per_pair: work of a (query, key) pair.
        per_token: work of a token of a short document.
    """

    tile: int
    prefix: FloatArray
    per_pair: float
    per_token: float


class Chunks(NamedTuple):
    """Chunks and their ranks. A *chunk* is a range of a long document, or all of it.

    Attributes:
        doc, start, length: [chunks], by document and start; only boundaries between chunks of a document change.
        behind: [chunks] number of chunks behind it in its document.
        rank: [chunks] the rank that holds it.
        members: [ranks, MOST_CHUNKS + 2] the chunks of every rank; a move that is undone may make one or two too many.
        num_held: [ranks] number of the rank's chunks.
        free: [ranks] tokens that still fit.
        load: [ranks] work, that of the short documents expected in the free tokens included.
        num_bytes: [ranks] what the rank adds to the estimated bytes of all ranks.
        power: [ranks] sum of the eighth powers of its estimated bytes in and out.
        helped: [ranks] estimated bytes into the ranks that take work from it.
    """

    doc: IntArray
    start: IntArray
    length: IntArray
    behind: IntArray
    rank: IntArray
    members: IntArray
    num_held: IntArray
    free: IntArray
    load: FloatArray
    num_bytes: FloatArray
    power: FloatArray
    helped: FloatArray


def make_chunks(segments: IntArray, capacities: IntArray, work: Work) -> Chunks:
    """Return chunks [4, n] of (rank, document, start, length), sorted by document and start.

    Ranks can hold ``capacities`` [ranks] tokens.
    """
    rank, doc, start, length = segments
    num_ranks = len(capacities)
    last = np.searchsorted(doc, doc, side="right") - 1
    num_bytes, power, helped = np.zeros((3, num_ranks))
    chunks = Chunks(
        doc=doc,
        start=start,
        length=length,
        behind=last - np.arange(len(doc)),
        rank=rank,
        members=np.zeros((num_ranks, MOST_CHUNKS + 2), dtype=np.int64),
        num_held=np.zeros(num_ranks, dtype=np.int64),
        free=capacities.copy(),
        load=(work.per_token * capacities).astype(np.float64),
        num_bytes=num_bytes,
        power=power,
        helped=helped,
    )
    fill_members(chunks, work)
    return chunks


@jit_inner
def work_of(work: Work, start: int, length: int) -> float:
    """Return the work of ``length`` queries of a document from ``start`` against all keys before them."""
    end = start + length
    return work.prefix[-(-end // work.tile)] - work.prefix[start // work.tile]


@jit
def fill_members(chunks: Chunks, work: Work) -> None:
    """Count all chunks in on their ranks."""
    for i in range(len(chunks.doc)):
        _count_in(chunks, work, i, 1)


@jit_inner
def _count_in(chunks: Chunks, work: Work, i: int, sign: int) -> None:
    """Add chunk ``i`` to its rank, or take it from its rank if ``sign`` is -1."""
    rank = chunks.rank[i]
    tokens = chunks.length[i]
    extra = work_of(work, chunks.start[i], tokens) - work.per_token * tokens
    chunks.free[rank] -= sign * tokens
    chunks.load[rank] += sign * extra
    if sign > 0:
        chunks.members[rank, chunks.num_held[rank]] = i
    else:
        at = 0
        while chunks.members[rank, at] != i:
            at += 1
        chunks.members[rank, at] = chunks.members[rank, chunks.num_held[rank] - 1]
    chunks.num_held[rank] += sign


@jit_inner
def change(
    chunks: Chunks, work: Work, i: int, rank: int, start: int, length: int
) -> None:
    """Give chunk ``i`` other tokens, and to a rank."""
    _count_in(chunks, work, i, -1)
    chunks.rank[i] = rank
    chunks.start[i] = start
    chunks.length[i] = length
    _count_in(chunks, work, i, 1)


@jit_inner
def has_room(chunks: Chunks, ranks: IntArray) -> bool:
    """Tell whether ranks [n] can hold their chunks."""
    has = True
    for rank in ranks:
        has &= chunks.free[rank] >= 0 and chunks.num_held[rank] <= MOST_CHUNKS
    return has


@jit
def cut_documents(
    docs: IntArray,
    lengths: IntArray,
    work: Work,
    bounds: IntArray,
    most_work: float,
    segments: IntArray,
) -> int:
    """Cut documents into chunks of at most ``most_work``, where possible; returns their number.

    Args:
        docs, lengths: [n] number and tokens of the documents.
        bounds: (grid of the cuts, fewest tokens of a chunk, most tokens).
        segments: [rows, 4] gets (-1, document, start, length) of the chunks.
    """
    grid = bounds[0]
    shortest = bounds[1]
    longest = bounds[2]
    count = 0
    for number in range(len(docs)):
        start = 0
        while start < lengths[number]:
            left = lengths[number] - start
            tokens = shortest
            while (
                tokens < longest
                and work_of(work, start, min(left, tokens + grid)) <= most_work
            ):
                tokens += grid
            if left <= longest and left - tokens < shortest // 2:
                tokens = left
            tokens = min(tokens, left)
            segments[count, 0] = -1
            segments[count, 1] = docs[number]
            segments[count, 2] = start
            segments[count, 3] = tokens
            count += 1
            start += tokens
    return count


@jit
def assign(
    segments: IntArray,
    order: IntArray,
    count: int,
    work: Work,
    grid: int,
    free: IntArray,
    load: FloatArray,
    held: IntArray,
) -> int:
    """Assign segments in ``order`` [n], each to the rank of least load that has room, and return their number.

    A segment that does not fit is cut at a multiple of ``grid``, and its rest, a new segment, goes to the next rank.
    Segments that no rank can take, because all are full or have ``MOST_CHUNKS``, keep the rank -1.

    Args:
        segments: [rows, 4] of (rank, document, start, length), of which ``count`` are in use.
        free, load, held: [ranks] free tokens, work, and chunks of every rank, updated.
    """
    heap = held[1]
    num_chunks = held[0]
    size = 0
    for rank in range(len(free)):
        size = push(heap, size, load, rank)
    for i in order:
        while size > 0:
            rank = pop(heap, size, load)
            size -= 1
            start = segments[i, 2]
            length = segments[i, 3]
            part = length if length <= free[rank] else free[rank] // grid * grid
            if part <= 0:
                continue
            segments[i, 0] = rank
            segments[i, 3] = part
            free[rank] -= part
            load[rank] += work_of(work, start, part) - work.per_token * part
            num_chunks[rank] += 1
            if num_chunks[rank] < MOST_CHUNKS:
                size = push(heap, size, load, rank)
            if part == length:
                break
            segments[count, 0] = -1
            segments[count, 1] = segments[i, 1]
            segments[count, 2] = start + part
            segments[count, 3] = length - part
            i = count
            count += 1
    return count


@jit
def assign_short(
    lengths: IntArray, work: Work, chunks: Chunks, home: IntArray, heap: IntArray
) -> None:
    """Assign whole documents of descending ``lengths`` [n], each to the rank of least load.

    A rank on which a document does not fit gets no more documents. ``home`` [n] is set to the rank, or -1.
    """
    size = 0
    for rank in range(len(heap)):
        chunks.load[rank] -= work.per_token * chunks.free[rank]
        if chunks.free[rank] > 0:
            size = push(heap, size, chunks.load, rank)
    for number in range(len(lengths)):
        home[number] = -1
        while size > 0 and home[number] < 0:
            rank = pop(heap, size, chunks.load)
            size -= 1
            if chunks.free[rank] >= lengths[number]:
                home[number] = rank
                chunks.free[rank] -= lengths[number]
                chunks.load[rank] += work_of(work, 0, lengths[number])
                size = push(heap, size, chunks.load, rank)
