# SPDX-License-Identifier: BSD-3-Clause
"""Parts of the exchange: chunks that fit into buffers, and calls of bounded size.

That the tables built of them carry out plans is in test_validate.py and test_properties.py.
"""

from dataclasses import astuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA
from tests.lib.plans import random_layout, random_plan
from tests.lib.refusals import refusal
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout
from torchtitan_cad.planning.exchange.calls import (
    MAX_CALLS,
    MOST_CALLS,
    MOST_REPEATED,
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
from torchtitan_cad.planning.model.tasks import make_tasks
from torchtitan_cad.runtime.triton import TENSOR_BITS

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


def tables(seed):
    """The causal and the unmasked call of a rank, by a random plan."""
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, 2, max_length=60)
    plan = random_plan(rng, layout, LLAMA, aligned=False, split_kv=True)
    exchange = plan.exchange(0)
    calls = ((exchange.causal, True), (exchange.full, False))
    return [(table, is_causal) for table, is_causal in calls if table.num_tasks]


def pairs(calls):
    """[rows of queries, rows of keys]: how often they see each other."""
    counts = np.zeros((300, 300), dtype=int)
    for table, causal in calls:
        for i in range(table.num_tasks):
            queries = table.q_rows[table.cu_q[i] : table.cu_q[i + 1]]
            keys = table.kv_rows[table.cu_k[i] : table.cu_k[i + 1]]
            before = table.q_start[i] - table.kv_start[i] if causal else len(keys)
            assert not causal or before + len(queries) == len(keys)
            seen = np.tri(len(queries), len(keys), before, dtype=int)
            counts[np.ix_(queries, keys)] += seen
    return counts


def total_rows(calls):
    return sum(int(weighted_rows(table)[-1]) for table, _ in calls)


@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.booleans())
def test_calls_see_every_pair_once(seed, num_local, split_keys):
    whole = tables(seed)
    cut = bounded(whole, num_local, split_keys=split_keys)
    assert np.array_equal(pairs(cut), pairs(whole))
    for table, _ in cut:
        assert table.num_tasks
        assert table.max_q == np.diff(table.cu_q).max()
        assert table.max_k == np.diff(table.cu_k).max()
    assert total_rows(cut) <= (1 + MOST_REPEATED) * total_rows(whole)
    assert len(cut) <= MAX_CALLS < 1 << TENSOR_BITS


def test_a_task_of_many_keys_is_cut_along_them():
    """Its pieces are alike."""
    layout = TokenLayout.from_segments([[(0, 0, 4016)]])
    tasks = make_tasks([0], 4000, 4016, 0, 4016, server=0)
    plan = Plan.from_tasks(layout, LLAMA, PlannerConfig(), tasks)
    whole = [(plan.exchange(0).causal, True)]
    cut = bounded(whole, 10, split_keys=True)
    most = total_rows(whole) / MOST_CALLS
    assert max(total_rows([call]) for call in cut) <= 1.1 * most
