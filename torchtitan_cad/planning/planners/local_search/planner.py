"""The default planner: local search from the plan without disaggregation.

Ranks over the tolerated load give parts of their tasks to ranks with room (``feasible.py``); then tasks move on for
fewer bytes, within the loads (``polish.py``). Loads are counted by the cost model, bytes by where rows live, on which
node too. Nothing depends on clocks: how much is tried is counted.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchtitan_cad.planning.intervals import sum_by_index
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import load_limits, server_loads
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import DOC, TaskArray, home_tasks, make_tasks, merge_queries, task_table
from torchtitan_cad.planning.planners.base import register_planner
from torchtitan_cad.planning.planners.local_search.improve import LocalSearch

SHORT = 20
"""A document on one rank that costs less than the mean limit / SHORT stays at home."""

MOVES, MOVES_PER_RANK = 8000, 12
"""Moves evaluated for fewer bytes."""


@register_planner("local_search")
def plan_local_search(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> TaskArray:
    """Return diagonals and rectangles within the guaranteed loads, and within the tolerated ones if that is found."""
    return search(layout, shape, config, cost, MOVES + MOVES_PER_RANK * layout.num_ranks)


def search(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel, budget: int
) -> TaskArray:
    """Plan as ``plan_local_search``, evaluating ``budget`` moves for fewer bytes."""
    home = home_tasks(layout)
    limits = load_limits(layout, config, cost, home)
    loads = server_loads(home, cost, layout.num_ranks)
    if (loads <= limits.tolerated).all():
        return home
    table, costs = task_table(layout, home), cost.cost(home)
    chosen = sum_by_index(table[:, DOC], costs, len(layout.docs)) * SHORT >= limits.tolerated.mean()
    chosen |= np.bincount(table[:, DOC], minlength=len(layout.docs)) > 1
    mine = chosen[table[:, DOC]]
    start, rest = table[mine].copy(), home[~mine]
    start[:, DOC] = (np.cumsum(chosen) - 1)[start[:, DOC]]
    others = server_loads(rest, cost, layout.num_ranks)
    found = LocalSearch(layout, shape, config, cost, np.flatnonzero(chosen)).improve(
        start, others, limits.tolerated, limits.guaranteed, budget
    )
    docs = layout.docs[chosen]
    if found is None:  # with cuts along the queries alone there always is a plan: ``limits.py``
        every = LocalSearch(layout, shape, replace(config, split_kv=False), cost, np.arange(len(layout.docs)))
        found = every.improve(table, np.zeros_like(loads), limits.guaranteed, limits.guaranteed, budget)
        docs, rest = layout.docs, rest[:0]
    assert found is not None
    doc, *columns = found.T
    return merge_queries(np.concatenate([rest, make_tasks(docs[doc], *columns)]))
