"""Gathers rows of a row space, local rows and then received ones, without joining the two."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.rows import column_blocks, with_dense_rows

HEIGHT = 16
"""Rows of a program."""
WIDTH = 256
"""Most elements that it takes of each."""


def gather_rows(local: Sequence[Tensor], received: Sequence[Tensor], rows: Tensor | None) -> list[Tensor]:
    """Gather, of several tensors, row ``i`` of their row space for every i of ``rows``, in one launch.

    Args:
        local: tensors [N, ...]; the first N rows of the row space.
        received: of each its further rows [M, ...], of the same dtype and row shape, rows of any stride.
        rows: int64 [R]; None for all in order.

    Returns:
        New contiguous tensors [R, ...].
    """
    num_local = local[0].shape[0]
    num_rows = num_local + received[0].shape[0] if rows is None else len(rows)
    outs = [x.new_empty(num_rows, *x.shape[1:]) for x in local]
    if not num_rows:
        return outs
    sizes = tuple(out[0].numel() for out in outs)
    widths, first = column_blocks(sizes, WIDTH)
    local, received = ([with_dense_rows(x) for x in part] for part in (local, received))
    _gather_rows[(triton.cdiv(num_rows, HEIGHT), first[-1])](
        tuple(local),
        tuple(received),
        tuple(outs),
        outs[0] if rows is None else rows,
        num_rows,
        num_local,
        tuple(x.stride(0) for x in local),
        tuple(x.stride(0) for x in received),
        SIZES=sizes,
        WIDTHS=widths,
        FIRST=first,
        HEIGHT=HEIGHT,
        HAS_ROWS=rows is not None,
    )
    return outs


@triton.jit(do_not_specialize=["num_rows", "num_local"])
def _gather_rows(
    local,
    received,
    outs,
    rows,
    num_rows,
    num_local,
    local_strides,
    received_strides,
    SIZES: tl.constexpr,
    WIDTHS: tl.constexpr,
    FIRST: tl.constexpr,
    HEIGHT: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    is_row = i < num_rows
    row = tl.load(rows + i, mask=is_row, other=0) if HAS_ROWS else i
    is_local = row < num_local
    column = tl.program_id(1)
    for p in tl.static_range(len(outs)):
        if (column >= FIRST[p]) & (column < FIRST[p + 1]):
            inside = (column - FIRST[p]) * WIDTHS[p] + tl.arange(0, WIDTHS[p])
            mask = is_row[:, None] & (inside < SIZES[p])[None, :]
            place = row[:, None] * local_strides[p] + inside[None, :]
            mine = tl.load(local[p] + place, mask=mask & is_local[:, None])
            place = (row - num_local)[:, None] * received_strides[p] + inside[None, :]
            theirs = tl.load(received[p] + place, mask=mask & (row >= num_local)[:, None])
            values = tl.where(is_local[:, None], mine, theirs)
            tl.store(outs[p] + i[:, None] * SIZES[p] + inside[None, :], values, mask=mask)
