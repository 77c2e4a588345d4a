"""Which rows each server needs, as intervals, and where they live. Imports numpy only.

This is the plan seen from the network; the exchange tables and the byte counts are both read off it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .intervals import IntArray, exclusive_cumsum, split_at, sum_by_index, union_by_group
from .layout import TokenLayout
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
    def length(self) -> IntArray:
        return self.end - self.start

    @property
    def remote_length(self) -> IntArray:
        """[n] rows that must travel: 0 where the server is the home."""
        return np.where(self.server == self.home, 0, self.length)

    def rows_in(self) -> IntArray:
        """[num_ranks] rows each rank receives."""
        return sum_by_index(self.server, self.remote_length, len(self.server_offsets) - 1)

    def rows_out(self) -> IntArray:
        """[num_ranks] rows each rank sends, counted once per receiver."""
        return sum_by_index(self.home, self.remote_length, len(self.server_offsets) - 1)


def query_needs(layout: TokenLayout, tasks: TaskArray) -> Needs:
    """Query rows of the tasks."""
    return _needs(layout, tasks, "q_start", "q_end")


def key_needs(layout: TokenLayout, tasks: TaskArray) -> Needs:
    """Key (and value) rows of the tasks."""
    return _needs(layout, tasks, "kv_start", "kv_end")


def _needs(layout: TokenLayout, tasks: TaskArray, start_field: str, end_field: str) -> Needs:
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    server, start, end = union_by_group(tasks["server"], base + tasks[start_field], base + tasks[end_field])
    source, run, start, end = split_at(start, end, layout.run_start)
    server = server[source]
    count = sum_by_index(server, np.ones(len(server), dtype=np.int64), layout.num_ranks)
    row = layout.run_row[run] + start - layout.run_start[run]
    return Needs(server, layout.run_rank[run], start, end, row, exclusive_cumsum(count))
