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
        two_rows = (2, heads, size)
        return torch.zeros(two_rows, dtype=dtype, device=device)

    q = rows(shape.num_heads, shape.head_dim)
    k = rows(shape.num_kv_heads, shape.key_dim)
    v = rows(shape.num_kv_heads, shape.out_dim)
    shared = rows(1, shape.shared_dim)
    out = rows(shape.num_heads, shape.out_dim)
    precise = compute_dtype(dtype)
    lse = torch.zeros(2, shape.num_heads, dtype=precise, device=device)
    gradients = [q, k, v, shared]
    _combine(out, lse, gradients)
    # rows of lse may be less aligned than those of q
    _move([q, lse])
    _move([q])
    delta.row_delta(out, out, precise)
    delta.prepare_statistics(out, lse, lse, empty_lse=0.0)
    pads = shape.head_dim != shape.out_dim
    if pads:  # FlashAttention-2 pads rows of dO to those of Q
        delta.prepare_statistics(q, lse, lse, empty_lse=0.0)
    _signal(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    _logger.info(f"CAD's Triton kernels are ready after {seconds:.1f} s")


def _combine(out: Tensor, lse: Tensor, gradients: list[Tensor]) -> None:
    """Merge and sum every number of partials that kernels are compiled for."""
    # two rows, each of which has one partial
    sources = np.zeros(2)
    offsets = np.arange(3)
    index = [
        rows_to_device(sources, out.device, np.int32),
        rows_to_device(offsets, out.device, np.int32),
    ]
    combination = Combination(2, index, is_fused=True)
    by_row_size = {}
    for gradient in gradients:
        if gradient.numel():
            by_row_size[gradient[0].numel()] = gradient
    for count in COUNTS:
        outs = [out] * count
        lses = [lse] * count
        combination.merge([outs, lses], out)
        for gradient in by_row_size.values():
            partials = [gradient] * count
            combination.add([partials], [gradient])


def _move(rows: list[Tensor]) -> None:
    """Pack rows into a message, and gather them as for kernel calls."""
    device = rows[0].device
    row_format = RowFormat(rows)
    num_bytes = 2 * row_format.row_bytes
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    two_rows = put.split_into_blocks([2], [0])
    blocks = put.Blocks.of([two_rows], [None], device)
    put.put_rows(
        [(rows, row_format)],
        blocks,
        [0],
        _address(message),
        _words(1, device),
    )
    nothing = [x[:0] for x in rows]
    gather.GatheredRows(rows, nothing).gather(None)


def _signal(device: torch.device) -> None:
    nobody = torch.tensor([-1], dtype=torch.int32, device=device)
    words = _words(2, device)
    failed = _words(1, device)
    record = _words(1, torch.device("cpu"))
    if device.type == "cuda":
        record = record.pin_memory()
    addresses = _address(words)
    signals.post(nobody, addresses, 0, 0, failed)
    signals.wait(nobody, words, 0, 0, 0, failed, record)


def _words(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


def _address(memory: Tensor) -> Tensor:
    """Return an int64 tensor of where ``memory`` begins."""
    begin = memory.data_ptr()
    return torch.tensor([begin], dtype=torch.int64, device=memory.device)
