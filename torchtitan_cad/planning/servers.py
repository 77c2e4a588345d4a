# SPDX-License-Identifier: BSD-3-Clause
"""Work of ranks for servers that have joined the job: processes without tokens and without a part in exchanges.

A joined server only gets tasks whose queries and keys all lie on one rank, their home. The home sends the rows, and
computes the task itself if no answer comes. So a plan with joined servers is the plan of the ranks, for some of whose
tasks a server stands in. Tasks and exchanges between ranks stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchtitan_cad.planning.intervals import FloatArray, IntArray, begins_group
from torchtitan_cad.planning.model.shape import AttentionShape, RowBytes
from torchtitan_cad.planning.model.tasks import (
    HOME,
    ORDER_FIELDS,
    StandIns,
    TaskArray,
    is_diagonal,
)
from torchtitan_cad.planning.plan import Plan

MOST_SERVERS = 4
"""Servers that stand in for one rank in a plan; the results of all its kernel calls are combined at once."""
LEAST_SHORTENING = 0.01
"""A plan keeps its tasks on the ranks if servers would shorten attention by less than this share."""
PARTS = 64
"""Tasks are given away in parts of about a rank's mean load / PARTS."""
FORWARD_PART = 2 / 7
"""The part of forward in a kernel's time: backward has 2.5 times its operations."""


@dataclass(frozen=True)
class JoinedServer:
    """A server that has joined a job.

    Attributes:
        number: of its registration, distinct over the job.
        speed: of its attention, relative to a rank.
        bytes_per_second: of the link to it, shared by both directions.
    """

    number: int
    speed: float
    bytes_per_second: float


def assign_to_servers(
    plan: Plan, servers: Sequence[JoinedServer], unit: float, share: float = 1.0
) -> Plan:
    """Return a plan of the same exchanges in which joined servers take part, for the least time of the slowest.

    The slowest rank gives away the heaviest part of its tasks that lie at home, to the server that would end first, if
    that ends before this rank would; and so on, until the slowest rank has nothing to give. Every part is looked at
    once.

    Args:
        servers: in the same order on all ranks.
        unit: seconds of attention of a rank per unit of the cost model, forward and backward.
        share: of the servers' time and links that this plan may use, where several groups plan for themselves.
    """
    if not servers or plan.shape.window is not None:
        return plan
    tasks, source = _cut_evenly(plan)
    cost = plan.cost.cost(tasks)
    rank_ends = (unit * plan.stats.loads).astype(np.float64)
    slowest = rank_ends.max()
    of_parts, of_keys = _seconds_on(
        servers, plan.shape, tasks, unit_cost=(unit * cost).astype(np.float64)
    )
    index, server_ends = _give_away(
        _heaviest_first(plan, tasks, cost),
        rank_ends,
        (unit * cost).astype(np.float64),
        on_servers=of_parts / share,
        for_keys=of_keys / share,
        source=source,
    )
    is_given = index >= 0
    last = max(rank_ends.max(), server_ends.max())
    if not is_given.any() or last > (1 - LEAST_SHORTENING) * slowest:
        return plan
    numbers = np.array([server.number for server in servers])
    assigned = np.where(is_given, numbers[index], HOME)
    given_share = float(cost[is_given].sum() / cost.sum())
    tasks, assigned = _joined(tasks, source, assigned)
    shared = replace(plan, tasks=tasks)
    seconds = {}
    for server in servers:
        of_server = _seconds_of(shared, tasks[assigned == server.number], server, unit)
        if of_server > 0:
            seconds[server.number] = of_server / share
    return replace(shared, stand_ins=StandIns(assigned, given_share, seconds))


def _seconds_of(
    plan: Plan, tasks: TaskArray, server: JoinedServer, unit: float
) -> float:
    """Return the seconds of tasks on a server, rows included."""
    unit_cost = (unit * plan.cost.cost(tasks)).astype(np.float64)
    of_tasks, of_keys = _seconds_on([server], plan.shape, tasks, unit_cost=unit_cost)
    return float(of_tasks.sum() + of_keys.sum())


