# SPDX-License-Identifier: BSD-3-Clause
"""Checks of plans, and slow and obvious counterparts of the planning capacity, one token and one tile at a time."""

from dataclasses import asdict
from fractions import Fraction

import numpy as np

from tests.lib.plans import written_plan
from tests.lib.shapes import rank_positions
from torchtitan_cad.planning import Plan, TokenLayout
from torchtitan_cad.planning.exchange.tables import RowExchange
from torchtitan_cad.planning.model.tasks import make_tasks

Token = tuple[int, int]


def pair_counts(
    layout: TokenLayout, tasks: np.ndarray, window: int | None = None
) -> np.ndarray:
    """int [tokens, tokens]: how often each (query, key) pair is computed; tokens by document and position."""
    tokens = layout.num_tokens
    counts = np.zeros((tokens, tokens), dtype=int)
    first_tokens = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    for task, first in zip(tasks, first_tokens, strict=True):
        queries = np.arange(task["q_start"], task["q_end"])
        keys = np.arange(task["kv_start"], task["kv_end"])
        ahead = queries[:, None] - keys
        is_seen = (ahead >= 0) & (ahead < (window or tokens))
        counts[np.ix_(first + queries, first + keys)] += is_seen
    return counts


def causal_mask(layout: TokenLayout) -> np.ndarray:
    """bool [tokens, tokens]: which pairs of the layout's queries there are, in the order of ``pair_counts``."""
    attends = np.zeros(layout.num_tokens, dtype=bool)
    for rank in range(layout.num_ranks):
        attends[rank_positions(layout, rank, queries=True)] = True
    doc = np.repeat(layout.docs, layout.doc_lengths)
    return np.tri(len(doc), dtype=bool) & (doc[:, None] == doc) & attends[:, None]


def covers_exactly(layout: TokenLayout, tasks: np.ndarray) -> bool:
    """Whether the tasks compute every causal pair of the layout's queries once and nothing else; small documents."""
    is_known = np.isin(tasks["doc"], layout.docs)
    is_known &= (tasks["server"] >= 0) & (tasks["server"] < layout.num_ranks)
    if not is_known.all():
        return False
    length = layout.doc_lengths[layout.doc_index(tasks["doc"])]
    columns = ("q_start", "q_end", "kv_start", "kv_end")
    q_start, q_end, kv_start, kv_end = (tasks[name] for name in columns)
    has_queries = (q_start >= 0) & (q_start < q_end) & (q_end <= length)
    has_keys = (kv_start >= 0) & (kv_start < kv_end) & (kv_end <= length)
    diagonal = (kv_end == q_end) & (kv_start <= q_start)
    rectangle = kv_end <= q_start
    if not (has_queries & has_keys & (diagonal | rectangle)).all():
        return False
    return np.array_equal(pair_counts(layout, tasks), causal_mask(layout))


def local_tokens(layout: TokenLayout, *, queries: bool = False) -> list[list[Token]]:
    """Per rank, its tokens (or those that are queries) as (document, position), in layout order."""
    ranks: list[list[Token]] = [[] for _ in range(layout.num_ranks)]
    for rank, segments in enumerate(layout.segments()):
        attends = layout.seg_attends[layout.seg_rank == rank]
        for (doc, start, length), is_query in zip(segments, attends, strict=True):
            if is_query or not queries:
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


def token_range(task: np.ndarray, start: str, end: str) -> list[Token]:
    return [(task["doc"], position) for position in range(task[start], task[end])]


