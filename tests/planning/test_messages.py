"""Trips in which rows travel, and the buffers that they fit into."""

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.layouts import LLAMA
from torchtitan_cad.planning.exchange.messages import MostRows, RowBytes, buffer_bytes

ROWS = st.integers(0, 10**6)


@given(st.builds(MostRows, ROWS, ROWS, ROWS, ROWS), st.booleans(), st.integers(1, 10**4))
def test_trips_bring_all_rows_and_fit_into_buffers(most: MostRows, keep: bool, buffer_rows: int) -> None:
    """No fewer trips would do, and none is fuller than another by more than a row."""
    row_bytes = RowBytes.of(LLAMA, keep=keep)
    buffer_bytes = buffer_rows * row_bytes.queries_out
    widths = row_bytes.queries_out, row_bytes.keys, row_bytes.queries_home, row_bytes.key_gradients
    for rows, trips, width in zip(astuple(most), astuple(most.trips(row_bytes, buffer_bytes)), widths, strict=True):
        assert sum(trips) == rows
        assert max(trips) * width <= buffer_bytes
        assert (len(trips) - 1) * (buffer_bytes // width) < max(1, rows)
        assert max(trips) - min(trips) <= 1
        assert len(trips) >= 1


def test_a_row_larger_than_a_buffer_travels_alone() -> None:
    assert MostRows(3, 0, 0, 0).trips(RowBytes.of(LLAMA, keep=False), 1).queries_out == (1, 1, 1)


def test_all_buffers_together_are_what_is_asked_for() -> None:
    assert buffer_bytes(2.0) == 10**9 // 512 * 512
    assert buffer_bytes() == buffer_bytes(nano_batches=2) == 5 * 10**8 // 512 * 512
    assert buffer_bytes(2.0, nano_batches=2) == 5 * 10**8 // 512 * 512
    assert buffer_bytes(1e-9) == 512
    with pytest.raises(ValueError, match="receive_buffer_gb = 0: set a positive number"):
        buffer_bytes(0)
