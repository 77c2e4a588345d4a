"""How many rows travel between each two ranks, and where they arrive. Imports numpy only.

A rank that writes into its peers' receive buffers must know where its rows go there. That depends on what other ranks
send to the same peer, which every rank reads off the plan: nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .intervals import IntArray, exclusive_cumsum, sum_by_index


@dataclass(frozen=True, eq=False)
class PairTable:
    """Rows of one kind for every (home, server) pair of different ranks that has any, ordered by (home, server).

    Attributes:
        home, server, rows: int64 [n].
        put_offset: int64 [n] rows that lower homes send to the same server: where the pair's rows arrive there, as
            received rows are ordered by sender.
        return_offset: int64 [n] rows that lower servers return to the same home.
        home_offsets: int64 [num_ranks + 1] delimits the homes.
        by_server, server_offsets: int64 [n], [num_ranks + 1] the pairs by (server, home), and where servers begin.
        most_rows: most rows that any rank receives, on the way out or back.
    """

    num_ranks: int
    home: IntArray
    server: IntArray
    rows: IntArray
    put_offset: IntArray
    return_offset: IntArray
    home_offsets: IntArray
    by_server: IntArray
    server_offsets: IntArray
    most_rows: int

    @classmethod
    def from_moves(cls, home: IntArray, server: IntArray, rows: IntArray, num_ranks: int) -> PairTable:
        """Sums up moves of ``rows`` rows from ``home`` to ``server``, all int64 [m]; a pair may have several."""
        pair, index = np.unique(home * num_ranks + server, return_inverse=True)
        rows = sum_by_index(index.reshape(-1), rows, len(pair))
        home, server = pair // num_ranks, pair % num_ranks
        by_server = np.argsort(server, kind="stable")
        home_offsets, server_offsets = _offsets(home, num_ranks), _offsets(server[by_server], num_ranks)
        put_offset = np.empty_like(rows)
        put_offset[by_server] = _rows_before(rows[by_server], server[by_server], server_offsets)
        rows_of_rank = np.concatenate((sum_by_index(home, rows, num_ranks), sum_by_index(server, rows, num_ranks)))
        return cls(
            num_ranks=num_ranks,
            home=home,
            server=server,
            rows=rows,
            put_offset=put_offset,
            return_offset=_rows_before(rows, home, home_offsets),
            home_offsets=home_offsets,
            by_server=by_server,
            server_offsets=server_offsets,
            most_rows=int(rows_of_rank.max(initial=0)),
        )

    def put_offsets(self, rank: int) -> IntArray:
        """int64 [num_ranks]: where ``rank``'s rows begin among those that each server receives; 0 if it sends none."""
        offsets = np.zeros(self.num_ranks, dtype=np.int64)
        pairs = slice(self.home_offsets[rank], self.home_offsets[rank + 1])
        offsets[self.server[pairs]] = self.put_offset[pairs]
        return offsets

    def return_offsets(self, rank: int) -> IntArray:
        """int64 [num_ranks]: where the rows that ``rank`` served begin among those that return to each home, or 0."""
        offsets = np.zeros(self.num_ranks, dtype=np.int64)
        pairs = self.by_server[self.server_offsets[rank] : self.server_offsets[rank + 1]]
        offsets[self.home[pairs]] = self.return_offset[pairs]
        return offsets


def _offsets(sorted_ranks: IntArray, num_ranks: int) -> IntArray:
    return np.searchsorted(sorted_ranks, np.arange(num_ranks + 1))


def _rows_before(rows: IntArray, group: IntArray, group_offsets: IntArray) -> IntArray:
    """int64 [n]: sum of the rows of earlier pairs of the same group; groups are contiguous."""
    before = exclusive_cumsum(rows)
    return before[:-1] - before[group_offsets[group]]
