"""Moves of the search for homes: drawn, carried out, and taken back.

Chunks change places, one goes elsewhere, gives its first tokens to another rank, shifts its boundary with the next of
its document, or takes in all of the next.
"""

from __future__ import annotations

from typing import NamedTuple

from torchtitan_cad.planning.intervals import FloatArray, IntArray
from torchtitan_cad.planning.jit import jit_leaf
from torchtitan_cad.planning.placement.chunks import MOST_CHUNKS, Chunks, Ranks, State, give, work_of
from torchtitan_cad.planning.placement.scratch import Scratch, insert, link, remove, unlink

SWAP, RELOCATE, SPLIT, SHIFT, JOIN, KINDS = range(6)
"""Kinds of moves."""

KIND, ONE, OTHER, FROM, TO, START, MIDDLE, CUT, END, ENTRIES = range(10)
"""Entries of a move: its kind; the chunk, and the other one of a swap or the next one of its document; the rank that
has the first, and the other rank; where the first chunk begins, and, if boundaries move, where it ends before and
after, and where the next one ends."""


class Documents(NamedTuple):
    """Documents to deal.

    ``lengths`` and ``offsets`` (position of the first token) of all; ``long`` and ``short`` are indices, the latter
    longest first; ``prefix`` is the work of the first rows of a document. ``units`` are (tile, grid, least, most): the
    search sets the last two, tokens of a chunk at least and at most. ``density`` [1] is the work of a token of short
    documents.
    """

    lengths: IntArray
    offsets: FloatArray
    long: IntArray
    short: IntArray
    prefix: FloatArray
    units: IntArray
    density: FloatArray


class Dealing(NamedTuple):
    """Who has which chunk, and what that comes to; ``prices`` see ``estimate.py``."""

    documents: Documents
    ranks: Ranks
    state: State
    chunks: Chunks
    scratch: Scratch
    prices: FloatArray


@jit_leaf
def random(state: IntArray, below: int) -> int:
    """Return the next pseudo-random number below a bound of at most 2^31; ``state`` [1]."""
    state[0] = (state[0] * 1103515245 + 12345) & 0x7FFFFFFF
    return (state[0] >> 8) * below >> 23


@jit_leaf
def _relocate(dealing: Dealing, i: int, rank: int) -> None:
    """Give chunk ``i`` to another rank."""
    chunks, state = dealing.chunks, dealing.state
    unlink(dealing.scratch, i, chunks.rank[i])
    link(dealing.scratch, i, rank)
    own = chunks.work[i] - dealing.documents.density[0] * chunks.length[i]
    give(state, dealing.ranks, chunks.rank[i], -chunks.length[i], -own)
    give(state, dealing.ranks, rank, chunks.length[i], own)
    state.chunks[chunks.rank[i]] -= 1
    state.chunks[rank] += 1
    chunks.rank[i] = rank


@jit_leaf
def _resize(dealing: Dealing, i: int, start: int, end: int) -> None:
    """Make chunk ``i`` [start, end)."""
    chunks, documents = dealing.chunks, dealing.documents
    work = work_of(documents.prefix, documents.units[0], start, end)
    more = end - start - chunks.length[i]
    give(dealing.state, dealing.ranks, chunks.rank[i], more, work - chunks.work[i] - documents.density[0] * more)
    chunks.start[i], chunks.length[i], chunks.work[i] = start, end - start, work


@jit_leaf
def _add(dealing: Dealing, j: int, i: int, rank: int) -> None:
    """Make chunk ``j``, of no tokens yet, the one after chunk ``i`` in its document, on a rank."""
    chunks = dealing.chunks
    chunks.doc[j], chunks.rank[j] = chunks.doc[i], rank
    chunks.start[j], chunks.length[j], chunks.work[j] = chunks.start[i] + chunks.length[i], 0, 0.0
    dealing.state.chunks[rank] += 1
    link(dealing.scratch, j, rank)
    insert(dealing.scratch, j, i)


@jit_leaf
def _drop(dealing: Dealing, j: int) -> None:
    """Take back what ``_add`` did."""
    rank = dealing.chunks.rank[j]
    dealing.state.chunks[rank] -= 1
    unlink(dealing.scratch, j, rank)
    remove(dealing.scratch, j)
    dealing.chunks.rank[j] = -1


