# SPDX-License-Identifier: BSD-3-Clause
"""Costs: the contract (``CostModel``) that planners and the guarantee on loads rely on, and measured profiles."""

import dataclasses
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.costs import models
from tests.lib.profiles import LLAMA, linear, make_profile
from tests.lib.refusals import refusal
from torchtitan_cad.planning import Profile, ProfileCost, TileAreaCost
from torchtitan_cad.planning.model.cost import isotonic
from torchtitan_cad.planning.model.tasks import (
    TaskArray,
    is_diagonal,
    make_tasks,
    merge_queries,
)

LONGEST = 200

ranges = st.lists(st.integers(0, LONGEST), min_size=4, max_size=4, unique=True).map(
    sorted
)


def task(cuts: list[int], diagonal: bool) -> TaskArray:
    a, b, c, d = cuts
    return make_tasks([0], c, d, a, d if diagonal else b, 0)


@given(model=models, cuts=ranges, diagonal=st.booleans())
def test_cost_is_the_sum_over_rows_of_tiles(model, cuts, diagonal):
    tile, tasks = model.granularity, task(cuts, diagonal)
    first, stop = int(tasks["kv_start"][0]) // tile, -(-int(tasks["kv_end"][0]) // tile)
    rows = range(int(tasks["q_start"][0]) // tile, -(-int(tasks["q_end"][0]) // tile))
    widths = np.array([(row + 1 if diagonal else stop) - first for row in rows])
    assert model.cost(tasks).dtype == model.row_cost(widths).dtype == np.int64
    assert model.cost(tasks).tolist() == [model.row_cost(widths).sum()]


@given(model=models)
def test_rows_cost_no_less_further_down(model):
    rows = model.row_cost(np.arange(LONGEST))
    assert rows[0] == 0 < rows[1]
    assert (np.diff(rows) >= 0).all()
    length = LONGEST * model.granularity - model.granularity // 2
    assert model.prefix_cost(length).tolist() == [
        0,
        *np.cumsum(model.row_cost(np.arange(1, LONGEST + 1))),
    ]
    assert model.row_cost(np.array([[1, 2], [3, 0]])).shape == (2, 2)


@given(model=models, cuts=ranges, diagonal=st.booleans(), at=st.floats(0, 1))
def test_cutting_on_the_grid_is_free_and_joining_never_adds_cost(
    model, cuts, diagonal, at
):
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


@given(
    model=models,
    cuts=st.lists(ranges, min_size=1, max_size=6),
    diagonal=st.lists(st.booleans(), min_size=6),
)
def test_no_tasks_of_that_cost_have_more_pairs(model, cuts, diagonal):
    tasks = np.concatenate([task(c, d) for c, d in zip(cuts, diagonal, strict=False)])
    rows, keys = tasks["q_end"] - tasks["q_start"], tasks["kv_end"] - tasks["kv_start"]
    pairs = np.where(
        is_diagonal(tasks), rows * keys - rows * (rows - 1) // 2, rows * keys
    )
    assert pairs.sum() <= model.max_pairs(int(model.cost(tasks).sum()))
    assert model.max_pairs(0) == 0


def test_tile_area_counts_tiles_and_profiles_interpolate_and_go_on_with_the_last_slope():
    assert TileAreaCost(128).row_cost(np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert TileAreaCost(128).max_pairs(3) == 3 * 128**2
    model = ProfileCost(128, (1, 3, 5), (10, 20, 25))
    # 5 a tile: the best of the grid
    assert model.row_cost(np.arange(8)).tolist() == [
        0,
        10,
        15,
        20,
        23,
        25,
        30,
        35,
    ]
    assert ProfileCost(128, (1, 3), (10, 50)).row_cost(np.arange(5)).tolist() == [
        0,
        10,
        30,
        50,
        70,
    ]
    assert ProfileCost(128, (1,), (7,)).row_cost(np.arange(4)).tolist() == [
        0,
        7,
        14,
        21,
    ]
    assert model.max_pairs(1000) == 1000 // 5 * 128**2


def test_long_rows_do_not_overflow():
    """Ten seconds a row at 64K keys, extrapolated to a billion keys: exact all the same."""
    costs = (10**10, 10**13)
    model = ProfileCost(128, (1, 512), costs)
    tiles = 10**9 // 128
    assert model.row_cost(np.array([tiles])).tolist() == [
        costs[1] - -(tiles - 512) * (costs[1] - costs[0]) // 511
    ]


@given(values=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_isotonic_is_the_nearest_monotone_sequence(values):
    """By the min-max formula: fit i is the largest over a <= i of the least mean of values a to b over b >= i."""

    def mean(a: int, b: int) -> Fraction:
        return Fraction(sum(values[a : b + 1]), b + 1 - a)

    n = len(values)
    want = [
        max(min(mean(a, b) for b in range(i, n)) for a in range(i + 1))
        for i in range(n)
    ]
    assert isotonic([Fraction(value) for value in values]) == want


@pytest.mark.parametrize(
    ("tiles", "costs"),
    [
        ((2, 3), (1, 2)),
        ((1, 3, 3), (1, 2, 3)),
        ((1, 2), (1,)),
        ((), ()),
        ((1, 2), (2, 1)),
        ((1, 2), (0, 1)),
    ],
)
def test_what_cannot_be_a_profile(tiles, costs):
    with refusal():
        ProfileCost(128, tiles, costs)


def test_json_round_trip(tmp_path):
    profile, path = make_profile(), tmp_path / "profile.json"
    path.write_text(profile.to_json())
    assert Profile.read(path) == profile
    path.write_text(json.dumps(json.loads(profile.to_json()), indent=3, sort_keys=True))
    assert Profile.read(path).fingerprint() == profile.fingerprint()
    assert (
        dataclasses.replace(profile, kernel="other").fingerprint()
        != profile.fingerprint()
    )


def test_costs_are_those_of_the_best_query_length():
    profile = make_profile(forward=linear(0.001, fixed=0.01), backward=linear(0.004))
    tiles = np.array([1, 8, 64])
    assert profile.cost_model("forward", LLAMA).row_cost(tiles).tolist() == [
        round((0.01 + 0.001 * n) * 1e9) for n in tiles
    ]
    assert profile.cost_model("backward", LLAMA).row_cost(tiles).tolist() == [
        round(0.004 * n * 1e9) for n in tiles
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 64},
        {"value_dim": 64},
        {"dtype_bytes": 4},
        {"num_kv_heads": 4},
    ],
)
def test_another_kind_of_attention_is_refused(change):
    with refusal():
        make_profile().cost_model("forward", dataclasses.replace(LLAMA, **change))


GRID = json.loads(make_profile().to_json())["grid"]
MISTAKES: list[tuple[tuple[str, ...], Any]] = [
    (("format",), 2),
    (("device",), None),
    (("tile",), 0),
    (("attention", "dtype"), "int8"),
    (("attention", "num_kv_heads"), 5),
    (("attention",), []),
    (("grid", "q_lengths"), [128, 128, 512]),
    (("grid", "kv_lengths"), [256, 1024, 8192]),
    (("grid", "forward_ms"), GRID["forward_ms"][:2]),
    (("grid", "backward_ms"), [[1, 2, 0]] * 3),
    (("grid", "forward_spread"), [[0.1] * 3] * 2),
    (("grid", "backward_spread"), [[0.1, 0.1, -1.0]] * 3),
    (("grid", "extra"), 1),
]


@pytest.mark.parametrize(
    ("path", "value"), MISTAKES, ids=[".".join(path) for path, _ in MISTAKES]
)
def test_mistakes_name_file_key_and_value(path, value, tmp_path):
    data = json.loads(make_profile().to_json())
    table = data if len(path) == 1 else data[path[0]]
    table[path[-1]] = value
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(data))
    with refusal(".".join(path)) as raised:
        Profile.read(file)
    assert str(file) in str(raised.value)


def test_files_that_are_no_profiles(tmp_path):
    with refusal():
        Profile.read(tmp_path / "none.json")
    cut = json.dumps(
        {
            key: value
            for key, value in json.loads(make_profile().to_json()).items()
            if key != "grid"
        }
    )
    for content in ("{", "[1]", "{}", cut):
        with refusal():
            Profile.from_json(content)


def test_noisy_cells():
    """Where repeats lie far apart, and where a task takes longer than a larger one."""
    calm = ((0.1, 0.2, 0.0),) * 3
    profile = dataclasses.replace(
        make_profile(),
        forward_spread=calm,
        backward_spread=(*calm[:2], (0.0, 0.0, 0.3)),
    )
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.noisy_cells() == [(512, 8192)]
    times = [list(row) for row in profile.backward_ms]
    times[1][0] = 2 * times[2][1]
    slow = dataclasses.replace(profile, backward_ms=tuple(map(tuple, times)))
    assert slow.noisy_cells() == [(128, 128), (512, 8192)]
