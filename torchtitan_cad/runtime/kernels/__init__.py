"""Attention kernels behind one interface (``base``): ``varlen`` and ``flash_attn`` on CUDA, ``cpu`` on the CPU."""

from torchtitan_cad.runtime.kernels.base import AttentionKernel, VarlenArgs
from torchtitan_cad.runtime.kernels.select import choose_kernel, get_kernel

__all__ = ["AttentionKernel", "VarlenArgs", "choose_kernel", "get_kernel"]
