# SPDX-License-Identifier: BSD-3-Clause
"""Rows that each server needs and their homes: the source of exchange tables and byte counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchtitan_cad.planning.intervals import (
    BoolArray,
    IntArray,
    split_at,
    sum_by_index,
    union_by_group,
)
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.tasks import TaskArray


@dataclass(frozen=True, eq=False)
class RowNeeds:
    """Rows of one kind (queries or keys) that servers use, each row once per server, in pieces with one home each.

    Attributes:
        num_ranks: ranks of the layout; each is a home and a server.
        server, home: int64 [n] ranks of each piece, which may be the same.
        start, end: int64 [n] global positions (see ``TokenLayout``), ordered by (server, start).
        row: int64 [n] local row, at home, of the first position.
    """

    num_ranks: int
    server: IntArray
    home: IntArray
    start: IntArray
    end: IntArray
    row: IntArray

    @cached_property
    def length(self) -> IntArray:
        """[n] rows of each piece."""
        return self.end - self.start

    @cached_property
    def travels(self) -> BoolArray:
        """[n] Whether the server of a piece is not its home."""
        return self.server != self.home

    @cached_property
    def rows(self) -> IntArray:
        """[2, num_ranks] rows each rank receives, and rows it sends, once per receiver."""
        return self._rows_of(self.travels)

    @property
    def rows_in(self) -> IntArray:
        """[num_ranks] rows each rank receives."""
        return self.rows[0]

    @property
    def rows_out(self) -> IntArray:
        """[num_ranks] rows each rank sends, once per receiver."""
        return self.rows[1]

    @property
    def sends(self) -> BoolArray:
        """[num_ranks, num_ranks] Whether the first rank sends rows to the second."""
        sends = np.zeros((self.num_ranks, self.num_ranks), dtype=bool)
        sends[self.home[self.travels], self.server[self.travels]] = True
        return sends

    def rows_between(self, node: IntArray) -> IntArray:
        """Return those of ``rows`` that travel between nodes; ``node`` [num_ranks] is the node of every rank."""
        return self._rows_of(node[self.server] != node[self.home])

    def put_offsets(self, rank: int) -> IntArray:
        """Return int64 [num_ranks] where ``rank``'s rows begin among those that each server receives.

        Received rows are ordered by home.
        """
        lower_homes = self.travels & (self.home < rank)
        return self._rows_by(self.server, lower_homes)

    def return_offsets(self, rank: int) -> IntArray:
        """Return int64 [num_ranks] where rows served by ``rank`` begin among those that return to each home.

        Returned rows are ordered by server.
        """
        lower_servers = self.travels & (self.server < rank)
        return self._rows_by(self.home, lower_servers)

    def _rows_of(self, chosen: BoolArray) -> IntArray:
        """Return int64 [2, num_ranks] rows of the chosen pieces by server, and by home."""
        by_server = self._rows_by(self.server, chosen)
        return np.stack([by_server, self._rows_by(self.home, chosen)])

    def _rows_by(self, rank: IntArray, chosen: BoolArray) -> IntArray:
        """Return int64 [num_ranks] rows of the chosen pieces by ``rank`` [n]."""
        return sum_by_index(rank[chosen], self.length[chosen], self.num_ranks)


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
    interval, run, start, end = split_at(start, end, layout.run_start)
    return RowNeeds(
        num_ranks=layout.num_ranks,
        server=server[interval],
        home=layout.run_rank[run],
        start=start,
        end=end,
        row=run_row[run] + start - layout.run_start[run],
    )
