# SPDX-License-Identifier: BSD-3-Clause
"""Costs: the contract (``CostModel``) that planners and the guarantee on loads rely on, and measured profiles."""

import dataclasses
import json
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.lib.costs import models
from tests.lib.profiles import LLAMA, linear, make_profile
from tests.lib.refusals import refusal
from torchtitan_cad.planning import Profile, ProfileCost
from torchtitan_cad.planning.model.cost import isotonic
from torchtitan_cad.planning.model.tasks import (
    TaskArray,
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
    tile = model.granularity
    tasks = task(cuts, diagonal)
    first_key = tasks["kv_start"][0] // tile
    last_key = -(-tasks["kv_end"][0] // tile)
    rows = np.arange(tasks["q_start"][0] // tile, -(-tasks["q_end"][0] // tile))
    end_key = rows + 1 if diagonal else np.full(len(rows), last_key)
    row_costs = model.row_cost(end_key - first_key)
    assert model.cost(tasks).dtype == row_costs.dtype == np.int64
    assert model.cost(tasks).tolist() == [row_costs.sum()]


@given(model=models)
def test_rows_cost_no_less_further_down(model):
    rows = model.row_cost(np.arange(LONGEST + 1))
    assert rows[0] == 0 < rows[1]
    assert (np.diff(rows) >= 0).all()
    length = LONGEST * model.granularity - model.granularity // 2
    assert model.prefix_cost(length).tolist() == np.cumsum(rows).tolist()
    assert model.row_cost(np.array([[1, 2], [3, 0]])).shape == (2, 2)


@given(cuts=ranges, diagonal=st.booleans(), data=st.data())
def test_parts_of_queries_are_joined_again(cuts, diagonal, data):
    whole = task(cuts, diagonal)
    q_start, q_end = cuts[2:]
    assume(q_end - q_start > 1)
    cut = data.draw(st.integers(q_start + 1, q_end - 1))
    parts = np.concatenate([whole, whole])
    parts["q_end"][0] = parts["q_start"][1] = cut
    if diagonal:
        parts["kv_end"][0] = cut
    assert np.array_equal(merge_queries(parts), whole)


def test_profiles_interpolate_and_go_on_with_the_last_slope():
    for tiles, costs, wanted in (
        # 5 a tile: the best of the grid
        ((1, 3, 5), (10, 20, 25), [0, 10, 15, 20, 23, 25, 30, 35]),
        ((1, 3), (10, 50), [0, 10, 30, 50, 70]),
        ((1,), (7,), [0, 7, 14, 21]),
    ):
        model = ProfileCost(128, tiles, costs)
        assert model.row_cost(np.arange(len(wanted))).tolist() == wanted
    assert ProfileCost(128, (1, 3, 5), (10, 20, 25)).max_pairs(1000) == 200 * 128**2


@given(values=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_isotonic_is_the_nearest_monotone_sequence(values):
    """By the min-max formula: fit i is the largest over a <= i of the least mean of values a to b over b >= i."""
    n = len(values)

    def least_mean(a: int, i: int) -> Fraction:
        return min(Fraction(sum(values[a : b + 1]), b + 1 - a) for b in range(i, n))

    want = [max(least_mean(a, i) for a in range(i + 1)) for i in range(n)]
    assert isotonic([Fraction(value) for value in values]) == want


def test_what_cannot_be_a_profile():
    for tiles, costs in (
        ((2, 3), (1, 2)),
        ((1, 2), (1,)),
        ((), ()),
        ((1, 2), (2, 1)),
        ((1, 2), (0, 1)),
    ):
        with refusal():
            ProfileCost(128, tiles, costs)


def test_json_round_trip():
    profile = make_profile()
    assert Profile.from_json(profile.to_json()) == profile
    other = dataclasses.replace(profile, kernel="other")
    assert other.fingerprint() != profile.fingerprint()


def test_costs_are_those_of_the_best_query_length():
    profile = make_profile(backward=linear(0.004, fixed=0.01))
    tiles = np.array([1, 8, 64])
    costs = profile.cost_model("backward", LLAMA).row_cost(tiles)
    assert costs.tolist() == np.round((0.01 + 0.004 * tiles) * 1e9).tolist()


def test_another_kind_of_attention_is_refused():
    for name, value in (("head_dim", 64), ("value_dim", 64), ("dtype_bytes", 4)):
        other = dataclasses.replace(LLAMA, **{name: value})
        with refusal():
            make_profile().cost_model("forward", other)


MISTAKES: dict[str, Any] = {
    "format": 2,
    "tile": 0,
    "attention.dtype": "int8",
    "attention": [],
    "grid.q_lengths": [128, 128, 512],
    "grid.kv_lengths": [256, 1024, 8192],
    "grid.forward_ms": [[1, 2, 3]] * 2,
    "grid.backward_ms": [[1, 2, 0]] * 3,
    "grid.forward_spread": [[0.1] * 3] * 2,
    "grid.extra": 1,
}


def test_mistakes_name_file_and_key(tmp_path):
    file = tmp_path / "profile.json"
    for key, value in MISTAKES.items():
        data = json.loads(make_profile().to_json())
        *table, name = key.split(".")
        (data[table[0]] if table else data)[name] = value
        file.write_text(json.dumps(data))
        with refusal(key) as raised:
            Profile.read(file)
        assert str(file) in str(raised.value)


def test_files_that_are_no_profiles(tmp_path):
    with refusal():
        Profile.read(tmp_path / "none.json")
    for content in ("{", "[1]", "{}"):
        with refusal():
            Profile.from_json(content)


def test_noisy_cells():
    """Where repeats lie far apart, and where a task takes longer than a larger one."""
    calm = (0.1, 0.2, 0.0)
    noisy = (0.0, 0.0, 0.3)
    profile = make_profile()
    first, second, third = profile.backward_ms
    slow = (2 * third[1], *second[1:])
    profile = dataclasses.replace(
        profile,
        forward_spread=(calm, calm, calm),
        backward_spread=(calm, calm, noisy),
        backward_ms=(first, slow, third),
    )
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.noisy_cells() == [(128, 128), (512, 8192)]
