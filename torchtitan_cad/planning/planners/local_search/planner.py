# SPDX-License-Identifier: BSD-3-Clause
"""The default planner: local search from the plan without disaggregation.

Ranks over the tolerated load give parts of their tasks to ranks with capacity (``feasible.py``); then moves within the
load limits lower the bytes (``polish.py``). The effort is bounded by counts of moves, not by clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from torchtitan_cad.planning.intervals import IntArray, sum_by_index
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import CostModel
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import load_limits
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import DOC, TaskArray, from_table, home_tasks, task_table
from torchtitan_cad.planning.planners.base import register_planner
from torchtitan_cad.planning.planners.local_search.improve import LocalSearch

SHORT = 20
"""A document on one rank stays at home if it costs less than the mean limit / SHORT."""

MOVES, MOVES_PER_RANK = 8000, 12
"""moves evaluated for fewer bytes = effort x (MOVES + MOVES_PER_RANK x ranks)"""


@register_planner("local_search")
def plan_local_search(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> TaskArray:
    """Return diagonals and rectangles within the guaranteed loads, and within the tolerated loads where possible."""
    return search(layout, shape, config, cost)[1]()


def search(
    layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel, effort: float = 1.0
) -> tuple[IntArray, Callable[[], TaskArray]]:
    """Return bytes [2, num_ranks] into and out of ranks, right only if all tokens attend, and a maker of the tasks."""
    home = home_tasks(layout)
    table, costs = task_table(layout, home), cost.cost(home)
    loads = sum_by_index(home["server"], costs, layout.num_ranks)
    limits = load_limits(layout, config, cost, loads)
    is_balanced = bool((loads <= limits.tolerated).all())
    budget = 0 if is_balanced else int((MOVES + MOVES_PER_RANK * layout.num_ranks) * effort)
    chosen = sum_by_index(table[:, DOC], costs, len(layout.docs)) * SHORT >= limits.tolerated.mean()
    chosen |= np.bincount(table[:, DOC], minlength=len(layout.docs)) > 1
    mine = chosen[table[:, DOC]]
    start, rest = table[mine].copy(), home[~mine]
    start[:, DOC] = (np.cumsum(chosen) - 1)[start[:, DOC]]
    others = sum_by_index(rest["server"], costs[~mine], layout.num_ranks)
    found = LocalSearch(layout, shape, config, cost, np.flatnonzero(chosen)).improve(
        start, others, limits.tolerated, limits.guaranteed, budget
    )
    docs = layout.docs[chosen]
    if found is None:  # with cuts along the queries alone a plan always exists: ``limits.py``
        every = LocalSearch(layout, shape, replace(config, split_kv=False), cost, np.arange(len(layout.docs)))
        found = every.improve(table, np.zeros_like(loads), limits.guaranteed, limits.guaranteed, budget)
        docs, rest = layout.docs, rest[:0]
    assert found is not None
    tasks, by_rank = found
    return by_rank, lambda: np.concatenate([rest, from_table(docs, tasks)])
