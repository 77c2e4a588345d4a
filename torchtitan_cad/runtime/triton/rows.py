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
WIDTH = 256
"""Words of a row that a program moves."""
_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_MOST_TENSORS = 4


@dataclass(frozen=True)
class Columns:
    """Rows of several tensors, laid side by side and cut into columns of ``WIDTH`` words, whatever their dtypes are.

    Numbers come times 16, as in ``Parts``.

    Attributes:
        count: columns of all tensors. first: of each tensor its first column. sizes: words of a row of each.
        word: dtype that words are moved as. is_aligned: whether all rows begin at multiples of 16 bytes.
    """

    count: int
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    word: tl.dtype
    is_aligned: bool

    @classmethod
    def of(cls, row_bytes: Sequence[int], tensors: Sequence[Tensor], *others: int) -> "Columns":
        """Cut rows of so many bytes into columns.

        Args:
            tensors: that are read or written; they and the numbers ``others`` decide how wide a word can be.
        """
        if len(row_bytes) > _MOST_TENSORS:
            raise ValueError(f"rows of {len(row_bytes)} tensors, at most {_MOST_TENSORS} can be moved at a time")
        strides = (x.stride(0) * x.itemsize for x in tensors)
        common = math.gcd(*row_bytes, *strides, *(x.data_ptr() for x in tensors), *others, 16)
        sizes = [num_bytes // min(common, 8) for num_bytes in row_bytes]
        ends = list(accumulate((triton.cdiv(size, WIDTH) for size in sizes), initial=0))
        first = [*ends[:-1], *[ends[-1]] * (_MOST_TENSORS - len(sizes))]
        return cls(
            ends[-1],
            tuple(16 * x for x in first),
            padded((16 * size for size in sizes), (_MOST_TENSORS,)),
            _WORDS[common],
            common == 16,
        )

    @staticmethod
    def places(tensors: Sequence[Tensor], instead: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tensors' addresses and strides in bytes; of ``instead`` for those without rows."""
        there = [x if x.numel() else other for x, other in zip(tensors, instead, strict=True)]
        addresses, strides = (x.data_ptr() for x in there), (16 * x.stride(0) * x.itemsize for x in there)
        return padded(addresses, (_MOST_TENSORS,)), padded(strides, (_MOST_TENSORS,))


def address_of(rows: Tensor | None) -> int:
    """Return where a table lies on the device; 0 for none."""
    return 0 if rows is None else rows.data_ptr()


def with_dense_rows(part: Tensor) -> Tensor:
    """Return the tensor itself if the elements of each row lie one after the other, otherwise a copy."""
    expected = 1
    for size, stride in zip(reversed(part.shape[1:]), reversed(part.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return part.contiguous()
        expected *= size
    return part


COUNTS = (4, 16)
"""Numbers of tensors that kernels are compiled for; the last one is that of ``combine.PART_BITS``."""


@dataclass(frozen=True)
class Parts:
    """Where rows of several tensors lie, as numbers: kernels are not compiled anew for other tensors.

    Triton compiles for numbers that are 1, or multiples of 16, or need 64 bits. Strides come times 16 and fit 32 bits.

    Attributes:
        addresses: of each tensor. strides: bytes from one row to the next, times 16.
        dtype: of tensors that are not of the dtype of sums, fp32 (fp64). wide: a bit for each of those that are.
        is_aligned: whether all rows begin at multiples of 16 bytes.
    """

    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: tl.dtype
    wide: int
    is_aligned: bool

    @classmethod
    def of(cls, tensors: Sequence[Tensor], result: Tensor) -> "Parts":
        """Describe tensors [P_i, ...] with dense rows, to be combined into ``result``.

        The last one repeats up to the next of ``COUNTS``.
        """
        dtype = min((x.dtype for x in (*tensors, result)), key=lambda dtype: dtype.itemsize)
        sums = torch.promote_types(dtype, torch.float32)
        wide = sum(1 << i for i, x in enumerate(tensors) if x.dtype == sums != dtype)
        bytes_of = [x.stride(0) * x.itemsize for x in tensors]
        addresses = addresses_of(tensors, result)
        is_aligned = math.gcd(*bytes_of, *addresses) % 16 == 0
        strides = padded(16 * x for x in bytes_of)
        return cls(padded(addresses), strides, DTYPES[dtype], wide, is_aligned)


def addresses_of(tensors: Sequence[Tensor], instead: Tensor) -> list[int]:
    """Return where tensors lie; that of ``instead`` for those without elements, which lie nowhere."""
    return [(x if x.numel() else instead).data_ptr() for x in tensors]


DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def padded(values: Iterable[int], counts: Sequence[int] = COUNTS) -> tuple[int, ...]:
    """Repeat the last value up to the next of ``counts``."""
    given = tuple(values)
    count = next(count for count in counts if count >= len(given))
    return given + given[-1:] * (count - len(given))


@triton.jit
def select(values, index):
    """Return the element of a tuple."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


@triton.jit
def in_column(column, first, sizes, WIDTH: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return which tensor a column of ``Columns`` belongs to, its words of that tensor's rows, and which of them are.

    Rows of words of 8 bytes that are aligned to 16 have an even number of them, which the compiler can use.
    """
    tensor = 0
    for k in tl.static_range(1, len(first)):
        tensor = tl.where(column >= first[k] >> 4, k, tensor)
    words = (column - (select(first, tensor) >> 4)) * WIDTH + tl.arange(0, WIDTH)
    size = select(sizes, tensor) >> 4
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
