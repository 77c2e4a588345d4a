"""The plan without disaggregation: every query is served where it lives."""

from __future__ import annotations

import numpy as np

from ..config import PlannerConfig
from ..cost import CostModel
from ..layout import TokenLayout
from ..shape import AttentionShape
from ..tasks import TaskArray, make_tasks
from .base import register_planner


def home_tasks(layout: TokenLayout) -> TaskArray:
    """One full-prefix diagonal task per maximal stretch of a document's queries on one rank, in canonical order."""
    order = layout.run_order[layout.run_attends]
    rank, doc, start = layout.seg_rank[order], layout.seg_doc[order], layout.seg_start[order]
    end = start + layout.seg_length[order]
    joins = (doc[1:] == doc[:-1]) & (rank[1:] == rank[:-1]) & (start[1:] == end[:-1])
    begins, ends = np.append(True, ~joins)[: len(doc)], np.append(~joins, True)[: len(doc)]
    return make_tasks(doc[begins], start[begins], end[ends], 0, end[ends], rank[begins])


@register_planner("home")
def plan_home(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> TaskArray:
    """No query moves; keys move only for documents that span ranks. The baseline, without any guarantee."""
    return home_tasks(layout)
