# SPDX-License-Identifier: BSD-3-Clause
"""Gather rows of a row space (local rows, then received rows) without joining the two."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.rows import (
    Kernel,
    Numbers,
    Words,
    addresses_of,
    divided,
    last_from,
    padded,
    pointer,
    row_of,
    select,
    strides_of,
    with_dense_rows,
    words_of,
)

HEIGHT = tl.constexpr(8)
"""rows of a program"""
MOST_TENSORS = 4
"""tensors whose rows are gathered in a launch"""


class GatheredRows:
    """The row spaces of several tensors, from which every kernel call of a layer gathers its rows.

    Args:
        local: tensors [N, ...], the first N rows of each row space.
        received: per tensor, further rows [M, ...] of the same dtype and row shape, dense rows of any stride.
    """

    def __init__(self, local: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self._local = [with_dense_rows(x) for x in local]
        self._received = received
        local_addresses = addresses_of(self._local)
        received_addresses = addresses_of(received)
        self._addresses = (
            padded(local_addresses, MOST_TENSORS),
            padded(received_addresses, MOST_TENSORS),
        )
        self._alignment = math.gcd(16, *local_addresses, *received_addresses)
        self._strides = strides_of([*self._local, *received])
        self._row_bytes = [x.shape[1:].numel() * x.itemsize for x in local]

    def gather(
        self, rows: Tensor | None, outs: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Gather rows of all row spaces, in one launch.

        Args:
            rows: int64 [R]; None for all in order.
            outs: tensors for the results, [R, ...] with dense rows of any stride; by default new contiguous tensors.

        Returns:
            outs.
        """
        num_local = self._local[0].shape[0]
        num_rows = num_local + self._received[0].shape[0]
        row_table = 0
        if rows is not None:
            num_rows = rows.shape[0]
            row_table = rows.data_ptr()
        if outs is None:
            outs = [x.new_empty(num_rows, *x.shape[1:]) for x in self._local]
        if not num_rows or not any(self._row_bytes):
            return outs
        out_addresses = [x.data_ptr() for x in outs]
        cut = _cut(
            tuple(self._row_bytes),
            (*self._strides, *strides_of(outs)),
            math.gcd(self._alignment, *out_addresses),
        )
        addresses = *self._addresses, padded(out_addresses, MOST_TENSORS)
        places = zip(addresses, cut.strides, strict=True)
        grid = divided(num_rows, HEIGHT.value), cut.num_columns, 1
        _gather_rows.launch(
            grid,
            (),
            (*places, *cut.tables, row_table, num_rows, num_local),
            (cut.words.dtype, cut.words.is_aligned),
        )
        return outs


class _Cut(NamedTuple):
    """Rows cut into columns of words.

    Attributes:
        strides: of local, received and gathered rows, per tensor, bytes from one row to the next.
        tables: per tensor, its first column, and words of a row.
    """

    num_columns: int
    words: Words
    strides: tuple[Numbers, ...]
    tables: tuple[Numbers, Numbers]


@lru_cache(maxsize=1024)
def _cut(row_bytes: Numbers, strides: Numbers, alignment: int) -> _Cut:
    """Cut what is the same in every layer, given the ``alignment`` of the tensors."""
    words = Words.of(row_bytes, math.gcd(alignment, *strides))
    count = len(row_bytes)
    *first_columns, num_columns = accumulate(words.columns, initial=0)
    of_parts = [
        padded(strides[begin : begin + count], MOST_TENSORS)
        for begin in range(0, 3 * count, count)
    ]
    tables = padded(first_columns, MOST_TENSORS), padded(words.sizes, MOST_TENSORS)
    return _Cut(num_columns, words, tuple(of_parts), tables)


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
    words, is_word = words_of(
        tl.program_id(1) - select(first_columns, p), select(sizes, p), IS_ALIGNED
    )
    mask = is_row[:, None] & is_word[None, :]
    local_row = row_of(local, p, row)
    received_row = row_of(received, p, row - num_local)
    source = pointer(
        tl.where(row < num_local, local_row, received_row), WORD, IS_ALIGNED
    )
    target = pointer(row_of(outs, p, i), WORD, IS_ALIGNED)
    values = tl.load(source[:, None] + words[None, :], mask=mask)
    tl.store(target[:, None] + words[None, :], values, mask=mask)
