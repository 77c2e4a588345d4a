# SPDX-License-Identifier: BSD-3-Clause
"""Checks of plans, and slow and obvious counterparts of the planning capacity, one token and one tile at a time."""

from dataclasses import asdict, astuple
from fractions import Fraction

import numpy as np

from torchtitan_cad.planning import Plan, TileAreaCost, TokenLayout, validate_plan
from torchtitan_cad.planning.exchange.tables import RowExchange
from torchtitan_cad.planning.model.tasks import make_tasks

Token = tuple[int, int]


def cover_counts(tasks: np.ndarray, doc: int, length: int) -> np.ndarray:
    """int [length, length]: how often each (query, key) pair of a document is computed. Wrong kinds raise."""
    counts = np.zeros((length, length), dtype=int)
    for task in tasks[tasks["doc"] == doc]:
        q0, q1, k0, k1 = (
            int(task[name]) for name in ("q_start", "q_end", "kv_start", "kv_end")
        )
        assert 0 <= q0 < q1 <= length
        assert 0 <= k0 < k1 <= length
        if k1 == q1 and k0 <= q0:
            for q in range(q0, q1):
                counts[q, k0 : q + 1] += 1
        else:
            assert k1 <= q0, "neither diagonal nor rectangle"
            counts[q0:q1, k0:k1] += 1
    return counts


def covers_exactly(layout: TokenLayout, tasks: np.ndarray) -> bool:
    """Whether the tasks compute every causal pair of the layout's queries once and nothing else; small documents."""
    lengths = dict(zip(layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True))
    attends = {doc: np.zeros(length, dtype=int) for doc, length in lengths.items()}
    columns = (layout.seg_doc, layout.seg_start, layout.seg_length, layout.seg_attends)
    for doc, start, length, attend in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        attends[doc][start : start + length] = attend
    if not set(tasks["doc"].tolist()) <= set(lengths):
        return False
    if ((tasks["server"] < 0) | (tasks["server"] >= layout.num_ranks)).any():
        return False
    try:
        return all(
            np.array_equal(
                cover_counts(tasks, doc, length),
                np.tri(length, dtype=int) * attends[doc][:length, None],
            )
            for doc, length in lengths.items()
        )
    except AssertionError:
        return False


def local_tokens(layout: TokenLayout, *, queries: bool = False) -> list[list[Token]]:
    """Per rank, its tokens (or those that are queries) as (document, position), in layout order."""
    ranks: list[list[Token]] = [[] for _ in range(layout.num_ranks)]
    columns = (
        layout.seg_rank,
        layout.seg_doc,
        layout.seg_start,
        layout.seg_length,
        layout.seg_attends,
    )
    for rank, doc, start, length, attends in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if attends or not queries:
            ranks[rank] += [(doc, start + i) for i in range(length)]
    return ranks


def run_exchange(
    local: list[list[Token]], exchanges: list[RowExchange]
) -> tuple[list[list[Token]], np.ndarray]:
    """All-to-all of tokens by the tables: (row space of every rank, rows [sender, receiver])."""
    num_ranks = len(local)
    volume = np.zeros((num_ranks, num_ranks), dtype=int)
    mailbox: dict[tuple[int, int], list[Token]] = {}
    for sender, exchange in enumerate(exchanges):
        rows = exchange.send_rows.tolist()
        for receiver, count in enumerate(exchange.send_counts.tolist()):
            mailbox[sender, receiver] = [local[sender][row] for row in rows[:count]]
            volume[sender, receiver] = count
            rows = rows[count:]
        assert not rows
    spaces = []
    for receiver, exchange in enumerate(exchanges):
        space = list(local[receiver])
        for sender, count in enumerate(exchange.recv_counts.tolist()):
            assert len(mailbox[sender, receiver]) == count
            space += mailbox[sender, receiver]
        spaces.append(space)
    return spaces, volume


def check_one_sided(
    exchanges: list[RowExchange], volume: np.ndarray, most_received: int, most_sent: int
) -> None:
    """Every rank writes its rows at the stated offsets: they fill each receiver's buffer in the order of senders.

    The largest buffers of all ranks are as stated.
    """
    for way, rows, most in (
        ("put", volume, most_received),
        ("return", volume.T, most_sent),
    ):
        for receiver in range(len(exchanges)):
            buffer = [None] * int(rows[:, receiver].sum())
            for sender, exchange in enumerate(exchanges):
                begin = int(
                    (exchange.put_offsets if way == "put" else exchange.return_offsets)[
                        receiver
                    ]
                )
                for row in range(rows[sender, receiver]):
                    assert buffer[begin + row] is None
                    buffer[begin + row] = sender
            assert buffer == sorted(buffer)
        assert rows.sum(axis=0).max() == most


