"""Costs against counting tiles, interval arithmetic against sets, the lower bound against optima."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_cad.planning import AttentionShape, Plan, PlannerConfig, TileAreaCost, TokenLayout, make_plan
from torchtitan_cad.planning.bound import forced_export_bytes, lower_bound_bytes, rank_bound_bytes
from torchtitan_cad.planning.intervals import concat_ranges, split_at, sum_by_index, union_by_group
from torchtitan_cad.planning.tasks import make_tasks, merge_queries

from .layouts import LLAMA, Case, cases
from .random_plans import random_tasks
from .reference import cover_counts, tile_cost


@settings(deadline=None, max_examples=300)
@given(
    tile=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 40), min_size=4, max_size=4, unique=True).map(sorted),
    diagonal=st.booleans(),
)
def test_tile_area(tile: int, cuts: list[int], diagonal: bool) -> None:
    a, b, c, d = cuts
    task = make_tasks([0], c, d, a, d if diagonal else b, 0)
    assert TileAreaCost(tile).cost(task).tolist() == [tile_cost(task[0], tile)]


@settings(deadline=None, max_examples=200)
@given(tile=st.integers(1, 9), cuts=st.lists(st.integers(0, 60), min_size=2, max_size=2, unique=True).map(sorted))
def test_prefix_cost_and_free_cuts(tile: int, cuts: list[int]) -> None:
    """Full-prefix tasks cost a difference of prefixes, and cutting on the grid is free."""
    model, (a, b) = TileAreaCost(tile), cuts
    prefix = model.prefix_cost(60)
    whole = int(model.cost(make_tasks([0], a, b, 0, b, 0))[0])
    assert whole == prefix[-(-b // tile)] - prefix[a // tile]
    for cut in range(a + 1, b):
        parts = model.cost(make_tasks([0, 0], [a, cut], [cut, b], 0, [cut, b], 0)).sum()
        assert parts >= whole
        assert cut % tile or parts == whole


def test_unit_tiles_are_pairs() -> None:
    tasks = make_tasks([0, 0], [10, 10], [20, 20], [0, 5], [5, 20], 0)
    assert TileAreaCost(1).cost(tasks).tolist() == [50, sum(range(6, 16))]


intervals = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 8)), max_size=12)


@settings(deadline=None, max_examples=300)
@given(rows=intervals, cuts=st.sets(st.integers(1, 40)))
def test_interval_arithmetic(rows: list[tuple[int, int, int]], cuts: set[int]) -> None:
    group, start, length = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    want = {(g, x) for g, s, n in rows for x in range(s, s + n)}

    group_, start_, end_ = union_by_group(group, start, start + length)
    found = [(g, x) for g, s, e in zip(group_, start_, end_, strict=True) for x in range(s, e)]
    assert found == sorted(want)

    grid = np.array(sorted({0, *cuts}))
    source, cell, a, b = split_at(start_, end_, grid)
    assert [(group_[i], x) for i, s, e in zip(source, a, b, strict=True) for x in range(s, e)] == found
    assert (grid[cell] <= a).all()
    assert (a < b).all()
    assert (b <= np.append(grid[1:], 10**6)[cell]).all()

    assert concat_ranges(start, length).tolist() == [x for _, s, n in rows for x in range(s, s + n)]
    sums = [sum(n for g, _, n in rows if g == i) for i in range(4)]
    assert sum_by_index(group, length, 4).tolist() == sums


@settings(deadline=None, max_examples=100)
@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_merging_keeps_the_pairs(case: Case, seed: int) -> None:
    layout = Case(case.family, min(case.num_ranks, 3), 1 + case.tokens % 20, 8, 0.0, 1, case.seed).layout()
    tasks = random_tasks(layout, np.random.default_rng(seed))
    merged = merge_queries(tasks)
    assert len(merged) <= len(tasks)
    for doc, length in zip(layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True):
        for server in range(layout.num_ranks):
            before, after = (cover_counts(t[t["server"] == server], doc, length) for t in (tasks, merged))
            assert np.array_equal(before, after)


@settings(deadline=None, max_examples=300)
@given(
    case=cases,
    heads=st.sampled_from([(32, 8), (64, 8), (8, 8), (1, 1)]),
    planner=st.sampled_from(["home", "greedy", "tiling"]),
)
def test_bound_is_below_every_plan(case: Case, heads: tuple[int, int], planner: str) -> None:
    shape = AttentionShape(num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, dtype_bytes=2)
    config = PlannerConfig(case.tolerance, case.min_shard, planner=planner, tile=case.tile)
    stats = make_plan(case.layout(), shape, config).stats
    assert 0 <= stats.lower_bound_bytes <= stats.total_bytes
    assert 0 <= stats.forced_export_bytes <= stats.lower_bound_rank_bytes <= stats.max_rank_bytes


def test_bound_of_one_document_on_one_rank() -> None:
    """A helper must compute F foreign pairs of a document it holds nothing of: 2 sqrt(c_q c_kv F) bytes."""
    layout = TokenLayout.from_segments([[(0, 0, 1000)], []])
    pairs = 1000 * 1001 // 2
    foreign = pairs - 300_000
    ideal = 2 * np.sqrt(LLAMA.query_bytes * LLAMA.kv_bytes * foreign)
    assert lower_bound_bytes(layout, LLAMA, 300_000) == pytest.approx(ideal, rel=1e-6)
    assert lower_bound_bytes(layout, LLAMA, pairs) == 0


def test_bound_knows_what_residency_costs() -> None:
    """Without any limit on load, the cheaper side of a document over two ranks still has to travel."""
    layout = TokenLayout.from_segments([[(0, 0, 100)], [(0, 100, 100)]])
    bound = lower_bound_bytes(layout, LLAMA, 10**9)
    assert bound == pytest.approx(100 * LLAMA.kv_bytes, abs=1)
    assert make_plan(layout, LLAMA, PlannerConfig(planner="home")).stats.total_bytes == 100 * LLAMA.kv_bytes


@settings(deadline=None, max_examples=200)
@given(case=cases, seed=st.integers(0, 2**32 - 1))
def test_bounds_are_below_random_plans(case: Case, seed: int) -> None:
    """Plans no planner would make: any cut, any server; the limit is whatever load they lead to."""
    layout = Case(case.family, min(case.num_ranks, 4), 1 + case.tokens % 40, 8, 0.0, 1, case.seed).layout()
    tasks = random_tasks(layout, np.random.default_rng(seed))
    stats = Plan.from_tasks(layout, LLAMA, PlannerConfig(tile=1, min_shard=1), tasks).stats
    assert stats.lower_bound_bytes <= stats.total_bytes
    assert stats.lower_bound_rank_bytes <= stats.max_rank_bytes


def test_bounds_against_exhaustive_search() -> None:
    """Every assignment of the cells of a document to two servers, with home rows on one or on both."""
    for segments in ([[(0, 0, 4)], []], [[(0, 0, 2)], [(0, 2, 2)]], [[(0, 0, 3)], [(0, 3, 1)]]):
        layout = TokenLayout.from_segments(segments)
        home = np.concatenate([[rank] * n for rank, runs in enumerate(segments) for _, _, n in runs])
        pairs = [(q, k) for q in range(4) for k in range(q + 1)]
        best: dict[int, tuple[int, int]] = {}
        for servers in itertools.product(range(2), repeat=len(pairs)):
            load = max(servers.count(0), servers.count(1))
            moved = {("q", q) for (q, _), s in zip(pairs, servers, strict=True) if home[q] != s}
            moved |= {("k", k) for (_, k), s in zip(pairs, servers, strict=True) if home[k] != s}
            price = {"q": LLAMA.query_bytes, "k": LLAMA.kv_bytes}
            out = [sum(price[kind] for kind, row in moved if home[row] == rank) for rank in range(2)]
            total, worst = best.get(load, (10**9, 10**9))
            best[load] = (min(total, sum(out)), min(worst, max(out)))
        for load, (total, worst) in best.items():
            bound = lower_bound_bytes(layout, LLAMA, load)
            assert bound <= total
            assert rank_bound_bytes(layout, LLAMA, load, bound) <= worst


def test_forced_export_against_sorting() -> None:
    layout = TokenLayout.from_segments([[(0, 0, 50), (1, 30, 40)], [(1, 0, 30)]])
    keys = np.sort(np.concatenate([np.arange(1, 51), np.arange(31, 71)]))[::-1]
    for cap in range(0, int(keys.sum()), 97):
        rows = int(np.searchsorted(np.cumsum(keys), keys.sum() - cap)) + 1
        assert forced_export_bytes(layout, LLAMA, cap)[0] == rows * LLAMA.query_bytes
