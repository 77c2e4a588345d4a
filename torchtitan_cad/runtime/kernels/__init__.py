"""Attention kernels behind one interface (``base``): ``varlen`` and ``flash_attn`` on CUDA, ``cpu`` on the CPU."""

from torchtitan_cad.runtime.kernels.base import AttentionKernel, CallArgs
from torchtitan_cad.runtime.kernels.select import choose_kernel, get_kernel

__all__ = ["AttentionKernel", "CallArgs", "choose_kernel", "get_kernel"]
