"""The plan without disaggregation: every query is served where it lives."""

from __future__ import annotations

import numpy as np

from ..config import PlannerConfig
from ..cost import CostModel
from ..layout import TokenLayout
from ..shape import AttentionShape
from ..tasks import TaskArray, make_tasks, merge_queries
from .base import register_planner


def home_tasks(layout: TokenLayout) -> TaskArray:
    """One full-prefix diagonal task per maximal stretch of a document on one rank, in canonical order."""
    doc, start = layout.seg_doc, layout.seg_start
    end = start + layout.seg_length
    return merge_queries(make_tasks(doc, start, end, np.int64(0), end, layout.seg_rank))


@register_planner("home")
def plan_home(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig, cost: CostModel) -> TaskArray:
    """No query moves; keys move only for documents that span ranks. The baseline, without any guarantee."""
    return home_tasks(layout)
