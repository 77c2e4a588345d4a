"""Helpers of kernels that move rows of several tensors in one launch."""

from collections.abc import Sequence
from itertools import accumulate

import triton
from torch import Tensor


def column_blocks(row_sizes: Sequence[int], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut the rows of several tensors, laid side by side, into blocks of columns.

    Args:
        row_sizes: elements in a row of each tensor.
        most: elements in a row of a block.

    Returns:
        Per tensor the width of its blocks, a power of 2; and per tensor the number of its first block, then that of all
        blocks.
    """
    widths = tuple(min(most, triton.next_power_of_2(size)) for size in row_sizes)
    counts = [triton.cdiv(size, width) for size, width in zip(row_sizes, widths, strict=True)]
    return widths, (0, *accumulate(counts))


def with_dense_rows(part: Tensor) -> Tensor:
    """Return the tensor itself if the elements of each row lie one after the other, otherwise a copy."""
    expected = 1
    for size, stride in zip(reversed(part.shape[1:]), reversed(part.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return part.contiguous()
        expected *= size
    return part


def as_parts(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Repeat the last tensor up to the next power of 2: kernels are compiled for few numbers of tensors."""
    missing = triton.next_power_of_2(len(parts)) - len(parts)
    return (*parts, *parts[-1:] * missing)
