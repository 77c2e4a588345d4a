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

from torchtitan_cad.planning.intervals import FloatArray, IntArray, begins_group
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
BISECTIONS = 8
"""Times tried by which all ranks and servers may end, the last two of which differ by 1 / 256."""


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
    local = plan.tasks[is_local]
    cost = plan.cost.cost(local)
    local = local[np.lexsort([-cost, local["server"]])]
    ranks = np.arange(plan.layout.num_ranks)
    first = np.searchsorted(local["server"], ranks)
    of_ranks = np.split(local, first[1:])
    speeds = np.ones(len(ranks))
    if plan.config.rank_speeds is not None:
        speeds = np.array(plan.config.rank_speeds)
    units_per_second = speeds / unit
    seconds = plan.stats.loads / units_per_second
    best = None
    low = 0.0
    high = (1 - LEAST_SHORTENING) * seconds.max()
    for _ in range(BISECTIONS):
        end = (low + high) / 2
        assignment = _Assignment(plan, servers, unit, share=share, end=end)
        excess = (seconds - end) * units_per_second
        is_relieved = map(assignment.relieve, of_ranks, excess.astype(int))
        if all(is_relieved):
            high = end
            best = assignment
        else:
            low = end
    if best is None or best.is_idle:
        return plan
    return best.plan_with(plan.tasks[~is_local])


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
        first = base + tasks[start]
        stretch = np.searchsorted(stretch_end, first, side="right")
        lies_at_home &= base + tasks[end] <= stretch_end[stretch]
        lies_at_home &= stretch_home[stretch] == tasks["server"]
    return lies_at_home


class _Assignment:
    """Tasks at home, with which one server after the other is filled, and the time that every server has taken on."""

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
        self._end = end
        self._busy = np.zeros(len(servers))
        self._parts: list[tuple[TaskArray, int]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no server has got a task."""
        return not self._busy.any()

    def relieve(self, tasks: TaskArray, excess: int) -> bool:
        """Give away tasks of one rank until ``excess`` units of cost are gone; returns False if servers take less.

        Args:
            tasks: of one home, in the order in which they are given away. The last is cut; what is left stays there.
            excess: units of the cost model.
        """
        used = set[int]()
        while len(tasks) and excess > 0:
            server = self._freest(used)
            used.add(server)
            costs = self._plan.cost.cost(tasks)
            seconds = self._seconds(tasks, server)
            ends = self._busy[server] + seconds.cumsum()
            num_needed = costs.cumsum().searchsorted(excess, side="right")
            num_fitting = ends.searchsorted(self._end, side="right")
            num_whole = min(num_needed, num_fitting)
            excess -= self._give(tasks[:num_whole], server)
            tasks = tasks[num_whole:]
            if not len(tasks) or excess <= 0:
                break
            kept, served = self._cut(tasks[:1], server, excess)
            if not num_whole and not len(served):
                return False
            excess -= self._give(served, server)
            tasks = np.concatenate([kept, tasks[1:]])
        self._parts.append((tasks, HOME))
        return excess <= 0

    def _give(self, tasks: TaskArray, server: int) -> int:
        """Hand tasks to a server, and return their cost."""
        number = self._servers[server].number
        self._parts.append((tasks, number))
        self._busy[server] += self._seconds(tasks, server).sum()
        return int(self._plan.cost.cost(tasks).sum())

    def plan_with(self, others: TaskArray) -> Plan:
        """Return the plan of all tasks handed over or kept, and of ``others``."""
        parts = [(others, HOME), *self._parts]
        tasks = np.concatenate([tasks for tasks, _ in parts])
        numbers = [number for _, number in parts]
        server = np.repeat(numbers, [len(tasks) for tasks, _ in parts])
        keys = [tasks[name] for name in ORDER_FIELDS[::-1]]
        order = np.lexsort(keys)
        tasks = canonical(tasks[order])
        server = server[order]
        cost = self._plan.cost.cost(tasks)
        total = max(1, cost.sum())
        share = float(cost[server != HOME].sum() / total)
        of_servers = zip(self._servers, self._busy, strict=True)
        seconds = {joined.number: float(busy) for joined, busy in of_servers if busy}
        stand_ins = StandIns(server, share, seconds)
        return replace(self._plan, tasks=tasks, stand_ins=stand_ins)

    def _freest(self, used: set[int]) -> int:
        """Return the index of the server with most free time, among those in use once there are enough of them."""
        servers = used if len(used) == MOST_SERVERS else range(len(self._servers))
        return min(servers, key=lambda server: (self._busy[server], server))

    def _seconds(self, tasks: TaskArray, server: int) -> FloatArray:
        """Return the seconds of every task on a server, rows included."""
        joined = self._servers[server]
        cost = self._plan.cost.cost(tasks)
        compute = self._unit / joined.speed * cost
        num_bytes = link_bytes(self._plan.shape, tasks)
        rows = num_bytes / joined.bytes_per_second
        return (compute + rows) / self._share

    def _cut(
        self, task: TaskArray, server: int, excess: int
    ) -> tuple[TaskArray, TaskArray]:
        """Return the part of a task that its home keeps, and its last queries, for the server; either may be empty."""
        heads, tails = _cuts(task, self._plan.config.min_shard)
        fits = self._busy[server] + self._seconds(tails, server) <= self._end
        enough = self._plan.cost.cost(tails) >= excess
        # Tails grow; the first that is enough is taken, or the longest that fits.
        last = int(enough.argmax()) if enough.any() else len(tails) - 1
        fitting = np.flatnonzero(fits[: last + 1])
        if not len(fitting):
            return task, task[:0]
        cut = fitting[-1:]
        head = heads[cut]
        is_left = head["q_end"] > head["q_start"]
        return head[is_left], tails[cut]


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
