# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the exchange: the order of ranks, chunks that fit into buffers, and calls of bounded size.

That the tables built of them carry out plans is in test_validate.py and test_properties.py.
"""

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA
from tests.lib.refusals import refusal
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout
from torchtitan_cad.planning.exchange.calls import (
    MAX_CALLS,
    MOST_CALLS,
    MOST_REPEATED,
    Calls,
    bounded,
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
from torchtitan_cad.planning.model.tasks import make_tasks
from torchtitan_cad.runtime.triton import TENSOR_BITS


@pytest.mark.parametrize("num_ranks", [1, 7, 2**16, 2**16 + 1, 10**6])
def test_order_by_rank_is_stable(num_ranks):
    rank = np.random.default_rng(0).integers(0, num_ranks, size=500)
    rank[:3] = num_ranks - 1
    order = order_by_rank(rank, num_ranks)
    assert order.tolist() == np.argsort(rank, kind="stable").tolist()
    offsets = offsets_by_rank(rank, num_ranks)
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
    all_rows = astuple(most)
    all_chunks = astuple(most.chunks(row_bytes, buffer_bytes))
    to_servers = (row_bytes.queries_out, row_bytes.keys)
    to_homes = (row_bytes.queries_home, row_bytes.key_gradients)
    for first, widths in ((0, to_servers), (2, to_homes)):
        kinds = list(zip(all_rows[first:], all_chunks[first:], widths, strict=False))
        message = sum(aligned(rows * width) for rows, _, width in kinds)
        is_together = message <= 2 * buffer_bytes
        for rows, chunks, width in kinds:
            assert sum(chunks) == rows
            assert max(chunks) - min(chunks) <= 1
            if is_together:
                assert len(chunks) == 1
            else:
                fitting = buffer_bytes // width
                assert max(chunks) <= fitting
                assert (len(chunks) - 1) * fitting < max(1, rows)


def test_a_row_larger_than_a_buffer_travels_alone():
    chunks = MostRows(3, 0, 0, 0).chunks(RowBytes.of(LLAMA, keep=False), 1)
    assert chunks.queries_out == (1, 1, 1)


def test_all_buffers_together_are_what_is_asked_for():
    default = int(RECEIVE_BUFFER_GB * 5e8) // 512 * 512
    assert buffer_bytes() == buffer_bytes(nano_batches=2) == default
    assert buffer_bytes(2.0) == 10**9 // 512 * 512
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
    """The causal and the unmasked call of a rank that has one document for each task."""
    queries, before, causal = np.array(tasks).T
    before = np.maximum(before, 1)
    numbers = np.arange(len(tasks))
    end = numbers + before + queries  # tasks do not begin with their documents
    documents = [(doc, 0, length) for doc, length in enumerate(end.tolist())]
    plan = Plan.from_tasks(
        TokenLayout.from_segments([documents]),
        LLAMA,
        PlannerConfig(),
        make_tasks(
            numbers,
            q_start=numbers + before,
            q_end=end,
            kv_start=numbers,
            kv_end=np.where(causal, end, numbers + before),
            server=0,
        ),
    )
    exchange = plan.exchange(0)
    calls = ((exchange.causal, True), (exchange.full, False))
    return [(table, is_causal) for table, is_causal in calls if table.num_tasks]


def pairs(calls: Calls) -> list[tuple[int, int]]:
    """Rows of every query and key that see each other, sorted."""
    seen = []
    for table, causal in calls:
        for i in range(table.num_tasks):
            queries = table.q_rows[table.cu_q[i] : table.cu_q[i + 1]].tolist()
            keys = table.kv_rows[table.cu_k[i] : table.cu_k[i + 1]].tolist()
            before = int(table.q_start[i] - table.kv_start[i])
            assert not causal or before + len(queries) == len(keys)
            for number, query in enumerate(queries):
                end = before + number + 1 if causal else len(keys)
                seen += [(query, key) for key in keys[:end]]
    return sorted(seen)


def total_rows(calls: Calls) -> int:
    return sum(int(weighted_rows(table)[-1]) for table, _ in calls)


@given(TASKS, st.integers(1, 100), st.booleans())
def test_calls_see_every_pair_once(tasks, num_local, split_keys):
    whole = tables(tasks)
    cut = bounded(whole, num_local, split_keys=split_keys)
    assert pairs(cut) == pairs(whole)
    for table, _ in cut:
        assert table.num_tasks
        assert table.max_q == np.diff(table.cu_q).max()
        assert table.max_k == np.diff(table.cu_k).max()
    assert total_rows(cut) <= (1 + MOST_REPEATED) * total_rows(whole)
    assert len(cut) <= MAX_CALLS < 1 << TENSOR_BITS
    if not split_keys:
        assert sum(table.num_tasks for table, _ in cut) == len(tasks)


@pytest.mark.parametrize("causal", [True, False])
def test_a_task_of_many_keys_is_cut_along_them(causal):
    """One task has nine tenths of the rows; its pieces are alike."""
    whole = tables([(16, 4000, causal), (10, 300, False)])
    kept = bounded(whole, 10, split_keys=False)
    cut = bounded(whole, 10, split_keys=True)
    most = total_rows(whole) / MOST_CALLS
    assert max(total_rows([call]) for call in kept) > 5 * most
    assert max(total_rows([call]) for call in cut) <= 1.1 * most
