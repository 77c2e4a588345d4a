"""Sums partial gradients of the same rows in fp32, in one pass and a fixed order."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.rows import as_parts, with_dense_rows

TILE = 1024
"""Most elements of a program."""


def sum_rows(
    parts: Sequence[Sequence[Tensor]], sources: Tensor, offsets: Tensor, sums: Sequence[Tensor], part_bits: int
) -> None:
    """Sum the partials of every row, for one or more tensors alike in one launch; 0 where there are none.

    Args:
        parts: of every sum its tensors of partials [P_i, ...], rows of any stride.
        sources, offsets, part_bits: as in ``merge.merge_rows``.
        sums: contiguous [N, ...], of one shape and dtype; sums are taken in fp32 (fp64 for fp64).
    """
    of_sums = [as_parts([with_dense_rows(part) for part in of_sum]) for of_sum in parts]
    row_size = sums[0][0].numel()
    block = min(TILE, triton.next_power_of_2(row_size))
    _sum_rows[(sums[0].shape[0], triton.cdiv(row_size, block), len(sums))](
        tuple(part for of_sum in of_sums for part in of_sum),
        sources,
        offsets,
        tuple(sums),
        tuple(part.stride(0) for of_sum in of_sums for part in of_sum),
        ROW_SIZE=row_size,
        BLOCK=block,
        PARTS=len(of_sums[0]),
        PART_BITS=part_bits,
    )


@triton.jit
def _sum_rows(
    parts,
    sources,
    offsets,
    sums,
    strides,
    ROW_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BITS: tl.constexpr,
):
    row = tl.program_id(0)
    end = tl.load(offsets + row + 1)
    inside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < ROW_SIZE
    stored: tl.constexpr = sums[0].dtype.element_ty
    dtype: tl.constexpr = tl.float64 if stored == tl.float64 else tl.float32
    for s in tl.static_range(len(sums)):
        if tl.program_id(2) == s:
            i = tl.load(offsets + row)
            total = tl.zeros([BLOCK], dtype)
            while i < end:
                source = tl.load(sources + i)
                which = source % (1 << PART_BITS)
                source_row = (source >> PART_BITS).to(tl.int64)
                for p in tl.static_range(PARTS):
                    if which == p:
                        place = source_row * strides[s * PARTS + p] + inside
                        total += tl.load(parts[s * PARTS + p] + place, mask=mask, other=0.0).to(dtype)
                i += 1
            tl.store(sums[s] + row.to(tl.int64) * ROW_SIZE + inside, total.to(stored), mask=mask)
