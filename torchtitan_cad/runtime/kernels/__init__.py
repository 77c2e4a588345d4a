"""Attention kernels behind one interface (``base``): ``varlen`` and ``flash_attn`` on CUDA, ``cpu`` on the CPU."""

from .base import AttentionKernel, CallArgs, choose_kernel, get_kernel

__all__ = ["AttentionKernel", "CallArgs", "choose_kernel", "get_kernel"]
