# SPDX-License-Identifier: BSD-3-Clause
"""The search for homes: moves keep the figures up to date, and what is taken back leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA
from torchtitan_cad.planning.placement.assign import (
    assign_chunks,
    assign_short,
    by_work,
    cut,
)
from torchtitan_cad.planning.placement.estimate import choose, estimate, read_by
from torchtitan_cad.planning.placement.moves import relocate, shift, swap
from torchtitan_cad.planning.placement.search import begin_search
from torchtitan_cad.planning.placement.state import (
    CAPACITY,
    CHUNK_DOC,
    COUNT,
    KEYS_IN,
    KEYS_OUT,
    KEYS_SHARED,
    LENGTH,
    LOAD,
    QUERIES_OUT,
    RANK,
    START,
    WORK,
    State,
    begin,
    make_state,
    start_move,
    undo,
)


def state_of(lengths: list[int], num_ranks: int, longest: int) -> State:
    """A state in which documents of so many cells are cut and redistributed to ranks with half more capacity than they
    fill."""
    prefix = np.cumsum(np.arange(max(lengths) + 1)).astype(np.float64)
    mean = sum(prefix[length] for length in lengths) / num_ranks
    limit, speed = np.full(num_ranks, 1.02 * mean), np.ones(num_ranks)
    prices = np.array(
        [LLAMA.query_bytes, LLAMA.kv_bytes, 1 / 128**2, 0.0, 0.0, 0.0, 0.3, 0.4]
    )
    state = make_state(
        3 * sum(lengths) + num_ranks,
        limit,
        speed,
        prefix,
        np.array([128, 128, 256]),
        prices,
    )
    begin(state, np.full(num_ranks, 128 * (3 * sum(lengths) // (2 * num_ranks) + 1)))
    for doc, length in enumerate(lengths):
        cut(state, doc, 128 * length, mean, 256, 128 * longest)
    heap, time = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks)
    assign_chunks(state, by_work(state), heap, time)
    return state


def chunks_of(state: State) -> np.ndarray:
    """Rows of the chunks that have a rank, by document and start."""
    first = len(state.limit)
    rows = np.arange(first, state.ints[-1, COUNT])
    rows = rows[state.ints[rows, RANK] >= 0]
    return rows[np.lexsort((state.ints[rows, START], state.ints[rows, CHUNK_DOC]))]


def check(state: State, lengths: list[int], capacity: int) -> None:
    """Chunks cover the documents, and all figures are those of the chunks."""
    rows, num_ranks = chunks_of(state), len(state.limit)
    ints, rank = state.ints[rows], state.ints[rows, RANK]
    for doc, length in enumerate(lengths):
        mine = ints[ints[:, CHUNK_DOC] == doc]
        assert mine[:, START].tolist() == [0, *np.cumsum(mine[:, LENGTH])[:-1]]
        assert mine[:, LENGTH].sum() == 128 * length
    assert (
        state.ints[:num_ranks, CAPACITY]
        == capacity - np.bincount(rank, ints[:, LENGTH], num_ranks)
    ).all()
    assert (
        state.ints[:num_ranks, COUNT].tolist()
        == np.bincount(rank, minlength=num_ranks).tolist()
    )
    assert state.reals[:num_ranks, LOAD] == pytest.approx(
        np.bincount(rank, state.reals[rows, WORK], num_ranks)
    )
    found, before = state.reals.copy(), estimate(state)
    start_move(state)
    state.reals[:num_ranks, KEYS_IN : KEYS_SHARED + 1] = 0.0
    for row in rows.tolist():
        read_by(state, row, 1.0, *state.reals[row, 1:3])
    for each in range(num_ranks):
        choose(state, each, -1, -1)
    for column in (KEYS_IN, KEYS_OUT, KEYS_SHARED, QUERIES_OUT):
        assert state.reals[:num_ranks, column] == pytest.approx(
            found[:num_ranks, column], rel=1e-9, abs=1.0
        )
    assert estimate(state) == pytest.approx(before, rel=1e-6, abs=1e-3)  # bytes


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(4, 40), min_size=2, max_size=4),
    num_ranks=st.integers(2, 5),
    longest=st.integers(4, 20),
    seed=st.integers(0, 2**20),
)
def test_moves_keep_tokens_loads_and_figures(lengths, num_ranks, longest, seed):
    state, numbers = state_of(lengths, num_ranks, longest), np.array([seed])
    # a rank takes MOST_CHUNKS at most
    assume((state.ints[num_ranks : state.ints[-1, COUNT], RANK] >= 0).all())
    capacity = int(
        state.ints[0, CAPACITY]
        + state.ints[chunks_of(state), LENGTH][
            state.ints[chunks_of(state), RANK] == 0
        ].sum()
    )
    begin_search(
        state,
        np.zeros(0, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks),
    )
    made = 0
    for number in range(60):
        rows = chunks_of(state)
        i = int(rows[number % len(rows)])
        start_move(state)
        before = state.ints.copy(), state.reals.copy()
        if (swap, relocate, shift)[number % 3](state, i, numbers):
            estimate(state)
            made += 1
            if made % 2:
                undo(state)
                assert (state.ints == before[0]).all()
                assert (state.reals == before[1]).all()
    check(state, lengths, capacity)


def test_short_documents_go_to_the_rank_of_least_time():
    """Of two ranks with as much capacity the first has more work already, and gets what the second has no capacity
    for."""
    prices, units = (
        np.array([1.0, 1.0, 1.0, 0.01, 0.0, 0.0, 0.3, 0.4]),
        np.array([128, 128, 128]),
    )
    state = make_state(
        4,
        np.full(2, 1e9),
        np.ones(2),
        np.cumsum(np.arange(9)).astype(np.float64),
        units,
        prices,
    )
    begin(state, np.full(2, 2048))
    home, heap = np.zeros(4, dtype=np.int64), np.zeros(2, dtype=np.int64)
    assign_short(
        state, np.array([1024, 1024, 256, 256]), home, heap, np.array([1000.0, 0.0])
    )
    assert home.tolist() == [1, 1, 0, 0]
