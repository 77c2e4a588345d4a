"""Merges partial attention results of the same rows by log-sum-exp, in one pass. Imports torch and triton.

A program owns a row and some of its heads and takes the row's partials one after the other, in the order of a table: no
atomics, and the same bits in every run. What it computes is that of ``kernels.merge.merge_partials``.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Most accumulator elements of a program."""


def merge_rows(
    out_acc: Tensor,
    lse_acc: Tensor,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    sources: Tensor,
    offsets: Tensor,
    fresh: bool,
) -> None:
    """Merges partials into accumulators, in place.

    Args:
        out_acc, lse_acc: contiguous [N, H, D] and [N, H], fp32 (fp64).
        outs, lses: one or two tensors [P_i, H, D] and [P_i, H], rows of any stride; partial j is row j of all of them
            one after the other.
        sources: int32 [P] partials by row of the accumulators, in the order in which they are merged.
        offsets: int32 [N + 1] where the partials of each row begin in ``sources``.
        fresh: the accumulators hold nothing yet: all rows are written, with 0 and -inf where there are no partials.
            Otherwise only rows with partials are, and start from what they hold.
    """
    num_rows, heads, dim = out_acc.shape
    if not out_acc.numel():
        return
    (out_a, out_b), (lse_a, lse_b) = pair(outs), pair(lses)
    block_dim = triton.next_power_of_2(dim)
    block_heads = min(triton.next_power_of_2(heads), max(1, TILE // block_dim))
    _merge_rows[(num_rows, triton.cdiv(heads, block_heads))](
        out_acc,
        lse_acc,
        out_a,
        lse_a,
        out_b,
        lse_b,
        sources,
        offsets,
        out_a.shape[0],
        out_a.stride(0),
        lse_a.stride(0),
        out_b.stride(0),
        lse_b.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        FRESH=fresh,
    )


def pair(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One or two partials as two with dense rows; the second is never read if there is one.

    Raises:
        ValueError: another number of them.
    """
    if not 1 <= len(parts) <= 2:
        raise ValueError(f"a rank makes one or two kernel calls, got partials of {len(parts)}")
    dense = [part if _rows_are_dense(part) else part.contiguous() for part in parts]
    return dense[0], dense[-1]


def _rows_are_dense(part: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(part.shape[1:]), reversed(part.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@triton.jit(do_not_specialize=["num_a"])
def _merge_rows(
    out_acc,
    lse_acc,
    out_a,
    lse_a,
    out_b,
    lse_b,
    sources,
    offsets,
    num_a,
    out_stride_a,
    lse_stride_a,
    out_stride_b,
    lse_stride_b,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FRESH: tl.constexpr,
):
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if FRESH or begin < end:
        heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        dims = tl.arange(0, BLOCK_DIM)
        is_head = heads < HEADS
        mask = is_head[:, None] & (dims < DIM)[None, :]
        inside = heads[:, None] * DIM + dims[None, :]
        out_row = out_acc + row.to(tl.int64) * (HEADS * DIM) + inside
        lse_row = lse_acc + row.to(tl.int64) * HEADS + heads
        dtype = out_acc.dtype.element_ty
        if FRESH:
            out = tl.zeros([BLOCK_HEADS, BLOCK_DIM], dtype)
            lse = tl.full([BLOCK_HEADS], float("-inf"), dtype)
        else:
            out = tl.load(out_row, mask=mask, other=0.0)
            lse = tl.load(lse_row, mask=is_head, other=float("-inf"))
        while begin < end:
            source = tl.load(sources + begin)
            if source < num_a:
                part = tl.load(out_a + source.to(tl.int64) * out_stride_a + inside, mask=mask, other=0.0).to(dtype)
                part_lse = tl.load(lse_a + source.to(tl.int64) * lse_stride_a + heads, mask=is_head, other=0.0)
            else:
                source = (source - num_a).to(tl.int32)
                part = tl.load(out_b + source.to(tl.int64) * out_stride_b + inside, mask=mask, other=0.0).to(dtype)
                part_lse = tl.load(lse_b + source.to(tl.int64) * lse_stride_b + heads, mask=is_head, other=0.0)
            part_lse = part_lse.to(dtype)
            is_first = lse == float("-inf")
            is_empty = part_lse == float("-inf")
            top = tl.maximum(lse, part_lse)
            weight = tl.exp(lse - top)
            part_weight = tl.exp(part_lse - top)
            total = weight + part_weight
            both = out * (weight / total)[:, None] + part * (part_weight / total)[:, None]
            out = tl.where(is_empty[:, None], out, tl.where(is_first[:, None], part, both))
            lse = tl.where(is_empty, lse, tl.where(is_first, part_lse, top + tl.log(total)))
            begin += 1
        tl.store(out_row, out, mask=mask)
        tl.store(lse_row, lse, mask=is_head)
