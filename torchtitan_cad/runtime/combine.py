# SPDX-License-Identifier: BSD-3-Clause
"""Combining partial results of the same row, in a fixed order on every device, without atomics.

Several kernel calls, tasks or servers compute partials of a row. On CPU, torch combines them in *waves*: wave k holds
the k-th partial of every row, so the rows of one wave are distinct. On CUDA, one Triton kernel combines the partials of
a row one after the other, in the same order. Both compute in fp32 (fp64 for fp64) and round once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.kernels.base import compute_dtype
from torchtitan_cad.runtime.kernels.merge import merge_partials
from torchtitan_cad.runtime.transport.base import rows_to_device
from torchtitan_cad.runtime.triton import TENSOR_BITS


@dataclass(frozen=True)
class Combination:
    """An index of partials by row, in the order in which they are combined.

    Partials are rows of several tensors. The same index serves all results of a row, such as out and lse.

    Attributes:
        num_rows: rows of the results.
        index: for Triton kernels int32 ``sources`` and ``offsets``. Row i has the partials
            ``sources[offsets[i] : offsets[i + 1]]``, each ``row of its tensor << TENSOR_BITS | number of the tensor``.
            ``sources`` is as long as there are partials; the end is unused if some belong to no row. For torch, per
            wave two int64 tensors: positions among all partials, and the distinct rows of these partials.
        is_fused: True if the index is for Triton kernels.
        in_place: number of the first tensor of this rank's own whose partials are those of all rows, in order; -1 if
            there is none. Triton kernels combine the partials of others into it, and leave rows without others, if it
            is like the result.
    """

    num_rows: int
    index: list[Tensor]
    is_fused: bool
    in_place: int = -1

    @classmethod
    def build(
        cls,
        targets: Sequence[np.ndarray],
        num_rows: int,
        device: torch.device,
        num_reusable: int | None = None,
    ) -> "Combination":
        """Index partials on ``device``.

        Args:
            targets: per tensor of partials, int64 [P_i] row of each partial, or -1 for none. The partials of a row are
                combined in this order.
            num_reusable: the first tensors, which may hold the results; others may lie in receive buffers, which peers
                write to again. None: all.
        """
        assert len(targets) <= 1 << TENSOR_BITS, "see MAX_CALLS of planning"
        rows = _concatenated(targets)
        num_unused = np.count_nonzero(rows < 0)
        order = np.argsort(rows, kind="stable")
        order = order[num_unused:]
        counts = np.bincount(rows[order], minlength=num_rows)
        if triton.runs_on(device):
            first = _first_of_all_rows(targets[:num_reusable], num_rows)
            sources = _sources(targets, order)
            offsets = np.append(0, np.cumsum(counts))
            index = [
                rows_to_device(sources, device, np.int32),
                rows_to_device(offsets, device, np.int32),
            ]
            return cls(num_rows, index, is_fused=True, in_place=first)
        waves = _wave_tables(order, counts)
        index = [rows_to_device(table, device) for table in waves]
        return cls(num_rows, index, is_fused=False)

    def merge(self, partials: Sequence[Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """Return partial attention results merged by log-sum-exp.

        Args:
            partials: tensors of outputs [P_i, H, D], and of their log-sum-exps [P_i, H].
            like: [..., H, D] tensor with the device and dtype of the returned out.

        Returns:
            out [N, H, D] and lse [N, H], fp32 (fp64); 0 and -inf in rows without partials.
        """
        heads_shape = (self.num_rows, like.shape[-2])
        precise = compute_dtype(like.dtype)
        if self.is_fused and partials[0]:
            from torchtitan_cad.runtime.triton.combine import merge_rows

            outs, lses = partials
            sources, offsets = self.index
            results, in_place = self._targets([outs], [like])
            out = results[0]
            lse = like.new_empty(heads_shape, dtype=precise)
            if out.numel():
                merge_rows(outs, lses, sources, offsets, out, lse, in_place)
            return [out, lse]
        out_shape = (*heads_shape, like.shape[-1])
        out_NHD = like.new_zeros(out_shape, dtype=precise)
        lse_NH = like.new_full(heads_shape, -torch.inf, dtype=precise)
        for part_out_PHD, part_lse_PH, rows_P in self._waves(partials):
            merge_partials(out_NHD, lse_NH, part_out_PHD, part_lse_PH, rows_P)
        return [out_NHD.to(like.dtype), lse_NH]

    def add(
        self, partials: Sequence[Sequence[Tensor]], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the sums of partials, for one or more results with the same index.

        Args:
            partials: per result, its tensors of partials [P_i, ...].
            like: per result, a tensor with the row shape, device and dtype of the sums. All have one dtype.

        Returns:
            Per result, [N, ...], 0 in rows without partials.
        """
        if self.is_fused and partials[0]:
            from torchtitan_cad.runtime.triton.combine import sum_rows

            sources, offsets = self.index
            sums, in_place = self._targets(partials, like)
            shapes = [x.shape for x in sums]
            has_pair = len(sums) > 1 and shapes[0] == shapes[1]
            in_first = 2 if has_pair else 1
            ends = range(in_first, len(sums) + 1)
            for begin, end in pairwise([0, *ends]):
                if sums[begin].numel():
                    sum_rows(
                        partials[begin:end],
                        sources,
                        offsets,
                        sums[begin:end],
                        in_place,
                    )
            return sums
        sums = []
        for of_result in like:
            shape = (self.num_rows, *of_result.shape[1:])
            precise = compute_dtype(of_result.dtype)
            sums.append(of_result.new_zeros(shape, dtype=precise))
        for *parts, rows in self._waves(partials):
            for total, part in zip(sums, parts, strict=True):
                total.index_add_(0, rows, part.to(total.dtype))
        return [
            total.to(of_result.dtype)
            for total, of_result in zip(sums, like, strict=True)
        ]

    def _targets(
        self, partials: Sequence[Sequence[Tensor]], like: Sequence[Tensor]
    ) -> tuple[list[Tensor], int]:
        """Return the tensors for results, and the number of the partials' tensors that they are, or -1."""
        if self.in_place >= 0:
            there = [of_result[self.in_place] for of_result in partials]
            are_contiguous = all(x.is_contiguous() for x in there)
            dtypes = [x.dtype for x in like]
            if are_contiguous and [x.dtype for x in there] == dtypes:
                return there, self.in_place
        fresh = [x.new_empty(self.num_rows, *x.shape[1:]) for x in like]
        return fresh, -1

    def _waves(self, partials: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield, per wave, the partials of each result, and their rows."""
        index = iter([] if self.is_fused else self.index)
        joined: list[Tensor] = []
        for source, rows in zip(index, index, strict=True):
            joined = joined or [
                torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
                for parts in partials
            ]
            of_wave = [part.index_select(0, source) for part in joined]
            yield [*of_wave, rows]


def _sources(targets: Sequence[np.ndarray], order: np.ndarray) -> np.ndarray:
    """Return int32 [P] partials in their order: of each its row of its tensor, and the number of the tensor."""
    names = [
        np.arange(len(rows)) << TENSOR_BITS | number
        for number, rows in enumerate(targets)
    ]
    all_names = _concatenated(names)
    used = all_names[order]
    sources = np.zeros(len(all_names), np.int32)
    sources[: len(used)] = used
    return sources


def _concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *arrays])


def _first_of_all_rows(targets: Sequence[np.ndarray], num_rows: int) -> int:
    """Return the number of the first tensor whose partials are those of all rows, in order; -1 if there is none."""
    every_row = np.arange(num_rows)
    for number, rows in enumerate(targets):
        if np.array_equal(rows, every_row):
            return number
    return -1


def _wave_tables(order: np.ndarray, counts: np.ndarray) -> Iterator[np.ndarray]:
    """Yield, per wave, positions among all partials, and the rows of these partials."""
    end = np.cumsum(counts)
    first = end - counts
    most = counts.max(initial=0)
    for number in range(most):
        has_partial = counts > number
        rows = np.flatnonzero(has_partial)
        yield order[first[rows] + number]
        yield rows
