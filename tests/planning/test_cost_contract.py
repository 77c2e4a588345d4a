"""The contract of cost models (``CostModel``), which planners and the guarantee on loads rely on."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_cad.planning import CostModel, TileAreaCost
from torchtitan_cad.planning.tasks import TaskArray, is_diagonal, make_tasks, merge_queries

LONGEST = 200

models: st.SearchStrategy[CostModel] = st.builds(TileAreaCost, st.integers(1, 24))
ranges = st.lists(st.integers(0, LONGEST), min_size=4, max_size=4, unique=True).map(sorted)


def task(cuts: list[int], diagonal: bool) -> TaskArray:
    a, b, c, d = cuts
    return make_tasks([0], c, d, a, d if diagonal else b, 0)


@settings(deadline=None, max_examples=300)
@given(model=models, cuts=ranges, diagonal=st.booleans())
def test_cost_is_the_sum_over_rows_of_tiles(model: CostModel, cuts: list[int], diagonal: bool) -> None:
    tile, tasks = model.granularity, task(cuts, diagonal)
    first, stop = int(tasks["kv_start"][0]) // tile, -(-int(tasks["kv_end"][0]) // tile)
    rows = range(int(tasks["q_start"][0]) // tile, -(-int(tasks["q_end"][0]) // tile))
    widths = np.array([(row + 1 if diagonal else stop) - first for row in rows])
    assert model.cost(tasks).dtype == model.row_cost(widths).dtype == np.int64
    assert model.cost(tasks).tolist() == [model.row_cost(widths).sum()]


@settings(deadline=None, max_examples=100)
@given(model=models)
def test_rows_cost_no_less_further_down(model: CostModel) -> None:
    rows = model.row_cost(np.arange(LONGEST))
    assert rows[0] == 0 < rows[1]
    assert (np.diff(rows) >= 0).all()
    length = LONGEST * model.granularity - model.granularity // 2
    assert model.prefix_cost(length).tolist() == [0, *np.cumsum(model.row_cost(np.arange(1, LONGEST + 1)))]
    assert model.row_cost(np.array([[1, 2], [3, 0]])).shape == (2, 2)


@settings(deadline=None, max_examples=300)
@given(model=models, cuts=ranges, diagonal=st.booleans(), at=st.floats(0, 1))
def test_cutting_on_the_grid_is_free_and_joining_never_adds_cost(
    model: CostModel, cuts: list[int], diagonal: bool, at: float
) -> None:
    whole = task(cuts, diagonal)
    q_start, q_end = int(whole["q_start"][0]), int(whole["q_end"][0])
    cut = q_start + round(at * (q_end - q_start))
    if not q_start < cut < q_end:
        return
    parts = np.concatenate([whole, whole])
    parts["q_end"][0] = parts["q_start"][1] = cut
    parts["kv_end"][0] = cut if diagonal else parts["kv_end"][0]
    (cost,), parted = model.cost(whole), model.cost(parts).sum()
    assert np.array_equal(merge_queries(parts), whole)
    assert cost <= parted
    assert cut % model.granularity or cost == parted


@settings(deadline=None, max_examples=300)
@given(model=models, cuts=st.lists(ranges, min_size=1, max_size=6), diagonal=st.lists(st.booleans(), min_size=6))
def test_no_tasks_of_that_cost_have_more_pairs(model: CostModel, cuts: list[list[int]], diagonal: list[bool]) -> None:
    tasks = np.concatenate([task(c, d) for c, d in zip(cuts, diagonal, strict=False)])
    rows, keys = tasks["q_end"] - tasks["q_start"], tasks["kv_end"] - tasks["kv_start"]
    pairs = np.where(is_diagonal(tasks), rows * keys - rows * (rows - 1) // 2, rows * keys)
    assert pairs.sum() <= model.max_pairs(int(model.cost(tasks).sum()))
    assert model.max_pairs(0) == 0


def test_tile_area_counts_tiles() -> None:
    assert TileAreaCost(128).row_cost(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert TileAreaCost(128).max_pairs(3) == 3 * 128**2
