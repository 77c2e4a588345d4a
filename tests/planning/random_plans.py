"""Random valid plans with both kinds of task, which no planner would make but everything downstream must carry out."""

from __future__ import annotations

import itertools

import numpy as np

from torchtitan_cad.planning import TokenLayout
from torchtitan_cad.planning.model.tasks import TaskArray, canonical, make_tasks


def random_tasks(layout: TokenLayout, rng: np.random.Generator) -> TaskArray:
    """Each document cut at random along the queries, each strip at random along its keys, on random servers."""
    records = []
    for doc, length in zip(layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True):
        q_cuts = sorted({0, *rng.integers(0, length, size=rng.integers(0, 5)).tolist(), length})
        for q_start, q_end in itertools.pairwise(q_cuts):
            k_cuts = sorted({0, *rng.integers(0, q_start + 1, size=rng.integers(0, 4)).tolist()})
            servers = rng.integers(layout.num_ranks, size=len(k_cuts)).tolist()
            for kv_start, kv_end, server in zip(k_cuts, [*k_cuts[1:], q_end], servers, strict=True):
                records.append((doc, q_start, q_end, kv_start, kv_end, server))
    columns = np.array(records, dtype=np.int64).reshape(-1, 6).T
    return canonical(make_tasks(*columns))