def check_exchanges(plan: Plan) -> None:
    """Carry out the exchange token by token; assert calls read the rows the tasks name and bytes are as stated."""
    ranks = range(plan.layout.num_ranks)
    exchanges = [plan.exchange(rank) for rank in ranks]
    local = local_tokens(plan.layout)
    local_queries = local_tokens(plan.layout, queries=True)
    q_spaces, q_volume = run_exchange(local_queries, [e.queries for e in exchanges])
    kv_spaces, kv_volume = run_exchange(local, [e.keys for e in exchanges])
    node = np.arange(len(ranks)) // 2
    for needs, sent in ((plan.query_needs, q_volume), (plan.key_needs, kv_volume)):
        between = np.where(node[:, None] != node, sent, 0)
        for found, rows in (
            (needs.rows, sent),
            (needs.rows_between(node), between),
        ):
            np.testing.assert_equal(found, (rows.sum(axis=0), rows.sum(axis=1)))
    moved = 0
    for rank, exchange in enumerate(exchanges):
        tasks = plan.tasks[plan.tasks["server"] == rank]
        diagonal = tasks["kv_end"] == tasks["q_end"]
        needed_queries = set[Token]()
        needed_keys = set[Token]()
        for call, expected in (
            (exchange.causal, tasks[diagonal]),
            (exchange.full, tasks[~diagonal]),
        ):
            assert call.q_start.tolist() == expected["q_start"].tolist()
            assert call.kv_start.tolist() == expected["kv_start"].tolist()
            for i, task in enumerate(expected):
                queries = token_range(task, "q_start", "q_end")
                keys = token_range(task, "kv_start", "kv_end")
                q_rows = call.q_rows[call.cu_q[i] : call.cu_q[i + 1]]
                kv_rows = call.kv_rows[call.cu_k[i] : call.cu_k[i + 1]]
                assert [q_spaces[rank][row] for row in q_rows] == queries
                assert [kv_spaces[rank][row] for row in kv_rows] == keys
                moved += not set(queries) <= set(local_queries[rank])
                needed_queries |= set(queries)
                needed_keys |= set(keys)
            assert call.max_q == np.diff(call.cu_q).max(initial=0)
            assert call.max_k == np.diff(call.cu_k).max(initial=0)
        for space, held, needed in (
            (q_spaces[rank], local_queries[rank], needed_queries),
            (kv_spaces[rank], local[rank], needed_keys),
        ):
            # Every row once, only what is needed, and nothing that is here already.
            assert sorted(space[len(held) :]) == sorted(needed - set(held))
    volume = q_volume * plan.shape.query_bytes + kv_volume * plan.shape.kv_bytes
    stats = plan.stats
    assert (stats.tasks_moved, stats.total_bytes) == (moved, volume.sum())
    assert stats.query_rows_moved == q_volume.sum()
    assert stats.kv_rows_moved == kv_volume.sum()
    assert stats.bytes_in.tolist() == volume.sum(axis=0).tolist()
    assert stats.bytes_out.tolist() == volume.sum(axis=1).tolist()
    assert stats.max_rank_bytes == max(stats.bytes_in.max(), stats.bytes_out.max())


def check_guarantee(plan: Plan, home: Plan) -> None:
    """Every load <= max((1 + tolerance) share, share + cost of the longest document's last min_shard rows)."""
    layout = plan.layout
    config = plan.config
    cost = plan.cost
    loads = np.zeros(layout.num_ranks, dtype=np.int64)
    np.add.at(loads, plan.tasks["server"], cost.cost(plan.tasks))
    assert plan.stats.loads.tolist() == loads.tolist()
    total = int(cost.cost(home.tasks).sum())
    assert loads.sum() <= total
    longest = int(layout.doc_lengths.max(initial=0))
    first = max(0, longest - config.min_shard)
    shard = make_tasks([0], first, longest, 0, longest, 0)
    shard_cost = int(cost.cost(shard)[0]) if longest else 0
    limit = plan.stats.load_limit
    share = Fraction(total, layout.num_ranks)
    for load in loads.tolist():
        tolerated = (1 + Fraction(config.tolerance)) * share
        assert load <= limit <= max(tolerated, share + shard_cost)


def check_loads(plan: Plan) -> None:
    """Loads are the tiles that tasks touch, counted row by row of tiles; the maximum is theirs."""
    tile = plan.cost.granularity
    loads = [0] * plan.layout.num_ranks
    columns = ("q_start", "q_end", "kv_start", "kv_end", "server")
    for task in plan.tasks[list(columns)].tolist():
        q_start, q_end, kv_start, kv_end, server = task
        for row in range(q_start // tile, -(-q_end // tile)):
            last_query = min(q_end, (row + 1) * tile) - 1
            last_key = min(last_query, kv_end - 1)  # no later one is attended to
            loads[server] += last_key // tile - kv_start // tile + 1
    assert plan.stats.loads.tolist() == loads
    mean = plan.stats.mean_load
    most = max(loads) / mean if mean else 1.0
    assert abs(plan.stats.max_over_mean - most) <= 1e-9 * most


def check_bound(plan: Plan) -> None:
    """The certificate of a plan lies below the plan."""
    assert 0 <= plan.stats.lower_bound_bytes <= plan.stats.total_bytes


def check_json(plan: Plan) -> None:
    """A plan that is written holds all that it is made of; ranks may ask for tables in whatever order."""
    again = written_plan(plan.to_json())
    assert (again.config, again.shape) == (plan.config, plan.shape)
    tables = [plan.exchange(rank) for rank in range(plan.layout.num_ranks)]
    for rank in reversed(range(plan.layout.num_ranks)):
        np.testing.assert_equal(asdict(again.exchange(rank)), asdict(tables[rank]))


def check_cuts(plan: Plan, home: Plan) -> None:
    """Documents are cut at multiples of min_shard or where residency cuts them, never elsewhere."""
    tasks = plan.tasks
    grid = plan.config.min_shard
    for side in ("q_start", "q_end"):
        of_layout = set(home.tasks[["doc", side]].tolist())
        for doc, cut in tasks[["doc", side]].tolist():
            assert cut % grid == 0 or (doc, cut) in of_layout
    assert (tasks["kv_start"] % grid == 0).all()
    diagonal = tasks["kv_end"] == tasks["q_end"]
    assert (diagonal | (tasks["kv_end"] % grid == 0)).all()
    if not plan.config.split_kv:
        assert (tasks["kv_start"] == 0).all()
        assert diagonal.all()
