"""The contract of cost models (``CostModel``), which planners and the guarantee on loads rely on."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.costs import models
from torchtitan_cad.planning import CostModel, ProfileCost, TileAreaCost
from torchtitan_cad.planning.model.cost import isotonic
from torchtitan_cad.planning.model.tasks import TaskArray, is_diagonal, make_tasks, merge_queries

LONGEST = 200


ranges = st.lists(st.integers(0, LONGEST), min_size=4, max_size=4, unique=True).map(sorted)


def task(cuts: list[int], diagonal: bool) -> TaskArray:
    a, b, c, d = cuts
    return make_tasks([0], c, d, a, d if diagonal else b, 0)


@given(model=models, cuts=ranges, diagonal=st.booleans())
def test_cost_is_the_sum_over_rows_of_tiles(model: CostModel, cuts: list[int], diagonal: bool) -> None:
    tile, tasks = model.granularity, task(cuts, diagonal)
    first, stop = int(tasks["kv_start"][0]) // tile, -(-int(tasks["kv_end"][0]) // tile)
    rows = range(int(tasks["q_start"][0]) // tile, -(-int(tasks["q_end"][0]) // tile))
    widths = np.array([(row + 1 if diagonal else stop) - first for row in rows])
    assert model.cost(tasks).dtype == model.row_cost(widths).dtype == np.int64
    assert model.cost(tasks).tolist() == [model.row_cost(widths).sum()]


@given(model=models)
def test_rows_cost_no_less_further_down(model: CostModel) -> None:
    rows = model.row_cost(np.arange(LONGEST))
    assert rows[0] == 0 < rows[1]
    assert (np.diff(rows) >= 0).all()
    length = LONGEST * model.granularity - model.granularity // 2
    assert model.prefix_cost(length).tolist() == [0, *np.cumsum(model.row_cost(np.arange(1, LONGEST + 1)))]
    assert model.row_cost(np.array([[1, 2], [3, 0]])).shape == (2, 2)


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


@given(model=models, cuts=st.lists(ranges, min_size=1, max_size=6), diagonal=st.lists(st.booleans(), min_size=6))
def test_no_tasks_of_that_cost_have_more_pairs(model: CostModel, cuts: list[list[int]], diagonal: list[bool]) -> None:
    tasks = np.concatenate([task(c, d) for c, d in zip(cuts, diagonal, strict=False)])
    rows, keys = tasks["q_end"] - tasks["q_start"], tasks["kv_end"] - tasks["kv_start"]
    pairs = np.where(is_diagonal(tasks), rows * keys - rows * (rows - 1) // 2, rows * keys)
    assert pairs.sum() <= model.max_pairs(int(model.cost(tasks).sum()))
    assert model.max_pairs(0) == 0


def test_tile_area_counts_tiles_and_profiles_interpolate_and_go_on_with_the_last_slope() -> None:
    assert TileAreaCost(128).row_cost(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert TileAreaCost(128).max_pairs(3) == 3 * 128**2
    model = ProfileCost(128, (1, 3, 5), (10, 20, 25))
    assert model.row_cost(np.arange(8)).tolist() == [0, 10, 15, 20, 23, 25, 30, 35]  # 5 a tile: the best of the grid
    assert ProfileCost(128, (1, 3), (10, 50)).row_cost(np.arange(5)).tolist() == [0, 10, 30, 50, 70]
    assert ProfileCost(128, (1,), (7,)).row_cost(np.arange(4)).tolist() == [0, 7, 14, 21]
    assert model.max_pairs(1000) == 1000 // 5 * 128**2


def test_long_rows_do_not_overflow() -> None:
    """Ten seconds a row at 64K keys, extrapolated to a billion keys: exact all the same."""
    costs = (10**10, 10**13)
    model = ProfileCost(128, (1, 512), costs)
    tiles = 10**9 // 128
    assert model.row_cost(np.array([tiles])).tolist() == [costs[1] - -(tiles - 512) * (costs[1] - costs[0]) // 511]


@given(values=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_isotonic_is_the_nearest_monotone_sequence(values: list[int]) -> None:
    """By the min-max formula: fit i is the largest over a <= i of the least mean of values a to b over b >= i."""

    def mean(a: int, b: int) -> Fraction:
        return Fraction(sum(values[a : b + 1]), b + 1 - a)

    n = len(values)
    want = [max(min(mean(a, b) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]
    assert isotonic([Fraction(value) for value in values]) == want


@pytest.mark.parametrize(
    ("tiles", "costs", "message"),
    [
        ((2, 3), (1, 2), "key_tiles = (2, 3)"),
        ((1, 3, 3), (1, 2, 3), "key_tiles = (1, 3, 3)"),
        ((1, 2), (1,), "key_tiles"),
        ((), (), "key_tiles"),
        ((1, 2), (2, 1), "row_costs = (2, 1)"),
        ((1, 2), (0, 1), "row_costs = (0, 1)"),
    ],
)
def test_what_cannot_be_a_profile(tiles: tuple[int, ...], costs: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ProfileCost(128, tiles, costs)
