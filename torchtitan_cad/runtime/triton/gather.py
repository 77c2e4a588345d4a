# SPDX-License-Identifier: BSD-3-Clause
"""Gather rows of a row space (local rows, then received rows) without joining the two."""

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.rows import (
    Kernel,
    Words,
    addresses_of,
    last_from,
    padded,
    pointer,
    row_bytes_of,
    row_of,
    select,
    strides_of,
    with_dense_rows,
    words_of,
)

HEIGHT = tl.constexpr(8)
"""rows of a program"""
MOST_TENSORS = 4


def gather_rows(
    local: Sequence[Tensor], received: Sequence[Tensor], rows: Tensor | None, outs: list[Tensor] | None = None
) -> list[Tensor]:
    """Gather ``rows`` of the row spaces of several tensors, in one launch.

    Args:
        local: tensors [N, ...], the first N rows of each row space.
        received: per tensor, further rows [M, ...] of the same dtype and row shape, rows of any stride.
        rows: int64 [R]; None for all in order.
        outs: tensors for the results, [R, ...] with dense rows of any stride; by default new contiguous tensors.

    Returns:
        outs.
    """
    num_local = local[0].shape[0]
    num_rows = num_local + received[0].shape[0] if rows is None else len(rows)
    if outs is None:
        outs = [x.new_empty(num_rows, *x.shape[1:]) for x in local]
    if not num_rows or not sum(x.numel() for x in outs):
        return outs
    local, received = ([with_dense_rows(x) for x in part] for part in (local, received))
    addresses = addresses_of(local, received), addresses_of(received, local), addresses_of(outs, outs)
    strides = strides_of(local), strides_of(received), strides_of(outs)
    words = Words.of(row_bytes_of(outs), *addresses, *strides)
    *first_columns, num_columns = accumulate(words.columns, initial=0)
    places = [tuple(padded(numbers, MOST_TENSORS) for numbers in pair) for pair in zip(addresses, strides, strict=True)]
    _gather_rows.launch(
        (triton.cdiv(num_rows, HEIGHT.value), num_columns, 1),
        (),
        (
            *places,
            padded(first_columns, MOST_TENSORS),
            padded(words.sizes, MOST_TENSORS),
            0 if rows is None else rows.data_ptr(),
            num_rows,
            num_local,
        ),
        (words.dtype, words.is_aligned),
    )
    return outs


@Kernel
@triton.jit(do_not_specialize=["rows", "num_rows", "num_local"])
def _gather_rows(
    local,
    received,
    outs,
    first_columns,
    sizes,
    rows: tl.int64,
    num_rows: tl.int64,
    num_local: tl.int64,
    WORD: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    is_row = i < num_rows
    row = i
    if rows != 0:
        row = tl.load(pointer(rows, tl.int64, False) + i, mask=is_row, other=0)
    p = last_from(first_columns, tl.program_id(1))
    words, is_word = words_of(tl.program_id(1) - select(first_columns, p), select(sizes, p), IS_ALIGNED)
    mask = is_row[:, None] & is_word[None, :]
    mine, theirs = row_of(local, p, row), row_of(received, p, row - num_local)
    source = pointer(tl.where(row < num_local, mine, theirs), WORD, IS_ALIGNED)
    target = pointer(row_of(outs, p, i), WORD, IS_ALIGNED)
    values = tl.load(source[:, None] + words[None, :], mask=mask)
    tl.store(target[:, None] + words[None, :], values, mask=mask)
