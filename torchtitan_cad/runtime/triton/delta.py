"""Inputs of a backward besides dout and out: rowsum(dout * out), and statistics in the layout that kernels read.

Each is one pass of one kernel, whose programs own some rows (the elements of one head of a token).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Elements of a program."""


def row_delta(dout: Tensor, out: Tensor, delta: Tensor) -> None:
    """Write rowsum(dout * out) to ``delta``.

    Args:
        dout, out: contiguous [T, H, D].
        delta: contiguous [T, H], fp32 (fp64); sums are taken in its dtype.
    """
    if dout.numel():
        grid, blocks = _split(dout)
        _row_delta[grid](dout, out, delta, delta.numel(), **blocks)


def prepare_statistics(
    dout: Tensor, lse: Tensor, delta: Tensor, out: Tensor, lse_out: Tensor, components: int, empty_lse: float
) -> None:
    """Write what ``kernels.varlen.prepare_statistics`` returns to ``out`` and ``lse_out``.

    Args:
        dout, out: contiguous [T, H, D], of the same dtype.
        lse, delta: contiguous [T, H], fp32 (fp64).
        lse_out: contiguous [H, T], fp32.
        components: largest elements of a row of ``dout`` over which delta is spread.
        empty_lse: replaces an infinite lse.
    """
    if dout.numel():
        grid, blocks = _split(dout)
        _prepare_statistics[grid](
            dout,
            lse,
            delta,
            out,
            lse_out,
            delta.numel(),
            len(dout),
            empty_lse,
            LIMIT=torch.finfo(out.dtype).max,
            COMPONENTS=components,
            HEADS=dout.shape[1],
            **blocks,
        )


def _split(rows: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid over the rows of [T, H, D], and the sizes of a program's block."""
    dim = rows.shape[-1]
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, TILE // block_dim)
    return (triton.cdiv(rows.numel() // dim, block_rows),), {
        "DIM": dim,
        "BLOCK_ROWS": block_rows,
        "BLOCK_DIM": block_dim,
    }


@triton.jit(do_not_specialize=["num_rows"])
def _row_delta(dout, out, delta, num_rows, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    is_row = rows < num_rows
    mask = is_row[:, None] & (dims < DIM)[None, :]
    places = rows.to(tl.int64)[:, None] * DIM + dims[None, :]
    dtype = delta.dtype.element_ty
    left = tl.load(dout + places, mask=mask, other=0.0).to(dtype)
    right = tl.load(out + places, mask=mask, other=0.0).to(dtype)
    tl.store(delta + rows, tl.sum(left * right, axis=1), mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "empty_lse"])
def _prepare_statistics(
    dout,
    lse,
    delta,
    out,
    lse_out,
    num_rows,
    num_tokens,
    empty_lse: tl.float32,
    LIMIT: tl.constexpr,
    COMPONENTS: tl.constexpr,
    HEADS: tl.constexpr,
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
    values = tl.load(dout + places, mask=mask, other=0.0).to(dtype)
    remaining = tl.load(delta + rows, mask=is_row, other=0.0)
    magnitude = tl.where(mask, tl.abs(values), -1.0)
    result = tl.zeros([BLOCK_ROWS, BLOCK_DIM], dtype)
    for _ in tl.static_range(COMPONENTS):
        chosen = dims[None, :] == tl.argmax(magnitude, axis=1)[:, None]
        factor = tl.sum(tl.where(chosen, values, 0.0), axis=1)
        component = tl.where(factor == 0.0, 0.0, remaining / tl.where(factor == 0.0, 1.0, factor))
        component = tl.minimum(tl.maximum(component, -LIMIT), LIMIT).to(out.dtype.element_ty).to(dtype)
        remaining -= factor * component
        result = tl.where(chosen, component[:, None], result)
        magnitude = tl.where(chosen, -1.0, magnitude)
    tl.store(out + places, result.to(out.dtype.element_ty), mask=mask)
    merged = tl.load(lse + rows, mask=is_row, other=0.0)
    merged = tl.where(tl.abs(merged) == float("inf"), empty_lse, merged)
    tl.store(lse_out + rows % HEADS * num_tokens + rows // HEADS, merged.to(lse_out.dtype.element_ty), mask=is_row)
