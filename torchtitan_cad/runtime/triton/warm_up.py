# SPDX-License-Identifier: BSD-3-Clause
"""Compile every kernel of a job before its first step, so that no rank waits for another's compiler."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import triton
from filelock import FileLock, Timeout
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.combine import TENSOR_BITS, Combination
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.triton import delta, gather, put, signals
from torchtitan_cad.runtime.triton.rows import COUNTS

_logger = logging.getLogger(__name__)

LOCK_S = 600.0
"""seconds: longest wait for another process that compiles a kernel"""


def warm_up(shape: AttentionShape, dtype: torch.dtype, device: torch.device, first: int = 0) -> None:
    """Launch every kernel on a row or two.

    The processes of a machine share Triton's cache. Each begins with a different kernel; one process compiles a kernel,
    and the others wait and load it.

    Args:
        shape: heads of this rank.
        dtype: dtype of queries, keys and values.
        first: number of this process on its machine.
    """
    begin, launches = time.perf_counter(), _launches(shape, dtype, device)
    _logger.info(f"CAD compiles its {len(launches)} Triton kernels, or loads those that are compiled already")
    for number in range(len(launches)):
        index = (first + number) % len(launches)
        with _locked(index):
            launches[index]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _logger.info(f"CAD's Triton kernels are ready after {time.perf_counter() - begin:.1f} s")


@contextmanager
def _locked(index: int) -> Iterator[None]:
    """Hold the lock of a kernel, which other processes compile meanwhile; without one where the cache is read-only.

    Raises TimeoutError that names the lock if another process does not release it in ``LOCK_S``.
    """
    path = _lock_path(index)
    lock = FileLock(path, timeout=LOCK_S)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise TimeoutError(
            f"{path}: another process has held this lock for {LOCK_S:.0f} s, for which CAD waits to compile a Triton "
            "kernel; end that process, or set TRITON_CACHE_DIR to another folder"
        ) from None
    except (OSError, NotImplementedError) as error:
        _logger.warning(f"CAD compiles a Triton kernel in this process, not once per machine: {error}")
    try:
        yield
    finally:
        lock.release()


def _lock_path(index: int) -> Path:
    """Return a file in the folder of Triton's cache, which is this user's own."""
    return Path(triton.knobs.cache.dir) / f"torchtitan_cad_kernel_{index}.lock"


def _launches(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[Callable[[], object]]:
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    sizes = (heads, shape.head_dim), (kv_heads, shape.key_dim), (heads, shape.out_dim), (kv_heads, shape.out_dim)
    tensors = [torch.zeros(2, *size, dtype=dtype, device=device) for size in (*sizes, (1, shape.shared_dim))]
    q, _, out, *_ = tensors
    summed = list({x[0].numel(): x for x in tensors if x is not out and x.numel()}.values())
    lse = torch.zeros(2, shape.num_heads, dtype=torch.promote_types(dtype, torch.float32), device=device)
    sources, offsets = (torch.tensor(x, dtype=torch.int32).to(device) for x in ([0, 0], [0, 1, 2]))
    combination = Combination(2, [sources, offsets], is_fused=True)
    row_format = RowFormat([q, lse])
    message = torch.zeros(2, row_format.row_bytes, dtype=torch.uint8, device=device)
    blocks = put.Blocks.of([put.split_into_blocks([2], [0])], [None], device)
    counter, failed, addresses = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
    record = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
    addresses += message.data_ptr()
    nobody = torch.full((1,), -1, dtype=torch.int32, device=device)

    def combine(count: int) -> list[Callable[[], object]]:
        return [
            lambda: combination.merge([[out] * count, [lse] * count], out),
            *(partial(combination.add, [[x] * count], [x]) for x in summed),
        ]

    rows: list[Tensor] = [q, lse]
    of_rows = [out] if shape.out_dim == shape.head_dim else [out, q]  # FlashAttention-2 pads rows of dO to those of Q
    return [
        *(launch for count in COUNTS if count <= 1 << TENSOR_BITS for launch in combine(count)),
        lambda: put.put_rows([(rows, row_format)], blocks, [0], addresses, failed),
        lambda: gather.gather_rows([q, lse], [q[:0], lse[:0]], None),
        lambda: delta.row_delta(out, out, lse.dtype),
        *(partial(delta.prepare_statistics, x, lse, lse, empty_lse=0.0) for x in of_rows),
        lambda: signals.post(nobody, addresses, 0, 0, counter, failed),
        lambda: signals.wait(nobody, message.view(-1)[:16].view(torch.int64), 0, 0, counter, 0, failed, record),
    ]
