# SPDX-License-Identifier: BSD-3-Clause
"""Combine partial results of the same rows in one pass: merge attention by log-sum-exp, and sum gradients in fp32.

A program owns a row and some of its elements, and combines the row's partials one after the other in the order of a
table, so there are no atomics and every run gives the same bits. Merging agrees with ``kernels.merge.merge_partials``.

Results may be a tensor of partials, each of which belongs to its own row: a row without others then stays as it is.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton import TENSOR_BITS
from torchtitan_cad.runtime.triton.rows import (
    Kernel,
    Partials,
    addresses_of,
    divided,
    padded,
    pointer,
    power_of_2,
    row_of,
    select,
    strides_of,
)

_TENSOR_BITS = tl.constexpr(TENSOR_BITS)
_TENSORS = tl.constexpr(1 << TENSOR_BITS)
SUM_TILE = 4096
"""elements: maximum of a program that sums."""
WARP_TILE = 1024
"""elements of a warp, and of a program that merges; with a quarter, a sum has 0.80 of a copy's bandwidth, with these
0.98 (H200)."""


def merge_rows(
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sources: Tensor,
    offsets: Tensor,
    out: Tensor,
    lse: Tensor,
    in_place: int = -1,
) -> None:
    """Merge the partials of every row of ``out`` and ``lse``; rows without partials get 0 and -inf.

    Args:
        outs, lses: tensors of partials [P_i, H, D] and [P_i, H]; rows of outs of any stride, lses of any strides.
            A partial without keys has an infinite lse, of either sign.
        sources: int32 [P] partials by row of ``out``, in the order in which they are merged, each
            ``row of its tensor << TENSOR_BITS | number of the tensor``.
        offsets: int32 [N + 1] where the partials of each row begin in ``sources``.
        out, lse: contiguous [N, H, D] of any dtype and [N, H] in fp32 (fp64), in which the merge is computed.
        in_place: number of the tensor that is ``out``, each of whose partials belongs to its own row; -1 for none.
    """
    num_rows, heads, dim = out.shape
    block_dim = power_of_2(dim)
    block_heads = min(power_of_2(heads), max(1, WARP_TILE // block_dim))
    partials = Partials.of(outs, out)
    count = len(partials.places[0])
    head_strides = [part.stride(1) * part.element_size() for part in lses]
    addresses = addresses_of(lses)
    lse_places = tuple(
        padded(numbers, count)
        for numbers in (addresses, strides_of(lses), head_strides)
    )
    _merge_rows.launch(
        (num_rows, divided(heads, block_heads), 1),
        (sources, offsets, lse),
        (
            partials.places,
            lse_places,
            out.data_ptr(),
            partials.wide,
            int(out.dtype == lse.dtype),
            in_place,
        ),
        (
            partials.dtype,
            partials.is_aligned,
            heads,
            dim,
            block_heads,
            block_dim,
            count,
        ),
        num_warps=1,
    )


def sum_rows(
    partials: Sequence[Sequence[Tensor]],
    sources: Tensor,
    offsets: Tensor,
    sums: Sequence[Tensor],
    in_place: int = -1,
) -> None:
    """Sum the partials of every row, for one or two sums in one launch; rows without partials get 0.

    Args:
        partials: per sum, its tensors of partials [P_i, ...], rows of any stride.
        sources, offsets, in_place: as in ``merge_rows``.
        sums: contiguous [N, ...], of one shape and dtype; sums are taken in fp32 (fp64 for fp64).
    """
    described = [Partials.of(of_sum, sums[0]) for of_sum in partials]
    first = described[0]
    last = described[-1]
    row_size = sums[0].numel() // sums[0].shape[0]
    count = len(first.places[0])
    block = min(SUM_TILE, power_of_2(row_size))
    both = tuple(
        of_first + of_last
        for of_first, of_last in zip(first.places, last.places, strict=True)
    )
    sum_dtype = tl.float64 if first.dtype == tl.float64 else tl.float32
    is_aligned = all(of_sum.is_aligned for of_sum in described)
    is_wide_sum = int(sums[0].dtype in (torch.float32, torch.float64))
    targets = sums[0].data_ptr(), sums[-1].data_ptr()
    _sum_rows.launch(
        (sums[0].shape[0], divided(row_size, block), len(sums)),
        (sources, offsets),
        (
            both,
            padded(targets, 2),
            first.wide | last.wide << count,
            is_wide_sum,
            in_place,
        ),
        (first.dtype, sum_dtype, is_aligned, row_size, block, count),
        num_warps=max(1, block // WARP_TILE),
    )


@triton.jit
def _load(
    address,
    is_wide,
    inside,
    mask,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Return the masked elements of a row, which is of dtype WIDE if ``is_wide``, else of DTYPE, as WIDE."""
    if is_wide != 0:
        part = tl.load(
            pointer(address, WIDE, IS_ALIGNED) + inside, mask=mask, other=0.0
        )
    else:
        part = tl.load(
            pointer(address, DTYPE, IS_ALIGNED) + inside, mask=mask, other=0.0
        ).to(WIDE)
    return part