def check_exchanges(plan: Plan) -> None:
    """Carry out the exchange token by token; assert calls read the rows the tasks name and bytes are as stated."""
    layout, num_ranks = plan.layout, plan.layout.num_ranks
    exchanges = [plan.exchange(rank) for rank in range(num_ranks)]
    local, local_queries = local_tokens(layout), local_tokens(layout, queries=True)
    query_tables, key_tables = (
        [getattr(each, kind) for each in exchanges] for kind in ("queries", "keys")
    )
    q_spaces, q_volume = run_exchange(local_queries, query_tables)
    kv_spaces, kv_volume = run_exchange(local, key_tables)
    most, node = plan.most_rows, np.arange(num_ranks) // 2
    assert all(exchange.most == most for exchange in exchanges)
    for needs, sent in ((plan.query_needs, q_volume), (plan.key_needs, kv_volume)):
        inside = np.where(node[:, None] == node, sent, 0)
        np.testing.assert_equal(
            (needs.rows_in, needs.rows_out), (sent.sum(axis=0), sent.sum(axis=1))
        )
        np.testing.assert_equal(
            needs.rows_inside(node), (inside.sum(axis=0), inside.sum(axis=1))
        )
    check_one_sided(query_tables, q_volume, most.received_queries, most.sent_queries)
    check_one_sided(key_tables, kv_volume, most.received_keys, most.sent_keys)
    moved = 0
    for rank, exchange in enumerate(exchanges):
        tasks = [task for task in plan.tasks if task["server"] == rank]
        diagonals = [task for task in tasks if task["kv_end"] == task["q_end"]]
        rectangles = [task for task in tasks if task["kv_end"] != task["q_end"]]
        needed: dict[str, set[Token]] = {"q": set(), "kv": set()}
        for call, expected in (
            (exchange.causal, diagonals),
            (exchange.full, rectangles),
        ):
            assert call.num_tasks == len(expected)
            for i, task in enumerate(expected):
                q_rows = call.q_rows[call.cu_q[i] : call.cu_q[i + 1]].tolist()
                kv_rows = call.kv_rows[call.cu_k[i] : call.cu_k[i + 1]].tolist()
                queries = [
                    (task["doc"], p) for p in range(task["q_start"], task["q_end"])
                ]
                keys = [
                    (task["doc"], p) for p in range(task["kv_start"], task["kv_end"])
                ]
                assert [q_spaces[rank][row] for row in q_rows] == queries
                assert [kv_spaces[rank][row] for row in kv_rows] == keys
                assert (call.q_start[i], call.kv_start[i]) == (
                    task["q_start"],
                    task["kv_start"],
                )
                moved += not set(queries) <= set(local_queries[rank])
                needed["q"] |= set(queries)
                needed["kv"] |= set(keys)
            assert call.max_q == max(
                [len(range(t["q_start"], t["q_end"])) for t in expected], default=0
            )
            assert call.max_k == max(
                [len(range(t["kv_start"], t["kv_end"])) for t in expected], default=0
            )
        for kind, spaces, mine in (
            ("q", q_spaces, local_queries[rank]),
            ("kv", kv_spaces, local[rank]),
        ):
            received = spaces[rank][len(mine) :]
            # Every row once, only what is needed, and nothing that is here already.
            assert sorted(received) == sorted(needed[kind] - set(mine))
    volume = q_volume * plan.shape.query_bytes + kv_volume * plan.shape.kv_bytes
    stats, into, out = plan.stats, volume.sum(axis=0), volume.sum(axis=1)
    assert (stats.tasks_moved, stats.total_bytes) == (moved, volume.sum())
    assert (stats.query_rows_moved, stats.kv_rows_moved) == (
        q_volume.sum(),
        kv_volume.sum(),
    )
    np.testing.assert_equal((stats.bytes_in, stats.bytes_out), (into, out))
    assert stats.max_rank_bytes == max(into.max(), out.max())


def check_guarantee(plan: Plan, home: Plan) -> None:
    """Every load <= max((1 + tolerance) share, share + cost of the longest document's last min_shard rows)."""
    layout, config, cost = plan.layout, plan.config, plan.cost
    loads = np.zeros(layout.num_ranks, dtype=np.int64)
    np.add.at(loads, plan.tasks["server"], cost.cost(plan.tasks))
    assert plan.stats.loads.tolist() == loads.tolist()
    total, longest = (
        int(cost.cost(home.tasks).sum()),
        int(layout.doc_lengths.max(initial=0)),
    )
    if isinstance(cost, TileAreaCost):  # others charge for the cuts along keys, too
        assert loads.sum() <= total
    shard = make_tasks([0], max(0, longest - config.min_shard), longest, 0, longest, 0)
    shard_cost = int(cost.cost(shard)[0]) if longest else 0
    speeds = [Fraction(speed) for speed in config.rank_speeds or [1] * layout.num_ranks]
    for load, limit, speed in zip(
        loads.tolist(), plan.stats.load_limits.tolist(), speeds, strict=True
    ):
        share = total * speed / sum(speeds)
        assert (
            load
            <= limit
            <= max((1 + Fraction(config.tolerance)) * share, share + shard_cost)
        )


