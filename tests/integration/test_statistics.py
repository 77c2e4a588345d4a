# SPDX-License-Identifier: BSD-3-Clause
"""Figures between two log lines: what they say, and that they keep no plan."""

import dataclasses
import gc
import weakref

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


def random_batch(
    rng: np.random.Generator, *, microbatches: int = 1, nano_batches: int = 1
) -> PlannedBatch:
    """A batch of random plans for 3 ranks."""
    plans = []
    for _ in range(microbatches * nano_batches):
        lengths = rng.integers(1, 2000, size=3).tolist()
        layout = TokenLayout.from_segments(
            [[(doc, 0, length)] for doc, length in enumerate(lengths)]
        )
        plans.append(
            Plan.from_tasks(layout, SHAPE, PlannerConfig(), random_tasks(rng, layout))
        )
    copied = rng.integers(0, 10**6, size=len(plans)).tolist()
    by_microbatch = [
        plans[i : i + nano_batches] for i in range(0, len(plans), nano_batches)
    ]
    planned = [PlannedMicrobatch([nanos], [nanos]) for nanos in by_microbatch]
    return PlannedBatch(
        torch.zeros(microbatches), planned, float(rng.random()), [], copied_bytes=copied
    )


def _mean_pairs(plans: list[Plan]) -> float:
    """Keys of the mean query, one by one."""
    keys = [
        position + 1
        for plan in plans
        for length in plan.layout.doc_lengths.tolist()
        for position in range(length)
    ]
    return float(np.mean(keys))


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_figures_are_means_over_all_batches(nano_batches):
    rng = np.random.default_rng(0)
    batches = [
        random_batch(rng, microbatches=2, nano_batches=nano_batches) for _ in range(3)
    ]
    statistics = StepStatistics()
    for batch in batches:
        statistics.add(batch)
    figures = statistics.drain()

    plans = [plan for batch in batches for plan in batch.plans]
    stats = [plan.stats for plan in plans]
    microbatches = [
        stats[i : i + nano_batches] for i in range(0, len(stats), nano_batches)
    ]
    assert (
        figures.pop("loads_before")
        == np.sum([s.loads_before for s in stats], axis=0).tolist()
    )
    assert (
        figures.pop("loads_after") == np.sum([s.loads for s in stats], axis=0).tolist()
    )
    for when, loads in (("before", "loads_before"), ("after", "loads")):
        ranked = np.mean(
            [sorted(getattr(s, loads) / s.mean_load, reverse=True) for s in stats],
            axis=0,
        )
        assert figures.pop(f"ranked_{when}") == pytest.approx(ranked)
    assert figures.pop("pairs_per_token") == pytest.approx([_mean_pairs(plans)])
    assert figures == pytest.approx(
        {
            "imbalance_before": np.mean([s.max_over_mean_before for s in stats]),
            "imbalance_after": np.mean([s.max_over_mean for s in stats]),
            "bytes_per_rank_mean": np.mean(
                [sum(s.mean_rank_bytes for s in nanos) for nanos in microbatches]
            ),
            "bytes_per_rank_max": max(
                sum(s.max_rank_bytes for s in nanos) for nanos in microbatches
            ),
            "bytes_copied": sum(sum(batch.copied_bytes) for batch in batches)
            / len(microbatches),
            "tasks": np.mean(
                [sum(s.num_tasks for s in nanos) for nanos in microbatches]
            ),
            "tasks_moved": np.mean(
                [sum(s.tasks_moved for s in nanos) for nanos in microbatches]
            ),
            "plan_seconds": np.mean([batch.seconds for batch in batches]),
            "tolerance": np.mean([plan.config.tolerance for plan in plans]),
        }
    )
    assert statistics.drain() == {}


def test_figures_are_those_of_the_mean_layer():
    """Of four layers one attends by the first plan, three by the other, on the same homes."""
    lengths = [[2000, 100], [1000, 1100]]
    first, other = (
        make_plan(
            TokenLayout.from_segments([[(doc, 0, n)] for doc, n in enumerate(each)]),
            SHAPE,
        )
        for each in lengths
    )
    planned, statistics = PlannedMicrobatch([[first], [other]], []), StepStatistics()
    statistics.add(PlannedBatch(torch.zeros(1), [planned], 0.1, [], layers=(1, 3)))
    figures = statistics.drain()
    work = np.array([first.stats.mean_load, 3 * other.stats.mean_load])
    for when, name in (("before", "max_over_mean_before"), ("after", "max_over_mean")):
        wanted = (
            work @ [getattr(plan.stats, name) for plan in (first, other)] / work.sum()
        )
        assert figures[f"imbalance_{when}"] == pytest.approx(wanted)
        assert figures[f"ranked_{when}"][0] == pytest.approx(wanted)
        assert sum(figures[f"ranked_{when}"]) == pytest.approx(2)
    for name, figure in (
        ("mean_rank_bytes", "bytes_per_rank_mean"),
        ("num_tasks", "tasks"),
    ):
        assert figures[figure] == pytest.approx(
            (getattr(first.stats, name) + 3 * getattr(other.stats, name)) / 4
        )
    assert figures["loads_after"] == pytest.approx(
        (first.stats.loads + 3 * other.stats.loads) / 4
    )
    mean = mean_stats([first.stats, other.stats], [1, 3])
    assert mean.lower_bound_bytes <= mean.total_bytes
    assert mean_stats([first.stats], [4]) is first.stats


def test_bytes_between_hosts_and_those_that_placement_saves_are_told_where_they_are_known():
    """Those between hosts are a microbatch's, those of placement are of all batches together."""
    rng, statistics = np.random.default_rng(4), StepStatistics()
    for between, given, placed in (
        ([100, 200], [1000, 100], [900, 10]),
        ([300, 800], [3000, 300], [1100, 30]),
    ):
        known = {"between_hosts": between, "home_bytes": np.array([given, placed])}
        statistics.add(dataclasses.replace(random_batch(rng, microbatches=2), **known))
    figures = statistics.drain()
    assert figures["bytes_between_hosts"] == 350
    assert (figures["placed_total"], figures["placed_worst"]) == (0.5, 0.1)
    statistics.add(random_batch(rng))
    assert figures.keys() - statistics.drain().keys() == {
        "bytes_between_hosts",
        "placed_total",
        "placed_worst",
    }


def test_no_plan_outlives_its_batch():
    rng = np.random.default_rng(2)
    statistics = StepStatistics()
    batch = random_batch(rng, microbatches=2)
    statistics.add(batch)
    held = [weakref.ref(x) for plan in batch.plans for x in (plan, plan.stats)]
    del batch
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
