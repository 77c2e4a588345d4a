"""Interval arithmetic against sets of numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.layouts import Case, cases
from tests.planning.reference import cover_counts
from tests.plans import random_tasks
from torchtitan_cad.planning.exchange.needs import offsets_by_rank, order_by_rank
from torchtitan_cad.planning.intervals import concat_ranges, split_at, sum_by_index, union_by_group
from torchtitan_cad.planning.model.tasks import merge_queries

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
    layout = case.small(3, 20).layout()
    tasks = random_tasks(np.random.default_rng(seed), layout)
    merged = merge_queries(tasks)
    assert len(merged) <= len(tasks)
    for doc, length in zip(layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True):
        for server in range(layout.num_ranks):
            before, after = (cover_counts(t[t["server"] == server], doc, length) for t in (tasks, merged))
            assert np.array_equal(before, after)


@pytest.mark.parametrize("num_ranks", [1, 7, 2**16, 2**16 + 1, 10**6])
def test_order_by_rank_is_stable(num_ranks: int) -> None:
    rank = np.random.default_rng(0).integers(0, num_ranks, size=500)
    rank[:3] = num_ranks - 1
    order, offsets = order_by_rank(rank, num_ranks), offsets_by_rank(rank, num_ranks)
    assert order.tolist() == sorted(range(500), key=lambda i: (rank[i], i))
    assert len(offsets) == num_ranks + 1
    assert (rank[order[offsets[num_ranks - 1] :]] == num_ranks - 1).all()
