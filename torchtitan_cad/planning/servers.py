# SPDX-License-Identifier: BSD-3-Clause
"""Work of ranks for servers that have joined the job: processes without tokens and without a part in exchanges.

A joined server only gets tasks whose queries and keys all lie on one rank, their home. The home sends the rows, and
computes the task itself if no answer comes. So a plan with joined servers is the plan of the ranks, in which some tasks
are cut along their queries, and for some of which a server stands in. Exchanges between ranks stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchtitan_cad.planning.intervals import (
    FloatArray,
    IntArray,
    begins_group,
    sum_by_index,
)
from torchtitan_cad.planning.model.shape import AttentionShape, RowBytes
from torchtitan_cad.planning.model.tasks import (
    HOME,
    ORDER_FIELDS,
    StandIns,
    TaskArray,
    canonical,
    is_diagonal,
)
from torchtitan_cad.planning.plan import Plan

MOST_SERVERS = 4
"""Servers that stand in for one rank in a plan; the results of all its kernel calls are combined at once."""
LEAST_SHORTENING = 0.01
"""A plan keeps its tasks on the ranks if servers would shorten attention by less than this share."""
FORWARD_PART = 2 / 7
"""The part of forward in a kernel's time: backward has 2.5 times its operations."""
ENDS = 8
"""Ends that are tried, from the earliest that the mean task allows to the least gain."""
BISECTIONS = 40


@dataclass(frozen=True)
class JoinedServer:
    """A server that has joined a job.

    Attributes:
        number: of its registration, distinct over the job.
        speed: of its attention, relative to a rank of speed 1.
        bytes_per_second: of the link to it, shared by both directions.
    """

    number: int
    speed: float
    bytes_per_second: float


def assign_to_servers(
    plan: Plan, servers: Sequence[JoinedServer], unit: float, share: float = 1.0
) -> Plan:
    """Return a plan of the same exchanges in which joined servers take part, for the least time of the slowest.

    All ranks and servers are to end at the same time. Every rank gives away what it has beyond that, as far as its
    tasks lie at home, the heaviest first.

    Args:
        servers: in the same order on all ranks.
        unit: seconds of attention of a rank of speed 1 per unit of the cost model, forward and backward.
        share: of the servers' time and links that this plan may use, where several groups plan for themselves.
    """
    if not servers or plan.shape.window is not None:
        return plan
    is_local = _lies_at_home(plan)
    ranks = _Ranks(plan, plan.tasks[is_local], unit)
    seconds_per_unit = [
        unit / server.speed + ranks.bytes_per_unit / server.bytes_per_second
        for server in servers
    ]
    earliest = ranks.common_end(np.array(seconds_per_unit) / share)
    latest = (1 - LEAST_SHORTENING) * ranks.seconds.max()
    if earliest >= latest:
        return plan
    best = None
    best_end = latest
    for step in range(ENDS):
        # Cut tasks bring more rows than whole ones, so that servers may be full before the earliest end.
        end = earliest + step / ENDS * (latest - earliest)
        assignment = _Assignment(plan, servers, unit, share=share, end=end)
        last_end = ranks.relieve(assignment, end)
        if last_end < best_end:
            best = assignment
            best_end = last_end
        if last_end <= (1 + LEAST_SHORTENING) * end:
            break
    return plan if best is None else best.plan_with(plan.tasks[~is_local])


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


def _lies_at_home(plan: Plan) -> np.ndarray:
    """Return bool [num_tasks] whether the server of a task is the home of all its queries and keys."""
    layout = plan.layout
    tasks = plan.tasks
    home = layout.run_rank
    run_end = layout.run_start + layout.seg_length[layout.run_order]
    # Runs of one home that follow each other make one stretch.
    is_last = np.roll(begins_group(home), -1)
    stretch_end = run_end[is_last]
    stretch_home = home[is_last]
    base = layout.doc_offsets[layout.doc_index(tasks["doc"])]
    lies_at_home = np.ones(len(tasks), dtype=bool)
    for start, end in (("q_start", "q_end"), ("kv_start", "kv_end")):
        stretch = np.searchsorted(stretch_end, base + tasks[start], side="right")
        lies_at_home &= base + tasks[end] <= stretch_end[stretch]
        lies_at_home &= stretch_home[stretch] == tasks["server"]
    return lies_at_home


class _Ranks:
    """The ranks' attention, and their tasks that servers can take: those at home, the heaviest of every rank first.

    Attributes:
        seconds: [ranks] of attention of every rank.
        bytes_per_unit: rows that servers get and return for a unit of cost.
    """

    def __init__(self, plan: Plan, local_tasks: TaskArray, unit: float) -> None:
        num_ranks = plan.layout.num_ranks
        cost = plan.cost.cost(local_tasks)
        home = local_tasks["server"]
        order = np.lexsort([-cost, home])
        self._unit = unit
        self._speeds = np.array(plan.config.rank_speeds or [1.0] * num_ranks)
        self._tasks = local_tasks[order]
        self._first = np.searchsorted(home[order], np.arange(num_ranks + 1))
        local_loads = sum_by_index(home, cost, num_ranks)
        self._local_seconds = unit * local_loads / self._speeds
        self.seconds = unit * plan.stats.loads / self._speeds
        num_bytes = link_bytes(plan.shape, local_tasks).sum()
        self.bytes_per_unit = num_bytes / max(1, cost.sum())

    def common_end(self, seconds_per_unit: FloatArray) -> float:
        """Return the least time by which all ranks can end if servers take what they have beyond it.

        Args:
            seconds_per_unit: [servers] that a server takes for a unit of cost, rows included.
        """
        units_per_second = self._speeds / self._unit
        low = float((self.seconds - self._local_seconds).max())
        high = float(self.seconds.max())
        for _ in range(BISECTIONS):
            end = (low + high) / 2
            excess = np.maximum(self.seconds - end, 0)
            units = (excess * units_per_second).sum()
            if units <= (end / seconds_per_unit).sum():
                high = end
            else:
                low = end
        return high

    def relieve(self, assignment: _Assignment, end: float) -> float:
        """Give away what ranks have beyond ``end``, as far as servers take it, and return when the last rank ends."""
        left = np.zeros(len(self._speeds))
        for rank, speed in enumerate(self._speeds):
            excess = int((self.seconds[rank] - end) * speed / self._unit)
            tasks = self._tasks[self._first[rank] : self._first[rank + 1]]
            units = assignment.relieve(tasks, excess)
            left[rank] = units * self._unit / speed
        return float((end + left).max())


