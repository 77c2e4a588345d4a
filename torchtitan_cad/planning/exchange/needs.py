# SPDX-License-Identifier: BSD-3-Clause
"""Rows that each server needs, as intervals, and their homes: the source of exchange tables and byte counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torchtitan_cad.planning.intervals import (
    BoolArray,
    IntArray,
    concat_ranges,
    covered,
    exclusive_cumsum,
    split_at,
    sum_by_index,
    union_by_group,
)
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.tasks import TaskArray


@dataclass(frozen=True, eq=False)
class RowNeeds:
    """Rows of one kind (queries or keys) that servers use, each row once per server: intervals, and their homes.

    The intervals are not cut between homes, as the servers of a document on n ranks may need rows of most others, which
    makes n^2 (home, server) pairs. All counts are computed from the intervals [n] and the runs [S] alone.

    Attributes:
        server, start, end: int64 [n] global positions (see ``TokenLayout``), ordered by (server, start).
        server_offsets: int64 [num_ranks + 1] delimits the servers.
        run_start, run_end, run_home, run_row: int64 [S] the runs by global position, their homes and the local rows
            of their first tokens.
    """

    server: IntArray
    start: IntArray
    end: IntArray
    server_offsets: IntArray
    run_start: IntArray
    run_end: IntArray
    run_home: IntArray
    run_row: IntArray

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout; each is a server."""
        return len(self.server_offsets) - 1

    def used_by(self, server: int) -> Rows:
        """Return the rows that a server uses, its own included, by position."""
        intervals = slice(self.server_offsets[server], self.server_offsets[server + 1])
        _, run, start, end = split_at(
            self.start[intervals], self.end[intervals], self.run_start
        )
        return Rows(
            self.run_home[run],
            start,
            end,
            self.run_row[run] + start - self.run_start[run],
        )

    def sent_by(self, home: int) -> Rows:
        """Return the rows that a home sends, by (server, position)."""
        runs = np.flatnonzero(self.run_home == home)
        first = np.searchsorted(self.run_end[runs], self.start, side="right")
        stop = np.searchsorted(self.run_start[runs], self.end, side="left")
        source = np.flatnonzero((stop > first) & (self.server != home))
        pieces = (stop - first)[source]
        run = runs[concat_ranges(first[source], pieces)]
        source = np.repeat(source, pieces)
        start = np.maximum(self.start[source], self.run_start[run])
        end = np.minimum(self.end[source], self.run_end[run])
        return Rows(
            self.server[source],
            start,
            end,
            self.run_row[run] + start - self.run_start[run],
        )

    @property
    def sends(self) -> BoolArray:
        """[num_ranks, num_ranks] Whether the first rank is home to rows that the second, another one, uses."""
        first = np.searchsorted(self.run_start, self.start, side="right") - 1
        stop = np.searchsorted(self.run_start, self.end, side="left")
        sends = np.zeros((self.num_ranks, self.num_ranks), dtype=bool)
        sends[
            self.run_home[concat_ranges(first, stop - first)],
            np.repeat(self.server, stop - first),
        ] = True
        np.fill_diagonal(sends, False)
        return sends

    def rows_inside(self, group: IntArray) -> tuple[IntArray, IntArray]:
        """Return int64 [num_ranks] rows each rank receives from ranks of its own group, and rows it sends to them.

        ``group`` [num_ranks] is the group of every rank.
        """
        used = (group[self.server], self.start, self.end)
        held = (group[self.run_home], self.run_start, self.run_end)
        into = sum_by_index(self.server, covered(used, held), self.num_ranks)
        out = sum_by_index(self.run_home, covered(held, used), self.num_ranks)
        return into - self._local, out - self._local

    def put_offsets(self, rank: int, servers: IntArray) -> IntArray:
        """Return int64 [num_ranks] where ``rank``'s rows begin among those received by each of ``servers``, else 0.

        Received rows are ordered by home, so rows that lower homes send to the same server come before.
        """
        first = self.server_offsets[servers]
        stop = self.server_offsets[servers + 1]
        intervals = concat_ranges(first, stop - first)
        lower = self.run_home < rank
        before = exclusive_cumsum(np.where(lower, self.run_end - self.run_start, 0))
        head = self._first_run[intervals]
        tail = self._last_run[intervals]
        rows = before[tail + 1] - before[head]
        rows -= np.where(lower[head], self.start[intervals] - self.run_start[head], 0)
        rows -= np.where(lower[tail], self.run_end[tail] - self.end[intervals], 0)
        offsets = sum_by_index(self.server[intervals], rows, self.num_ranks)
        own = servers[servers < rank]
        offsets[own] -= self._local[own]
        return offsets

    def return_offsets(self, rank: int, homes: IntArray) -> IntArray:
        """Return int64 [num_ranks] where rows served by ``rank`` begin among those that return to ``homes``, else 0.

        Rows that lower servers return to the same home come before.
        """
        before = self._rows_of_homes(int(self.server_offsets[rank]))
        before[:rank] -= self._local[:rank]
        offsets = np.zeros(self.num_ranks, dtype=np.int64)
        offsets[homes] = before[homes]
        return offsets

    @cached_property
    def rows_out(self) -> IntArray:
        """[num_ranks] rows each rank sends, counted once per receiver."""
        return self._rows_of_homes(len(self.server)) - self._local

    @cached_property
    def rows_in(self) -> IntArray:
        """[num_ranks] rows each rank receives."""
        return (
            sum_by_index(self.server, self.end - self.start, self.num_ranks)
            - self._local
        )

    @cached_property
    def _first_run(self) -> IntArray:
        """[n] the run in which an interval begins."""
        return np.searchsorted(self.run_start, self.start, side="right") - 1

    @cached_property
    def _last_run(self) -> IntArray:
        """[n] the run in which an interval ends."""
        return np.searchsorted(self.run_start, self.end, side="left") - 1

    @cached_property
    def _local(self) -> IntArray:
        """[num_ranks] rows that each rank uses and is home to."""
        used = covered(
            (self.server, self.start, self.end),
            (self.run_home, self.run_start, self.run_end),
        )
        return sum_by_index(self.server, used, self.num_ranks)

    def _rows_of_homes(self, count: int) -> IntArray:
        """[num_ranks] rows of each home that the first ``count`` intervals use, once per server."""
        head = self._first_run[:count]
        tail = self._last_run[:count]
        runs = len(self.run_start)
        begins = np.bincount(head, minlength=runs)
        ends = np.bincount(tail, minlength=runs)
        # Intervals that use some of a run, times its rows; those that begin or end in it leave some rows out.
        rows = (np.cumsum(begins) - np.cumsum(ends) + ends) * (
            self.run_end - self.run_start
        )
        np.subtract.at(rows, head, self.start[:count] - self.run_start[head])
        np.subtract.at(rows, tail, self.run_end[tail] - self.end[:count])
        return sum_by_index(self.run_home, rows, self.num_ranks)


