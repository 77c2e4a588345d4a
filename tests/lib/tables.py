# SPDX-License-Identifier: BSD-3-Clause
"""Proof that the tables of all ranks agree and carry out a plan's tasks."""

from collections.abc import Sequence

import numpy as np

from tests.lib.shapes import rank_positions
from tests.lib.validate import PlanError, validate_plan
from torchtitan_cad.planning import (
    CallTable,
    Plan,
    RankExchange,
    TokenLayout,
)
from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.planning.exchange.tables import RowExchange
from torchtitan_cad.planning.intervals import IntArray, exclusive_cumsum
from torchtitan_cad.planning.model.tasks import HOME, StandIns, TaskArray, is_diagonal


def check_plan(plan: Plan) -> None:
    """Prove tasks, tables and statistics of a plan. Raises PlanError at the first error found."""
    validate_plan(plan)
    tables = [plan.exchange(rank) for rank in range(plan.layout.num_ranks)]
    validate_exchanges(plan.layout, plan.tasks, tables, plan.stand_ins)
    check_stats(plan)


def validate_exchanges(
    layout: TokenLayout,
    tasks: TaskArray,
    exchanges: Sequence[RankExchange],
    stand_ins: StandIns | None = None,
) -> None:
    """Prove that the tables of all ranks, in rank order, agree and carry out ``tasks``, which are valid.

    Every row is identified by its global position and followed from its home over its arrival to the kernel call, where
    it must be the row that the task names. In a call of a joined server, it must be a local row.

    Raises:
        PlanError: at the first disagreement.
    """
    num_ranks = layout.num_ranks
    if len(exchanges) != num_ranks:
        raise PlanError(f"{len(exchanges)} exchange tables for {num_ranks} ranks")
    local = [rank_positions(layout, rank) for rank in range(num_ranks)]
    queries = [rank_positions(layout, rank, queries=True) for rank in range(num_ranks)]
    _check_sizes(exchanges, local, queries)
    q_spaces = _row_spaces(
        queries, [exchange.queries for exchange in exchanges], "queries"
    )
    kv_spaces = _row_spaces(local, [exchange.keys for exchange in exchanges], "keys")
    _check_most(exchanges)
    joined = np.full(len(tasks), HOME) if stand_ins is None else stand_ins.server
    for rank, exchange in enumerate(exchanges):
        where = f"rank {rank}"
        is_own = tasks["server"] == rank
        own = tasks[is_own & (joined == HOME)]
        calls = (exchange.causal, exchange.full)
        _check_calls(layout, where, calls, own, (q_spaces[rank], kv_spaces[rank]))
        called = {server for server, *_ in exchange.stand_ins}
        if called != {*joined[is_own].tolist()} - {HOME}:
            raise PlanError(f"{where}: calls of joined servers {sorted(called)}")
        for server, _, causal, full in exchange.stand_ins:
            served = tasks[is_own & (joined == server)]
            _check_calls(
                layout,
                f"{where}, joined server {server}",
                calls=(causal, full),
                tasks=served,
                spaces=(queries[rank], local[rank]),
            )


def _check_sizes(
    exchanges: Sequence[RankExchange], local: list[IntArray], queries: list[IntArray]
) -> None:
    """Check what every table says of its rank and its local rows."""
    for rank, exchange in enumerate(exchanges):
        found = (
            exchange.rank,
            exchange.num_ranks,
            exchange.keys.num_local,
            exchange.queries.num_local,
        )
        if found != (rank, len(exchanges), len(local[rank]), len(queries[rank])):
            raise PlanError(
                f"rank {rank}: table says (rank, num_ranks, local rows, local queries) = {found}"
            )


def _check_calls(
    layout: TokenLayout,
    where: str,
    calls: tuple[CallTable, CallTable],
    tasks: TaskArray,
    spaces: tuple[IntArray, IntArray],
) -> None:
    """Check the causal and the unmasked call of ``tasks``, in spaces of queries and keys."""
    diagonal = is_diagonal(tasks)
    causal, full = calls
    _check_call(layout, f"{where}, causal call", causal, tasks[diagonal], *spaces)
    _check_call(layout, f"{where}, full call", full, tasks[~diagonal], *spaces)


def _row_spaces(
    local: list[IntArray], exchanges: Sequence[RowExchange], kind: str
) -> list[IntArray]:
    """Return the global position of every row-space index of every rank, by exchanging positions instead of rows."""
    num_ranks = len(local)
    # per server, in order of the homes
    arrived: list[list[IntArray]] = [[] for _ in range(num_ranks)]
    received = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for rank, exchange in enumerate(exchanges):
        rows = exchange.send_rows
        counts = exchange.send_counts
        if (
            counts.shape != (num_ranks,)
            or (counts < 0).any()
            or counts.sum() != len(rows)
        ):
            raise PlanError(
                f"rank {rank}: {kind}.send_counts do not divide its {len(rows)} send_rows by rank"
            )
        if counts[rank]:
            raise PlanError(f"rank {rank}: sends {counts[rank]} {kind} to itself")
        if len(rows) and (rows.min() < 0 or rows.max() >= len(local[rank])):
            raise PlanError(
                f"rank {rank}: {kind}.send_rows leave its {len(local[rank])} local rows"
            )
        received[:, rank] = counts
        offsets = exclusive_cumsum(counts)
        for peer in np.flatnonzero(counts).tolist():
            sent = local[rank][rows[offsets[peer] : offsets[peer + 1]]]
            if (np.diff(sent) <= 0).any():
                raise PlanError(
                    f"rank {rank} sends {kind} to rank {peer} repeatedly or out of order"
                )
            arrived[peer].append(sent)
    spaces = []
    for rank, exchange in enumerate(exchanges):
        counts = received[rank]
        expected = exchange.recv_counts
        if expected.shape != (num_ranks,) or (counts != expected).any():
            raise PlanError(
                f"rank {rank}: {kind}.recv_counts {expected.tolist()}, but its peers send {counts.tolist()}"
            )
        spaces.append(np.concatenate([local[rank], *arrived[rank]]))
    _check_offsets(exchanges, received.T, kind)
    return spaces


