# SPDX-License-Identifier: BSD-3-Clause
"""Exchange tables: what one rank sends, receives and computes for a plan.

The classes below say the format, docs/how_it_works.md what it is for. Building the tables of one rank takes time
proportional to its rows and tasks, and to the pieces of the plan's needs (``needs.py``).

NOTE [Row spaces]: the ways in which the rows of one kind, queries or keys, are numbered.

    home     local rows     0 ... num_local                     its tokens in layout order
             sent rows      to server 0 | to server 1 | ...     ``send_rows``: local rows, by (document, position)
                |
                v  exchange, in one or more chunks
    server   remote rows    from home 0 | from home 1 | ...     received rows, by (document, position)
             row space      local rows | remote rows            row j of others is ``num_local + j``
             task rows      task 0 | task 1 | ...               ``q_rows``, ``kv_rows``: indices of the row space
                |
                v  kernel calls
             results        task 0 | task 1 | ...               a partial for each task row
                |
                v  combined by row of the row space: those of local rows stay, those of remote rows return
    home     returned       by server 0 | by server 1 | ...     j belongs to local row ``send_rows[j]``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.planning.exchange.needs import RowNeeds
from torchtitan_cad.planning.intervals import (
    IntArray,
    concat_ranges,
    exclusive_cumsum,
    split_at,
    sum_by_index,
)
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.tasks import (
    HOME,
    StandIns,
    TaskArray,
    is_diagonal,
)

MAX_ROWS = 2**27
"""rows: maximum sent, received or computed on by a rank; a column takes 1 GiB, and offsets fit in int32."""


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
        """Tasks of the call."""
        return len(self.q_start)

    @property
    def q_length(self) -> IntArray:
        """int64 [num_tasks] queries of each task."""
        return np.diff(self.cu_q).astype(np.int64)

    @property
    def k_length(self) -> IntArray:
        """int64 [num_tasks] keys of each task."""
        return np.diff(self.cu_k).astype(np.int64)

    @classmethod
    def of(
        cls,
        q_rows: IntArray,
        kv_rows: IntArray,
        *,
        q_length: IntArray,
        k_length: IntArray,
        q_start: IntArray,
        kv_start: IntArray,
    ) -> CallTable:
        """Return the call of tasks with so many queries and keys, int64 [num_tasks]; others as the attributes."""
        return cls(
            q_rows,
            kv_rows,
            cu_q=exclusive_cumsum(q_length).astype(np.int32),
            cu_k=exclusive_cumsum(k_length).astype(np.int32),
            max_q=int(q_length.max(initial=0)),
            max_k=int(k_length.max(initial=0)),
            q_start=q_start,
            kv_start=kv_start,
        )

    @classmethod
    def joined(cls, tables: Sequence[CallTable]) -> CallTable:
        """Return one call with the tasks of all ``tables``, at least one, in their order."""

        def column(name: str) -> IntArray:
            return np.concatenate([getattr(table, name) for table in tables])

        return cls.of(
            column("q_rows"),
            column("kv_rows"),
            q_length=column("q_length"),
            k_length=column("k_length"),
            q_start=column("q_start"),
            kv_start=column("kv_start"),
        )

    def tasks(self, begin: int, end: int) -> CallTable:
        """Return a call of tasks [begin, end)."""
        tasks = np.arange(begin, end)
        return self.pieces(tasks, np.zeros_like(tasks), self.k_length[tasks])

    def pieces(self, task: IntArray, begin: IntArray, end: IntArray) -> CallTable:
        """Return a call of pieces of tasks: piece i has all queries and the keys [begin[i], end[i]) of ``task[i]``."""
        q_length = self.q_length[task]
        k_length = end - begin
        k_begin = self.cu_k[task] + begin
        return CallTable.of(
            self.q_rows[concat_ranges(self.cu_q[task], q_length)],
            self.kv_rows[concat_ranges(k_begin, k_length)],
            q_length=q_length,
            k_length=k_length,
            q_start=self.q_start[task],
            kv_start=self.kv_start[task] + begin,
        )


@dataclass(frozen=True, eq=False)
class RowExchange:
    """Rows of one kind that one rank sends and receives: queries, or keys (with their values); see NOTE [Row spaces].

    Attributes:
        num_local: local rows of this kind.
        send_rows: int64 [sum(send_counts)] local rows.
        send_counts, recv_counts: int64 [num_ranks] rows per peer.
        put_offsets: int64 [num_ranks] where this rank's rows begin among those each server receives.
        return_offsets: int64 [num_ranks] where the rows that this rank served begin among those that return to each
            home. Offsets are 0 for peers that get no rows.
    """

    num_local: int
    send_rows: IntArray
    send_counts: IntArray
    recv_counts: IntArray
    put_offsets: IntArray
    return_offsets: IntArray

    @property
    def num_received(self) -> int:
        """Rows that this rank receives."""
        return int(self.recv_counts.sum())


@dataclass(frozen=True, eq=False)
class RankExchange:
    """Send, receive and compute tables of one rank.

    Attributes:
        queries, keys: rows sent and received. Local queries are the local rows that attend, all of them unless the
            layout leaves queries out. Local keys are all local rows.
        most: rows of the plan's busiest ranks.
        causal, full: the call over all diagonal tasks, and the call over all rectangles.
        split_keys: True if kernel calls may cut tasks along the keys.
        window: keys that a query attends to at most; None: all that come before it.
        stand_ins: per joined server that computes for this rank, its number, the predicted seconds of all that it
            computes by the plan, and its calls as ``causal`` and ``full``, which read local rows only.
    """

    rank: int
    num_ranks: int
    queries: RowExchange
    keys: RowExchange
    most: MostRows
    causal: CallTable
    full: CallTable
    split_keys: bool
    window: int | None
    stand_ins: tuple[tuple[int, float, CallTable, CallTable], ...] = ()


def build_exchange(
    layout: TokenLayout,
    tasks: TaskArray,
    queries: RowNeeds,
    keys: RowNeeds,
    rank: int,
    *,
    split_keys: bool,
    window: int | None,
    stand_ins: StandIns | None = None,
) -> RankExchange:
    """Build the tables of ``rank`` from its tasks, in canonical order, and the needs of all ranks.

    Args:
        stand_ins: of these tasks; None: there are none.

    Raises:
        ValueError: more than ``MAX_ROWS`` rows are sent, received or computed on.
    """
    _require_size(rank, tasks, queries, keys)
    q_space = _RowSpace(queries, rank, int(layout.queries_per_rank[rank]))
    kv_space = _RowSpace(keys, rank, int(layout.tokens_per_rank[rank]))

    def calls(chosen: TaskArray) -> tuple[CallTable, CallTable]:
        diagonal = is_diagonal(chosen)
        return (
            _call_table(layout, chosen[diagonal], q_space, kv_space),
            _call_table(layout, chosen[~diagonal], q_space, kv_space),
        )

    if stand_ins is None:
        stand_ins = StandIns(np.full(len(tasks), HOME), 0.0, {})
    joined = np.unique(stand_ins.server[stand_ins.server != HOME]).tolist()
    causal, full = calls(tasks[stand_ins.server == HOME])
    return RankExchange(
        rank=rank,
        num_ranks=layout.num_ranks,
        queries=_row_exchange(queries, rank, q_space),
        keys=_row_exchange(keys, rank, kv_space),
        most=most_rows(queries, keys),
        causal=causal,
        full=full,
        split_keys=split_keys and window is None,
        window=window,
        stand_ins=tuple(
            (
                server,
                stand_ins.seconds[server],
                *calls(tasks[stand_ins.server == server]),
            )
            for server in joined
        ),
    )


def _row_exchange(needs: RowNeeds, rank: int, space: _RowSpace) -> RowExchange:
    sent = needs.travels & (needs.home == rank)
    length = needs.length[sent]
    send_counts = sum_by_index(needs.server[sent], length, needs.num_ranks)
    return RowExchange(
        num_local=space.num_local,
        send_rows=concat_ranges(needs.row[sent], length),
        send_counts=send_counts,
        recv_counts=space.recv_counts,
        put_offsets=np.where(send_counts, needs.put_offsets(rank), 0),
        return_offsets=np.where(space.recv_counts, needs.return_offsets(rank), 0),
    )


def most_rows(queries: RowNeeds, keys: RowNeeds) -> MostRows:
    """Return the rows of the busiest ranks, see :class:`MostRows`."""
    return MostRows(
        received_queries=int(queries.rows_in.max()),
        received_keys=int(keys.rows_in.max()),
        sent_queries=int(queries.rows_out.max()),
        sent_keys=int(keys.rows_out.max()),
    )


def _require_size(
    rank: int, tasks: TaskArray, queries: RowNeeds, keys: RowNeeds
) -> None:
    """Raise ValueError if the tables of ``rank`` would have too many rows."""
    for needs, name, start, end in (
        (queries, "query", "q_start", "q_end"),
        (keys, "key", "kv_start", "kv_end"),
    ):
        rows = {
            "sends": needs.rows_out[rank],
            "receives": needs.rows_in[rank],
            "computes on": (tasks[end] - tasks[start]).sum(),
        }
        for verb, count in rows.items():
            if count > MAX_ROWS:
                raise ValueError(
                    f"rank {rank} {verb} {count} {name} rows, more than the {MAX_ROWS} of a rank's tables: plan fewer "
                    f"tokens or use more ranks"
                )


class _RowSpace:
    """Maps global positions to row-space indices on one server."""

    def __init__(self, needs: RowNeeds, rank: int, num_local: int) -> None:
        used = needs.server == rank
        home = needs.home[used]
        length = needs.length[used]
        remote = np.flatnonzero(home != rank)
        self.num_local = num_local
        self._start = needs.start[used]
        self._index = needs.row[used]
        arrival = remote[np.argsort(home[remote], kind="stable")]
        self._index[arrival] = num_local + exclusive_cumsum(length[arrival])[:-1]
        self.recv_counts = sum_by_index(home[remote], length[remote], needs.num_ranks)

    def rows(self, start: IntArray, end: IntArray) -> IntArray:
        """Row-space indices of the global ranges [start, end), concatenated."""
        if len(start) == 0:
            return np.zeros(0, dtype=np.int64)
        _, piece, start, end = split_at(start, end, self._start)
        return concat_ranges(
            self._index[piece] + start - self._start[piece], end - start
        )


def _call_table(
    layout: TokenLayout, tasks: TaskArray, q_space: _RowSpace, kv_space: _RowSpace
) -> CallTable:
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    return CallTable.of(
        q_space.rows(base + tasks["q_start"], base + tasks["q_end"]),
        kv_space.rows(base + tasks["kv_start"], base + tasks["kv_end"]),
        q_length=tasks["q_end"] - tasks["q_start"],
        k_length=tasks["kv_end"] - tasks["kv_start"],
        q_start=np.ascontiguousarray(tasks["q_start"]),
        kv_start=np.ascontiguousarray(tasks["kv_start"]),
    )
