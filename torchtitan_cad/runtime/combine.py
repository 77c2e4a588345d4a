"""Combining partial results that belong to the same row, in a fixed order on every device, without atomics.

A row is combined from partials that several kernel calls, tasks or servers have computed. On CPU they are taken in
*waves* with torch: wave k holds the k-th partial of every row, so the rows of one wave are distinct. On CUDA one Triton
kernel takes all partials of a row one after the other, in the same order. Either computes in fp32 (fp64 for fp64) and
rounds once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.kernels.base import compute_dtype
from torchtitan_cad.runtime.kernels.merge import merge_partials
from torchtitan_cad.runtime.transport.base import rows_to_device

PART_BITS = 4
"""Partials lie in at most 2^4 tensors: which one and a row of it (``planning.exchange.MAX_ROWS``) make an int32."""


class Combination(Protocol):
    """Index of partials by row, in the order in which they are combined. Partials are rows of several tensors."""

    def merge(self, outs: Sequence[Tensor], lses: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return partial attention results merged by log-sum-exp.

        Args:
            outs, lses: tensors of partials [P_i, H, D] and [P_i, H].
            like: [..., H, D] of the device and dtype that out shall have.

        Returns:
            out [N, H, D] and lse [N, H], fp32 (fp64); 0 and -inf in rows without partials.
        """
        ...

    def add(self, parts: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """Return the sums of partials, of one or more kinds alike.

        Args:
            parts: of each kind its tensors of partials [P_i, ...].
            like: [..., ...] of the row shape, device and dtype that the sums shall have.

        Returns:
            Of each kind [N, ...], 0 in rows without partials.
        """
        ...

    def tensors(self) -> list[Tensor]:
        """Return the index tensors that define the combination, on the device."""
        ...


def build_combination(targets: Sequence[np.ndarray], num_rows: int, device: torch.device) -> Combination:
    """Return the combination for partials on ``device``.

    Args:
        targets: per tensor of partials, int64 [P_i] row of each partial; those of a row are combined in this order.
            -1: of no row.
        num_rows: rows of the results.

    Raises:
        ValueError: more tensors than ``PART_BITS`` allow.
    """
    build = CsrCombination.build if triton.runs_on(device) else WaveCombination.build
    return build(targets, num_rows, device)


@dataclass(frozen=True)
class Wave:
    """Partials ``source`` (int64 [n], positions among the partials) and their distinct rows ``target`` (int64 [n])."""

    source: Tensor
    target: Tensor


@dataclass(frozen=True)
class WaveCombination:
    """A ``Combination`` by torch operations."""

    waves: list[Wave]
    num_rows: int

    @classmethod
    def build(cls, targets: Sequence[np.ndarray], num_rows: int, device: torch.device) -> "WaveCombination":
        """Build as ``build_combination``."""
        joined = _joined_targets(targets)
        order = np.argsort(joined, kind="stable")
        order = order[np.count_nonzero(joined < 0) :]
        counts = np.bincount(joined[order])
        first = np.cumsum(counts) - counts
        occurrence = np.full(joined.size, -1)
        occurrence[order] = np.arange(order.size) - first[joined[order]]
        waves = []
        for index in range(int(counts.max(initial=0))):
            source = np.flatnonzero(occurrence == index)
            waves.append(Wave(rows_to_device(source, device), rows_to_device(joined[source], device)))
        return cls(waves, num_rows)

    def merge(self, outs: Sequence[Tensor], lses: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        merged = like.new_zeros(self.num_rows, *like.shape[-2:], dtype=compute_dtype(like.dtype))
        merged_lse = merged.new_full(merged.shape[:2], -torch.inf)
        if self.waves:
            out, lse = _joined(outs), _joined(lses)
        for wave in self.waves:
            part, part_lse = out.index_select(0, wave.source), lse.index_select(0, wave.source)
            merge_partials(merged, merged_lse, part, part_lse, wave.target)
        return merged.to(like.dtype), merged_lse

    def add(self, parts: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        return [self._sum(of_sum, like) for of_sum in parts]

    def _sum(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        total = like.new_zeros(self.num_rows, *like.shape[1:], dtype=compute_dtype(like.dtype))
        if self.waves:
            part = _joined(parts)
        for wave in self.waves:
            total.index_add_(0, wave.target, part.index_select(0, wave.source).to(total.dtype))
        return total.to(like.dtype)

    def tensors(self) -> list[Tensor]:
        return [x for wave in self.waves for x in (wave.source, wave.target)]


@dataclass(frozen=True)
class CsrCombination:
    """A ``Combination`` by Triton kernels: row i's partials are ``sources[offsets[i] : offsets[i + 1]]`` (int32).

    A source is a row of a tensor of partials, shifted by ``PART_BITS``, and in these bits which tensor. ``sources`` has
    room for all partials, at its end for those of no row.
    """

    sources: Tensor
    offsets: Tensor

    @classmethod
    def build(cls, targets: Sequence[np.ndarray], num_rows: int, device: torch.device) -> "CsrCombination":
        """Build as ``build_combination``."""
        if len(targets) > 1 << PART_BITS:
            raise ValueError(f"partials in {len(targets)} tensors, at most {1 << PART_BITS} can be combined")
        used = [np.flatnonzero(part >= 0) for part in targets]
        rows = _joined_targets([part[index] for part, index in zip(targets, used, strict=True)])
        of_parts = _joined_targets([index << PART_BITS | number for number, index in enumerate(used)])
        sources = np.zeros(sum(len(part) for part in targets), np.int32)
        sources[: len(rows)] = of_parts[np.argsort(rows, kind="stable")]
        offsets = np.append(0, np.cumsum(np.bincount(rows, minlength=num_rows)))
        return cls(rows_to_device(sources, device, np.int32), rows_to_device(offsets, device, np.int32))

    def merge(self, outs: Sequence[Tensor], lses: Sequence[Tensor], like: Tensor) -> tuple[Tensor, Tensor]:
        from torchtitan_cad.runtime.triton.combine import merge_rows

        out = like.new_empty(self._num_rows, *like.shape[-2:])
        lse = out.new_empty(out.shape[:2], dtype=compute_dtype(out.dtype))
        if not outs:
            return out.zero_(), lse.fill_(-torch.inf)
        if out.numel():
            merge_rows(outs, lses, self.sources, self.offsets, out, lse, PART_BITS)
        return out, lse

    def add(self, parts: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        from torchtitan_cad.runtime.triton.combine import sum_rows

        sums = [like.new_empty(self._num_rows, *like.shape[1:]) for _ in parts]
        if not parts[0]:
            return [x.zero_() for x in sums]
        if sums[0].numel():
            sum_rows(parts, self.sources, self.offsets, sums, PART_BITS)
        return sums

    def tensors(self) -> list[Tensor]:
        return [self.sources, self.offsets]

    @property
    def _num_rows(self) -> int:
        return len(self.offsets) - 1


def _joined_targets(targets: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *targets])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