@jit_leaf
def _draw_swap(dealing: Dealing, count: int, move: IntArray, numbers: IntArray) -> bool:
    """Draw a chunk to change places with, where tokens fit."""
    chunks, state, i = dealing.chunks, dealing.state, move[ONE]
    j, home = random(numbers, count), move[FROM]
    other, more = chunks.rank[j], chunks.length[i] - chunks.length[j]
    move[OTHER], move[TO] = j, other
    if other < 0 or other == home:
        return False
    if state.left[other] < more or state.left[home] < -more:
        return False
    return bool(state.chunks[home] > 1 or state.chunks[other] > 1)  # else as if ranks changed names


@jit_leaf
def _draw_rank(dealing: Dealing, count: int, move: IntArray, numbers: IntArray) -> bool:
    """Draw a rank that takes the chunk, or its first tokens."""
    chunks, state, i, home = dealing.chunks, dealing.state, move[ONE], move[FROM]
    other, grid = random(numbers, len(state.load)), dealing.documents.units[1]
    move[TO] = other
    if other == home or state.left[other] < grid or state.chunks[other] >= MOST_CHUNKS:
        return False
    if move[KIND] == RELOCATE:
        fits = state.left[other] >= chunks.length[i]
        return bool(fits and (state.chunks[home] > 1 or state.chunks[other] > 0))  # else the same
    fewest = dealing.documents.units[2]
    cells = (min(state.left[other], chunks.length[i] - fewest) - fewest) // grid + 1
    if cells <= 0 or count == len(chunks.doc) or state.chunks[home] >= MOST_CHUNKS:
        return False
    move[OTHER], move[CUT] = count, move[START] + fewest + random(numbers, cells) * grid
    move[MIDDLE] = move[END] = move[START] + chunks.length[i]
    return True


@jit_leaf
def _draw_boundary(dealing: Dealing, move: IntArray, numbers: IntArray) -> bool:
    """Draw a new boundary with the next chunk of the document; its end, to take it in."""
    chunks, state, i, home = dealing.chunks, dealing.state, move[ONE], move[FROM]
    j, middle, grid = dealing.scratch.right[i], move[START] + chunks.length[i], dealing.documents.units[1]
    if j < 0 or chunks.start[j] != middle:
        return False
    other, end = chunks.rank[j], middle + chunks.length[j]
    at = end
    if move[KIND] == SHIFT:
        at = middle + (random(numbers, 33) - 16) * max(1, chunks.length[i] // (40 * grid)) * grid
    move[OTHER], move[TO], move[MIDDLE], move[CUT], move[END] = j, other, middle, at, end
    more = at - middle
    if other == home or more == 0 or at - move[START] < grid or end - at < (move[KIND] == SHIFT) * grid:
        return False
    return bool(state.left[home] >= more and state.left[other] >= -more)


@jit_leaf
def draw(dealing: Dealing, count: int, i: int, move: IntArray, numbers: IntArray) -> bool:
    """Draw a move of chunk ``i`` into ``move`` [ENTRIES]; returns whether it can be made."""
    move[KIND], move[ONE], move[OTHER] = random(numbers, KINDS), i, -1
    move[FROM], move[START] = dealing.chunks.rank[i], dealing.chunks.start[i]
    if move[KIND] == SWAP:
        return _draw_swap(dealing, count, move, numbers)
    if move[KIND] <= SPLIT:
        return _draw_rank(dealing, count, move, numbers)
    return _draw_boundary(dealing, move, numbers)


@jit_leaf
def carry_out(dealing: Dealing, move: IntArray) -> None:
    """Carry a move out."""
    kind, i, j = move[KIND], move[ONE], move[OTHER]
    if kind == SPLIT:
        _add(dealing, j, i, move[FROM])
    if kind >= SPLIT:
        _resize(dealing, i, move[START], move[CUT])
        _resize(dealing, j, move[CUT], move[END])
    if kind <= SPLIT:
        _relocate(dealing, i, move[TO])
    if kind == SWAP:
        _relocate(dealing, j, move[FROM])
    if kind == JOIN:
        _drop(dealing, j)


@jit_leaf
def take_back(dealing: Dealing, move: IntArray) -> None:
    """Take back what ``carry_out`` did."""
    kind, i, j = move[KIND], move[ONE], move[OTHER]
    if kind == JOIN:
        _add(dealing, j, i, move[TO])
    if kind == SWAP:
        _relocate(dealing, j, move[TO])
    if kind <= SPLIT:
        _relocate(dealing, i, move[FROM])
    if kind >= SPLIT:
        _resize(dealing, j, move[MIDDLE], move[END])
        _resize(dealing, i, move[START], move[MIDDLE])
    if kind == SPLIT:
        _drop(dealing, j)
