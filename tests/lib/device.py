# SPDX-License-Identifier: BSD-3-Clause
"""Marks of tests that need a CUDA device, its kernels, and the order not to wait for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from torchtitan_cad.runtime.kernels import select
from torchtitan_cad.runtime.kernels.base import AttentionKernel
from torchtitan_cad.runtime.kernels.select import get_kernel

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cuda_kernels() -> dict[str, AttentionKernel]:
    """By title: varlen, cudnn, and flash_attn with every package that is installed."""
    if not torch.cuda.is_available():
        return {"varlen": get_kernel("varlen", "cuda")}
    kernels, _ = select.usable_kernels("auto", torch.device("cuda"), select._SHAPE)
    return kernels


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
