"""The default planner: strips for what overloaded ranks cannot do, then local search.

Every rank keeps its own work up to the tolerated load; what is over is tiled over the ranks with room (``tile.py``) and
improved by local search, which counts loads by the cost model and knows the nodes. Where work cannot be cut into
rectangles of whole cells, as when documents are shorter than ``min_shard``, or with ``split_kv = false``, local search
begins with the plan without disaggregation. Nothing depends on clocks: how much is tried is counted.
"""

from __future__ import annotations

import numpy as np

from torchtitan_cad.planning.exchange.traffic import node_of_ranks
from torchtitan_cad.planning.intervals import IntArray, sum_by_index
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import LARGEST, CostModel, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import LoadLimits, load_limits, server_loads
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import (
    DOC,
    Q_START,
    TaskArray,
    home_tasks,
    make_tasks,
    merge_queries,
    task_table,
)
from torchtitan_cad.planning.planners.base import register_planner
from torchtitan_cad.planning.planners.local_search.improve import LocalSearch
from torchtitan_cad.planning.planners.tiling.assemble import assemble
from torchtitan_cad.planning.planners.tiling.surplus import RUN
from torchtitan_cad.planning.planners.tiling.tile import tile

SHORT = 50
"""Local search skips documents on one rank that cost less than the mean limit / SHORT."""

MOVES, MOVES_PER_RANK = 8000, 12
"""Moves that local search evaluates for fewer bytes."""


@register_planner("tiling")
def plan_tiling(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> TaskArray:
    """Return diagonals and rectangles within the guaranteed loads, and within the tolerated ones if that is found."""
    return make_tiling(layout, shape, config, cost, config.split_kv, MOVES + MOVES_PER_RANK * layout.num_ranks)


def make_tiling(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel, strips: bool, budget: int
) -> TaskArray:
    """Plan as ``plan_tiling``, with or without strips, evaluating ``budget`` moves for fewer bytes."""
    home = home_tasks(layout)
    limits = load_limits(layout, config, cost, home)
    loads = server_loads(home, cost, layout.num_ranks)
    if (loads <= limits.tolerated).all():
        return home
    table, costs = task_table(layout, home), cost.cost(home)
    tiling = None
    if strips:
        room = _room_in_tiles(layout, home, cost, loads, limits)
        node = node_of_ranks(config, layout.num_ranks)
        tiling = tile(layout, shape, table, room, cost.granularity, config.min_shard, node)
    looked_at = sum_by_index(table[:, DOC], costs, len(layout.docs)) * SHORT >= limits.tolerated.mean()
    looked_at |= np.bincount(table[:, DOC], minlength=len(layout.docs)) > 1
    if tiling is not None:
        looked_at[tiling[0][:, DOC]] = True
    mine = looked_at[table[:, DOC]]
    number = np.cumsum(looked_at) - 1
    start, rest = table[mine].copy(), home[~mine]
    start[:, DOC] = number[start[:, DOC]]
    if tiling is not None:
        blocks, pieces = tiling
        position = layout.doc_offsets[table[mine, DOC]] + table[mine, Q_START]
        run = np.searchsorted(position, layout.doc_offsets[blocks[:, DOC]] + blocks[:, RUN])
        start = assemble(start, blocks, run, pieces, config.min_shard)
    search = LocalSearch(layout, shape, config, cost, np.flatnonzero(looked_at), config.split_kv)
    others = server_loads(rest, cost, layout.num_ranks)
    found = search.improve(start, others, limits.tolerated, limits.guaranteed, budget)
    docs = layout.docs[looked_at]
    if found is None:  # with cuts along the queries alone there always is a plan: ``limits.py``
        search = LocalSearch(layout, shape, config, cost, np.arange(len(layout.docs)), split_kv=False)
        found = search.improve(table, np.zeros_like(loads), limits.guaranteed, limits.guaranteed, budget)
        docs, rest = layout.docs, rest[:0]
    assert found is not None
    doc, *columns = found.T
    return merge_queries(np.concatenate([rest, make_tasks(docs[doc], *columns)]))


def _room_in_tiles(
    layout: TokenLayout, home: TaskArray, cost: CostModel, loads: IntArray, limits: LoadLimits
) -> IntArray:
    """Return int64 [num_ranks] tiles that each rank may take, negative where it has to give.

    A tile is taken to cost on an overloaded rank what it does there at home, on others the mean of those: it is their
    work that moves.
    """
    free = limits.tolerated - loads
    if isinstance(cost, TileAreaCost):
        return free
    tiles = server_loads(home, TileAreaCost(cost.granularity), layout.num_ranks)
    over = free < 0
    mean = float(loads[over].sum()) / max(1.0, float(tiles[over].sum()))
    per_tile = np.where(over, loads / np.maximum(tiles, 1), mean)
    return np.minimum(np.floor(free / per_tile), LARGEST // 2).astype(np.int64)
