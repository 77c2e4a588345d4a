# SPDX-License-Identifier: BSD-3-Clause
"""Costs: what planners and the guarantee on loads rely on (``TileAreaCost``)."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from torchtitan_cad.planning import TileAreaCost
from torchtitan_cad.planning.model.tasks import make_tasks, merge_queries

TOKENS = st.integers(1, 300)


@given(
    start=st.integers(0, 300),
    length=TOKENS,
    window=st.none() | TOKENS,
    tile=st.sampled_from([1, 7]),
)
def test_queries_cost_the_tiles_that_they_touch(start, length, window, tile):
    """Rectangles in plans are counted by check_loads."""
    end = start + length
    reach = window or end
    first = max(0, start - reach + 1)
    cost = TileAreaCost(tile, window)
    touched = 0
    for row in range(start // tile, -(-end // tile)):
        first_seen = max(first, row * tile - reach + 1)
        touched += row - first_seen // tile + 1
    task = make_tasks([0], start, end, first, end, 0)
    assert cost.cost(task).tolist() == [touched]
    whole = cost.cost(make_tasks([0], 0, end, 0, end, 0))
    prefix = cost.prefix_cost(end)
    assert len(prefix) == -(-end // tile) + 1
    assert (prefix[0], prefix[-1]) == (0, whole[0])


@given(
    cuts=st.lists(st.integers(0, 200), min_size=4, max_size=4, unique=True).map(sorted),
    diagonal=st.booleans(),
    data=st.data(),
)
def test_parts_of_queries_are_joined_again(cuts, diagonal, data):
    kv_start, kv_end, q_start, q_end = cuts
    assume(q_end - q_start > 1)
    cut = data.draw(st.integers(q_start + 1, q_end - 1))

    def task(start, end):
        last_key = end if diagonal else kv_end
        return make_tasks([0], start, end, kv_start, last_key, 0)

    parts = np.concatenate([task(q_start, cut), task(cut, q_end)])
    assert np.array_equal(merge_queries(parts), task(q_start, q_end))
