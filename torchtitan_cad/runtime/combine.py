"""Combining partial results that belong to the same row, in a fixed order on every device, without atomics.

A row is combined from partials that several kernel calls, tasks or servers have computed. On CPU they are taken in
*waves* with torch: wave k holds the k-th partial of every row, so the rows of one wave are distinct. On CUDA one Triton
kernel takes all partials of a row one after the other, in the same order. Either computes in fp32 (fp64 for fp64) and
rounds once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.kernels.base import compute_dtype
from torchtitan_cad.runtime.kernels.merge import merge_partials
from torchtitan_cad.runtime.transport.base import rows_to_device

PART_BITS = 4
"""Partials lie in at most 2^4 tensors: which one and a row of it (``planning.exchange.MAX_ROWS``) make an int32."""


@dataclass(frozen=True)
class Combination:
    """An index of partials by row, in the order in which they are combined.

    Partials are rows of several tensors. A row is combined from all of its kinds alike.

    Attributes:
        num_rows: rows of the results.
        index: For Triton kernels, int32 ``sources`` and ``offsets``: row i's partials are
            ``sources[offsets[i] : offsets[i + 1]]``. A source is a row of a tensor of partials, shifted by
            ``PART_BITS``, and in these bits which tensor; ``sources`` has room for all partials, at its end for those
            of no row. For torch, int64 positions among all partials and their distinct rows, of one wave after another.
        is_fused: whether the index is for Triton kernels.
    """

    num_rows: int
    index: list[Tensor]
    is_fused: bool

    @classmethod
    def build(cls, targets: Sequence[np.ndarray], num_rows: int, device: torch.device) -> "Combination":
        """Index partials on ``device``.

        Args:
            targets: per tensor of partials, int64 [P_i] row of each partial; those of a row are combined in this order.
                -1: of no row.

        Raises:
            ValueError: more tensors than ``PART_BITS`` allow.
        """
        if len(targets) > 1 << PART_BITS:
            raise ValueError(f"partials in {len(targets)} tensors, at most {1 << PART_BITS} can be combined")
        rows = np.concatenate([np.empty(0, np.int64), *targets])
        order = np.argsort(rows, kind="stable")[np.count_nonzero(rows < 0) :]
        counts = np.bincount(rows[order], minlength=num_rows)
        ends = np.cumsum(counts)
        if triton.runs_on(device):
            names = [np.arange(len(part)) << PART_BITS | number for number, part in enumerate(targets)]
            sources = np.zeros(len(rows), np.int32)
            sources[: len(order)] = np.concatenate([np.empty(0, np.int64), *names])[order]
            both = sources, np.append(0, ends)
            return cls(num_rows, [rows_to_device(each, device, np.int32) for each in both], is_fused=True)
        waves = (np.flatnonzero(counts > number) for number in range(counts.max(initial=0)))
        pairs = ((order[(ends - counts)[wave] + number], wave) for number, wave in enumerate(waves))
        return cls(num_rows, [rows_to_device(each, device) for pair in pairs for each in pair], is_fused=False)

    def merge(self, partials: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """Return partial attention results merged by log-sum-exp.

        Args:
            partials: tensors of outputs [P_i, H, D], and of their log-sum-exps [P_i, H].
            like: [..., H, D] of the device and dtype that out shall have.

        Returns:
            out [N, H, D] and lse [N, H], fp32 (fp64); 0 and -inf in rows without partials.
        """
        shape, precise = (self.num_rows, *like.shape[-2:]), compute_dtype(like.dtype)
        if self.is_fused and partials[0]:
            from torchtitan_cad.runtime.triton.combine import merge_rows

            out, lse = like.new_empty(shape), like.new_empty(shape[:2], dtype=precise)
            if out.numel():
                (outs, lses), (sources, offsets) = partials, self.index
                merge_rows(outs, lses, sources, offsets, out, lse, PART_BITS)
            return [out, lse]
        out, lse = like.new_zeros(shape, dtype=precise), like.new_full(shape[:2], -torch.inf, dtype=precise)
        for part_out, part_lse, rows in self._waves(partials):
            merge_partials(out, lse, part_out, part_lse, rows)
        return [out.to(like.dtype), lse]

    def add(self, partials: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """Return the sums of partials, of one or more kinds alike.

        Args:
            partials: of each kind its tensors of partials [P_i, ...].
            like: [..., ...] of the row shape, device and dtype that the sums shall have.

        Returns:
            Of each kind [N, ...], 0 in rows without partials.
        """
        shape = self.num_rows, *like.shape[1:]
        if self.is_fused and partials[0]:
            from torchtitan_cad.runtime.triton.combine import sum_rows

            sums = [like.new_empty(shape) for _ in partials]
            if sums[0].numel():
                sources, offsets = self.index
                sum_rows(partials, sources, offsets, sums, PART_BITS)
            return sums
        sums = [like.new_zeros(shape, dtype=compute_dtype(like.dtype)) for _ in partials]
        for *parts, rows in self._waves(partials):
            for total, part in zip(sums, parts, strict=True):
                total.index_add_(0, rows, part.to(total.dtype))
        return [total.to(like.dtype) for total in sums]

    def _waves(self, partials: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield of every wave its partials of each kind, and their rows."""
        index = iter([] if self.is_fused else self.index)
        joined: list[Tensor] = []
        for source, rows in zip(index, index, strict=True):
            joined = joined or [torch.cat(tuple(parts)) if len(parts) > 1 else parts[0] for parts in partials]
            yield [*(part.index_select(0, source) for part in joined), rows]
