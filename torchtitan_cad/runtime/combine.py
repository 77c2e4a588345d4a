"""Combining partial results that belong to the same row, in a fixed order on every device, without atomics.

A row is combined from partials that several kernel calls, tasks or servers have computed. On CPU they are taken in
*waves* with torch: wave k holds the k-th partial of every row, so the rows of one wave are distinct. On CUDA one Triton
kernel takes all partials of a row one after the other, in the same order. Imports torch, numpy and runtime modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.merge import merge_partials
from torchtitan_cad.runtime.transport.base import to_device


class Combination(Protocol):
    """Which partials belong to which row, and their order.

    Partials are rows of one or two tensors, counted through from the first to the second. ``fresh`` accumulators hold
    nothing yet: rows without partials get 0 (and -inf as log-sum-exp). Otherwise rows start from what they hold.
    """

    def merge(
        self, out_acc: Tensor, lse_acc: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], *, fresh: bool
    ) -> None:
        """Merges outs [P_i, H, D] with lses [P_i, H] into out_acc [N, H, D] and lse_acc [N, H], fp32 (fp64)."""
        ...

    def add(self, acc: Tensor, parts: Sequence[Tensor], *, fresh: bool) -> None:
        """Adds parts [P_i, ...] to acc [N, ...], fp32 (fp64)."""
        ...

    def tensors(self) -> list[Tensor]:
        """What says so, on the device."""
        ...


def build_combination(targets: np.ndarray, num_rows: int, device: torch.device) -> Combination:
    """The combination for partials on ``device``.

    Args:
        targets: int64 [P] row of each partial; partials of a row are combined in this order. -1: of no row.
        num_rows: rows of the accumulators.
    """
    return Segments.build(targets, num_rows, device) if device.type == "cuda" else Waves.build(targets, device)


@dataclass(frozen=True)
class Wave:
    """Partials ``source`` (int64 [n], positions among the partials) and their distinct rows ``target`` (int64 [n])."""

    source: Tensor
    target: Tensor


@dataclass(frozen=True)
class Waves:
    """A ``Combination`` by torch operations."""

    waves: list[Wave]

    @classmethod
    def build(cls, targets: np.ndarray, device: torch.device) -> "Waves":
        """As ``build_combination``."""
        order = np.argsort(targets, kind="stable")
        order = order[np.count_nonzero(targets < 0) :]
        counts = np.bincount(targets[order])
        first = np.cumsum(counts) - counts
        occurrence = np.full(targets.size, -1)
        occurrence[order] = np.arange(order.size) - first[targets[order]]
        waves = []
        for index in range(int(counts.max(initial=0))):
            source = np.flatnonzero(occurrence == index)
            waves.append(Wave(_to(source, device), _to(targets[source], device)))
        return cls(waves)

    def merge(
        self, out_acc: Tensor, lse_acc: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], *, fresh: bool
    ) -> None:
        if fresh:
            out_acc.zero_()
            lse_acc.fill_(-torch.inf)
        if self.waves:
            out, lse = _joined(outs), _joined(lses)
        for wave in self.waves:
            part, part_lse = out.index_select(0, wave.source), lse.index_select(0, wave.source)
            merge_partials(out_acc, lse_acc, part, part_lse, wave.target)

    def add(self, acc: Tensor, parts: Sequence[Tensor], *, fresh: bool) -> None:
        if fresh:
            acc.zero_()
        if self.waves:
            part = _joined(parts)
        for wave in self.waves:
            acc.index_add_(0, wave.target, part.index_select(0, wave.source).to(acc.dtype))

    def tensors(self) -> list[Tensor]:
        return [x for wave in self.waves for x in (wave.source, wave.target)]


@dataclass(frozen=True)
class Segments:
    """A ``Combination`` by Triton kernels: row i's partials are ``sources[offsets[i] : offsets[i + 1]]`` (int32).

    Partials of no row come last in ``sources``.
    """

    sources: Tensor
    offsets: Tensor

    @classmethod
    def build(cls, targets: np.ndarray, num_rows: int, device: torch.device) -> "Segments":
        """As ``build_combination``."""
        rows = np.where(targets < 0, num_rows, targets)
        offsets = np.append(0, np.cumsum(np.bincount(rows, minlength=num_rows + 1)[:num_rows]))
        return cls(_to(np.argsort(rows, kind="stable"), device, np.int32), _to(offsets, device, np.int32))

    def merge(
        self, out_acc: Tensor, lse_acc: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], *, fresh: bool
    ) -> None:
        from torchtitan_cad.runtime.triton.merge import merge_rows

        if outs and self._has_work(fresh):
            merge_rows(out_acc, lse_acc, outs, lses, self.sources, self.offsets, fresh)
        elif fresh:
            out_acc.zero_()
            lse_acc.fill_(-torch.inf)

    def add(self, acc: Tensor, parts: Sequence[Tensor], *, fresh: bool) -> None:
        from torchtitan_cad.runtime.triton.reduce import sum_rows

        if parts and self._has_work(fresh):
            sum_rows(acc, parts, self.sources, self.offsets, fresh)
        elif fresh:
            acc.zero_()

    def tensors(self) -> list[Tensor]:
        return [self.sources, self.offsets]

    def _has_work(self, fresh: bool) -> bool:
        return fresh or len(self.sources) > 0


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]


def _to(array: np.ndarray, device: torch.device, dtype: type = np.int64) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)), device)
