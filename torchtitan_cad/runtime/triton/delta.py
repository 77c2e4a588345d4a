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
    heads_of_rows = out.shape[:-1]
    delta = out.new_empty(heads_of_rows, dtype=dtype)
    if dout.numel():
        grid, blocks = _split(dout)
        tensors = dout, out, delta
        num_rows = delta.numel()
        _row_delta.launch(grid, tensors, (num_rows,), blocks)
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
    num_tokens, num_heads, _ = dout.shape
    out = torch.empty_like(dout)
    lse_out = lse.new_empty((num_heads, num_tokens), dtype=torch.float32)
    if dout.numel():
        grid, blocks = _split(dout)
        limit = torch.finfo(out.dtype).max
        _prepare_statistics.launch(
            grid,
            (dout, lse, delta, out, lse_out),
            (delta.numel(), num_tokens, empty_lse),
            (limit, COMPONENTS, num_heads, *blocks),
        )
    return out, lse_out


def _split(rows: Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the grid over the rows of [T, H, D], and the constants DIM, BLOCK_ROWS and BLOCK_DIM."""
    dim = rows.shape[-1]
    num_rows = rows.numel() // dim
    block_dim = power_of_2(dim)
    block_rows = max(1, TILE // block_dim)
    grid = divided(num_rows, block_rows), 1, 1
    return grid, (dim, block_rows, block_dim)


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
    first_row = tl.program_id(0) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    is_row = rows < num_rows
    is_dim = dims < DIM
    mask = is_row[:, None] & is_dim[None, :]
    first = rows.to(tl.int64) * DIM
    places = first[:, None] + dims[None, :]
    dtype = delta.dtype.element_ty
    left = tl.load(dout + places, mask=mask, other=0.0)
    right = tl.load(out + places, mask=mask, other=0.0)
    products = left.to(dtype) * right.to(dtype)
    tl.store(delta + rows, tl.sum(products, axis=1), mask=is_row)


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
    first_row = tl.program_id(0) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    remaining = tl.load(delta + rows, mask=is_row, other=0.0)
    dtype = delta.dtype.element_ty
    row_dtype: tl.constexpr = dout.dtype.element_ty
    group = tl.arange(0, _GROUPS)
    GROUP_DIM: tl.constexpr = BLOCK_DIM // _GROUPS
    inside = tl.arange(0, GROUP_DIM)
    dims = group[:, None] * GROUP_DIM + inside[None, :]
    is_dim = dims < DIM
    mask = is_row[:, None, None] & is_dim[None, :, :]
    first = rows.to(tl.int64) * DIM
    places = first[:, None, None] + dims[None, :, :]
    dout_bits = dout.to(tl.pointer_type(tl.int16))
    bits = tl.load(dout_bits + places, mask=mask, other=0)
    magnitudes = (bits & 0x7FFF).to(tl.int32)
    keys = magnitudes << 16 | inside[None, None, :]
    largest = tl.max(keys, axis=2)
    left = largest & -0x10000 | group[None, :]
    components = tl.zeros([BLOCK_ROWS, _GROUPS], row_dtype)
    for _ in tl.static_range(COMPONENTS):
        top = tl.max(left, axis=1)
        magnitude = (top >> 16).to(tl.int16)
        factor = magnitude.to(row_dtype, bitcast=True).to(dtype)
        is_zero = factor == 0.0
        divisor = tl.where(is_zero, 1.0, factor)
        component = tl.where(is_zero, 0.0, remaining / divisor)
        component = tl.minimum(tl.maximum(component, -LIMIT), LIMIT)
        component = component.to(row_dtype)
        product = factor * component.to(dtype)
        remaining -= product
        is_top = left == top[:, None]
        components = tl.where(is_top, component[:, None], components)
        left = tl.where(is_top, -1, left)
    component_bits = components.to(tl.int16, bitcast=True)
    signs = bits & -0x8000
    values = component_bits[:, :, None] ^ signs
    is_largest = keys == largest[:, :, None]
    out_bits = out.to(tl.pointer_type(tl.int16))
    values = tl.where(is_largest, values, 0)
    tl.store(out_bits + places, values, mask=mask)
    merged = tl.load(lse + rows, mask=is_row, other=0.0)
    is_infinite = tl.abs(merged) == float("inf")
    merged = tl.where(is_infinite, empty_lse, merged)
    head = rows % HEADS
    token = rows // HEADS
    place = head * num_tokens + token
    lse_dtype = lse_out.dtype.element_ty
    tl.store(lse_out + place, merged.to(lse_dtype), mask=is_row)
