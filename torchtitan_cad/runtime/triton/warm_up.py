# SPDX-License-Identifier: BSD-3-Clause
"""Compile every kernel of a job before its first step, so that no rank waits for another's compiler."""

import logging
import time

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.kernels.base import compute_dtype
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import rows_to_device
from torchtitan_cad.runtime.triton import delta, gather, put, signals
from torchtitan_cad.runtime.triton.rows import COUNTS

_logger = logging.getLogger(__name__)


def warm_up(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
    """Launch every kernel, on two rows of tensors like those of the job, or on a signal to nobody.

    Args:
        shape: heads of this rank.
        dtype: dtype of queries, keys and values.
    """
    _logger.info("CAD compiles its Triton kernels, or loads those of an earlier job")
    begin = time.perf_counter()

    def rows(heads: int, size: int) -> Tensor:
        return torch.zeros(2, heads, size, dtype=dtype, device=device)

    q = rows(shape.num_heads, shape.head_dim)
    k = rows(shape.num_kv_heads, shape.key_dim)
    v = rows(shape.num_kv_heads, shape.out_dim)
    shared = rows(1, shape.shared_dim)
    out = rows(shape.num_heads, shape.out_dim)
    precise = compute_dtype(dtype)
    lse = torch.zeros(2, shape.num_heads, dtype=precise, device=device)
    _combine(out, lse, [q, k, v, shared])
    # rows of lse may be less aligned than those of q
    _move([q, lse])
    _move([q])
    delta.row_delta(out, out, precise)
    delta.prepare_statistics(out, lse, lse, empty_lse=0.0)
    if q.shape[2] != out.shape[2]:  # FlashAttention-2 pads rows of dO to those of Q
        delta.prepare_statistics(q, lse, lse, empty_lse=0.0)
    _signal(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    _logger.info(f"CAD's Triton kernels are ready after {seconds:.1f} s")


def _combine(out: Tensor, lse: Tensor, gradients: list[Tensor]) -> None:
    """Merge and sum every number of partials that kernels are compiled for."""
    sources = rows_to_device(np.zeros(2), out.device, np.int32)
    offsets = rows_to_device(np.arange(3), out.device, np.int32)
    combination = Combination(2, [sources, offsets], is_fused=True)
    not_empty = [x for x in gradients if x.numel()]
    by_row_size = {x[0].numel(): x for x in not_empty}
    for count in COUNTS:
        combination.merge([[out] * count, [lse] * count], out)
        for gradient in by_row_size.values():
            combination.add([[gradient] * count], [gradient])


def _move(rows: list[Tensor]) -> None:
    """Pack rows into a message, and gather them as for kernel calls."""
    device = rows[0].device
    row_format = RowFormat(rows)
    message = torch.zeros(2 * row_format.row_bytes, dtype=torch.uint8, device=device)
    failed = torch.zeros(1, dtype=torch.int64, device=device)
    blocks = put.Blocks.of([put.split_into_blocks([2], [0])], [None], device)
    put.put_rows([(rows, row_format)], blocks, [0], _address(message), failed)
    nothing = [x[:0] for x in rows]
    gather.GatheredRows(rows, nothing).gather(None)


def _signal(device: torch.device) -> None:
    nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
    words = torch.zeros(2, dtype=torch.int64, device=device)
    failed = torch.zeros(1, dtype=torch.int64, device=device)
    record = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
    signals.post(nobody, _address(words), 0, 0, failed)
    signals.wait(nobody, words, 0, 0, 0, failed, record)


def _address(memory: Tensor) -> Tensor:
    """Return an int64 tensor of where ``memory`` begins."""
    return torch.tensor([memory.data_ptr()], dtype=torch.int64).to(memory.device)
