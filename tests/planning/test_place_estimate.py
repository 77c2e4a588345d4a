# SPDX-License-Identifier: BSD-3-Clause
"""The search for homes: moves keep the figures up to date. That they lower bytes is in test_place.py."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA
from tests.lib.workloads import GRID, spanning_layout
from torchtitan_cad.planning import PlannerConfig, TileAreaCost
from torchtitan_cad.planning.placement.chunks import MOST_CHUNKS, make_chunks
from torchtitan_cad.planning.placement.estimate import estimate_rank
from torchtitan_cad.planning.placement.home_search import WEIGHTS, HomeSearch, improve

CONFIG = PlannerConfig()


@settings(max_examples=60)
@given(
    cells=st.lists(st.integers(4, 40), min_size=2, max_size=4),
    num_ranks=st.integers(2, 5),
    weights=st.sampled_from(WEIGHTS),
    seed=st.integers(0, 2**20),
)
def test_moves_keep_tokens_and_figures(cells, num_ranks, weights, seed):
    """Short documents leave room on all ranks."""
    lengths = GRID * np.array([*cells, *[1] * sum(cells)])
    layout = spanning_layout(lengths.tolist(), num_ranks)
    search = HomeSearch(layout, LLAMA, CONFIG, TileAreaCost(GRID), weights)
    is_held = search._segments[0] >= 0
    chunks, prices = search._begin(search._segments[:, is_held])
    assume(len(chunks.doc) > 1)
    tokens = np.bincount(chunks.doc, chunks.length).tolist()
    work = search._work
    scratch = np.zeros((2, 2, 3), dtype=np.int64)
    improve(chunks, work, prices, 0.0, 300, GRID, np.array([seed]), scratch)

    again = np.stack([chunks.rank, chunks.doc, chunks.start, chunks.length])
    ends = chunks.start + chunks.length
    is_first = chunks.start == 0
    assert (is_first[1:] | (chunks.start[1:] == ends[:-1])).all()
    assert np.bincount(chunks.doc, chunks.length).tolist() == tokens
    assert (chunks.free >= 0).all()
    assert (chunks.num_held <= MOST_CHUNKS).all()
    check_figures(chunks, make_chunks(again, layout.tokens_per_rank, work), prices)


def check_figures(chunks, anew, prices):
    """The figures of moved chunks are those of the same chunks counted anew."""
    assert chunks.free.tolist() == anew.free.tolist()
    assert chunks.load == pytest.approx(anew.load)
    for rank in range(len(anew.num_held)):
        count = anew.num_held[rank]
        members = chunks.members[rank, : chunks.num_held[rank]]
        assert sorted(members) == sorted(anew.members[rank, :count])
        estimate_rank(anew, prices, rank)
    assert chunks.num_bytes == pytest.approx(anew.num_bytes)
    assert chunks.power == pytest.approx(anew.power)
