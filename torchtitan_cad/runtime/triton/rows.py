# SPDX-License-Identifier: BSD-3-Clause
"""Helpers for kernels that move rows of several tensors in one launch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSION = {"enable_fp_fusion": True}
"""option of every launch: fused multiply-add, independent of the default of a version of Triton."""
WIDTH = tl.constexpr(256)
"""words of a row that a program moves"""
COUNTS = (4, 16)
"""numbers of tensors that kernels are compiled for; the last one is 2^``combine.TENSOR_BITS``"""
_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_MOST_MOVED = COUNTS[0]

Numbers = tuple[int, ...]
"""tuple argument of kernels with a number per tensor. Triton compiles again for numbers that are 1, are multiples of
16, or need 64 bits. To avoid this, numbers other than addresses are passed times 16 and fit 32 bits."""


def places(tensors: Sequence[Tensor], instead: Sequence[Tensor]) -> tuple[Numbers, Numbers]:
    """Return the tensors' addresses, and row strides in bytes x 16; ``instead`` replaces tensors without elements."""
    there = [x if x.numel() else other for x, other in zip(tensors, instead, strict=True)]
    return padded(x.data_ptr() for x in there), padded(16 * x.stride(0) * x.itemsize for x in there)


def padded(values: Iterable[int]) -> Numbers:
    """Repeat the last value up to the next of ``COUNTS``."""
    given = tuple(values)
    count = next(count for count in COUNTS if count >= len(given))
    return given + given[-1:] * (count - len(given))


@dataclass(frozen=True)
class Columns:
    """Rows of several tensors of any dtypes, side by side, cut into columns of ``WIDTH`` words.

    Attributes:
        count: columns of all tensors.
        table: per tensor, its first column and the words of its rows.
        word: dtype of the words.
        is_aligned: True if all rows begin at multiples of 16 bytes.
    """

    count: int
    table: tuple[Numbers, Numbers]
    word: tl.dtype
    is_aligned: bool

    @classmethod
    def of(cls, row_bytes: Sequence[int], tensors: Sequence[Tensor], *others: int) -> "Columns":
        """Cut rows of ``row_bytes`` into columns.

        Args:
            tensors: tensors that are read or written. A word is as wide as their alignment and ``others`` allow.
        """
        if len(row_bytes) > _MOST_MOVED:
            raise ValueError(f"rows of {len(row_bytes)} tensors, and at most {_MOST_MOVED} can be moved at a time")
        strides = (x.stride(0) * x.itemsize for x in tensors)
        common = math.gcd(*row_bytes, *strides, *(x.data_ptr() for x in tensors), *others, 16)
        sizes = [num_bytes // min(common, 8) for num_bytes in row_bytes]
        ends = list(accumulate((triton.cdiv(size, WIDTH.value) for size in sizes), initial=0))
        first = [*ends[:-1], *[ends[-1]] * (_MOST_MOVED - len(sizes))]
        table = padded(16 * x for x in first), padded(16 * size for size in sizes)
        return cls(ends[-1], table, _WORDS[common], common == 16)


def with_dense_rows(part: Tensor) -> Tensor:
    """Return the tensor itself if each of its rows is contiguous, otherwise a contiguous copy."""
    return part if len(part) and part[0].is_contiguous() else part.contiguous()


@dataclass(frozen=True)
class Partials:
    """Tensors of partials, as arguments of kernels.

    Attributes:
        places: addresses and row strides, see :func:`places`.
        dtype: dtype of the tensors whose bit in ``wide`` is 0.
        wide: a bit per tensor, 1 if it has the dtype of sums, fp32 (fp64).
        is_aligned: True if all rows begin at multiples of 16 bytes.
    """

    places: tuple[Numbers, Numbers]
    dtype: tl.dtype
    wide: int
    is_aligned: bool

    @classmethod
    def of(cls, tensors: Sequence[Tensor], result: Tensor) -> "Partials":
        """Describe tensors [P_i, ...] to be combined into ``result``; copies tensors with rows that are not dense."""
        tensors = [with_dense_rows(x) for x in tensors]
        dtype = min((x.dtype for x in (*tensors, result)), key=lambda dtype: dtype.itemsize)
        sums = torch.promote_types(dtype, torch.float32)
        wide = sum(1 << i for i, x in enumerate(tensors) if x.dtype == sums != dtype)
        addresses, strides = places(tensors, [result] * len(tensors))
        is_aligned = math.gcd(*addresses, *(x >> 4 for x in strides)) % 16 == 0
        return cls((addresses, strides), getattr(tl, str(dtype).removeprefix("torch.")), wide, is_aligned)


@triton.jit
def select(values, index):
    """Return ``values[index]`` for an index that is known at run time."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


@triton.jit
def row_of(places, index, row):
    """Return the address of a row (int64) of tensor ``index``."""
    return select(places[0], index) + row * (select(places[1], index) >> 4)


@triton.jit
def in_column(column, table, IS_ALIGNED: tl.constexpr):
    """Return the tensor of a column of ``Columns``, the column's words in that tensor's rows, and a mask of the words.

    Aligned rows have an even number of 8-byte words, which the compiler uses.
    """
    first = table[0]
    tensor = 0
    for k in tl.static_range(1, len(first)):
        tensor = tl.where(column >= first[k] >> 4, k, tensor)
    words = (column - (select(first, tensor) >> 4)) * WIDTH + tl.arange(0, WIDTH)
    size = select(table[1], tensor) >> 4
    if IS_ALIGNED:
        size = tl.multiple_of(size, 2)
    return tensor, words, words < size


@triton.jit
def pointer(address, dtype: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return a pointer to ``dtype``; IS_ALIGNED tells the compiler that it is a multiple of 16 bytes."""
    place = address.to(tl.pointer_type(dtype))
    if IS_ALIGNED:
        place = tl.multiple_of(place, 16)
    return place
