# SPDX-License-Identifier: BSD-3-Clause
"""Costs: what planners and the guarantee on loads rely on (``TileAreaCost``)."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from torchtitan_cad.planning import TileAreaCost
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


@given(tile=st.integers(1, 24), cuts=ranges, diagonal=st.booleans())
def test_cost_is_the_sum_over_rows_of_tiles(tile, cuts, diagonal):
    tasks = task(cuts, diagonal)
    first_key = tasks["kv_start"][0] // tile
    last_key = -(-tasks["kv_end"][0] // tile)
    rows = np.arange(tasks["q_start"][0] // tile, -(-tasks["q_end"][0] // tile))
    end_key = rows + 1 if diagonal else np.full(len(rows), last_key)
    cost = TileAreaCost(tile).cost(tasks)
    assert cost.dtype == np.int64
    assert cost.tolist() == [(end_key - first_key).sum()]


@given(tile=st.integers(1, 24), window=st.none() | st.integers(1, LONGEST))
def test_rows_cost_no_less_further_down(tile, window):
    cost = TileAreaCost(tile, window)
    prefix = cost.prefix_cost(LONGEST * tile - tile // 2)
    assert len(prefix) == LONGEST + 1
    rows = np.diff(prefix)
    assert prefix[0] == 0 < rows[0]
    assert (np.diff(rows) >= 0).all()


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
