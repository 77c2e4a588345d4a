# SPDX-License-Identifier: BSD-3-Clause
"""Launches of Triton kernels, and helpers for kernels that move rows of several tensors in one launch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSION = {"enable_fp_fusion": True}
"""option of every launch: fused multiply-add, independent of the default of a version of Triton."""
WIDTH = tl.constexpr(256)
"""words of a row that a program moves"""
COUNTS = (4, 16)
"""numbers of partials that kernels are compiled for; the last one is 2^``TENSOR_BITS``"""
_WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_NOWHERE = 1 << 40
"""an address that needs 64 bits, as all do"""

Numbers = tuple[int, ...]
"""tuple argument of kernels with a number per tensor, see :func:`padded`"""


class Kernel:
    """A kernel of Triton that finds its compiled variants faster than Triton, which looks at every argument's value.

    Here tensors and constants tell variants apart. Other arguments have one type: annotated and not specialized, or
    tuples of :func:`padded`, whose length is one of the constants.

    Args:
        function: its parameters are tensors, then numbers and tuples, then constants.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._variants: dict[object, Any] = {}

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int = 4,
    ) -> None:
        """Launch the kernel with these arguments, on the current stream."""
        kinds = tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors])
        key = kinds, constants, num_warps
        if (variant := self._variants.get(key)) is not None:
            variant[grid](*tensors, *numbers, *constants)
        else:  # Triton's interpreter returns None
            self._variants[key] = self.function[grid](
                *tensors, *numbers, *constants, num_warps=num_warps, **FUSION
            )


def padded(values: Sequence[int], count: int) -> Numbers:
    """Return numbers times 16, the last one repeated up to ``count``.

    Triton compiles again for numbers of a tuple that are 1, are multiples of 16, or need 64 bits. Times 16 all are
    multiples; numbers other than addresses fit 32 bits, and addresses do not.

    Raises:
        ValueError: there are more than ``count``.
    """
    if len(values) > count:
        raise ValueError(
            f"{len(values)} tensors, and a kernel takes at most {count} at a time"
        )
    return tuple([16 * value for value in values]) + (16 * values[-1],) * (
        count - len(values)
    )


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the tensors' addresses; a tensor without elements has none, and gets one that is never read."""
    return [x.data_ptr() or _NOWHERE for x in tensors]


def strides_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the bytes from one row to the next."""
    return [x.stride(0) * x.element_size() for x in tensors]


def divided(number: int, by: int) -> int:
    """Return the quotient rounded up; Triton's ``cdiv`` takes ten times as long on the host."""
    return -(-number // by)


def power_of_2(number: int) -> int:
    """Return the least power of 2 that is at least ``number``."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Words:
    """The words that rows of several tensors are moved in, ``WIDTH`` at a time.

    Attributes:
        sizes: per tensor, words of a row.
        columns: per tensor, parts of ``WIDTH`` words.
        dtype: dtype of a word.
        is_aligned: True if all rows begin at multiples of 16 bytes.
    """

    sizes: list[int]
    columns: list[int]
    dtype: tl.dtype
    is_aligned: bool

    @classmethod
    def of(cls, row_bytes: Sequence[int], alignment: int) -> "Words":
        """Divide rows, which begin at multiples of ``alignment`` bytes, into words as wide as that allows."""
        common = math.gcd(16, alignment, *row_bytes)
        sizes = [num_bytes // min(common, 8) for num_bytes in row_bytes]
        return cls(
            sizes,
            [divided(size, WIDTH.value) for size in sizes],
            _WORDS[common],
            common == 16,
        )


@lru_cache(maxsize=4096)
def _has_dense_rows(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(shape[:0:-1], strides[:0:-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def with_dense_rows(part: Tensor) -> Tensor:
    """Return the tensor itself if each of its rows is contiguous, otherwise a contiguous copy."""
    return part if _has_dense_rows(part.shape, part.stride()) else part.contiguous()


@dataclass(frozen=True)
class Partials:
    """Tensors of partials, as arguments of kernels.

    Attributes:
        places: addresses and row strides.
        dtype: dtype of the tensors whose bit in ``wide`` is 0.
        wide: a bit per tensor, 1 if it has the dtype of sums, fp32 (fp64).
        is_aligned: True if all rows begin at multiples of 16 bytes.
        tensors: what lies at the places, which may be copies, so that it lives until the launch.
    """

    places: tuple[Numbers, Numbers]
    dtype: tl.dtype
    wide: int
    is_aligned: bool
    tensors: Sequence[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], result: Tensor) -> "Partials":
        """Describe tensors [P_i, ...] to be combined into ``result``; copies tensors with rows that are not dense."""
        tensors = [with_dense_rows(x) for x in tensors]
        dtype, wide = _narrowest(tuple([x.dtype for x in tensors]), result.dtype)
        addresses = addresses_of(tensors)
        strides = strides_of(tensors)
        is_aligned = math.gcd(16, *addresses, *strides) == 16
        count = COUNTS[len(tensors) > COUNTS[0]]
        places = (padded(addresses, count), padded(strides, count))
        return cls(places, dtype, wide, is_aligned, tensors)


@lru_cache
def _narrowest(
    dtypes: tuple[torch.dtype, ...], result: torch.dtype
) -> tuple[tl.dtype, int]:
    """Return the narrowest of all dtypes, and ``Partials.wide``."""
    dtype = min((*dtypes, result), key=lambda dtype: dtype.itemsize)
    sums = torch.promote_types(dtype, torch.float32)
    wide = sum(
        1 << i for i, of_tensor in enumerate(dtypes) if of_tensor == sums != dtype
    )
    return getattr(tl, str(dtype).removeprefix("torch.")), wide


@triton.jit
def select(values, index):
    """Return ``values[index]`` of the numbers of ``padded``, for an index that is known at run time."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen >> 4


@triton.jit
def row_of(places, index, row):
    """Return the address of a row (int64) of tensor ``index``."""
    return select(places[0], index) + row * select(places[1], index)


@triton.jit
def last_from(first, number):
    """Return the last index of ``first``, ascending numbers of ``padded``, whose number is at most ``number``."""
    index = 0
    for k in tl.static_range(1, len(first)):
        index = tl.where(number >= first[k] >> 4, k, index)
    return index


@triton.jit
def words_of(column, size, IS_ALIGNED: tl.constexpr):
    """Return the words of a column of rows of ``size`` words, and a mask of those that rows have.

    Aligned rows have an even number of 8-byte words, which the compiler is to see: a hint about an argument is lost.
    """
    words = column * WIDTH + tl.arange(0, WIDTH)
    if IS_ALIGNED:
        size = size // 2 * 2
    return words, words < size


@triton.jit
def pointer(address, dtype: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return a pointer to ``dtype``; IS_ALIGNED tells the compiler that it is a multiple of 16 bytes."""
    place = address.to(tl.pointer_type(dtype))
    if IS_ALIGNED:
        place = tl.multiple_of(place, 16)
    return place
