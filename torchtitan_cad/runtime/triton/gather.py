"""Gathers rows of a row space, local rows and then received ones, without joining the two. Imports torch and triton."""

import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.merge import pair

TILE = 4096
"""Elements of a program."""


def gather_rows(local: Tensor, received: Tensor, rows: Tensor) -> Tensor:
    """Row ``i`` of the row space for every i of ``rows``: of ``local`` if there are as many, else of ``received``.

    Args:
        local: [N, ...]. received: [M, ...] of the same dtype and row shape, rows of any stride.
        rows: int64 [R].

    Returns:
        A new contiguous tensor [R, ...].
    """
    out = local.new_empty(len(rows), *local.shape[1:])
    if not out.numel():
        return out
    row_size = out[0].numel()
    part_a, part_b = pair((local, received))
    columns = min(1024, triton.next_power_of_2(row_size))
    height = TILE // columns
    _gather_rows[(triton.cdiv(len(rows), height), triton.cdiv(row_size, columns))](
        part_a,
        part_b,
        out,
        rows,
        len(rows),
        local.shape[0],
        part_a.stride(0),
        part_b.stride(0),
        ROW_SIZE=row_size,
        COLUMNS=columns,
        HEIGHT=height,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_local"])
def _gather_rows(
    local,
    received,
    out,
    rows,
    num_rows,
    num_local,
    local_stride,
    received_stride,
    ROW_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    i = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    inside = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + i, mask=i < num_rows, other=0)
    is_local = (row < num_local)[:, None]
    mask = (i < num_rows)[:, None] & (inside < ROW_SIZE)[None, :]
    mine = tl.load(local + row[:, None] * local_stride + inside[None, :], mask=mask & is_local)
    place = (row - num_local)[:, None] * received_stride + inside[None, :]
    theirs = tl.load(received + place, mask=mask & (row >= num_local)[:, None])
    values = tl.where(is_local, mine, theirs)
    tl.store(out + i.to(tl.int64)[:, None] * ROW_SIZE + inside[None, :], values, mask=mask)