@triton.jit
def _store(
    address,
    is_wide,
    first,
    inside,
    values,
    mask,
    WIDE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write the masked elements of a result's row, which begins at its element ``first``."""
    if is_wide != 0:
        tl.store(pointer(address, WIDE, True) + first + inside, values, mask=mask)
    else:
        tl.store(
            pointer(address, DTYPE, True) + first + inside, values.to(DTYPE), mask=mask
        )


@Kernel
@triton.jit(do_not_specialize=["out", "wide", "is_wide_out", "in_place"])
def _merge_rows(
    sources,
    offsets,
    lse,
    partials,
    lses,
    out: tl.int64,
    wide: tl.int32,
    is_wide_out: tl.int32,
    in_place: tl.int32,
    DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TENSORS: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    is_head = heads < HEADS
    mask = is_head[:, None] & (dims < DIM)[None, :]
    inside = heads[:, None] * DIM + dims[None, :]
    dtype: tl.constexpr = lse.dtype.element_ty
    merged = tl.zeros([BLOCK_HEADS, BLOCK_DIM], dtype)
    merged_lse = tl.full([BLOCK_HEADS], float("-inf"), dtype)
    source = tl.load(sources + i, mask=i < end, other=0)
    stays = (end == i + 1) & (source % _TENSORS == in_place)
    is_moved = mask & (dims < tl.where(stays, 0, DIM))[None, :]
    while i < end:
        following = tl.load(sources + i + 1, mask=i + 1 < end, other=0)
        which = source % _TENSORS
        source_row = (source >> _TENSOR_BITS).to(tl.int64)
        address = row_of(partials, which, source_row)
        part = _load(
            address, (wide >> which) & 1, inside, is_moved, dtype, DTYPE, IS_ALIGNED
        )
        lse_address = row_of(lses, which, source_row) + heads.to(tl.int64) * select(
            lses[2], which
        )
        part_lse = tl.load(pointer(lse_address, dtype, False), mask=is_head, other=0.0)
        part_lse = tl.where(part_lse == float("inf"), float("-inf"), part_lse)
        is_first = merged_lse == float("-inf")
        is_empty = part_lse == float("-inf")
        top = tl.maximum(merged_lse, part_lse)
        weight = tl.exp(merged_lse - top)
        part_weight = tl.exp(part_lse - top)
        total = weight + part_weight
        # Two factors a head: each goes from the threads that have the head to those that have its elements.
        keep = tl.where(is_empty, 1.0, tl.where(is_first, 0.0, weight / total))[:, None]
        add = tl.where(is_empty, 0.0, tl.where(is_first, 1.0, part_weight / total))[
            :, None
        ]
        merged = merged * keep + tl.where(add == 0.0, 0.0, part) * add
        merged_lse = tl.where(
            is_empty, merged_lse, tl.where(is_first, part_lse, top + tl.log(total))
        )
        source = following
        i += 1
    # A head without keys has zeros.
    is_written = is_moved | (mask & (merged_lse == float("-inf"))[:, None])
    first = row.to(tl.int64) * (HEADS * DIM)
    _store(out, is_wide_out, first, inside, merged, is_written, dtype, DTYPE)
    tl.store(lse + row.to(tl.int64) * HEADS + heads, merged_lse, mask=is_head)


@Kernel
@triton.jit(do_not_specialize=["wide", "is_wide_sum", "in_place"])
def _sum_rows(
    sources,
    offsets,
    partials,
    sums,
    wide: tl.int64,
    is_wide_sum: tl.int32,
    in_place: tl.int32,
    DTYPE: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TENSORS: tl.constexpr,
):
    row = tl.program_id(0)
    kind = tl.program_id(2)
    i = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    inside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], SUM_DTYPE)
    source = tl.load(sources + i, mask=i < end, other=0)
    stays = (end == i + 1) & (source % _TENSORS == in_place)
    mask = inside < tl.where(stays, 0, ROW_SIZE)
    while i < end:
        following = tl.load(sources + i + 1, mask=i + 1 < end, other=0)
        which = source % _TENSORS
        source_row = (source >> _TENSOR_BITS).to(tl.int64)
        part = kind * TENSORS + which
        address = row_of(partials, part, source_row)
        total += _load(
            address, (wide >> part) & 1, inside, mask, SUM_DTYPE, DTYPE, IS_ALIGNED
        )
        source = following
        i += 1
    first = row.to(tl.int64) * ROW_SIZE
    _store(
        select(sums, kind), is_wide_sum, first, inside, total, mask, SUM_DTYPE, DTYPE
    )