class _Assignment:
    """Tasks at home, which are handed to servers one after the other, and the free time of every server."""

    def __init__(
        self,
        plan: Plan,
        servers: Sequence[JoinedServer],
        unit: float,
        share: float,
        end: float,
    ) -> None:
        self._plan = plan
        self._servers = servers
        self._unit = unit
        self._share = share
        self._free = np.full(len(servers), end)
        self._busy = np.zeros(len(servers))
        self._tasks: list[TaskArray] = []
        self._stand_ins: list[int] = []

    def relieve(self, tasks: TaskArray, excess: int) -> int:
        """Give away tasks of one rank until ``excess`` units of cost are gone, the last of them cut.

        Returns the units that remain, 0 or more.

        Args:
            tasks: of one home, in the order in which they are given away; what is left of them stays there.
            excess: units of the cost model.
        """
        left = list(tasks)
        used = set[int]()
        while left and excess > 0:
            task = np.array([left.pop(0)])
            server = self._freest(used)
            kept, served = self._cut(task, server, excess)
            if not len(served):
                self._add(kept)
                break
            used.add(server)
            self._add(served, self._servers[server].number)
            seconds = float(self._seconds(served, server)[0])
            self._free[server] -= seconds
            self._busy[server] += seconds
            excess -= int(self._plan.cost.cost(served)[0])
            if len(kept) and excess > 0:  # this server is full, another may not be
                left.insert(0, kept[0])
            else:
                self._add(kept)
        for task in left:
            self._add(np.array([task]))
        return max(0, excess)

    def plan_with(self, others: TaskArray) -> Plan:
        """Return the plan of all tasks handed over or kept, and of ``others``; the plan itself if nothing fits."""
        if not self._busy.any():
            return self._plan
        tasks = np.concatenate([others, *self._tasks])
        at_home = np.full(len(others), HOME)
        server = np.append(at_home, self._stand_ins)
        order = np.lexsort([tasks[name] for name in ORDER_FIELDS[::-1]])
        seconds = {
            joined.number: float(busy)
            for joined, busy in zip(self._servers, self._busy, strict=True)
            if busy
        }
        tasks = canonical(tasks[order])
        server = server[order]
        cost = self._plan.cost.cost(tasks)
        served_cost = cost[server != HOME].sum()
        share = float(served_cost / max(1, cost.sum()))
        stand_ins = StandIns(server, share, seconds)
        return replace(self._plan, tasks=tasks, stand_ins=stand_ins)

    def _add(self, tasks: TaskArray, server: int = HOME) -> None:
        if len(tasks):
            self._tasks.append(tasks)
            self._stand_ins.append(server)

    def _freest(self, used: set[int]) -> int:
        """Return the index of the server with most free time, among those in use once there are enough of them."""
        if len(used) < MOST_SERVERS:
            return int(self._free.argmax())
        return max(used, key=lambda server: (self._free[server], -server))

    def _seconds(self, tasks: TaskArray, server: int) -> FloatArray:
        """Return the seconds of every task on a server, rows included."""
        joined = self._servers[server]
        cost = self._plan.cost.cost(tasks)
        compute = self._unit / joined.speed * cost
        rows = link_bytes(self._plan.shape, tasks) / joined.bytes_per_second
        return (compute + rows) / self._share

    def _cut(
        self, task: TaskArray, server: int, excess: int
    ) -> tuple[TaskArray, TaskArray]:
        """Return the part of a task that its home keeps, and its last queries, for the server; either may be empty."""
        heads, tails = _cuts(task, self._plan.config.min_shard)
        fits = self._seconds(tails, server) <= self._free[server]
        enough = self._plan.cost.cost(tails) >= excess
        # Tails grow; the first that is enough is taken, or the longest that fits.
        last = int(enough.argmax()) if enough.any() else len(tails) - 1
        fitting = np.flatnonzero(fits[: last + 1])
        if not len(fitting):
            return task, task[:0]
        cut = fitting[-1]
        head = heads[cut : cut + 1]
        tail = tails[cut : cut + 1]
        return head[head["q_end"] > head["q_start"]], tail


def _cuts(task: TaskArray, min_shard: int) -> tuple[TaskArray, TaskArray]:
    """Return all ways to cut a task [1] along its queries at multiples of ``min_shard``: heads and tails.

    Tails are in ascending order of their queries; the last is the whole task.
    """
    q_start = int(task["q_start"][0])
    q_end = int(task["q_end"][0])
    first = (q_start // min_shard + 1) * min_shard
    inside = np.arange(first, q_end, min_shard)
    cuts = np.append(inside[::-1], q_start)
    heads = task.repeat(len(cuts))
    tails = task.repeat(len(cuts))
    heads["q_end"] = tails["q_start"] = cuts
    if is_diagonal(task)[0]:
        heads["kv_end"] = cuts
    return heads, tails
