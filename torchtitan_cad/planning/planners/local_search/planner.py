# SPDX-License-Identifier: BSD-3-Clause
"""The default planner: local search from the plan without disaggregation.

Ranks over the tolerated load give parts of their tasks to ranks with capacity (``feasible.py``); then moves within the
load limits lower the bytes (``polish.py``). The effort is bounded by counts of moves, not by clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from torchtitan_cad.planning.intervals import BoolArray, IntArray, sum_by_index
from torchtitan_cad.planning.model.config import PlannerConfig
from torchtitan_cad.planning.model.cost import LARGEST, TileAreaCost
from torchtitan_cad.planning.model.layout import TokenLayout
from torchtitan_cad.planning.model.limits import load_limits
from torchtitan_cad.planning.model.shape import AttentionShape
from torchtitan_cad.planning.model.tasks import (
    DOC,
    TaskArray,
    from_table,
    home_tasks,
    task_table,
)
from torchtitan_cad.planning.planners.base import register_planner
from torchtitan_cad.planning.planners.local_search.improve import LocalSearch

SHORT = 20
"""A document on one rank stays at home if it costs less than the limit / SHORT."""

PATIENCE = 6000
"""moves: maximum evaluated per rank to bring a plan within the tolerated loads."""

MOVES = 8000
MOVES_PER_RANK = 12
"""MOVES + MOVES_PER_RANK x ranks moves are evaluated for fewer bytes."""

Searched = tuple[IntArray, Callable[[], TaskArray]]
"""bytes [2, num_ranks] into and out of ranks, right only if all tokens attend, and a maker of the tasks"""


@register_planner("local_search")
def plan_local_search(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig,
    cost: TileAreaCost,
) -> TaskArray:
    """Return diagonals and rectangles within the guaranteed loads, and within the tolerated loads where possible."""
    return search(layout, shape, config, cost)[1]()


def search(
    layout: TokenLayout,
    shape: AttentionShape,
    config: PlannerConfig,
    cost: TileAreaCost,
    effort: float = 1.0,
) -> Searched:
    """Return a plan of few bytes within the guaranteed loads, and within the tolerated loads where possible.

    Benches evaluate ``effort`` times the moves.
    """
    home = home_tasks(layout)
    table = task_table(layout, home)
    costs = cost.cost(home)
    loads = sum_by_index(home["server"], costs, layout.num_ranks)
    limits = load_limits(layout, config, cost, loads)
    is_balanced = (loads <= limits.tolerated).all()
    moves = MOVES + MOVES_PER_RANK * layout.num_ranks
    budget = 0 if is_balanced else int(moves * effort)

    def improved(
        chosen: BoolArray, options: PlannerConfig, target: int, patience: int
    ) -> Searched | None:
        """Search among the tasks of the ``chosen`` documents, while others stay at home."""
        searched = chosen[table[:, DOC]]
        found = LocalSearch(layout, shape, options, cost).improve(
            table[searched],
            loads,
            target,
            guaranteed=limits.guaranteed,
            patience=patience,
            budget=budget,
        )
        if found is None:
            return None
        tasks, by_rank = found
        rest = home[~searched]
        return by_rank, lambda: np.concatenate([rest, from_table(layout.docs, tasks)])

    chosen = _may_move(table, costs, len(layout.docs), limit=limits.tolerated)
    patience = PATIENCE * layout.num_ranks
    plan = improved(chosen, config, limits.tolerated, patience=patience)
    # with cuts along the queries alone a plan always exists: ``limits.py``
    if plan is None:
        options = replace(config, split_kv=False)
        every = np.ones_like(chosen)
        plan = improved(every, options, limits.guaranteed, patience=LARGEST)
    assert plan is not None
    return plan


def _may_move(table: IntArray, costs: IntArray, num_docs: int, limit: int) -> BoolArray:
    """Return [num_docs] whether a document is large, or on several ranks, so that the search may move parts of it."""
    is_large = sum_by_index(table[:, DOC], costs, num_docs) * SHORT >= limit
    is_spread = np.bincount(table[:, DOC], minlength=num_docs) > 1
    return is_large | is_spread
