# SPDX-License-Identifier: BSD-3-Clause
"""Vectorised arithmetic on half-open integer intervals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchtitan_cad.planning.jit import jit

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def exclusive_cumsum(lengths: IntArray) -> IntArray:
    """Return int64 [n + 1]: offsets of consecutive blocks of the given lengths, the total last."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def concat_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return the concatenation of ``arange(start, start + length)`` over all intervals, int64 [sum(lengths)]."""
    offsets = exclusive_cumsum(lengths)
    values = np.empty(offsets[-1], dtype=np.int64)
    _fill_ranges(np.ascontiguousarray(starts, dtype=np.int64), offsets, values)
    return values


@jit
def _fill_ranges(starts: IntArray, offsets: IntArray, values: IntArray) -> None:
    """Fill the ranges in one pass over the result: a rank may send millions of rows."""
    for i in range(len(starts)):
        target = values[offsets[i] : offsets[i + 1]]
        start = starts[i]
        # indices of a slice are not negative: three times as fast for long ranges
        for j in range(len(target)):
            target[j] = start + j


def begins_group(*columns: npt.NDArray) -> BoolArray:
    """Return bool [n] True where any of the ``columns`` [n] differs from the entry before, and for the first entry."""
    begins = np.zeros(len(columns[0]), dtype=bool)
    begins[:1] = True
    for column in columns:
        begins[1:] |= column[1:] != column[:-1]
    return begins


def causal_pairs(queries: npt.ArrayLike, window: int | None = None) -> IntArray:
    """Return the pairs of a document's first queries, each with the keys up to itself, of a window the last ones."""
    count = np.asarray(queries, dtype=np.int64)
    if window is None:
        return _triangle(count)
    first = np.minimum(count, window)
    others = count - first
    return _triangle(first) + others * window


def _triangle(side: IntArray) -> IntArray:
    return side * (side + 1) // 2


def union_by_group(
    group: IntArray,
    start: IntArray,
    end: IntArray,
) -> tuple[IntArray, IntArray, IntArray]:
    """Return the union of intervals within each group; touching intervals are joined.

    Args are int64 [n] with non-negative positions and group numbers whose product fits in int64; returns (group, start,
    end), disjoint, sorted by (group, start).
    """
    if len(group) == 0:
        return group, start, end
    # Every group is shifted past the previous one, so that one sort and one running maximum serve all groups.
    span = int(end.max()) + 1
    shift = group * span
    start = start + shift
    end = end + shift
    order = np.argsort(start)
    start = start[order]
    reach = np.maximum.accumulate(end[order])
    is_first = np.ones(len(start), dtype=bool)
    is_first[1:] = start[1:] > reach[:-1]
    is_last = np.roll(is_first, -1)
    group = group[order][is_first]
    shift = group * span
    return group, start[is_first] - shift, reach[is_last] - shift


def split_at(
    start: IntArray,
    end: IntArray,
    cuts: IntArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut intervals, none of them empty, at the sorted positions ``cuts``; ``cuts[0]`` must not exceed any start.

    Returns (source, cell, start, end) of the pieces: the index of the piece's interval, and the index i of its cell
    [cuts[i], cuts[i + 1]). Pieces are ordered by source, then position.
    """
    first = np.searchsorted(cuts, start, side="right") - 1
    stop = np.searchsorted(cuts, end, side="left")
    pieces = stop - first
    source = np.repeat(np.arange(len(start)), pieces)
    cell = concat_ranges(first, pieces)
    unlimited = np.iinfo(np.int64).max
    cell_end = np.append(cuts[1:], unlimited)
    return (
        source,
        cell,
        np.maximum(start[source], cuts[cell]),
        np.minimum(end[source], cell_end[cell]),
    )


def end_to_end(
    lengths: IntArray, capacities: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Lay intervals of these lengths, none of them empty, end to end into capacities.

    Returns (source, capacity, start, end) of the pieces: the index of the piece's interval, the index of its capacity,
    and the piece's positions inside the interval.
    """
    begin = exclusive_cumsum(lengths)
    used = np.flatnonzero(capacities)
    cuts = exclusive_cumsum(capacities[used])[:-1]
    source, cell, start, end = split_at(
        begin[:-1],
        begin[1:],
        cuts,
    )
    first = begin[source]
    start = start - first
    end = end - first
    return source, used[cell], start, end


def sum_by_index(index: IntArray, values: IntArray, size: int) -> IntArray:
    """Return int64 [size]: exact sums of ``values`` per index."""
    totals = np.zeros(size, dtype=np.int64)
    np.add.at(totals, index, values)
    return totals
