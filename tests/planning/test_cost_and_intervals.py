"""Costs against counting tiles, interval arithmetic against sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.layouts import Case, cases
from tests.planning.random_plans import random_tasks
from tests.planning.reference import cover_counts, tile_cost
from torchtitan_cad.planning import TileAreaCost
from torchtitan_cad.planning.intervals import concat_ranges, split_at, sum_by_index, union_by_group
from torchtitan_cad.planning.model.tasks import make_tasks, merge_queries


@given(
    tile=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 40), min_size=4, max_size=4, unique=True).map(sorted),
    diagonal=st.booleans(),
)
def test_tile_area(tile: int, cuts: list[int], diagonal: bool) -> None:
    a, b, c, d = cuts
    task = make_tasks([0], c, d, a, d if diagonal else b, 0)
    assert TileAreaCost(tile).cost(task).tolist() == [tile_cost(task[0], tile)]


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