def _check_offsets(
    exchanges: Sequence[RowExchange], counts: IntArray, kind: str
) -> None:
    """Check all offsets against those that follow from ``counts`` [home, server]."""
    for name, sent in (("put_offsets", counts), ("return_offsets", counts.T)):
        wanted = np.where(sent, np.cumsum(sent, axis=0) - sent, 0)
        for rank, exchange in enumerate(exchanges):
            found = (
                exchange.put_offsets
                if name == "put_offsets"
                else exchange.return_offsets
            )
            if not np.array_equal(found, wanted[rank]):
                raise PlanError(
                    f"rank {rank}: {kind}.{name} {found.tolist()}, but the counts give {wanted[rank].tolist()}"
                )


def _check_most(exchanges: Sequence[RankExchange]) -> None:
    """Check the rows of the busiest ranks against the counts of all ranks."""
    wanted = MostRows(
        received_queries=max(exchange.queries.num_received for exchange in exchanges),
        received_keys=max(exchange.keys.num_received for exchange in exchanges),
        sent_queries=max(len(exchange.queries.send_rows) for exchange in exchanges),
        sent_keys=max(len(exchange.keys.send_rows) for exchange in exchanges),
    )
    for rank, exchange in enumerate(exchanges):
        if exchange.most != wanted:
            raise PlanError(
                f"rank {rank}: most is {exchange.most}, but the counts give {wanted}"
            )


def _check_call(
    layout: TokenLayout,
    where: str,
    call: CallTable,
    tasks: TaskArray,
    q_space: IntArray,
    kv_space: IntArray,
) -> None:
    """Check that the call's rows are exactly those its tasks name, in canonical order."""
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    for name, start_field, rows, offsets, longest, starts, space in (
        ("q", "q_start", call.q_rows, call.cu_q, call.max_q, call.q_start, q_space),
        (
            "kv",
            "kv_start",
            call.kv_rows,
            call.cu_k,
            call.max_k,
            call.kv_start,
            kv_space,
        ),
    ):
        begin = tasks[start_field]
        length = tasks["q_end" if name == "q" else "kv_end"] - begin
        cumulative = exclusive_cumsum(length)
        if offsets.dtype != np.int32 or not np.array_equal(offsets, cumulative):
            raise PlanError(
                f"{where}: cumulative {name} lengths {offsets.tolist()} do not fit the tasks"
            )
        if longest != length.max(initial=0):
            raise PlanError(
                f"{where}: longest {name} range {longest}, but the tasks' is {length.max(initial=0)}"
            )
        if not np.array_equal(starts, begin):
            raise PlanError(
                f"{where}: {start_field} {starts.tolist()} is not that of the tasks"
            )
        if len(rows) != cumulative[-1] or (
            len(rows) and (rows.min() < 0 or rows.max() >= len(space))
        ):
            raise PlanError(
                f"{where}: {name}_rows have the wrong number or leave the {len(space)} rows at hand"
            )
        wanted = np.repeat(base + begin - cumulative[:-1], length) + np.arange(
            cumulative[-1]
        )
        if not np.array_equal(space[rows], wanted):
            i = int(np.argmax(space[rows] != wanted))
            owner = int(np.searchsorted(cumulative, i, side="right")) - 1
            raise PlanError(
                f"{where}: {name}_rows[{i}] is not the row that task {tasks[owner]} names"
            )


def check_stats(plan: Plan) -> None:
    """Check the byte and task counts of the statistics."""
    stats = plan.stats
    shape = plan.shape
    queries = plan.query_needs
    keys = plan.key_needs
    bytes_in = queries.rows_in * shape.query_bytes + keys.rows_in * shape.kv_bytes
    bytes_out = queries.rows_out * shape.query_bytes + keys.rows_out * shape.kv_bytes
    for name, found, wanted in (
        ("bytes_in", stats.bytes_in, bytes_in),
        ("bytes_out", stats.bytes_out, bytes_out),
        ("total_bytes", stats.total_bytes, bytes_in.sum()),
        ("num_tasks", stats.num_tasks, len(plan.tasks)),
    ):
        if not np.array_equal(found, wanted):
            raise PlanError(f"stats.{name} is {found}, but the tasks give {wanted}")
