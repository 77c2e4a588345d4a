from dataclasses import astuple

import pytest
import torch

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import RowBytes
from torchtitan_cad.runtime.kernels.base import compute_dtype
from torchtitan_cad.runtime.packing import RowFormat, hide_storage


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_round_trip_of_mixed_dtypes_and_odd_sizes(num_rows: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(7, 3, 5).to(dtype), torch.randn(7, 3), torch.randn(7, 1, 1).to(dtype)]
    rows = torch.tensor([6, 0, 3, 3, 2])[:num_rows]
    row_format = RowFormat(parts)
    message = row_format.pack(parts, rows)
    assert message.dtype == torch.uint8
    assert message.shape == (num_rows, row_format.row_bytes)
    for part, back in zip(parts, row_format.unpack(message), strict=True):
        assert back.dtype == part.dtype
        assert torch.equal(back, part[rows])


def test_rows_cost_their_bytes_and_at_most_alignment() -> None:
    parts = [torch.zeros(4, 3, 5, dtype=torch.bfloat16), torch.zeros(4, 3)]
    payload = 3 * 5 * 2 + 3 * 4
    assert payload <= RowFormat(parts).row_bytes < payload + 16 * len(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (3, 1, 5)])
def test_planned_bytes_are_those_of_the_engines_messages(heads: int, kv_heads: int, head_dim: int, dtype) -> None:
    q, k = torch.zeros(1, heads, head_dim, dtype=dtype), torch.zeros(1, kv_heads, head_dim, dtype=dtype)
    statistic = torch.zeros(1, heads, dtype=compute_dtype(dtype))
    shape = AttentionShape(heads, kv_heads, head_dim, dtype.itemsize)
    for keep, backward in ((False, [q, q, statistic, statistic]), (True, [q, statistic, statistic])):
        messages = [[q], [q, statistic], backward, [q], [k, k], [k, k]]
        assert astuple(RowBytes.of(shape, keep=keep)) == tuple(RowFormat(parts).row_bytes for parts in messages)


def test_a_hidden_message_comes_back_whole() -> None:
    message = torch.randint(0, 255, (5, 32), dtype=torch.uint8)
    hidden = hide_storage(message)
    assert hidden.shape == (0,)
    want = message.clone()
    del message
    (rows,) = RowFormat([torch.zeros(0, 32, dtype=torch.uint8)]).reveal(hidden, 5)
    assert torch.equal(rows, want)


def test_a_copied_view_is_an_error_that_names_the_setting() -> None:
    message = torch.zeros(5, 32, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"cad\.backward = 'keep'.*set cad\.backward = 'resend'"):
        RowFormat([message]).reveal(hide_storage(message).clone(), 5)
