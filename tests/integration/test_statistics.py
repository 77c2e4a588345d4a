"""Figures between two log lines: what they say, and that they keep no plan."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from tests.plans import random_tasks
from torchtitan_cad.integration.loading.batch_planner import PlannedBatch
from torchtitan_cad.integration.report.statistics import StepStatistics
from torchtitan_cad.planning import AttentionShape, Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.stats import mean_stats

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, dtype_bytes=4)


def random_batch(rng: np.random.Generator, *, microbatches: int = 1, nano_batches: int = 1) -> PlannedBatch:
    """A batch of random plans for 3 ranks."""
    plans = []
    for _ in range(microbatches * nano_batches):
        lengths = rng.integers(1, 2000, size=3).tolist()
        layout = TokenLayout.from_segments([[(doc, 0, length)] for doc, length in enumerate(lengths)])
        plans.append(Plan.from_tasks(layout, SHAPE, PlannerConfig(), random_tasks(rng, layout)))
    copied = rng.integers(0, 10**6, size=len(plans)).tolist()
    return PlannedBatch(torch.zeros(microbatches), plans, float(rng.random()), [], nano_batches, copied)


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_figures_are_means_over_all_batches(nano_batches: int) -> None:
    rng = np.random.default_rng(0)
    batches = [random_batch(rng, microbatches=2, nano_batches=nano_batches) for _ in range(3)]
    statistics = StepStatistics()
    for batch in batches:
        statistics.add(batch)
    figures = statistics.drain()

    plans = [plan for batch in batches for plan in batch.plans]
    stats = [plan.stats for plan in plans]
    microbatches = [stats[i : i + nano_batches] for i in range(0, len(stats), nano_batches)]
    assert figures.pop("loads_before") == np.sum([s.loads_before for s in stats], axis=0).tolist()
    assert figures.pop("loads_after") == np.sum([s.loads for s in stats], axis=0).tolist()
    for when, loads in (("before", "loads_before"), ("after", "loads")):
        ranked = np.mean([sorted(getattr(s, loads) / s.mean_load, reverse=True) for s in stats], axis=0)
        assert figures.pop(f"ranked_{when}") == pytest.approx(ranked)
    assert figures == pytest.approx(
        {
            "imbalance_before": np.mean([s.max_over_mean_before for s in stats]),
            "imbalance_after": np.mean([s.max_over_mean for s in stats]),
            "bytes_per_rank_mean": np.mean([sum(s.mean_rank_bytes for s in nanos) for nanos in microbatches]),
            "bytes_per_rank_max": max(sum(s.max_rank_bytes for s in nanos) for nanos in microbatches),
            "bytes_copied": sum(sum(batch.copied_bytes) for batch in batches) / len(microbatches),
            "tasks": np.mean([sum(s.num_tasks for s in nanos) for nanos in microbatches]),
            "tasks_moved": np.mean([sum(s.tasks_moved for s in nanos) for nanos in microbatches]),
            "plan_seconds": np.mean([batch.seconds for batch in batches]),
            "tolerance": np.mean([plan.config.tolerance for plan in plans]),
        }
    )
    assert statistics.drain() == {}


def test_figures_are_those_of_the_mean_layer() -> None:
    """Of four layers one attends by the first plan, three by the other, on the same homes."""
    lengths = [[2000, 100], [1000, 1100]]
    first, other = (
        make_plan(TokenLayout.from_segments([[(doc, 0, n)] for doc, n in enumerate(each)]), SHAPE) for each in lengths
    )
    statistics = StepStatistics()
    statistics.add(PlannedBatch(torch.zeros(1), [first], 0.1, [], others=[[other]], layers=(1, 3)))
    figures = statistics.drain()
    work = np.array([first.stats.mean_load, 3 * other.stats.mean_load])
    for when, name in (("before", "max_over_mean_before"), ("after", "max_over_mean")):
        wanted = work @ [getattr(plan.stats, name) for plan in (first, other)] / work.sum()
        assert figures[f"imbalance_{when}"] == pytest.approx(wanted)
        assert figures[f"ranked_{when}"][0] == pytest.approx(wanted)
        assert sum(figures[f"ranked_{when}"]) == pytest.approx(2)
    for name, figure in (("mean_rank_bytes", "bytes_per_rank_mean"), ("num_tasks", "tasks")):
        assert figures[figure] == pytest.approx((getattr(first.stats, name) + 3 * getattr(other.stats, name)) / 4)
    assert figures["loads_after"] == pytest.approx((first.stats.loads + 3 * other.stats.loads) / 4)
    mean = mean_stats([first.stats, other.stats], [1, 3])
    assert mean.lower_bound_bytes <= mean.total_bytes
    assert mean_stats([first.stats], [4]) is first.stats


def test_bytes_between_hosts_are_those_of_a_microbatch() -> None:
    rng, statistics = np.random.default_rng(4), StepStatistics()
    for between in ([100, 200], [300, 800]):
        statistics.add(dataclasses.replace(random_batch(rng, microbatches=2), between_hosts=between))
    assert statistics.drain()["bytes_between_hosts"] == 350
    statistics.add(random_batch(rng))
    assert "bytes_between_hosts" not in statistics.drain()


def test_placement_is_measured_by_the_bytes_of_all_batches() -> None:
    rng, statistics = np.random.default_rng(4), StepStatistics()
    for given, placed in (([1000, 100], [900, 10]), ([3000, 300], [1100, 30])):
        statistics.add(dataclasses.replace(random_batch(rng), home_bytes=np.array([given, placed])))
    figures = statistics.drain()
    assert (figures["placed_total"], figures["placed_worst"]) == (0.5, 0.1)
    statistics.add(random_batch(rng))
    assert "placed_total" not in statistics.drain()


def test_no_plan_outlives_its_batch() -> None:
    rng = np.random.default_rng(2)
    statistics = StepStatistics()
    batch = random_batch(rng, microbatches=2)
    statistics.add(batch)
    held = [weakref.ref(x) for plan in batch.plans for x in (plan, plan.stats)]
    del batch
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


LONG, SHORT = [(0, 0, 2048)], [(i, 0, 128) for i in range(1, 17)]


@pytest.mark.parametrize(
    ("layouts", "speeds", "imbalance"),
    [
        ([[LONG, SHORT], [SHORT, LONG]], None, 1.8),  # each of two ranks has its turn
        ([[LONG, SHORT]], (1.0, 0.5), None),
        ([[[], []]], None, 1.0),
    ],
    ids=["turns", "speeds", "no work"],
)
def test_the_busiest_bar_is_the_imbalance_whoever_is_busiest(
    layouts: list[list], speeds: tuple[float, ...] | None, imbalance: float | None
) -> None:
    config = PlannerConfig(min_shard=128, rank_speeds=speeds)
    plans = [make_plan(TokenLayout.from_segments(layout), SHAPE, config) for layout in layouts]
    statistics = StepStatistics()
    statistics.add(PlannedBatch(torch.zeros(len(plans)), plans, 0.1, [], 1, [0] * len(plans)))
    figures = statistics.drain()
    for when in ("before", "after"):
        ranked = figures[f"ranked_{when}"]
        assert ranked[0] == pytest.approx(figures[f"imbalance_{when}"])
        assert ranked == sorted(ranked, reverse=True)
        assert speeds or sum(ranked) == pytest.approx(2.0)
    assert imbalance is None or figures["imbalance_before"] == pytest.approx(imbalance, abs=0.2)
    loads = np.array(figures["loads_before"])
    assert speeds or loads.max() == pytest.approx(loads.mean())
