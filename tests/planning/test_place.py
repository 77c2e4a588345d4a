# SPDX-License-Identifier: BSD-3-Clause
"""Homes: the same tokens, as many on every rank, and no more bytes than before."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings

from tests.lib.layouts import LLAMA
from tests.lib.tables import check_plan
from tests.lib.workloads import document_lengths, spanning_layout
from tests.planning.test_place_step import check_homes
from tests.planning.test_properties import problems
from torchtitan_cad.planning import TokenLayout, make_plan, place_and_plan
from torchtitan_cad.planning.plan import moved_by


@settings(max_examples=settings.default.max_examples // 3)
@given(problem=problems())
def test_every_layout(problem):
    layout, config = problem
    plan = place_and_plan(layout, LLAMA, config)
    check_homes([[layout]], [[plan.layout]])
    if plan.layout is not layout:
        for segments in plan.layout.segments():
            assert segments == sorted(segments)
    before = make_plan(layout, LLAMA, config)
    after = make_plan(plan.layout, LLAMA, config)
    assert after.fingerprint() == plan.fingerprint()
    again = place_and_plan(layout, LLAMA, config)
    assert again.fingerprint() == plan.fingerprint()
    check_plan(plan)
    assert plan.stats.max_over_mean <= plan.stats.guaranteed_over_mean
    moved = moved_by(before)
    assert moved_by(after) == moved or moved_by(after).score(moved) < moved.score(moved)


@pytest.mark.parametrize("workload", ["lognormal", "one big"])
def test_the_worst_rank_has_fewer_bytes(workload):
    layout = spanning_layout(document_lengths(workload, 64, 21), 64)
    plan = place_and_plan(layout, LLAMA)
    most = make_plan(layout, LLAMA).stats
    assert plan.stats.max_rank_bytes < 0.8 * most.max_rank_bytes
    assert plan.stats.total_bytes < 1.1 * most.total_bytes
    # Lengths and capacities are multiples of min_shard, so every cut is.
    assert not (plan.layout.seg_start % 128).any()


def test_homes_that_cannot_be_better_are_kept():
    """Without bytes, with equal ranks, with queries left out, on one rank, and without tokens."""
    equal = [
        spanning_layout(np.full(2 * num_ranks, 1024), num_ranks)
        for num_ranks in (8, 64, 128)
    ]
    long = [[(0, 0, 4096), (0, 4096, 8192)], [(1, 0, 12288)]]
    for layout in (
        *equal,
        TokenLayout.from_segments(long, [False, True, True]),
        TokenLayout.from_segments([[(0, 0, 100)]]),
        TokenLayout.from_segments([[], []]),
    ):
        assert place_and_plan(layout, LLAMA).layout is layout


def test_nothing_is_left_for_the_garbage_collector():
    """Which training turns off."""
    lengths = document_lengths("lognormal", 4, 24)
    gc.collect()
    gc.disable()
    try:
        layout = spanning_layout(lengths, 4)
        plan = place_and_plan(layout, LLAMA)
        assert plan.layout is not layout
        left = [weakref.ref(held) for held in (layout, plan.layout, plan)]
        del layout, plan
        assert [held() for held in left] == [None] * 3
    finally:
        gc.enable()
