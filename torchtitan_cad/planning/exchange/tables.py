"""Exchange tables: what one rank sends, receives and computes for a plan.

The format is fixed in docs/architecture.md. Tables of one rank take time proportional to that rank's rows,
tasks and peers, and to the intervals that the plan's needs are made of (``transfers.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.planning.exchange.needs import Needs
from torchtitan_cad.planning.intervals import IntArray, concat_ranges, exclusive_cumsum, split_at, sum_by_index
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.tasks import TaskArray, is_diagonal

MAX_ROWS = 2**27
"""Rows in one column of a rank's tables, at most, as sent, received or in a kernel call: 1 GiB, and within int32."""


@dataclass(frozen=True, eq=False)
class CallTable:
    """One variable-length kernel call: the tasks of one kind on one server, ordered by (doc, q_start, kv_start).

    Attributes:
        q_rows, kv_rows: int64 [total_q], [total_k] row-space index of each row, tasks concatenated.
        cu_q, cu_k: int32 [num_tasks + 1] offsets of the tasks in q_rows and kv_rows.
        max_q, max_k: longest task, 0 without tasks.
        q_start, kv_start: int64 [num_tasks] document position of each task's first query and key.
    """

    q_rows: IntArray
    kv_rows: IntArray
    cu_q: np.ndarray
    cu_k: np.ndarray
    max_q: int
    max_k: int
    q_start: IntArray
    kv_start: IntArray

    @property
    def num_tasks(self) -> int:
        return len(self.q_start)

    def part(self, begin: int, end: int) -> CallTable:
        """A call of tasks ``begin`` up to ``end`` alone."""
        cu_q, cu_k = (cu[begin : end + 1] for cu in (self.cu_q, self.cu_k))
        return CallTable(
            q_rows=self.q_rows[cu_q[0] : cu_q[-1]],
            kv_rows=self.kv_rows[cu_k[0] : cu_k[-1]],
            cu_q=cu_q - cu_q[0],
            cu_k=cu_k - cu_k[0],
            max_q=int(np.diff(cu_q).max(initial=0)),
            max_k=int(np.diff(cu_k).max(initial=0)),
            q_start=self.q_start[begin:end],
            kv_start=self.kv_start[begin:end],
        )


@dataclass(frozen=True, eq=False)
class RankExchange:
    """Send, receive and compute tables of one rank.

    Row space: index i < num_local is local row i, num_local + j the j-th received row. Received rows are ordered by
    sending rank, then by (document, position). Queries and keys have separate row spaces; that of the queries begins
    with the ``num_queries`` local rows that attend, which are all of them unless the layout leaves queries out.

    Attributes:
        q_send_rows, kv_send_rows: int64 local rows, grouped by destination rank, inside by (document, position).
        q_send_counts, q_recv_counts, kv_send_counts, kv_recv_counts: int64 [num_ranks] rows per peer.
        q_put_offsets, kv_put_offsets: int64 [num_ranks] where this rank's rows begin among those each server receives.
        q_return_offsets, kv_return_offsets: int64 [num_ranks] where the rows it served begin among those that return to
            each home. Offsets are 0 for peers that get no rows.
        most: rows of the plan's busiest ranks.
        causal, full: the calls over all diagonal tasks and over all rectangles.
    """

    rank: int
    num_ranks: int
    num_local: int
    num_queries: int
    q_send_rows: IntArray
    q_send_counts: IntArray
    q_recv_counts: IntArray
    kv_send_rows: IntArray
    kv_send_counts: IntArray
    kv_recv_counts: IntArray
    q_put_offsets: IntArray
    q_return_offsets: IntArray
    kv_put_offsets: IntArray
    kv_return_offsets: IntArray
    most: MostRows
    causal: CallTable
    full: CallTable


