"""Homes: the same tokens, as many on every rank, and no more bytes than before."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given, settings

from bench.workloads import document_lengths, spanning_layout
from tests.planning.costs import concave_cost
from tests.planning.layouts import LLAMA, Case, cases
from torchtitan_cad.planning import (
    Plan,
    PlannerConfig,
    TileAreaCost,
    TokenLayout,
    make_plan,
    place,
    place_and_plan,
    validate_plan,
)
from torchtitan_cad.planning.placement.home_search import HomeSearch
from torchtitan_cad.planning.placement.place import SEARCHES, SEARCHES_NEAR
from torchtitan_cad.planning.score import Moved


def cuts(layout: TokenLayout) -> list[tuple[int, int]]:
    """(document, position) of the cuts inside documents."""
    order = layout.run_order
    columns = layout.seg_doc[order], layout.seg_start[order], layout.seg_rank[order]
    doc, start, rank = (column.tolist() for column in columns)
    return [(doc[i], start[i]) for i in range(1, len(doc)) if doc[i] == doc[i - 1] and rank[i] != rank[i - 1]]


def check_homes(layout: TokenLayout, placed: TokenLayout) -> None:
    """The same documents, which a layout proves to be whole, and as many tokens on every rank, in document order."""
    assert placed.num_ranks == layout.num_ranks
    assert placed.docs.tolist() == layout.docs.tolist()
    assert placed.doc_lengths.tolist() == layout.doc_lengths.tolist()
    assert placed.tokens_per_rank.tolist() == layout.tokens_per_rank.tolist()
    if placed is not layout:
        for segments in placed.segments():
            assert segments == sorted(segments)


def check_case(case: Case) -> None:
    layout = case.layout()
    placed, plan, given_plan = place_and_plan(layout, LLAMA, case.config)
    check_homes(layout, placed)
    assert plan.layout is placed
    assert (plan is given_plan) == (placed is layout)
    again = place(case.layout(), LLAMA, case.config)
    assert again.segments() == placed.segments()
    before, after = make_plan(layout, LLAMA, case.config), make_plan(placed, LLAMA, case.config)
    validate_plan(after)
    assert after.stats.max_over_mean <= after.stats.guaranteed_over_mean
    moved = Moved.by(before)
    assert Moved.by(after) == moved or Moved.by(after).score(moved) < moved.score(moved)
    assert after.fingerprint() == plan.fingerprint()
    assert before.fingerprint() == given_plan.fingerprint()


@settings(max_examples=15)
@given(case=cases)
def test_every_layout(case: Case) -> None:
    check_case(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000)
@given(case=cases)
def test_every_layout_at_length(case: Case) -> None:
    check_case(case)


def figures(plan: Plan) -> tuple[int, int]:
    return plan.stats.total_bytes, plan.stats.max_rank_bytes


@pytest.mark.parametrize(
    ("workload", "num_ranks"), [("lognormal", 8), ("one big", 8), ("lognormal", 64), ("one big", 64)]
)
def test_the_worst_rank_has_fewer_bytes(workload: str, num_ranks: int) -> None:
    layout = spanning_layout(document_lengths(workload, num_ranks, 21), num_ranks)
    placed = place(layout, LLAMA)
    check_homes(layout, placed)
    total, worst = figures(make_plan(layout, LLAMA))
    new_total, new_worst = figures(make_plan(placed, LLAMA))
    assert new_worst < 0.8 * worst
    assert new_total < 1.1 * total
    # Lengths and rooms are multiples of min_shard, so every cut is.
    assert all(position % 128 == 0 for _, position in cuts(placed))


def test_of_the_homes_found_for_few_ranks_those_of_the_least_bytes_are_taken() -> None:
    layout, config = spanning_layout(document_lengths("lognormal", 8, 14), 8), PlannerConfig()
    search = HomeSearch(layout, LLAMA, config, TileAreaCost(config.cost_tile))
    given_bytes, scores, best = Moved.by(make_plan(layout, LLAMA, config)), {}, None
    for seed in range((SEARCHES + SEARCHES_NEAR) // 8):
        homes, assignment = search.find(seed, best if seed >= SEARCHES // 8 else None)
        score = Moved.by(make_plan(homes, LLAMA, config)).score(given_bytes)
        best = assignment if score < min(scores, default=score + 1) else best
        scores[score] = homes.segments()
    assert len(scores) == (SEARCHES + SEARCHES_NEAR) // 8  # assignments differ
    assert place(layout, LLAMA, config).segments() == scores[min(scores)]


@pytest.mark.parametrize("num_ranks", [8, 64, 128])
def test_homes_without_bytes_are_kept(num_ranks: int) -> None:
    layout = spanning_layout(np.full(2 * num_ranks, 1024), num_ranks)
    assert place(layout, LLAMA) is layout


def test_equal_ranks_keep_their_homes() -> None:
    layout = TokenLayout.from_segments([[(rank, 0, 4096)] for rank in range(8)])
    assert place(layout, LLAMA) is layout


def test_layouts_that_leave_queries_out_keep_their_homes() -> None:
    layout = TokenLayout.from_segments([[(0, 0, 4096), (0, 4096, 8192)], [(1, 0, 12288)]], [False, True, True])
    assert place(layout, LLAMA) is layout


def test_one_rank_and_no_tokens() -> None:
    for layout in (TokenLayout.from_segments([[(0, 0, 100)]]), TokenLayout.from_segments([[], []])):
        assert place(layout, LLAMA) is layout


@pytest.mark.parametrize(
    "options",
    [
        {"rank_speeds": (1.0, 0.5, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0)},
        {"ranks_per_node": 4},
        {"planner": "greedy"},
        {"planner": "home"},
    ],
)
def test_options(options: dict) -> None:
    layout = spanning_layout(document_lengths("lognormal", 8, 22), 8)
    config = PlannerConfig(**options)
    placed = place(layout, LLAMA, config)
    check_homes(layout, placed)
    before, after = make_plan(layout, LLAMA, config), make_plan(placed, LLAMA, config)
    validate_plan(after)
    assert after.stats.max_rank_bytes <= before.stats.max_rank_bytes or "ranks_per_node" in options


def test_another_cost_model() -> None:
    layout, cost = spanning_layout(document_lengths("lognormal", 8, 23), 8), concave_cost(3.0)
    placed = place(layout, LLAMA, None, cost)
    check_homes(layout, placed)
    before, after = make_plan(layout, LLAMA, None, cost), make_plan(placed, LLAMA, None, cost)
    assert after.stats.max_rank_bytes < before.stats.max_rank_bytes


@pytest.mark.matrix
def test_other_processes_find_the_same_homes() -> None:
    code = (
        "from bench.workloads import *; from torchtitan_cad.planning import *;"
        "from tests.planning.layouts import LLAMA;"
        "print(make_plan(place(spanning_layout(document_lengths('lognormal', 16, 3), 16), LLAMA), LLAMA).fingerprint())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=300) for _ in (1, 2)
    ]
    plan = make_plan(place(spanning_layout(document_lengths("lognormal", 16, 3), 16), LLAMA), LLAMA)
    assert [run.stdout.strip() for run in runs] == [plan.fingerprint()] * 2


@pytest.mark.parametrize("num_ranks", [4, 32])
def test_nothing_is_left_for_the_garbage_collector(num_ranks: int) -> None:
    """Which training turns off."""
    gc.collect()
    gc.disable()
    try:
        layout = spanning_layout(document_lengths("lognormal", num_ranks, 24), num_ranks)
        placed = place_and_plan(layout, LLAMA)
        assert placed.layout is not layout
        left = [weakref.ref(each) for each in (layout, *placed)]
        del layout, placed
        assert [each() for each in left] == [None] * 4
    finally:
        gc.enable()
