"""Helpers of kernels that move rows of several tensors in one launch."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSION = {"enable_fp_fusion": True}
"""Option of every launch: multiply and add in one instruction, whatever a version of Triton does by default."""
WIDTH = tl.constexpr(256)
"""Words of a row that a program moves."""
COUNTS = (4, 16)
"""Numbers of tensors that kernels are compiled for; the last one is that of ``combine.TENSOR_BITS``."""
_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_MOST_MOVED = COUNTS[0]

Numbers = tuple[int, ...]
"""What kernels get of several tensors. Triton compiles for numbers that are 1, or multiples of 16, or need 64 bits;
so that it need not compile anew for other tensors, numbers other than addresses come times 16 and fit 32 bits."""


def places(tensors: Sequence[Tensor], instead: Sequence[Tensor]) -> tuple[Numbers, Numbers]:
    """Return where tensors lie, and the bytes from one row to the next; of ``instead`` for those without elements."""
    there = [x if x.numel() else other for x, other in zip(tensors, instead, strict=True)]
    return padded(x.data_ptr() for x in there), padded(16 * x.stride(0) * x.itemsize for x in there)


def padded(values: Iterable[int]) -> Numbers:
    """Repeat the last value up to the next of ``COUNTS``."""
    given = tuple(values)
    count = next(count for count in COUNTS if count >= len(given))
    return given + given[-1:] * (count - len(given))


@dataclass(frozen=True)
class Columns:
    """Rows of several tensors, laid side by side and cut into columns of ``WIDTH`` words, whatever their dtypes are.

    Attributes:
        count: columns of all tensors. table: of each tensor its first column, and the words of a row.
        word: dtype that words are moved as. is_aligned: whether all rows begin at multiples of 16 bytes.
    """

    count: int
    table: tuple[Numbers, Numbers]
    word: tl.dtype
    is_aligned: bool

    @classmethod
    def of(cls, row_bytes: Sequence[int], tensors: Sequence[Tensor], *others: int) -> "Columns":
        """Cut rows of so many bytes into columns.

        Args:
            tensors: that are read or written; they and the numbers ``others`` decide how wide a word can be.
        """
        if len(row_bytes) > _MOST_MOVED:
            raise ValueError(f"rows of {len(row_bytes)} tensors, at most {_MOST_MOVED} can be moved at a time")
        strides = (x.stride(0) * x.itemsize for x in tensors)
        common = math.gcd(*row_bytes, *strides, *(x.data_ptr() for x in tensors), *others, 16)
        sizes = [num_bytes // min(common, 8) for num_bytes in row_bytes]
        ends = list(accumulate((triton.cdiv(size, WIDTH.value) for size in sizes), initial=0))
        first = [*ends[:-1], *[ends[-1]] * (_MOST_MOVED - len(sizes))]
        table = padded(16 * x for x in first), padded(16 * size for size in sizes)
        return cls(ends[-1], table, _WORDS[common], common == 16)


def with_dense_rows(part: Tensor) -> Tensor:
    """Return the tensor itself if the elements of each row lie one after the other, otherwise a copy."""
    return part if len(part) and part[0].is_contiguous() else part.contiguous()


@dataclass(frozen=True)
class Partials:
    """Tensors whose rows are combined, and how they are read.

    Attributes:
        places: of the tensors.
        dtype: of tensors that are not of the dtype of sums, fp32 (fp64). wide: a bit for each of those that are.
        is_aligned: whether all rows begin at multiples of 16 bytes.
    """

    places: tuple[Numbers, Numbers]
    dtype: tl.dtype
    wide: int
    is_aligned: bool

    @classmethod
    def of(cls, tensors: Sequence[Tensor], result: Tensor) -> "Partials":
        """Describe tensors [P_i, ...] to be combined into ``result``; of rows that are not dense, copies."""
        tensors = [with_dense_rows(x) for x in tensors]
        dtype = min((x.dtype for x in (*tensors, result)), key=lambda dtype: dtype.itemsize)
        sums = torch.promote_types(dtype, torch.float32)
        wide = sum(1 << i for i, x in enumerate(tensors) if x.dtype == sums != dtype)
        addresses, strides = places(tensors, [result] * len(tensors))
        is_aligned = math.gcd(*addresses, *(x >> 4 for x in strides)) % 16 == 0
        return cls((addresses, strides), getattr(tl, str(dtype).removeprefix("torch.")), wide, is_aligned)


@triton.jit
def select(values, index):
    """Return the element of a tuple."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


@triton.jit
def row_of(places, index, row):
    """Return where a row (int64) of the tensor of that index lies."""
    return select(places[0], index) + row * (select(places[1], index) >> 4)


@triton.jit
def in_column(column, table, IS_ALIGNED: tl.constexpr):
    """Return which tensor a column of ``Columns`` belongs to, its words of that tensor's rows, and which of them are.

    Rows of words of 8 bytes that are aligned to 16 have an even number of them, which the compiler can use.
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
    """Return a pointer to ``dtype``, of which the compiler knows whether it is a multiple of 16 bytes."""
    place = address.to(tl.pointer_type(dtype))
    if IS_ALIGNED:
        place = tl.multiple_of(place, 16)
    return place
