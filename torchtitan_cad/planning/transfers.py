"""Which rows each server needs, as intervals, and where they live. Imports numpy only.

This is the plan seen from the network; the exchange tables and the byte counts are both read off it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .intervals import IntArray, exclusive_cumsum, split_at, sum_by_index, union_by_group
from .layout import TokenLayout
from .pairs import PairTable
from .tasks import TaskArray


@dataclass(frozen=True, eq=False)
class Needs:
    """Rows of one kind (queries or keys) that servers use, each row once per server. All columns int64 [n].

    Ordered by (server, start). ``start`` and ``end`` are global positions (see ``TokenLayout``), ``home`` is the rank
    that holds them and ``row`` its local row of the first. ``server_offsets`` [num_ranks + 1] delimits the servers.
    """

    server: IntArray
    home: IntArray
    start: IntArray
    end: IntArray
    row: IntArray
    server_offsets: IntArray

    @property
    def num_ranks(self) -> int:
        return len(self.server_offsets) - 1

    @property
    def length(self) -> IntArray:
        return self.end - self.start

    @cached_property
    def sent(self) -> tuple[IntArray, IntArray]:
        """Intervals that must travel, by home, inside by (server, start), and [num_ranks + 1] offsets of the homes."""
        remote = np.flatnonzero(self.server != self.home)
        home = self.home[remote]
        return remote[order_by_rank(home, self.num_ranks)], offsets_by_rank(home, self.num_ranks)

    @cached_property
    def pairs(self) -> PairTable:
        """Rows by (home, server), and where they arrive; made once per plan."""
        sent, _ = self.sent
        return PairTable.from_moves(
            self.home[sent], self.server[sent], self.end[sent] - self.start[sent], self.num_ranks
        )

    def rows_in(self) -> IntArray:
        """[num_ranks] rows each rank receives."""
        sent, _ = self.sent
        return sum_by_index(self.server[sent], self.end[sent] - self.start[sent], self.num_ranks)

    def rows_out(self) -> IntArray:
        """[num_ranks] rows each rank sends, counted once per receiver."""
        sent, _ = self.sent
        return sum_by_index(self.home[sent], self.end[sent] - self.start[sent], self.num_ranks)


def order_by_rank(rank: IntArray, num_ranks: int) -> IntArray:
    """Stable permutation that sorts by rank; linear time below 2**16 ranks (radix sort)."""
    return np.argsort(rank.astype(np.uint16) if num_ranks <= 2**16 else rank, kind="stable")


def offsets_by_rank(rank: IntArray, num_ranks: int) -> IntArray:
    """[num_ranks + 1] offsets of the ranks in an array sorted by rank."""
    return exclusive_cumsum(np.bincount(rank, minlength=num_ranks))


def query_needs(layout: TokenLayout, tasks: TaskArray) -> Needs:
    """Query rows of the tasks."""
    return _needs(layout, tasks, "q_start", "q_end", layout.run_query_row)


def key_needs(layout: TokenLayout, tasks: TaskArray) -> Needs:
    """Key (and value) rows of the tasks."""
    return _needs(layout, tasks, "kv_start", "kv_end", layout.run_row)


def _needs(layout: TokenLayout, tasks: TaskArray, start_field: str, end_field: str, run_row: IntArray) -> Needs:
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    server, start, end = union_by_group(tasks["server"], base + tasks[start_field], base + tasks[end_field])
    source, run, start, end = split_at(start, end, layout.run_start)
    server = server[source]
    row = run_row[run] + start - layout.run_start[run]
    return Needs(server, layout.run_rank[run], start, end, row, offsets_by_rank(server, layout.num_ranks))
