# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the exchange: intervals against sets of numbers, chunks that fit into buffers, and calls of bounded size.

That the tables built of them carry out plans is in test_validate.py and test_properties.py.
"""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA
from tests.lib.refusals import refusal
from torchtitan_cad.planning.exchange.calls import (
    CUT_AT,
    MAX_CALLS,
    MOST_CALLS,
    MOST_REPEATED,
    MOST_UNEVEN,
    Calls,
    bounded,
    halves,
    weighted_rows,
)
from torchtitan_cad.planning.exchange.messages import (
    RECEIVE_BUFFER_GB,
    MostRows,
    RowBytes,
    aligned,
    buffer_bytes,
)
from torchtitan_cad.planning.exchange.needs import offsets_by_rank, order_by_rank
from torchtitan_cad.planning.exchange.tables import CallTable
from torchtitan_cad.planning.intervals import (
    concat_ranges,
    exclusive_cumsum,
    split_at,
    sum_by_index,
    union_by_group,
)
from torchtitan_cad.runtime.triton import TENSOR_BITS

intervals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 8)), max_size=12
)


@given(rows=intervals, cuts=st.sets(st.integers(1, 40)))
def test_interval_arithmetic(rows, cuts):
    group, start, length = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    want = {(g, x) for g, s, n in rows for x in range(s, s + n)}

    group_, start_, end_ = union_by_group(group, start, start + length)
    found = [
        (g, x)
        for g, s, e in zip(group_, start_, end_, strict=True)
        for x in range(s, e)
    ]
    assert found == sorted(want)

    grid = np.array(sorted({0, *cuts}))
    source, cell, a, b = split_at(start_, end_, grid)
    assert [
        (group_[i], x)
        for i, s, e in zip(source, a, b, strict=True)
        for x in range(s, e)
    ] == found
    assert (grid[cell] <= a).all()
    assert (a < b).all()
    assert (b <= np.append(grid[1:], 10**6)[cell]).all()

    assert concat_ranges(start, length).tolist() == [
        x for _, s, n in rows for x in range(s, s + n)
    ]
    sums = [sum(n for g, _, n in rows if g == i) for i in range(4)]
    assert sum_by_index(group, length, 4).tolist() == sums


@pytest.mark.parametrize("num_ranks", [1, 7, 2**16, 2**16 + 1, 10**6])
def test_order_by_rank_is_stable(num_ranks):
    rank = np.random.default_rng(0).integers(0, num_ranks, size=500)
    rank[:3] = num_ranks - 1
    order, offsets = order_by_rank(rank, num_ranks), offsets_by_rank(rank, num_ranks)
    assert order.tolist() == sorted(range(500), key=lambda i: (rank[i], i))
    assert len(offsets) == num_ranks + 1
    assert (rank[order[offsets[num_ranks - 1] :]] == num_ranks - 1).all()


ROWS = st.integers(0, 10**6)


@settings(max_examples=settings.default.max_examples // 3)
@given(
    st.builds(MostRows, ROWS, ROWS, ROWS, ROWS), st.booleans(), st.integers(1, 10**4)
)
def test_chunks_bring_all_rows_and_fit_into_buffers(most, keep, buffer_rows):
    """Both kinds travel at once if they fit; else no fewer chunks would do, and all are full to a row."""
    row_bytes = RowBytes.of(LLAMA, keep=keep)
    buffer_bytes = buffer_rows * row_bytes.queries_out
    widths = (
        row_bytes.queries_out,
        row_bytes.keys,
        row_bytes.queries_home,
        row_bytes.key_gradients,
    )
    each = list(
        zip(
            astuple(most),
            astuple(most.chunks(row_bytes, buffer_bytes)),
            widths,
            strict=True,
        )
    )
    for direction in each[:2], each[2:]:
        together = (
            sum(aligned(rows * width) for rows, _, width in direction)
            <= 2 * buffer_bytes
        )
        for rows, chunks, width in direction:
            assert sum(chunks) == rows
            assert together or max(chunks) * width <= buffer_bytes
            assert (
                len(chunks) == 1
                if together
                else (len(chunks) - 1) * (buffer_bytes // width) < max(1, rows)
            )
            assert max(chunks) - min(chunks) <= 1


def test_a_row_larger_than_a_buffer_travels_alone():
    assert MostRows(3, 0, 0, 0).chunks(
        RowBytes.of(LLAMA, keep=False), 1
    ).queries_out == (1, 1, 1)


def test_all_buffers_together_are_what_is_asked_for():
    assert buffer_bytes(2.0) == 10**9 // 512 * 512
    assert (
        buffer_bytes()
        == buffer_bytes(nano_batches=2)
        == int(RECEIVE_BUFFER_GB * 5e8) // 512 * 512
    )
    assert buffer_bytes(2.0, nano_batches=2) == 5 * 10**8 // 512 * 512
    assert buffer_bytes(1e-9) == 512
    with refusal("receive_buffer_gb", "0"):
        buffer_bytes(0)


TASKS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 400), st.booleans()),
    min_size=1,
    max_size=8,
)
"""Queries, keys before them, and whether the task is causal."""


def tables(tasks: list[tuple[int, int, bool]]) -> Calls:
    """Causal and unmasked tasks, one document each: the row of a query or key is its place among all tasks'."""
    calls, base = [], 0
    for causal in (True, False):
        mine = [
            (queries, max(before, 1))
            for queries, before, is_causal in tasks
            if is_causal is causal
        ]
        if not mine:
            continue
        q_length = np.array([queries for queries, _ in mine])
        k_length = np.array([before + queries * causal for queries, before in mine])
        cu_q, cu_k = exclusive_cumsum(q_length), exclusive_cumsum(k_length)
        first = 1000 * np.arange(len(mine))
        rows = [base + np.arange(cu[-1]) for cu in (cu_q, cu_k)]
        base += int(max(cu_q[-1], cu_k[-1]))
        q_start = first + k_length - q_length * causal
        cu = (cu_q.astype(np.int32), cu_k.astype(np.int32))
        calls.append(
            (
                CallTable(
                    *rows, *cu, int(q_length.max()), int(k_length.max()), q_start, first
                ),
                causal,
            )
        )
    return calls


