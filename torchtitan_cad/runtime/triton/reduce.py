"""Sums partial gradients of the same rows in fp32, in one pass and a fixed order. Imports torch and triton."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torchtitan_cad.runtime.triton.merge import pair

TILE = 1024
"""Most accumulator elements of a program."""


def sum_rows(acc: Tensor, parts: Sequence[Tensor], sources: Tensor, offsets: Tensor, fresh: bool) -> None:
    """Adds partials to an accumulator, in place.

    Args:
        acc: contiguous [N, ...], fp32 (fp64).
        parts: one or two tensors [P_i, ...], rows of any stride; partial j is row j of all of them one after the other.
        sources, offsets, fresh: as in ``merge.merge_rows``; a fresh row without partials is 0.
    """
    if not acc.numel():
        return
    part_a, part_b = pair(parts)
    row_size = acc[0].numel()
    block = min(TILE, triton.next_power_of_2(row_size))
    _sum_rows[(acc.shape[0], triton.cdiv(row_size, block))](
        acc,
        part_a,
        part_b,
        sources,
        offsets,
        part_a.shape[0],
        part_a.stride(0),
        part_b.stride(0),
        ROW_SIZE=row_size,
        BLOCK=block,
        FRESH=fresh,
    )


@triton.jit(do_not_specialize=["num_a"])
def _sum_rows(
    acc,
    part_a,
    part_b,
    sources,
    offsets,
    num_a,
    stride_a,
    stride_b,
    ROW_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FRESH: tl.constexpr,
):
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if FRESH or begin < end:
        inside = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = inside < ROW_SIZE
        place = acc + row.to(tl.int64) * ROW_SIZE + inside
        dtype = acc.dtype.element_ty
        total = tl.zeros([BLOCK], dtype) if FRESH else tl.load(place, mask=mask, other=0.0)
        while begin < end:
            source = tl.load(sources + begin)
            if source < num_a:
                part = tl.load(part_a + source.to(tl.int64) * stride_a + inside, mask=mask, other=0.0)
            else:
                source = (source - num_a).to(tl.int32)
                part = tl.load(part_b + source.to(tl.int64) * stride_b + inside, mask=mask, other=0.0)
            total += part.to(dtype)
            begin += 1
        tl.store(place, total, mask=mask)
