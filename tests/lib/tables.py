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
        calls = exchange.causal, exchange.full
        _check_calls(layout, calls, own, spaces)
        for space, at_home, name in zip(
            spaces, (queries[rank], keys[rank]), ("q_rows", "kv_rows"), strict=True
        ):
            used = np.concatenate([getattr(call, name) for call in calls])
            received = np.arange(len(at_home), len(space))
            assert np.isin(received, used).all(), "rows that no task needs"
            assert len(np.unique(space)) == len(space), "rows that are here already"
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
    """Check the rows, bytes and tasks of the statistics against the tables of all ranks."""
    stats = plan.stats
    exchanges = [plan.exchange(rank) for rank in range(plan.layout.num_ranks)]
    ranks = np.arange(len(exchanges))
    node = ranks // (plan.config.ranks_per_node or 2)
    is_far = node[:, None] != node
    volume = np.zeros(is_far.shape, dtype=int)
    for kind, needs, row_bytes, moved in (
        ("queries", plan.query_needs, plan.shape.query_bytes, stats.query_rows_moved),
        ("keys", plan.key_needs, plan.shape.kv_bytes, stats.kv_rows_moved),
    ):
        sent = np.array([getattr(exchange, kind).send_counts for exchange in exchanges])
        between = sent * is_far
        for found, rows in ((needs.rows, sent), (needs.rows_between(node), between)):
            np.testing.assert_equal(found, (rows.sum(axis=0), rows.sum(axis=1)))
        assert moved == sent.sum()
        volume += sent * row_bytes
    bytes_in = volume.sum(axis=0)
    bytes_out = volume.sum(axis=1)
    np.testing.assert_equal(stats.bytes_in, bytes_in)
    np.testing.assert_equal(stats.bytes_out, bytes_out)
    assert stats.total_bytes == bytes_in.sum()
    assert stats.max_rank_bytes == max(bytes_in.max(), bytes_out.max())
    far = volume * is_far if plan.config.ranks_per_node else 0 * volume
    assert stats.inter_node_bytes == far.sum()
    most = max(far.sum(axis=0).max(), far.sum(axis=1).max())
    assert stats.max_rank_inter_node_bytes == most
    assert stats.num_tasks == len(plan.tasks)
    if plan.stand_ins is None:
        moved_tasks = 0
        for exchange in exchanges:
            for call in (exchange.causal, exchange.full):
                task = np.repeat(np.arange(call.num_tasks), call.q_length)
                is_remote = call.q_rows >= exchange.queries.num_local
                moved_tasks += len(np.unique(task[is_remote]))
        assert stats.tasks_moved == moved_tasks
