# SPDX-License-Identifier: BSD-3-Clause
"""Checks of plans, and slow and obvious counterparts of the planning capacity, one token and one tile at a time."""

from dataclasses import asdict
from fractions import Fraction

import numpy as np

from tests.lib.plans import written_plan
from tests.lib.shapes import rank_positions
from torchtitan_cad.planning.model.tasks import make_tasks

Token = tuple[int, int]


def pair_counts(layout, tasks: np.ndarray, window=None) -> np.ndarray:
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


def causal_mask(layout) -> np.ndarray:
    """bool [tokens, tokens]: which pairs of the layout's queries there are, in the order of ``pair_counts``."""
    attends = np.zeros(layout.num_tokens, dtype=bool)
    for rank in range(layout.num_ranks):
        attends[rank_positions(layout, rank, queries=True)] = True
    doc = np.repeat(layout.docs, layout.doc_lengths)
    return np.tri(len(doc), dtype=bool) & (doc[:, None] == doc) & attends[:, None]


def covers_exactly(layout, tasks: np.ndarray) -> bool:
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


def local_tokens(layout, *, queries: bool = False) -> list[list[Token]]:
    """Per rank, its tokens (or those that are queries) as (document, position), in layout order."""
    ranks: list[list[Token]] = [[] for _ in range(layout.num_ranks)]
    for rank, segments in enumerate(layout.segments()):
        attends = layout.seg_attends[layout.seg_rank == rank]
        for (doc, start, length), is_query in zip(segments, attends, strict=True):
            if is_query or not queries:
                ranks[rank] += [(doc, start + i) for i in range(length)]
    return ranks


def check_guarantee(plan, home):
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


def check_loads(plan):
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


def check_bound(plan):
    """The certificate of a plan lies below the plan."""
    assert 0 <= plan.stats.lower_bound_bytes <= plan.stats.total_bytes


def check_json(plan):
    """A plan that is written holds all that it is made of; ranks may ask for tables in whatever order."""
    again = written_plan(plan.to_json())
    assert (again.config, again.shape) == (plan.config, plan.shape)
    tables = [plan.exchange(rank) for rank in range(plan.layout.num_ranks)]
    for rank in reversed(range(plan.layout.num_ranks)):
        np.testing.assert_equal(asdict(again.exchange(rank)), asdict(tables[rank]))


def check_cuts(plan, home):
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
