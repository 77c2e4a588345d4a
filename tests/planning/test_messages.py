"""Trips in which results return, and the buffers that they need."""

from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plans import random_layout, random_plan
from torchtitan_cad.planning import AttentionShape, TokenLayout, make_plan
from torchtitan_cad.planning.exchange.messages import MIN_TRIP_BYTES, MostRows, RowBytes

LLAMA = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)
ROWS = st.integers(0, 10**6)


@given(st.builds(MostRows, ROWS, ROWS, ROWS, ROWS), st.booleans())
def test_trips_bring_all_rows_and_need_no_larger_buffers(most: MostRows, keep: bool) -> None:
    """Larger than what servers receive, or than what always returns at once."""
    row_bytes = RowBytes.of(LLAMA, keep=keep)
    received = row_bytes.received(most.received_queries, most.received_keys)
    rooms = [max(num_bytes, MIN_TRIP_BYTES) for num_bytes in received]
    both = most.trips(row_bytes)
    assert all(x <= y <= room for x, y, room in zip(received, most.slot_bytes(row_bytes), rooms, strict=True))
    assert both[0].slots[0] == 0
    assert both[1].slots[0] != both[0].slots[-1]
    for sent, trips, num_bytes in zip(
        (most.sent_queries, most.sent_keys),
        both,
        (row_bytes.query_results, row_bytes.key_gradients),
        strict=True,
    ):
        assert sum(trips.rows) == sent
        most_each = [rooms[slot] // num_bytes for slot in trips.slots]
        assert all(rows <= bring for rows, bring in zip(trips.rows, most_each, strict=True))
        assert trips.count == 1 or sum(most_each[:-1]) < sent


def test_a_document_over_many_ranks_returns_in_trips_and_ordinary_plans_at_once() -> None:
    row_bytes = RowBytes.of(LLAMA, keep=False)
    long = make_plan(TokenLayout.from_segments([[(0, 4096 * r, 4096)] for r in range(64)]), LLAMA)
    assert [trips.count for trips in long.most_rows.trips(row_bytes)] == [1, 2]
    short = make_plan(TokenLayout.from_segments([[(0, 0, 32768)], *([(r, 0, 32768)] for r in range(1, 8))]), LLAMA)
    assert [trips.count for trips in short.most_rows.trips(row_bytes)] == [1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_most_rows_are_those_of_the_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, 4)
    plan = random_plan(rng, layout, LLAMA, aligned=False, split_kv=True)
    tables = [plan.exchange(rank) for rank in range(4)]
    totals = [
        max(int(counts(getattr(table, kind)).sum()) for table in tables)
        for counts in (attrgetter("recv_counts"), attrgetter("send_counts"))
        for kind in ("queries", "keys")
    ]
    assert plan.most_rows == MostRows(*totals) == tables[2].most
