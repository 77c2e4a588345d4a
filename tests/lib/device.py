# SPDX-License-Identifier: BSD-3-Clause
"""Marks of tests that need a CUDA device, its kernels, and the order not to wait for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from torchtitan_cad.runtime.kernels import AttentionKernel, get_kernel, select

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cuda_kernels() -> dict[str, AttentionKernel]:
    """By name: varlen, cudnn, and flash_attn with every package that is installed."""
    if not torch.cuda.is_available():
        return {"varlen": get_kernel("varlen", "cuda")}
    compared, _ = select.compare_kernels(torch.device("cuda"), select._SHAPE)
    return {str(kernel): kernel for kernel, _ in compared}


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Waiting for the device is an error inside."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
