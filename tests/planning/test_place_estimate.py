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
    by_work,
    cut,
)
from torchtitan_cad.planning.placement.estimate import choose, estimate, read_by
from torchtitan_cad.planning.placement.moves import relocate, shift, swap
from torchtitan_cad.planning.placement.search import begin_search
from torchtitan_cad.planning.placement.state import (
    CHUNK_DOC,
    COUNT,
    KEYS_IN,
    KEYS_SHARED,
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
    cells = sum(lengths)
    prefix = np.cumsum(np.arange(max(lengths) + 1)).astype(np.float64)
    mean = prefix[lengths].sum() / num_ranks
    bytes_and_time = [LLAMA.query_bytes, LLAMA.kv_bytes, 1 / 128**2]
    state = make_state(
        3 * cells + num_ranks,
        limit=np.full(num_ranks, 1.02 * mean),
        prefix=prefix,
        sizes=np.array([128, 128, 256]),
        prices=np.array([*bytes_and_time, 0.0, 0.0, 0.0, 0.3, 0.4]),
    )
    begin(state, np.full(num_ranks, 128 * (3 * cells // (2 * num_ranks) + 1)))
    for doc, length in enumerate(lengths):
        cut(state, doc, 128 * length, mean, 256, 128 * longest)
    heap = np.zeros(num_ranks, dtype=np.int64)
    assign_chunks(state, by_work(state), heap, np.zeros(num_ranks))
    return state


def chunks_of(state: State) -> np.ndarray:
    """Rows of the chunks that have a rank, by document and start."""
    first = len(state.limit)
    rows = np.arange(first, state.ints[-1, COUNT])
    rows = rows[state.ints[rows, RANK] >= 0]
    return rows[np.lexsort((state.ints[rows, START], state.ints[rows, CHUNK_DOC]))]


def check(state: State) -> None:
    """All figures are those of the chunks; that these hold all tokens is in test_place.py."""
    rows = chunks_of(state)
    num_ranks = len(state.limit)
    work = np.bincount(state.ints[rows, RANK], state.reals[rows, WORK], num_ranks)
    assert state.reals[:num_ranks, LOAD] == pytest.approx(work)

    figures = state.reals[:num_ranks, KEYS_IN : QUERIES_OUT + 1].copy()
    num_bytes = estimate(state)
    start_move(state)
    state.reals[:num_ranks, KEYS_IN : KEYS_SHARED + 1] = 0.0
    for row in rows.tolist():
        read_by(state, row, 1.0, *state.reals[row, 1:3])
    for number in range(num_ranks):
        choose(state, number, -1, -1)
    again = state.reals[:num_ranks, KEYS_IN : QUERIES_OUT + 1]
    assert again == pytest.approx(figures, rel=1e-9, abs=1.0)
    assert estimate(state) == pytest.approx(num_bytes, rel=1e-6, abs=1e-3)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(4, 40), min_size=2, max_size=4),
    num_ranks=st.integers(2, 5),
    longest=st.integers(4, 20),
    seed=st.integers(0, 2**20),
)
def test_moves_keep_loads_and_figures(lengths, num_ranks, longest, seed):
    state = state_of(lengths, num_ranks, longest)
    chunks = state.ints[num_ranks : state.ints[-1, COUNT]]
    assume((chunks[:, RANK] >= 0).all())  # a rank takes MOST_CHUNKS at most
    nothing = np.zeros(0, dtype=np.int64)
    heap = np.zeros(num_ranks, dtype=np.int64)
    begin_search(state, nothing, heap, np.zeros(num_ranks))
    numbers = np.array([seed])
    moves_made = 0
    for number in range(60):
        rows = chunks_of(state)
        move = (swap, relocate, shift)[number % 3]
        start_move(state)
        ints_before = state.ints.copy()
        reals_before = state.reals.copy()
        if move(state, int(rows[number % len(rows)]), numbers):
            estimate(state)
            moves_made += 1
            if moves_made % 2:
                undo(state)
                assert (state.ints == ints_before).all()
                assert (state.reals == reals_before).all()
    check(state)
