# SPDX-License-Identifier: BSD-3-Clause
"""A plan of two ranks that serve each other."""

import numpy as np

from torchtitan_cad.planning import (
    TASK_DTYPE,
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
)


def two_rank_plan(tokens: int, shape: AttentionShape) -> Plan:
    """One document of ``tokens`` on rank 0, eight on rank 1. Rank 1 serves half of the long one's queries, some of them
    against a part of their keys; rank 0 serves one of the short ones. ``tokens`` is a multiple of 8.
    """
    half = tokens // 2
    most = tokens // 4 * 3
    short = tokens // 8
    layout = TokenLayout.from_segments(
        [[(0, 0, tokens)], [(doc, 0, short) for doc in range(1, 9)]]
    )
    tasks = [(0, 0, half, 0, half, 0), (0, half, most, 0, most, 1)]
    tasks += [(0, most, tokens, 0, half, 1), (0, most, tokens, half, tokens, 0)]
    tasks += [(doc, 0, short, 0, short, 0 if doc == 1 else 1) for doc in range(1, 9)]
    return Plan.from_tasks(
        layout, shape, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE)
    )
