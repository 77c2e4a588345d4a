"""What an estimate keeps of ranks and chunks, and lists of the chunks of a rank and of a document."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_leaf

ROOM, ROOTS, MOVED, SAVED, EACH, TOTAL, POWERS, SLOPE, SUMS = range(9)
"""Sums: the typical room of a rank with room; of the square roots of the
rooms; bytes into ranks with room, for what others give away, if they held none of the keys; what they hold of these;
what a rank with room gets of the rest, over the root of its room, when powers were last taken of all ranks; of the
bytes into ranks besides; of the powers; and by what part the eighth root of these grows per unit of EACH."""

INTO, OUT, SHARED, WANTED, QUERIES, HELPED, ROOT, KEPT, POWER, FIGURES = range(10)
"""Of a rank:

    INTO     bytes of keys into it, for what it keeps
    OUT      bytes of its keys that others read
    SHARED   the part of OUT that is read for what others give away
    WANTED   work of what others give away that reads these
    QUERIES  bytes of queries that it gives away
    HELPED   bytes into those that get what it gives away
    ROOT     square root of its room
    KEPT     bytes of SHARED that it need not send, as it attends to them itself
    POWER    eighth powers of its bytes in and out, added up
"""

COUNT, MOVE, MARKS = range(3)
"""Marks: ranks touched by a move, and the number of the move."""


class Scratch(NamedTuple):
    """Of an estimate. By rank [num_ranks]: the ``figures`` [num_ranks, FIGURES]; those ``before`` a move, in the order
    of the ranks ``touched``; the move that last touched a rank; and the first of its chunks, -1 for none.

    By chunk [n]: keys given away (negative where the rank imports them all the same), strips and height of what is; the
    same before a move, [n, 3]; the next chunk of the rank, -1 for none; the chunks to its ``left`` and ``right`` in the
    document, of those that have a rank; and whether a move is about it. ``sums`` as above, those before a move, and
    ``marks``.
    """

    figures: FloatArray
    before: FloatArray
    touched: IntArray
    stamp: IntArray
    head: IntArray
    keys: FloatArray
    strips: FloatArray
    heights: FloatArray
    given: FloatArray
    after: IntArray
    left: IntArray
    right: IntArray
    moves: IntArray
    sums: FloatArray
    sums_before: FloatArray
    marks: IntArray


def make_scratch(num_ranks: int, chunks: int) -> Scratch:
    """Return scratch for so many ranks, and at most so many chunks."""
    figures, before = np.zeros((2, num_ranks, FIGURES))
    touched, stamp, head = np.zeros((3, num_ranks), dtype=np.int64)
    keys, strips, heights = np.zeros((3, chunks))
    after, left, right, moves = np.zeros((4, chunks), dtype=np.int64)
    sums, sums_before = np.zeros((2, SUMS))
    return Scratch(
        figures=figures,
        before=before,
        touched=touched,
        stamp=stamp,
        head=head,
        keys=keys,
        strips=strips,
        heights=heights,
        given=np.zeros((chunks, 3)),
        after=after,
        left=left,
        right=right,
        moves=moves,
        sums=sums,
        sums_before=sums_before,
        marks=np.zeros(MARKS, dtype=np.int64),
    )


@jit_leaf
def link(scratch: Scratch, i: int, rank: int) -> None:
    """Make chunk ``i`` the first of a rank's."""
    scratch.after[i] = scratch.head[rank]
    scratch.head[rank] = i


@jit_leaf
def unlink(scratch: Scratch, i: int, rank: int) -> None:
    """Take chunk ``i`` out of a rank's."""
    k = scratch.head[rank]
    if k == i:
        scratch.head[rank] = scratch.after[i]
        return
    while scratch.after[k] != i:
        k = scratch.after[k]
    scratch.after[k] = scratch.after[i]


@jit_leaf
def insert(scratch: Scratch, i: int, left: int) -> None:
    """Let chunk ``i`` follow another of its document."""
    right = scratch.right[left]
    scratch.left[i], scratch.right[i], scratch.right[left] = left, right, i
    if right >= 0:
        scratch.left[right] = i


@jit_leaf
def remove(scratch: Scratch, i: int) -> None:
    """Take back what ``insert`` did."""
    left, right = scratch.left[i], scratch.right[i]
    scratch.right[left] = right
    if right >= 0:
        scratch.left[right] = left
