# SPDX-License-Identifier: BSD-3-Clause
"""Inputs of a backward: rowsum(dout * out), and statistics in the layout of the libraries' kernels.

Each is one launch of one kernel, whose programs own some rows (a row has the elements of one head of a token).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.rows import Kernel, divided, power_of_2

TILE = 4096
"""elements of a program: 16 KB (delta) and 8 KB (statistics) of bf16 in flight, in 4 warps"""
COMPONENTS = 3
"""elements of a row of the surrogate that are not zero"""
_GROUPS = tl.constexpr(4)
"""groups of elements of a row; each has at most one element of the surrogate that is not zero"""


def row_delta(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rowsum(dout * out), [T, H], of contiguous [T, H, D]; sums are taken in ``dtype``, fp32 (fp64)."""
    delta = out.new_empty(out.shape[:-1], dtype=dtype)
    if dout.numel():
        grid, blocks = _split(dout)
        _row_delta.launch(grid, (dout, out, delta), (delta.numel(),), blocks)
    return delta


def prepare_statistics(
    dout: Tensor, lse: Tensor, delta: Tensor, *, empty_lse: float
) -> tuple[Tensor, Tensor]:
    """Return the merged rows' statistics as the libraries' backwards take them, in one launch.

    The libraries take ``out`` but use it only for delta = rowsum(dout * out). So a server needs no merged ``out`` (Hq x
    D values per token): this returns a *surrogate*, an ``out`` with the right delta (Hq values per token). The first
    component of the surrogate is where dout is largest, and has the value delta / dout. The next component is where
    dout is largest in another quarter of the row, and has the rounding error of the first, and so on. In bf16 three
    components leave an error of about 2^-27 of delta, less than fp32 rounding in the sum. A row of zeros gets zeros.

    Args:
        dout: contiguous [T, H, D], bf16 or fp16.
        lse, delta: contiguous [T, H], fp32 (fp64).
        empty_lse: replaces an infinite lse.

    Returns:
        out [T, H, D] in dout's dtype, finite for finite arguments, and lse [H, T], contiguous, fp32.
    """
    out, lse_out = (
        torch.empty_like(dout),
        lse.new_empty(lse.shape[::-1], dtype=torch.float32),
    )
    if dout.numel():
        grid, blocks = _split(dout)
        _prepare_statistics.launch(
            grid,
            (dout, lse, delta, out, lse_out),
            (delta.numel(), dout.shape[0], empty_lse),
            (torch.finfo(out.dtype).max, COMPONENTS, dout.shape[1], *blocks),
        )
    return out, lse_out


def _split(rows: Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the grid over the rows of [T, H, D], and the constants DIM, BLOCK_ROWS and BLOCK_DIM."""
    dim = rows.shape[-1]
    block_dim = power_of_2(dim)
    block_rows = max(1, TILE // block_dim)
    return (divided(rows.numel() // dim, block_rows), 1, 1), (
        dim,
        block_rows,
        block_dim,
    )


@Kernel
@triton.jit(do_not_specialize=["num_rows"])
def _row_delta(
    dout,
    out,
    delta,
    num_rows: tl.int32,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    is_row = rows < num_rows
    mask = is_row[:, None] & (dims < DIM)[None, :]
    places = rows.to(tl.int64)[:, None] * DIM + dims[None, :]
    dtype = delta.dtype.element_ty
    left = tl.load(dout + places, mask=mask, other=0.0).to(dtype)
    right = tl.load(out + places, mask=mask, other=0.0).to(dtype)
    tl.store(delta + rows, tl.sum(left * right, axis=1), mask=is_row)


@Kernel
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "empty_lse"])
def _prepare_statistics(
    dout,
    lse,
    delta,
    out,
    lse_out,
    num_rows: tl.int32,
    num_tokens: tl.int32,
    empty_lse: tl.float32,
    LIMIT: tl.constexpr,
    COMPONENTS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Find the largest elements as integers of magnitude and place, one maximum for every group of dims.

    Instructions bound this kernel as much as memory does: 22 an element, where the largest of whole rows take 62.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    remaining = tl.load(delta + rows, mask=is_row, other=0.0)
    dtype = delta.dtype.element_ty
    row_dtype: tl.constexpr = dout.dtype.element_ty
    group = tl.arange(0, _GROUPS)
    inside = tl.arange(0, BLOCK_DIM // _GROUPS)
    dims = group[:, None] * (BLOCK_DIM // _GROUPS) + inside[None, :]
    mask = is_row[:, None, None] & (dims < DIM)[None, :, :]
    places = rows.to(tl.int64)[:, None, None] * DIM + dims[None, :, :]
    bits = tl.load(dout.to(tl.pointer_type(tl.int16)) + places, mask=mask, other=0)
    keys = (bits & 0x7FFF).to(tl.int32) << 16 | inside[None, None, :]
    largest = tl.max(keys, axis=2)
    left = largest & -0x10000 | group[None, :]
    components = tl.zeros([BLOCK_ROWS, _GROUPS], row_dtype)
    for _ in tl.static_range(COMPONENTS):
        top = tl.max(left, axis=1)
        factor = (top >> 16).to(tl.int16).to(row_dtype, bitcast=True).to(dtype)
        component = tl.where(
            factor == 0.0, 0.0, remaining / tl.where(factor == 0.0, 1.0, factor)
        )
        component = tl.minimum(tl.maximum(component, -LIMIT), LIMIT).to(row_dtype)
        remaining -= factor * component.to(dtype)
        is_top = left == top[:, None]
        components = tl.where(is_top, component[:, None], components)
        left = tl.where(is_top, -1, left)
    values = components.to(tl.int16, bitcast=True)[:, :, None] ^ (bits & -0x8000)
    tl.store(
        out.to(tl.pointer_type(tl.int16)) + places,
        tl.where(keys == largest[:, :, None], values, 0),
        mask=mask,
    )
    merged = tl.load(lse + rows, mask=is_row, other=0.0)
    merged = tl.where(tl.abs(merged) == float("inf"), empty_lse, merged)
    tl.store(
        lse_out + rows % HEADS * num_tokens + rows // HEADS,
        merged.to(lse_out.dtype.element_ty),
        mask=is_row,
    )
