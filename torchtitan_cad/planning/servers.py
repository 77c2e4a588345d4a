# SPDX-License-Identifier: BSD-3-Clause
"""Work of ranks for servers that have joined the job: processes without tokens and without a part in exchanges.

A joined server only gets tasks whose queries and keys all lie on one rank, their home. The home sends the rows, and
computes the task itself if no answer comes. So a plan with joined servers is the plan of the ranks, for some of whose
tasks a server stands in. Tasks and exchanges between ranks stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchtitan_cad.planning.intervals import (
    BoolArray,
    IntArray,
    begins_group,
    split_at,
)
from torchtitan_cad.planning.model.tasks import (
    HOME,
    StandIns,
    TaskArray,
    is_diagonal,
    merge_queries,
)
from torchtitan_cad.planning.pipeline.one_f_one_b import BACKWARD_ATTENTION
from torchtitan_cad.planning.plan import Plan

MOST_SERVERS = 4
"""Servers that stand in for one rank in a plan; the results of all its kernel calls are combined at once."""
LEAST_SHORTENING = 0.01
"""A plan keeps its tasks on the ranks if servers would shorten attention by less than this share."""
PARTS = 256
"""Tasks are given away in parts of about a rank's mean queries / PARTS."""
TRIALS = 10
"""times for the slowest that are tried"""
DIRECTIONS = 1 + BACKWARD_ATTENTION
"""Forward and backward, in forwards: of time, and of bytes too, as backward has fewer of them for its time."""


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

    To end in a given time, ranks give away what they cannot compute in it, to one server after the other, each of which
    takes what it can in that time. The shortest time is found by bisection.

    Args:
        servers: in the same order on all ranks.
        unit: seconds of attention of a rank per unit of the cost model, forward and backward.
        share: of the servers' time and links that this plan may use, where several groups plan for themselves.
    """
    if not servers or not len(plan.tasks) or plan.shape.window is not None:
        return plan
    servers = sorted(servers, key=lambda server: -server.speed)
    rates = [
        (share * server.speed, share * server.bytes_per_second * unit / DIRECTIONS)
        for server in servers
    ]
    parts = _Parts.of(plan)
    shortest = (1 - LEAST_SHORTENING) * float(plan.stats.loads.max())
    best = parts.give_away(rates, shortest)
    if best is None:
        return plan
    too_short = 0.0
    for _ in range(TRIALS):
        end = (too_short + shortest) / 2
        tried = parts.give_away(rates, end)
        if tried is None:
            too_short = end
        else:
            best = tried
            shortest = end
    index, ends = best
    tasks, index = _joined(parts.tasks, index)
    numbers = np.array([HOME, *(server.number for server in servers)])
    cost = plan.cost.cost(tasks)
    served = float(cost[index >= 0].sum() / cost.sum())
    seconds = {
        server.number: unit * end
        for server, end in zip(servers, ends, strict=True)
        if end
    }
    stand_ins = StandIns(numbers[index + 1], served, seconds)
    return replace(plan, tasks=tasks, stand_ins=stand_ins)


@dataclass(frozen=True)
class _Parts:
    """A plan's tasks, cut along their queries: by rank, the heaviest first, and of each its last part first.

    The last part has all keys of the task, which a server that takes the parts before it then has already.

    Attributes:
        tasks: [n] the parts.
        is_first: [n] whether the part is of another task than the one before.
        cost: [n] units, which are also a time: that of a unit on a rank.
        query_bytes, key_bytes: [n] of its rows, to a server and back in a forward.
        is_local: [n] whether its rows all lie on the part's rank.
        loads: [num_ranks] cost of all of a rank's tasks.
    """

    tasks: TaskArray
    is_first: BoolArray
    cost: IntArray
    query_bytes: IntArray
    key_bytes: IntArray
    is_local: BoolArray
    loads: IntArray

    @classmethod
    def of(cls, plan: Plan) -> _Parts:
        """Cut the tasks of a plan."""
        whole = plan.tasks
        shard = plan.config.min_shard
        queries_per_part = int(plan.layout.queries_per_rank.mean()) // PARTS
        step = max(1, queries_per_part // shard) * shard
        cuts = np.arange(0, whole["q_end"].max(), step)
        source, _, start, end = split_at(whole["q_start"], whole["q_end"], cuts)
        heaviest_first = -plan.cost.cost(whole)[source]
        order = np.lexsort((-start, source, heaviest_first, whole["server"][source]))
        source = source[order]
        tasks = whole[source]
        is_causal = is_diagonal(tasks)
        tasks["q_start"] = start[order]
        tasks["q_end"] = end[order]
        tasks["kv_end"] = np.where(is_causal, tasks["q_end"], tasks["kv_end"])
        doc = tasks["doc"]
        server = tasks["server"]
        home_of_queries = plan.layout.home_of(doc, tasks["q_start"], tasks["q_end"])
        home_of_keys = plan.layout.home_of(doc, tasks["kv_start"], tasks["kv_end"])
        num_queries = tasks["q_end"] - tasks["q_start"]
        num_keys = tasks["kv_end"] - tasks["kv_start"]
        return cls(
            tasks,
            begins_group(source),
            cost=plan.cost.cost(tasks),
            query_bytes=plan.shape.query_bytes * num_queries,
            key_bytes=plan.shape.kv_bytes * num_keys,
            is_local=(home_of_queries == server) & (home_of_keys == server),
            loads=plan.stats.loads,
        )

    def give_away(
        self, rates: Sequence[tuple[float, float]], end: float
    ) -> tuple[IntArray, list[float]] | None:
        """Return [n] the index of the server that takes a part, -1 for none, and when servers end.

        Returns None if not all ranks and servers can end by ``end``.

        Args:
            rates: of every server, cost and bytes in a unit of time.
        """
        index = np.full(len(self.tasks), -1)
        ends = [0.0] * len(rates)
        ranks = self.tasks["server"]
        excess = self.loads - end
        candidates = np.flatnonzero(self.is_local & (excess[ranks] > 0)).tolist()
        needed = (part for part in candidates if excess[ranks[part]] > 0)
        part = next(needed, None)
        first_server: dict[int, int] = {}
        for number, (speed, link) in enumerate(rates):
            while part is not None:
                rank = int(ranks[part])
                if number - first_server.setdefault(rank, number) == MOST_SERVERS:
                    return None
                num_bytes = self.query_bytes[part]
                if self.is_first[part] or index[part - 1] != number:
                    num_bytes += self.key_bytes[part]
                ends_at = ends[number] + self.cost[part] / speed + num_bytes / link
                if ends_at > end:
                    break
                index[part] = number
                ends[number] = ends_at
                excess[rank] -= self.cost[part]
                part = next(needed, None)
        return None if (excess > 0).any() else (index, ends)


def _joined(parts: TaskArray, index: IntArray) -> tuple[TaskArray, IntArray]:
    """Join neighbouring parts that a rank, or one server for it, computes; returns tasks and the index of each."""
    count = int(index.max()) + 2
    coded = parts.copy()
    coded["server"] = parts["server"] * count + index + 1
    tasks = merge_queries(coded)
    rank, number = np.divmod(tasks["server"], count)
    tasks["server"] = rank
    return tasks, number - 1