def pairs(calls: Calls, window: int | None = None) -> list[tuple[int, int]]:
    """Rows of every query and key that see each other, sorted."""
    seen = []
    for table, causal in calls:
        for i in range(table.num_tasks):
            for j, q_row in enumerate(
                table.q_rows[table.cu_q[i] : table.cu_q[i + 1]].tolist()
            ):
                keys = table.kv_rows[table.cu_k[i] : table.cu_k[i + 1]].tolist()
                visible = (
                    int(table.q_start[i] + j - table.kv_start[i] + 1)
                    if causal
                    else len(keys)
                )
                assert not causal or table.q_start[i] + np.diff(table.cu_q)[
                    i
                ] == table.kv_start[i] + len(keys)
                seen += [
                    (q_row, k_row)
                    for k_row in keys[
                        0 if window is None else max(0, visible - window) : visible
                    ]
                ]
    return sorted(seen)


def total_rows(calls: Calls) -> int:
    return sum(int(weighted_rows(table)[-1]) for table, _ in calls)


@given(TASKS, st.integers(1, 100), st.booleans(), st.booleans())
def test_calls_see_every_pair_once(tasks, num_local, split_keys, two_rounds):
    whole = tables(tasks)
    rounds = halves(whole) if two_rounds else [whole]
    cut = [
        call
        for calls in bounded(rounds, num_local, split_keys=split_keys)
        for call in calls
    ]
    assert pairs(cut) == pairs(whole)
    for table, _ in cut:
        assert table.num_tasks
        assert table.max_q == np.diff(table.cu_q).max()
        assert table.max_k == np.diff(table.cu_k).max()
    assert total_rows(cut) <= (1 + MOST_REPEATED) ** (1 + two_rounds) * total_rows(
        whole
    )
    assert len(cut) <= MAX_CALLS < 1 << TENSOR_BITS
    if not split_keys:
        assert sum(table.num_tasks for table, _ in cut) == len(tasks)


@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 30)), min_size=1, max_size=4
    ),
    st.integers(1, 40),
)
def test_halves_of_windows_see_every_pair_once_and_few_keys_twice(tasks, window):
    """Tasks have no keys before their first window."""
    whole = tables(
        [(queries, min(before, window - 1), True) for queries, before in tasks]
    )
    first, second = halves(whole, window)
    both = first + second
    assert pairs(both, window) == pairs(whole, window)
    assert (
        sum(int(table.cu_k[-1]) for table, _ in both)
        <= sum(int(table.cu_k[-1]) for table, _ in whole) + window - 1
    )
    most, least = sorted(
        (len(pairs(half, window)) for half in (first, second)), reverse=True
    )
    assert most - least <= max(MOST_UNEVEN * (most + least), CUT_AT * window)


@pytest.mark.parametrize(
    ("tasks", "even"),
    [
        ([(768, 0, True), (128, 0, True)], True),  # a document and little else
        ([(100, 300, True), (1024, 200, False), (200, 10, False)], True),
        ([(300, 8000, True)], False),  # its keys would be read twice
        ([(120, 0, True)], False),  # smaller than a tile
        ([(200, 100, False), (220, 100, False)], True),
    ],
)
def test_halves_are_even_where_a_task_can_be_cut(tasks, even):
    whole = tables(tasks)
    first, second = halves(whole)
    assert pairs(first + second) == pairs(whole)
    share = len(pairs(first)) / len(pairs(whole))
    assert (0.375 <= share <= 0.625) == even
    assert len(first) <= len(whole), "no calls are added"
    assert len(second) <= len(whole)


@pytest.mark.parametrize("causal", [True, False])
def test_a_task_of_many_keys_is_cut_along_them(causal):
    """One task has nine tenths of the rows; its pieces are alike."""
    whole = tables([(16, 4000, causal), (10, 300, False)])
    (kept,) = bounded([whole], 10, split_keys=False)
    (cut,) = bounded([whole], 10, split_keys=True)
    most = total_rows(whole) / MOST_CALLS
    assert max(map(total_rows, ([call] for call in kept))) > 5 * most
    assert max(map(total_rows, ([call] for call in cut))) <= 1.1 * most
    assert pairs(cut) == pairs(whole)