def build_exchange(layout: TokenLayout, tasks: TaskArray, queries: Needs, keys: Needs, rank: int) -> RankExchange:
    """Tables of ``rank``. ``tasks`` are those it serves, in canonical order; the needs are those of the whole plan.

    Raises:
        ValueError: more than ``MAX_ROWS`` rows are sent, received or computed on.
    """
    _require_size(rank, tasks, queries, keys)
    num_local, num_queries = int(layout.tokens_per_rank[rank]), int(layout.queries_per_rank[rank])
    q_send_rows, q_send_counts = _sends(queries, rank)
    kv_send_rows, kv_send_counts = _sends(keys, rank)
    q_space, kv_space = _RowSpace(queries, rank, num_queries), _RowSpace(keys, rank, num_local)
    diagonal = is_diagonal(tasks)
    return RankExchange(
        rank=rank,
        num_ranks=layout.num_ranks,
        num_local=num_local,
        num_queries=num_queries,
        q_send_rows=q_send_rows,
        q_send_counts=q_send_counts,
        q_recv_counts=q_space.recv_counts,
        kv_send_rows=kv_send_rows,
        kv_send_counts=kv_send_counts,
        kv_recv_counts=kv_space.recv_counts,
        q_put_offsets=queries.put_offsets(rank, np.flatnonzero(q_send_counts)),
        q_return_offsets=queries.return_offsets(rank, np.flatnonzero(q_space.recv_counts)),
        kv_put_offsets=keys.put_offsets(rank, np.flatnonzero(kv_send_counts)),
        kv_return_offsets=keys.return_offsets(rank, np.flatnonzero(kv_space.recv_counts)),
        most=most_rows(queries, keys),
        causal=_call_table(layout, tasks[diagonal], q_space, kv_space),
        full=_call_table(layout, tasks[~diagonal], q_space, kv_space),
    )


def most_rows(queries: Needs, keys: Needs) -> MostRows:
    """Rows of the busiest ranks, as :class:`MostRows` says."""
    rows = (queries.rows_in(), keys.rows_in(), queries.rows_out(), keys.rows_out())
    return MostRows(*(int(each.max(initial=0)) for each in rows))


def _require_size(rank: int, tasks: TaskArray, queries: Needs, keys: Needs) -> None:
    """Raise ValueError before tables are made that have too many rows."""
    for needs, name, start, end in ((queries, "query", "q_start", "q_end"), (keys, "key", "kv_start", "kv_end")):
        rows = {
            "sends": needs.rows_out()[rank],
            "receives": needs.rows_in()[rank],
            "computes on": (tasks[end] - tasks[start]).sum(),
        }
        for verb, count in rows.items():
            if count > MAX_ROWS:
                raise ValueError(
                    f"rank {rank} {verb} {count} {name} rows, more than the {MAX_ROWS} of a rank's tables: plan fewer "
                    f"tokens or use more ranks"
                )


def _sends(needs: Needs, rank: int) -> tuple[IntArray, IntArray]:
    """(local rows to send, rows per destination)."""
    sent = needs.sent_by(rank)
    length = sent.end - sent.start
    return concat_ranges(sent.row, length), sum_by_index(sent.peer, length, needs.num_ranks)


class _RowSpace:
    """Global positions to row-space indices on one server."""

    def __init__(self, needs: Needs, rank: int, num_local: int) -> None:
        home, self._start, end, self._index = needs.used_by(rank)
        length = end - self._start
        remote = np.flatnonzero(home != rank)
        arrival = remote[np.argsort(home[remote], kind="stable")]
        self._index[arrival] = num_local + exclusive_cumsum(length[arrival])[:-1]
        self.recv_counts = sum_by_index(home[remote], length[remote], needs.num_ranks)

    def rows(self, start: IntArray, end: IntArray) -> IntArray:
        """Row-space indices of the global ranges [start, end), concatenated."""
        if len(start) == 0:
            return np.zeros(0, dtype=np.int64)
        _, piece, start, end = split_at(start, end, self._start)
        return concat_ranges(self._index[piece] + start - self._start[piece], end - start)


def _call_table(layout: TokenLayout, tasks: TaskArray, q_space: _RowSpace, kv_space: _RowSpace) -> CallTable:
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    q_length, k_length = tasks["q_end"] - tasks["q_start"], tasks["kv_end"] - tasks["kv_start"]
    cu_q, cu_k = exclusive_cumsum(q_length), exclusive_cumsum(k_length)
    return CallTable(
        q_rows=q_space.rows(base + tasks["q_start"], base + tasks["q_end"]),
        kv_rows=kv_space.rows(base + tasks["kv_start"], base + tasks["kv_end"]),
        cu_q=cu_q.astype(np.int32),
        cu_k=cu_k.astype(np.int32),
        max_q=int(q_length.max(initial=0)),
        max_k=int(k_length.max(initial=0)),
        q_start=np.ascontiguousarray(tasks["q_start"]),
        kv_start=np.ascontiguousarray(tasks["kv_start"]),
    )