def check_loads(plan: Plan) -> None:
    """Loads are the tiles that tasks touch, counted row by row of tiles; the maximum is theirs, over speeds."""
    tile, loads = plan.cost.granularity, [0] * plan.layout.num_ranks
    columns = (
        plan.tasks[name].tolist()
        for name in ("q_start", "q_end", "kv_start", "kv_end", "server")
    )
    for q_start, q_end, kv_start, kv_end, server in zip(*columns, strict=True):
        for row in range(q_start // tile, -(-q_end // tile)):
            last_query = min(q_end, (row + 1) * tile) - 1
            last_key = min(last_query, kv_end - 1)  # no later one is attended to
            loads[server] += last_key // tile - kv_start // tile + 1
    assert plan.stats.loads.tolist() == loads
    speeds = [Fraction(speed) for speed in plan.config.rank_speeds or [1] * len(loads)]
    share = [
        plan.stats.mean_load * float(speed * len(loads) / sum(speeds))
        for speed in speeds
    ]
    most = max(
        (load / even for load, even in zip(loads, share, strict=True) if even),
        default=1.0,
    )
    assert abs(plan.stats.max_over_mean - most) <= 1e-9 * most


def check_tables(plan: Plan) -> None:
    """What each rank's tables say of its peers is what the peers' own tables say; between them they hold all tasks."""
    ranks = range(plan.layout.num_ranks)
    tables = [plan.exchange(rank) for rank in ranks]
    assert len({astuple(table.most) for table in tables}) == 1
    assert sum(
        table.causal.num_tasks + table.full.num_tasks for table in tables
    ) == len(plan.tasks)
    total = 0
    for kind, row_bytes in (
        ("queries", plan.shape.query_bytes),
        ("keys", plan.shape.kv_bytes),
    ):
        rows = [getattr(table, kind) for table in tables]
        sent, received, put, back = (
            np.stack([getattr(each, name) for each in rows])
            for name in ("send_counts", "recv_counts", "put_offsets", "return_offsets")
        )
        np.testing.assert_equal(sent, received.T)
        assert not sent.diagonal().any()
        # rows that a server gets from lower ranks
        before = np.cumsum(sent, axis=0) - sent
        np.testing.assert_equal(put, np.where(sent > 0, before, 0))
        np.testing.assert_equal(
            back, np.where(received > 0, np.cumsum(received, axis=0) - received, 0)
        )
        for own in rows:
            assert len(own.send_rows) == own.send_counts.sum()
            assert (
                not len(own.send_rows)
                or 0 <= own.send_rows.min() <= own.send_rows.max() < own.num_local
            )
            row_for_peer = (
                np.repeat(ranks, own.send_counts) * own.num_local + own.send_rows
            )
            assert len(np.unique(row_for_peer)) == len(row_for_peer)
        total += int(sent.sum()) * row_bytes
    assert plan.stats.total_bytes == total


def check_bounds(plan: Plan) -> None:
    """The certificate of a plan lies below the plan."""
    stats = plan.stats
    assert 0 <= stats.lower_bound_bytes <= stats.total_bytes
    assert 0 <= stats.forced_export_bytes <= stats.bytes_out.max()
    assert (
        stats.forced_export_bytes
        <= stats.lower_bound_rank_bytes
        <= stats.max_rank_bytes
    )
    assert stats.lower_bound_rank_bytes * len(stats.loads) >= stats.lower_bound_bytes


def check_json(plan: Plan) -> None:
    """A plan that is written and read again is the same, with the same tables in whatever order ranks ask for them."""
    again = Plan.from_json(plan.to_json())
    validate_plan(again)
    assert again.fingerprint() == plan.fingerprint()
    assert again.stats.to_dict() == plan.stats.to_dict()
    assert (again.config, again.shape) == (plan.config, plan.shape)
    tables = [plan.exchange(rank) for rank in range(plan.layout.num_ranks)]
    for rank in reversed(range(plan.layout.num_ranks)):
        np.testing.assert_equal(asdict(again.exchange(rank)), asdict(tables[rank]))


def check_cuts(plan: Plan, home: Plan) -> None:
    """Documents are cut at multiples of min_shard or where residency cuts them, never elsewhere."""
    tasks, grid = plan.tasks, plan.config.min_shard
    for side in ("q_start", "q_end"):
        given_cuts = set(
            zip(home.tasks["doc"].tolist(), home.tasks[side].tolist(), strict=True)
        )
        for doc, cut in zip(
            plan.tasks["doc"].tolist(), plan.tasks[side].tolist(), strict=True
        ):
            assert cut % plan.config.min_shard == 0 or (doc, cut) in given_cuts
    assert (tasks["kv_start"] % grid == 0).all()
    assert ((tasks["kv_end"] == tasks["q_end"]) | (tasks["kv_end"] % grid == 0)).all()
    if plan.config.planner == "greedy" or not plan.config.split_kv:
        assert (tasks["kv_start"] == 0).all()
        assert (tasks["kv_end"] == tasks["q_end"]).all()
