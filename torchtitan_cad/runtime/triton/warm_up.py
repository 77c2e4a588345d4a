# SPDX-License-Identifier: BSD-3-Clause
"""Compile every kernel of a job before its first step, so that no rank waits for another's compiler."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

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


Launch = Callable[[], object]


def warm_up(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    first: int = 0,
) -> None:
    """Launch every kernel on a row or two.

    The processes of a machine share Triton's cache, whose files appear whole. Each begins with a different kernel, so
    that it loads most of what others have compiled.

    Args:
        shape: heads of this rank.
        dtype: dtype of queries, keys and values.
        first: number of this process on its machine.
    """
    begin = time.perf_counter()
    launches = _launches(shape, dtype, device)
    _logger.info(
        f"CAD compiles its {len(launches)} Triton kernels, or loads those that are compiled already"
    )
    for number in range(len(launches)):
        index = (first + number) % len(launches)
        launches[index]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _logger.info(
        f"CAD's Triton kernels are ready after {time.perf_counter() - begin:.1f} s"
    )


def _launches(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Launch]:
    """Return a launch of every kernel, on two rows of tensors like those of the job."""

    def rows(heads: int, size: int) -> Tensor:
        return torch.zeros(2, heads, size, dtype=dtype, device=device)

    q = rows(shape.num_heads, shape.head_dim)
    k = rows(shape.num_kv_heads, shape.key_dim)
    v = rows(shape.num_kv_heads, shape.out_dim)
    shared = rows(1, shape.shared_dim)
    out = rows(shape.num_heads, shape.out_dim)
    gradients = [q, k, v, shared]
    precise = compute_dtype(dtype)
    lse = torch.zeros(2, shape.num_heads, dtype=precise, device=device)
    launches = chain(
        _combinations(out, lse, gradients),
        _moves_of_rows(q, lse),
        _statistics(q, out, lse),
        _signals(device),
    )
    return list(launches)


def _combinations(
    out: Tensor,
    lse: Tensor,
    gradients: list[Tensor],
) -> Iterator[Launch]:
    """Yield merges and sums of every number of partials that kernels are compiled for."""
    sources = rows_to_device(np.zeros(2), out.device, np.int32)
    offsets = rows_to_device(np.arange(3), out.device, np.int32)
    combination = Combination(2, [sources, offsets], is_fused=True)
    not_empty = [x for x in gradients if x.numel()]
    by_row_size = {x[0].numel(): x for x in not_empty}
    for count in COUNTS:
        outs = [out] * count
        lses = [lse] * count
        yield partial(combination.merge, [outs, lses], out)
        for gradient in by_row_size.values():
            partials = [gradient] * count
            yield partial(combination.add, [partials], [gradient])


def _moves_of_rows(q: Tensor, lse: Tensor) -> Iterator[Launch]:
    """Yield what packs rows into messages, and what gathers them for kernel calls."""
    failed = torch.zeros(1, dtype=torch.int64, device=q.device)
    table = put.split_into_blocks([2], [0])
    blocks = put.Blocks.of([table], [None], q.device)
    # rows of lse may be less aligned than those of q
    for rows in ([q, lse], [q]):
        row_format = RowFormat(rows)
        num_bytes = 2 * row_format.row_bytes
        message = torch.zeros(num_bytes, dtype=torch.uint8, device=q.device)
        sent = [(rows, row_format)]
        yield partial(_put, sent, blocks, message, failed)
        nothing = [x[:0] for x in rows]
        row_spaces = gather.GatheredRows(rows, nothing)
        yield partial(row_spaces.gather, None)


def _put(
    sent: Sequence[put.Message],
    blocks: put.Blocks,
    memory: Tensor,
    failed: Tensor,
) -> None:
    put.put_rows(sent, blocks, [0], _address(memory), failed)


def _address(memory: Tensor) -> Tensor:
    """Return an int64 tensor of where ``memory`` begins."""
    return torch.tensor([memory.data_ptr()], dtype=torch.int64).to(memory.device)


def _statistics(
    q: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Iterator[Launch]:
    """Yield what computes the statistics that kernels' backwards take."""
    yield partial(delta.row_delta, out, out, lse.dtype)
    yield partial(delta.prepare_statistics, out, lse, lse, empty_lse=0.0)
    if q.shape[2] != out.shape[2]:  # FlashAttention-2 pads rows of dO to those of Q
        yield partial(delta.prepare_statistics, q, lse, lse, empty_lse=0.0)


def _signals(device: torch.device) -> Iterator[Launch]:
    """Yield a signal to nobody, and a wait for nobody."""
    nobody = torch.full((1,), -1, dtype=torch.int32, device=device)
    words = torch.zeros(2, dtype=torch.int64, device=device)
    failed = torch.zeros(1, dtype=torch.int64, device=device)
    record = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
    memory = _address(words)
    yield lambda: signals.post(nobody, memory, 0, 0, failed)
    yield lambda: signals.wait(nobody, words, 0, 0, 0, failed, record)