def _cut_evenly(plan: Plan) -> tuple[TaskArray, IntArray]:
    """Return the plan's tasks, cut along their queries into parts of about a rank's mean load / PARTS, and [n] the
    index of the task that a part is of."""
    shard = plan.config.min_shard
    part_cost = max(1.0, plan.stats.mean_load / PARTS)
    counts = np.ceil(plan.cost.cost(plan.tasks) / part_cost).astype(np.int64)
    source = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    parts = plan.tasks[source]
    start = parts["q_start"]
    end = parts["q_end"]
    cuts = start + (end - start) * number // counts[source]
    cuts = np.maximum(start, cuts // shard * shard)
    is_last = number == counts[source] - 1
    ends = np.where(is_last, end, np.roll(cuts, -1))
    parts["kv_end"] = np.where(is_diagonal(parts), ends, parts["kv_end"])
    parts["q_start"] = cuts
    parts["q_end"] = ends
    is_used = ends > cuts
    return parts[is_used], source[is_used]


def _joined(
    parts: TaskArray, source: IntArray, assigned: IntArray
) -> tuple[TaskArray, IntArray]:
    """Join neighbouring parts of a task that one server, or its home, computes; returns tasks and their servers."""
    first = np.flatnonzero(begins_group(source, assigned))
    last = np.append(first[1:], len(parts)) - 1
    tasks = parts[first]
    tasks["q_end"] = parts["q_end"][last]
    tasks["kv_end"] = parts["kv_end"][last]
    keys = [tasks[name] for name in ORDER_FIELDS[::-1]]
    order = np.lexsort(keys)
    return tasks[order], assigned[first][order]


def _give_away(
    candidates: Sequence[Iterator[int]],
    rank_ends: FloatArray,
    on_rank: FloatArray,
    on_servers: FloatArray,
    for_keys: FloatArray,
    source: IntArray,
) -> tuple[IntArray, FloatArray]:
    """Return the index of the server of every task, or -1, and when servers end; ``rank_ends`` become earlier.

    Args:
        candidates: by rank, the tasks that it may give away, in order.
        rank_ends: seconds of all tasks of every rank.
        on_rank: [n] seconds of every task on its rank.
        on_servers: [servers, n] seconds of every task on every server, but for its keys.
        for_keys: [servers, n] seconds of the keys; a server that has a neighbouring part has those of this one.
        source: [n] the tasks that these are parts of.
    """
    num_servers, num_tasks = on_servers.shape
    server_ends = np.zeros(num_servers)
    is_used = np.zeros((len(rank_ends), num_servers), dtype=bool)
    index = np.full(num_tasks, -1)
    while True:
        rank = int(rank_ends.argmax())
        task = next(candidates[rank], None)
        if task is None:
            return index, server_ends
        has_keys = np.zeros(num_servers, dtype=bool)
        for neighbour in (max(0, task - 1), min(task + 1, num_tasks - 1)):
            if source[neighbour] == source[task] and index[neighbour] >= 0:
                has_keys[index[neighbour]] = True
        keys = np.where(has_keys, 0.0, for_keys[:, task])
        ends = server_ends + on_servers[:, task] + keys
        if is_used[rank].sum() == MOST_SERVERS:
            ends[~is_used[rank]] = np.inf
        server = int(ends.argmin())
        if ends[server] >= rank_ends[rank]:
            continue
        index[task] = server
        is_used[rank, server] = True
        server_ends[server] = ends[server]
        rank_ends[rank] -= on_rank[task]


def _seconds_on(
    servers: Sequence[JoinedServer],
    shape: AttentionShape,
    tasks: TaskArray,
    unit_cost: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Return [servers, n] seconds of tasks on servers without their keys, and of the keys.

    ``unit_cost`` [n] are their seconds on a rank.
    """
    without_keys = tasks.copy()
    without_keys["kv_end"] = without_keys["kv_start"]
    query_bytes = link_bytes(shape, without_keys)
    key_bytes = link_bytes(shape, tasks) - query_bytes
    of_tasks = []
    of_keys = []
    for server in servers:
        compute = unit_cost / server.speed
        of_tasks.append(compute + query_bytes / server.bytes_per_second)
        of_keys.append(key_bytes / server.bytes_per_second)
    return np.stack(of_tasks), np.stack(of_keys)


def _heaviest_first(
    plan: Plan, tasks: TaskArray, cost: IntArray
) -> list[Iterator[int]]:
    """Return, by rank, the indices of its tasks that lie at home, the heaviest first."""
    local = np.flatnonzero(_lies_at_home(plan, tasks))
    local = local[np.argsort(-cost[local], kind="stable")]
    ranks = tasks["server"][local]
    return [
        iter(local[ranks == rank].tolist()) for rank in range(plan.layout.num_ranks)
    ]


def link_bytes(shape: AttentionShape, tasks: TaskArray) -> FloatArray:
    """Return [n] bytes of each task to a server and back, in both directions if each took as long for its attention.

    Ranks wait in both directions. Where rows take longer beside attention in one, they count for both.
    """
    forward = direction_bytes(shape, tasks, True) / FORWARD_PART
    backward = direction_bytes(shape, tasks, False) / (1 - FORWARD_PART)
    return np.maximum(forward, backward)


def direction_bytes(shape: AttentionShape, tasks: TaskArray, forward: bool) -> IntArray:
    """Return int64 [n] bytes of rows to a server and back, forward or backward, of each task."""
    rows = RowBytes.of(shape)
    if forward:
        query_bytes = rows.forward_queries + rows.outputs
        key_bytes = rows.keys
    else:
        query_bytes = rows.backward_queries + rows.query_gradients
        key_bytes = rows.keys + rows.key_gradients
    num_queries = tasks["q_end"] - tasks["q_start"]
    num_keys = tasks["kv_end"] - tasks["kv_start"]
    return num_queries * query_bytes + num_keys * key_bytes


def _lies_at_home(plan: Plan, tasks: TaskArray) -> np.ndarray:
    """Return bool [num_tasks] whether the server of a task is the home of all its queries and keys."""
    layout = plan.layout
    home = layout.run_rank
    run_end = layout.run_start + layout.seg_length[layout.run_order]
    # Runs of one home that follow each other make one stretch.
    is_last = np.roll(begins_group(home), -1)
    stretch_end = run_end[is_last]
    stretch_home = home[is_last]
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    lies_at_home = np.ones(len(tasks), dtype=bool)
    for start, end in (("q_start", "q_end"), ("kv_start", "kv_end")):
        first = base + tasks[start]
        stretch = np.searchsorted(stretch_end, first, side="right")
        lies_at_home &= base + tasks[end] <= stretch_end[stretch]
        lies_at_home &= stretch_home[stretch] == tasks["server"]
    return lies_at_home
