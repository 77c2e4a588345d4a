# SPDX-License-Identifier: BSD-3-Clause
"""Figures between two log lines: what they say, and that they keep no plan."""

import dataclasses
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
    PlannedMicrobatch,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.stats import mean_stats

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype_bytes=4)


def one_document_a_rank(lengths: list[int]) -> TokenLayout:
    return TokenLayout.from_segments([[(doc, 0, n)] for doc, n in enumerate(lengths)])


def random_batch(
    rng: np.random.Generator, *, microbatches: int = 1, nano_batches: int = 1
) -> PlannedBatch:
    """A batch of random plans for 3 ranks."""
    plans = []
    planned = []
    for _ in range(microbatches):
        nanos = []
        for _ in range(nano_batches):
            layout = one_document_a_rank(rng.integers(1, 2000, size=3).tolist())
            tasks = random_tasks(rng, layout)
            nanos.append(Plan.from_tasks(layout, SHAPE, PlannerConfig(), tasks))
        planned.append(PlannedMicrobatch([nanos], [nanos]))
        plans += nanos
    copied = rng.integers(0, 10**6, size=len(plans)).tolist()
    keys = torch.zeros(microbatches)
    seconds = float(rng.random())
    return PlannedBatch(keys, planned, seconds, [], copied_bytes=copied)


def figures_of(*batches: PlannedBatch) -> dict[str, Any]:
    statistics = StepStatistics()
    for batch in batches:
        statistics.add(batch)
    figures = statistics.drain()
    assert statistics.drain() == {}
    return figures


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_figures_are_means_over_all_batches(nano_batches):
    rng = np.random.default_rng(0)
    batches = [
        random_batch(rng, microbatches=2, nano_batches=nano_batches) for _ in range(3)
    ]
    plans = [plan for batch in batches for plan in batch.plans]
    num_plans = len(plans)
    microbatches = 6

    def total(name: str) -> Any:
        return np.sum([getattr(plan.stats, name) for plan in plans], axis=0)

    def ranked(name: str) -> Any:
        relative = [getattr(plan.stats, name) / plan.stats.mean_load for plan in plans]
        return np.mean(-np.sort(-np.array(relative)), axis=0)

    most = np.reshape([plan.stats.max_rank_bytes for plan in plans], (microbatches, -1))
    lengths = np.concatenate([plan.layout.doc_lengths for plan in plans])
    keys = [np.arange(1, length + 1) for length in lengths]
    expected = {
        "imbalance_before": total("max_over_mean_before") / num_plans,
        "imbalance_after": total("max_over_mean") / num_plans,
        "ranked_before": ranked("loads_before"),
        "ranked_after": ranked("loads"),
        "loads_before": total("loads_before"),
        "loads_after": total("loads"),
        "pairs_per_token": [np.concatenate(keys).mean()],
        "bytes_per_rank_mean": total("mean_rank_bytes") / microbatches,
        "bytes_per_rank_max": most.sum(axis=1).max(),
        "bytes_copied": sum(sum(x.copied_bytes) for x in batches) / microbatches,
        "tasks": total("num_tasks") / microbatches,
        "tasks_moved": total("tasks_moved") / microbatches,
        "plan_seconds": np.mean([batch.seconds for batch in batches]),
        "tolerance": PlannerConfig().tolerance,
    }
    figures = figures_of(*batches)
    assert figures.keys() == expected.keys()
    for name, figure in figures.items():
        assert figure == pytest.approx(expected[name]), name


def test_figures_are_those_of_the_mean_layer():
    """Of four layers one attends by the first plan, three by the other, on the same homes."""
    first, other = (
        make_plan(one_document_a_rank(lengths), SHAPE)
        for lengths in ([2000, 100], [1000, 1100])
    )
    planned = PlannedMicrobatch([[first], [other]], [])
    figures = figures_of(
        PlannedBatch(torch.zeros(1), [planned], 0.1, [], layers=(1, 3))
    )
    work = [first.stats.mean_load, 3 * other.stats.mean_load]
    for when, name in (("before", "max_over_mean_before"), ("after", "max_over_mean")):
        imbalances = [getattr(plan.stats, name) for plan in (first, other)]
        imbalance = np.average(imbalances, weights=work)
        assert figures[f"imbalance_{when}"] == pytest.approx(imbalance)
        assert figures[f"ranked_{when}"] == pytest.approx([imbalance, 2 - imbalance])
    for name, figure in (
        ("mean_rank_bytes", "bytes_per_rank_mean"),
        ("num_tasks", "tasks"),
        ("loads", "loads_after"),
    ):
        values = [getattr(plan.stats, name) for plan in (first, other)]
        expected = np.average(values, axis=0, weights=[1, 3])
        assert figures[figure] == pytest.approx(expected)
    mean = mean_stats([first.stats, other.stats], [1, 3])
    assert mean.lower_bound_bytes <= mean.total_bytes
    assert mean_stats([first.stats], [4]) is first.stats


def test_bytes_between_hosts_and_those_that_placement_saves_are_told_where_they_are_known():
    """Those between hosts are a microbatch's, those of placement are of all batches together."""
    rng = np.random.default_rng(4)
    batches = [
        dataclasses.replace(
            random_batch(rng, microbatches=2),
            between_hosts=between,
            home_bytes=np.array(home_bytes),
        )
        for between, home_bytes in (
            ([100, 200], [[1000, 100], [900, 10]]),
            ([300, 800], [[3000, 300], [1100, 30]]),
        )
    ]
    figures = figures_of(*batches)
    known = {"bytes_between_hosts": 350, "placed_total": 0.5, "placed_worst": 0.1}
    assert known.items() <= figures.items()
    assert figures.keys() - figures_of(random_batch(rng)).keys() == known.keys()


def test_no_plan_outlives_its_batch():
    statistics = StepStatistics()
    batch = random_batch(np.random.default_rng(2), microbatches=2)
    statistics.add(batch)
    held = [weakref.ref(x) for plan in batch.plans for x in (plan, plan.stats)]
    del batch
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
