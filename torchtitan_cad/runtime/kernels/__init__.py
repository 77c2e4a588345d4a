# SPDX-License-Identifier: BSD-3-Clause
"""Attention kernels behind one interface (``base``): varlen, flash_attn and cudnn on CUDA, cpu on the CPU."""
