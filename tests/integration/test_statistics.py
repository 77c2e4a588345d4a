# SPDX-License-Identifier: BSD-3-Clause
"""Figures between two log lines: what they say, and that they keep no plan."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.plans import random_tasks
from torchtitan_cad.integration.loading.batch_planner import PlannedBatch
from torchtitan_cad.integration.report.statistics import StepStatistics
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)

CONFIG = PlannerConfig(ranks_per_node=2)
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype_bytes=4)


def one_document_a_rank(lengths: list[int]) -> TokenLayout:
    return TokenLayout.from_segments([[(doc, 0, n)] for doc, n in enumerate(lengths)])


def random_batch(rng: np.random.Generator) -> PlannedBatch:
    """Two microbatches of two nano-batches, with random plans for 3 ranks, of which two share a host."""
    plans = []
    for _ in range(4):
        layout = one_document_a_rank(rng.integers(1, 2000, size=3).tolist())
        tasks = random_tasks(rng, layout)
        plans.append((Plan.from_tasks(layout, SHAPE, CONFIG, tasks),))
    by_key = dict(enumerate(plans))
    return PlannedBatch(torch.zeros(2), by_key, 2, seconds=float(rng.random()))


def figures_of(*batches: PlannedBatch) -> dict[str, Any]:
    statistics = StepStatistics()
    for batch in batches:
        statistics.add(batch)
    figures = statistics.drain()
    assert statistics.drain() == {}
    return figures


def test_figures_are_means_over_all_batches():
    """The plans of both nano-batches of a microbatch count together, but for their imbalance."""
    rng = np.random.default_rng(0)
    batches = [random_batch(rng), random_batch(rng)]
    plans = [plan for batch in batches for plan in batch.plans]
    microbatches = 4

    def total(name):
        return sum(getattr(plan.stats, name) for plan in plans)

    most = np.reshape([plan.stats.max_rank_bytes for plan in plans], (microbatches, 2))
    keys_per_query = []
    for batch in batches:
        lengths = np.concatenate([plan.layout.doc_lengths for plan in batch.plans])
        pairs = lengths * (lengths + 1) / 2
        keys_per_query.append(pairs.sum() / lengths.sum())
    expected = {
        "imbalance_before": total("max_over_mean_before") / len(plans),
        "imbalance_after": total("max_over_mean") / len(plans),
        "pairs_per_token": [np.mean(keys_per_query)],
        "loads_before": total("loads_before") / 2,
        "loads_after": total("loads") / 2,
        "bytes_per_rank_mean": total("mean_rank_bytes") / microbatches,
        "bytes_per_rank_max": most.sum(axis=1).max(),
        "tasks_moved": total("tasks_moved") / microbatches,
        "plan_seconds": (batches[0].seconds + batches[1].seconds) / 2,
        "tolerance": CONFIG.tolerance,
        "bytes_between_hosts": total("inter_node_bytes") / microbatches,
    }
    figures = figures_of(*batches)
    for name, figure in expected.items():
        assert figures[name] == pytest.approx(figure), name


def test_figures_are_those_of_the_mean_layer():
    """Of four layers one attends by the first plan, three by the other, on the same homes."""
    first, other = (
        make_plan(one_document_a_rank(lengths), SHAPE)
        for lengths in ([2000, 100], [1000, 1100])
    )
    planned = PlannedBatch(torch.zeros(1), {0: (first, other)}, layers=(1, 3))
    figures = figures_of(planned)
    assert "bytes_between_hosts" not in figures
    work = [first.stats.mean_load, 3 * other.stats.mean_load]
    for when, name in (("before", "max_over_mean_before"), ("after", "max_over_mean")):
        imbalances = [getattr(plan.stats, name) for plan in (first, other)]
        imbalance = np.average(imbalances, weights=work)
        assert figures[f"imbalance_{when}"] == pytest.approx(imbalance)
        assert figures[f"ranked_{when}"] == pytest.approx([imbalance, 2 - imbalance])
    tasks = [plan.stats.num_tasks for plan in (first, other)]
    assert figures["tasks"] == pytest.approx(np.average(tasks, weights=[1, 3]))


def test_no_plan_outlives_its_batch():
    statistics = StepStatistics()
    batch = random_batch(np.random.default_rng(2))
    statistics.add(batch)
    held = [weakref.ref(x) for plan in batch.plans for x in (plan, plan.stats)]
    del batch
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
