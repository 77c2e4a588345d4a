# SPDX-License-Identifier: BSD-3-Clause
"""The search for homes: moves keep the figures up to date, and what is taken back leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planning.layouts import LLAMA
from torchtitan_cad.planning.placement.assign import assign_chunks, assign_short, by_work, cut
from torchtitan_cad.planning.placement.estimate import choose, estimate, read_by
from torchtitan_cad.planning.placement.moves import relocate, shift, swap
from torchtitan_cad.planning.placement.search import begin_search
from torchtitan_cad.planning.placement.table import (
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
    Table,
    begin,
    make_table,
    start_move,
    undo,
)


def table_of(lengths: list[int], num_ranks: int, longest: int) -> Table:
    """A table in which documents of so many cells are cut and redistributed to ranks with half more capacity than they
    fill."""
    prefix = np.cumsum(np.arange(max(lengths) + 1)).astype(np.float64)
    mean = sum(prefix[length] for length in lengths) / num_ranks
    limit, speed = np.full(num_ranks, 1.02 * mean), np.ones(num_ranks)
    prices = np.array([LLAMA.query_bytes, LLAMA.kv_bytes, 1 / 128**2, 0.0, 0.0, 0.0, 0.3, 0.4])
    table = make_table(3 * sum(lengths) + num_ranks, limit, speed, prefix, np.array([128, 128, 256]), prices)
    begin(table, np.full(num_ranks, 128 * (3 * sum(lengths) // (2 * num_ranks) + 1)))
    for doc, length in enumerate(lengths):
        cut(table, doc, 128 * length, mean, 256, 128 * longest)
    heap, time = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks)
    assign_chunks(table, by_work(table), heap, time)
    return table


def chunks_of(table: Table) -> np.ndarray:
    """Rows of the chunks that have a rank, by document and start."""
    first = len(table.limit)
    rows = np.arange(first, table.ints[-1, COUNT])
    rows = rows[table.ints[rows, RANK] >= 0]
    return rows[np.lexsort((table.ints[rows, START], table.ints[rows, CHUNK_DOC]))]


def check(table: Table, lengths: list[int], capacity: int) -> None:
    """Chunks cover the documents, and all figures are those of the chunks."""
    rows, num_ranks = chunks_of(table), len(table.limit)
    ints, rank = table.ints[rows], table.ints[rows, RANK]
    for doc, length in enumerate(lengths):
        mine = ints[ints[:, CHUNK_DOC] == doc]
        assert mine[:, START].tolist() == [0, *np.cumsum(mine[:, LENGTH])[:-1]]
        assert mine[:, LENGTH].sum() == 128 * length
    assert (table.ints[:num_ranks, CAPACITY] == capacity - np.bincount(rank, ints[:, LENGTH], num_ranks)).all()
    assert table.ints[:num_ranks, COUNT].tolist() == np.bincount(rank, minlength=num_ranks).tolist()
    assert table.reals[:num_ranks, LOAD] == pytest.approx(np.bincount(rank, table.reals[rows, WORK], num_ranks))
    found, before = table.reals.copy(), estimate(table)
    start_move(table)
    table.reals[:num_ranks, KEYS_IN : KEYS_SHARED + 1] = 0.0
    for row in rows.tolist():
        read_by(table, row, 1.0, *table.reals[row, 1:3])
    for each in range(num_ranks):
        choose(table, each, -1, -1)
    for column in (KEYS_IN, KEYS_OUT, KEYS_SHARED, QUERIES_OUT):
        assert table.reals[:num_ranks, column] == pytest.approx(found[:num_ranks, column], rel=1e-9, abs=1.0)
    assert estimate(table) == pytest.approx(before, rel=1e-6, abs=1e-3)  # bytes


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(4, 40), min_size=2, max_size=4),
    num_ranks=st.integers(2, 5),
    longest=st.integers(4, 20),
    seed=st.integers(0, 2**20),
)
def test_moves_keep_tokens_loads_and_figures(lengths: list[int], num_ranks: int, longest: int, seed: int) -> None:
    table, numbers = table_of(lengths, num_ranks, longest), np.array([seed])
    assume((table.ints[num_ranks : table.ints[-1, COUNT], RANK] >= 0).all())  # a rank takes MOST_CHUNKS at most
    capacity = int(
        table.ints[0, CAPACITY] + table.ints[chunks_of(table), LENGTH][table.ints[chunks_of(table), RANK] == 0].sum()
    )
    begin_search(table, np.zeros(0, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks))
    made = 0
    for number in range(60):
        rows = chunks_of(table)
        i = int(rows[number % len(rows)])
        start_move(table)
        before = table.ints.copy(), table.reals.copy()
        if (swap, relocate, shift)[number % 3](table, i, numbers):
            estimate(table)
            made += 1
            if made % 2:
                undo(table)
                assert (table.ints == before[0]).all()
                assert (table.reals == before[1]).all()
    check(table, lengths, capacity)


def test_short_documents_go_to_the_rank_of_least_time() -> None:
    """Of two ranks with as much capacity the first has more work already, and gets what the second has no capacity
    for."""
    prices, units = np.array([1.0, 1.0, 1.0, 0.01, 0.0, 0.0, 0.3, 0.4]), np.array([128, 128, 128])
    table = make_table(4, np.full(2, 1e9), np.ones(2), np.cumsum(np.arange(9)).astype(np.float64), units, prices)
    begin(table, np.full(2, 2048))
    home, heap = np.zeros(4, dtype=np.int64), np.zeros(2, dtype=np.int64)
    assign_short(table, np.array([1024, 1024, 256, 256]), home, heap, np.array([1000.0, 0.0]))
    assert home.tolist() == [1, 1, 0, 0]
