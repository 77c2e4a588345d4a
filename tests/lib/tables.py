# SPDX-License-Identifier: BSD-3-Clause
"""Proof that the tables of all ranks agree and carry out a plan's tasks."""

from collections.abc import Sequence

import numpy as np

from tests.lib.shapes import rank_positions
from tests.lib.validate import validate_plan
from torchtitan_cad.planning import CallTable, Plan, RankExchange, TokenLayout
from torchtitan_cad.planning.exchange.messages import MostRows
from torchtitan_cad.planning.exchange.tables import RowExchange
from torchtitan_cad.planning.intervals import IntArray, exclusive_cumsum
from torchtitan_cad.planning.model.tasks import HOME, StandIns, TaskArray, is_diagonal

Spaces = tuple[IntArray, IntArray]
"""Global positions of the rows of queries and of keys that a call's indices mean."""


def check_plan(plan: Plan) -> None:
    """Prove tasks, tables and statistics of a plan."""
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
    """
    num_ranks = layout.num_ranks
    assert [(x.rank, x.num_ranks) for x in exchanges] == [
        (rank, num_ranks) for rank in range(num_ranks)
    ]
    keys = [rank_positions(layout, rank) for rank in range(num_ranks)]
    queries = [rank_positions(layout, rank, queries=True) for rank in range(num_ranks)]
    kv_spaces = _row_spaces(keys, [exchange.keys for exchange in exchanges])
    q_spaces = _row_spaces(queries, [exchange.queries for exchange in exchanges])
    most = MostRows(
        received_queries=max(exchange.queries.num_received for exchange in exchanges),
        received_keys=max(exchange.keys.num_received for exchange in exchanges),
        sent_queries=max(len(exchange.queries.send_rows) for exchange in exchanges),
        sent_keys=max(len(exchange.keys.send_rows) for exchange in exchanges),
    )
    joined = np.full(len(tasks), HOME) if stand_ins is None else stand_ins.server
    for rank, exchange in enumerate(exchanges):
        assert exchange.most == most
        is_own = tasks["server"] == rank
        own = tasks[is_own & (joined == HOME)]
        spaces = q_spaces[rank], kv_spaces[rank]
        _check_calls(layout, (exchange.causal, exchange.full), own, spaces)
        called = {server for server, *_ in exchange.stand_ins}
        assert called == {*joined[is_own].tolist()} - {HOME}
        for server, _, *calls in exchange.stand_ins:
            served = tasks[is_own & (joined == server)]
            _check_calls(layout, calls, served, (queries[rank], keys[rank]))


def _row_spaces(
    local: list[IntArray], exchanges: Sequence[RowExchange]
) -> list[IntArray]:
    """Return the global position of every row-space index of every rank, by exchanging positions instead of rows."""
    # per server, in order of the homes
    spaces = [[rows] for rows in local]
    sent = np.array([exchange.send_counts for exchange in exchanges])
    assert (sent >= 0).all()
    assert not sent.diagonal().any(), "a rank sends to itself"
    for own, exchange in zip(local, exchanges, strict=True):
        rows = exchange.send_rows
        offsets = exclusive_cumsum(exchange.send_counts)
        assert (exchange.num_local, len(rows)) == (len(own), offsets[-1])
        assert np.isin(rows, np.arange(len(own))).all()
        for server, space in enumerate(spaces):
            positions = own[rows[offsets[server] : offsets[server + 1]]]
            assert (np.diff(positions) > 0).all(), "repeatedly or out of order"
            space.append(positions)
    before = [np.cumsum(counts, axis=0) - counts for counts in (sent, sent.T)]
    put, back = np.where([sent, sent.T], before, 0)
    for rank, exchange in enumerate(exchanges):
        np.testing.assert_array_equal(exchange.recv_counts, sent[:, rank])
        np.testing.assert_array_equal(exchange.put_offsets, put[rank])
        np.testing.assert_array_equal(exchange.return_offsets, back[rank])
    return [np.concatenate(space) for space in spaces]


def _check_calls(
    layout: TokenLayout, calls: Sequence[CallTable], tasks: TaskArray, spaces: Spaces
) -> None:
    """Check the causal and the unmasked call of ``tasks``, which have exactly the rows of these in canonical order."""
    for call, is_in_call in zip(
        calls, (is_diagonal(tasks), ~is_diagonal(tasks)), strict=True
    ):
        called = tasks[is_in_call]
        base = layout.doc_offsets[layout.doc_index(called["doc"])]
        for name, rows, offsets, longest, starts, space in (
            ("q", call.q_rows, call.cu_q, call.max_q, call.q_start, spaces[0]),
            ("kv", call.kv_rows, call.cu_k, call.max_k, call.kv_start, spaces[1]),
        ):
            begin = called[f"{name}_start"]
            length = called[f"{name}_end"] - begin
            cumulative = exclusive_cumsum(length)
            assert offsets.dtype == np.int32
            assert longest == length.max(initial=0)
            assert np.isin(rows, np.arange(len(space))).all()
            first = np.repeat(base + begin - cumulative[:-1], length)
            np.testing.assert_array_equal(offsets, cumulative)
            np.testing.assert_array_equal(starts, begin)
            np.testing.assert_array_equal(space[rows], first + np.arange(len(first)))


def check_stats(plan: Plan) -> None:
    """Check the byte and task counts of the statistics."""
    stats = plan.stats
    shape = plan.shape
    queries = plan.query_needs
    keys = plan.key_needs
    bytes_in = queries.rows_in * shape.query_bytes + keys.rows_in * shape.kv_bytes
    bytes_out = queries.rows_out * shape.query_bytes + keys.rows_out * shape.kv_bytes
    np.testing.assert_array_equal(stats.bytes_in, bytes_in)
    np.testing.assert_array_equal(stats.bytes_out, bytes_out)
    assert stats.total_bytes == bytes_in.sum()
    assert stats.num_tasks == len(plan.tasks)
