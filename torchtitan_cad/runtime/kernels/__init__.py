# SPDX-License-Identifier: BSD-3-Clause
"""Attention kernels behind one interface (``base``): varlen, flash_attn and cudnn on CUDA, cpu on the CPU."""

from torchtitan_cad.runtime.kernels.base import AttentionKernel, VarlenArgs
from torchtitan_cad.runtime.kernels.select import get_kernel

__all__ = [
    "AttentionKernel",
    "VarlenArgs",
    "get_kernel",
]
