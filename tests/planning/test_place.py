# SPDX-License-Identifier: BSD-3-Clause
"""Homes: the same tokens, as many on every rank, and no more bytes than before."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.lib.costs import concave_cost
from tests.lib.layouts import LLAMA, cases
from tests.lib.workloads import document_lengths, spanning_layout
from torchtitan_cad.planning import (
    PlannerConfig,
    TokenLayout,
    make_plan,
    place_and_plan,
    validate_plan,
)
from torchtitan_cad.planning.plan import moved_by


def cuts(layout: TokenLayout) -> list[tuple[int, int]]:
    """(document, position) of the cuts inside documents."""
    order = layout.run_order
    columns = layout.seg_doc[order], layout.seg_start[order], layout.seg_rank[order]
    doc, start, rank = (column.tolist() for column in columns)
    return [
        (doc[i], start[i])
        for i in range(1, len(doc))
        if doc[i] == doc[i - 1] and rank[i] != rank[i - 1]
    ]


def placed_homes(*arguments: Any) -> TokenLayout:
    return place_and_plan(*arguments)[0].layout


def check_homes(layout: TokenLayout, placed: TokenLayout) -> None:
    """The same documents, whole, and as many tokens on every rank, in document order."""
    TokenLayout.from_segments(placed.segments())
    assert placed.num_ranks == layout.num_ranks
    assert placed.docs.tolist() == layout.docs.tolist()
    assert placed.doc_lengths.tolist() == layout.doc_lengths.tolist()
    assert placed.tokens_per_rank.tolist() == layout.tokens_per_rank.tolist()
    if placed is not layout:
        for segments in placed.segments():
            assert segments == sorted(segments)


@settings(max_examples=15)
@given(case=cases)
def test_every_layout(case):
    layout = case.layout()
    plan, given_plan = place_and_plan(layout, LLAMA, case.config)
    placed = plan.layout
    check_homes(layout, placed)
    assert given_plan.layout is layout
    assert (plan is given_plan) == (placed is layout)
    again = placed_homes(case.layout(), LLAMA, case.config)
    assert again.segments() == placed.segments()
    before, after = (
        make_plan(layout, LLAMA, case.config),
        make_plan(placed, LLAMA, case.config),
    )
    validate_plan(after)
    assert after.stats.max_over_mean <= after.stats.guaranteed_over_mean
    moved = moved_by(before)
    assert moved_by(after) == moved or moved_by(after).score(moved) < moved.score(moved)
    assert after.fingerprint() == plan.fingerprint()
    assert before.fingerprint() == given_plan.fingerprint()


@pytest.mark.parametrize(
    ("workload", "num_ranks"),
    [("lognormal", 8), ("one big", 8), ("lognormal", 64), ("one big", 64)],
)
def test_the_worst_rank_has_fewer_bytes(workload, num_ranks):
    layout = spanning_layout(document_lengths(workload, num_ranks, 21), num_ranks)
    placed = placed_homes(layout, LLAMA)
    check_homes(layout, placed)
    before, after = (make_plan(homes, LLAMA).stats for homes in (layout, placed))
    assert after.max_rank_bytes < 0.8 * before.max_rank_bytes
    assert after.total_bytes < 1.1 * before.total_bytes
    # Lengths and capacities are multiples of min_shard, so every cut is.
    assert all(position % 128 == 0 for _, position in cuts(placed))


def test_homes_that_cannot_be_better_are_kept():
    """Without bytes, with equal ranks, with queries left out, on one rank, and without tokens."""
    for layout in (
        *(
            spanning_layout(np.full(2 * num_ranks, 1024), num_ranks)
            for num_ranks in (8, 64, 128)
        ),
        TokenLayout.from_segments([[(rank, 0, 4096)] for rank in range(8)]),
        TokenLayout.from_segments(
            [[(0, 0, 4096), (0, 4096, 8192)], [(1, 0, 12288)]], [False, True, True]
        ),
        TokenLayout.from_segments([[(0, 0, 100)]]),
        TokenLayout.from_segments([[], []]),
    ):
        assert placed_homes(layout, LLAMA) is layout


@pytest.mark.parametrize("cost", [None, concave_cost(3.0)], ids=["tiles", "concave"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank_speeds": (1.0, 0.5, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0)},
        {"ranks_per_node": 4},
        {"planner": "greedy"},
        {"planner": "home"},
    ],
)
def test_options_and_cost_models(options, cost):
    layout = spanning_layout(document_lengths("lognormal", 8, 22), 8)
    config = PlannerConfig(**options)
    placed = placed_homes(layout, LLAMA, config, cost)
    check_homes(layout, placed)
    before, after = (
        make_plan(homes, LLAMA, config, cost) for homes in (layout, placed)
    )
    validate_plan(after)
    assert (
        after.stats.max_rank_bytes <= before.stats.max_rank_bytes
        or "ranks_per_node" in options
    )


@pytest.mark.parametrize("num_ranks", [4, 32])
def test_nothing_is_left_for_the_garbage_collector(num_ranks):
    """Which training turns off."""
    gc.collect()
    gc.disable()
    try:
        layout = spanning_layout(
            document_lengths("lognormal", num_ranks, 24), num_ranks
        )
        plan, given_plan = place_and_plan(layout, LLAMA)
        assert plan.layout is not layout
        left = [weakref.ref(held) for held in (layout, plan.layout, plan, given_plan)]
        del layout, plan, given_plan
        assert [held() for held in left] == [None] * 4
    finally:
        gc.enable()
