"""Sums partial gradients of the same rows in fp32, in one pass and a fixed order."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.rows import FUSION, Parts, pointer, row_of, select

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
    described = [Parts.of(of_sum, sums[0]) for of_sum in parts]
    first, last = described[0], described[-1]
    row_size, count = sums[0][0].numel(), len(first.places[0])
    block = min(TILE, triton.next_power_of_2(row_size))
    both = tuple(mine + theirs for mine, theirs in zip(first.places, last.places, strict=True))
    _sum_rows[(sums[0].shape[0], triton.cdiv(row_size, block), len(sums))](
        *(both, sources, offsets, (sums[0].data_ptr(), sums[-1].data_ptr()), first.wide | last.wide << count),
        int(sums[0].dtype in (torch.float32, torch.float64)),
        DTYPE=first.dtype,
        SUM_DTYPE=tl.float64 if first.dtype == tl.float64 else tl.float32,
        IS_ALIGNED=all(of_sum.is_aligned for of_sum in described),
        ROW_SIZE=row_size,
        BLOCK=block,
        PARTS=count,
        PART_BITS=part_bits,
        **FUSION,
    )


@triton.jit(do_not_specialize=["wide", "is_wide_sum"])
def _sum_rows(
    parts,
    sources,
    offsets,
    sums,
    wide: tl.int64,
    is_wide_sum: tl.int32,
    DTYPE: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PART_BITS: tl.constexpr,
):
    row = tl.program_id(0)
    kind = tl.program_id(2)
    i = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    inside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < ROW_SIZE
    total = tl.zeros([BLOCK], SUM_DTYPE)
    while i < end:
        source = tl.load(sources + i)
        which = source % (1 << PART_BITS)
        source_row = (source >> PART_BITS).to(tl.int64)
        part = kind * PARTS + which
        address = row_of(parts, part, source_row)
        if (wide >> part) & 1 != 0:
            total += tl.load(pointer(address, SUM_DTYPE, IS_ALIGNED) + inside, mask=mask, other=0.0)
        else:
            total += tl.load(pointer(address, DTYPE, IS_ALIGNED) + inside, mask=mask, other=0.0).to(SUM_DTYPE)
        i += 1
    first = row.to(tl.int64) * ROW_SIZE
    if is_wide_sum != 0:
        tl.store(pointer(select(sums, kind), SUM_DTYPE, True) + first + inside, total, mask=mask)
    else:
        tl.store(pointer(select(sums, kind), DTYPE, True) + first + inside, total.to(DTYPE), mask=mask)