class Rows(NamedTuple):
    """Intervals of rows that one rank uses or sends, each within one run. All int64 [n].

    ``peer`` is the home or the server, ``start`` and ``end`` are global positions, ``row`` is the local row at home of
    the first position.
    """

    peer: IntArray
    start: IntArray
    end: IntArray
    row: IntArray


def order_by_rank(rank: IntArray, num_ranks: int) -> IntArray:
    """Return the stable permutation that sorts by rank; linear time below 2**16 ranks (radix sort)."""
    return np.argsort(
        rank.astype(np.uint16) if num_ranks <= 2**16 else rank, kind="stable"
    )


def offsets_by_rank(rank: IntArray, num_ranks: int) -> IntArray:
    """Return [num_ranks + 1] offsets of the ranks in an array sorted by rank."""
    return exclusive_cumsum(np.bincount(rank, minlength=num_ranks))


def query_needs(layout: TokenLayout, tasks: TaskArray) -> RowNeeds:
    """Return the query rows of the tasks."""
    return _needs(layout, tasks, "q_start", "q_end", layout.run_query_row)


def key_needs(layout: TokenLayout, tasks: TaskArray) -> RowNeeds:
    """Return the key (and value) rows of the tasks."""
    return _needs(layout, tasks, "kv_start", "kv_end", layout.run_row)


def _needs(
    layout: TokenLayout,
    tasks: TaskArray,
    start_field: str,
    end_field: str,
    run_row: IntArray,
) -> RowNeeds:
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    server, start, end = union_by_group(
        tasks["server"], base + tasks[start_field], base + tasks[end_field]
    )
    run_end = layout.run_start + layout.seg_length[layout.run_order]
    offsets = offsets_by_rank(server, layout.num_ranks)
    return RowNeeds(
        server, start, end, offsets, layout.run_start, run_end, layout.run_rank, run_row
    )
