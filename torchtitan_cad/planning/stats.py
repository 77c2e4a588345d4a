# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of a plan: loads, bytes and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any

import numpy as np

from torchtitan_cad.planning.bound import lower_bound
from torchtitan_cad.planning.exchange.needs import RowNeeds
from torchtitan_cad.planning.exchange.traffic import measure_traffic, node_of_ranks
from torchtitan_cad.planning.intervals import IntArray
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import load_limits, server_loads
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import TaskArray, home_tasks


@dataclass(frozen=True, eq=False)
class PlanStats:
    """Loads are in the cost model's units (tiles by default), bytes are those of one layer's forward.

    A query row served away from home counts ``query_bytes`` (Q there, O and LSE back), a key row ``kv_bytes``, each
    once per (token, server). All bytes of a row count in ``bytes_out`` of its home and in ``bytes_in`` of its server,
    also those that return. Hence both sum to ``total_bytes``.
    """

    max_over_mean: float
    """The largest load over ``mean_load``. 1.0 without any load."""
    max_over_mean_before: float
    """``max_over_mean`` of the home plan."""
    guaranteed_over_mean: float
    """``max_over_mean`` of the guaranteed maximum load (see ``limits.py``)."""
    mean_load: float
    """Total load of the home plan over the number of ranks."""
    load_limit: int
    """The guaranteed maximum load of a server."""
    loads: IntArray
    """[num_ranks] load of each server."""
    loads_before: IntArray
    """[num_ranks] load of each server in the home plan."""
    total_bytes: int
    """Bytes over all ranks."""
    max_rank_bytes: int
    """Largest of all ranks' ``bytes_in`` and ``bytes_out``."""
    mean_rank_bytes: float
    """total_bytes / num_ranks."""
    inter_node_bytes: int
    """The part of ``total_bytes`` between ranks of different nodes; 0 without ``ranks_per_node``."""
    max_rank_inter_node_bytes: int
    """Largest inter-node bytes of any rank, in or out."""
    bytes_in: IntArray
    """[num_ranks] bytes of the rows of other ranks that a rank uses as a server."""
    bytes_out: IntArray
    """[num_ranks] bytes of a rank's rows that other ranks use."""
    num_tasks: int
    tasks_moved: int
    """Tasks whose server is not the home of all their queries."""
    query_rows_moved: int
    """(token, server) pairs of queries served away from home."""
    kv_rows_moved: int
    """(token, server) pairs of keys used away from home."""
    plan_seconds: float
    """Wall-clock time of planning, without exchange tables and statistics."""
    bound: Callable[[], int] = field(repr=False)
    """Returns the lower bound, computed at the first call; training never calls it."""

    @property
    def lower_bound_bytes(self) -> int:
        """Lower bound on ``total_bytes`` of any plan with loads within ``load_limit`` or, if larger, within what the
        ranks can do in this plan's time."""
        return self.bound()

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics and the bound for JSON; arrays become lists."""
        values = {name: getattr(self, name) for name in (*_STORED, "lower_bound_bytes")}
        return {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in values.items()
        }


_STORED = [field.name for field in fields(PlanStats) if field.name != "bound"]
"""Fields of PlanStats in the JSON form."""


def compute_stats(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig,
    cost: TileAreaCost,
    tasks: TaskArray,
    needs: tuple[RowNeeds, RowNeeds],
    plan_seconds: float,
) -> PlanStats:
    """Return the statistics of the canonical ``tasks``, with their ``needs`` of queries and keys."""
    queries, keys = needs
    home = home_tasks(layout, shape.window)
    loads = server_loads(tasks, cost, layout.num_ranks)
    loads_before = server_loads(home, cost, layout.num_ranks)
    limits = load_limits(layout, config, cost, loads_before)
    node = node_of_ranks(config, layout.num_ranks)
    traffic = measure_traffic(needs, (shape.query_bytes, shape.kv_bytes), node)
    bytes_in, bytes_out = traffic.total
    total = int(bytes_in.sum())
    most = max(limits.guaranteed, int(loads.max()))
    bound = partial(_lower_bound, layout, shape, cost, most)
    return PlanStats(
        max_over_mean=limits.over_mean(int(loads.max())),
        max_over_mean_before=limits.over_mean(int(loads_before.max())),
        mean_load=limits.mean,
        guaranteed_over_mean=limits.over_mean(limits.guaranteed),
        load_limit=limits.guaranteed,
        loads=loads,
        loads_before=loads_before,
        total_bytes=total,
        max_rank_bytes=int(traffic.total.max()),
        mean_rank_bytes=total / layout.num_ranks,
        inter_node_bytes=int(traffic.between[0].sum()),
        max_rank_inter_node_bytes=int(traffic.between.max()),
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        num_tasks=len(tasks),
        tasks_moved=_tasks_moved(layout, tasks),
        query_rows_moved=int(queries.rows_in.sum()),
        kv_rows_moved=int(keys.rows_in.sum()),
        plan_seconds=plan_seconds,
        bound=cache(bound),
    )


def _lower_bound(
    layout: TokenLayout, shape: AttentionShape, cost: TileAreaCost, load: int
) -> int:
    """Return the least bytes of plans in which every rank computes at most ``load``."""
    lengths = layout.doc_lengths
    all_pairs = int((lengths * (lengths + 1) // 2).sum())
    return lower_bound(layout, shape, min(all_pairs, cost.max_pairs(load)))


def _tasks_moved(layout: TokenLayout, tasks: TaskArray) -> int:
    """Tasks with a query whose home is not the task's server."""
    home = layout.home_of(tasks["doc"], tasks["q_start"], tasks["q_end"])
    return int((home != tasks["server"]).sum())
