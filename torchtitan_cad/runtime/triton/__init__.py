# SPDX-License-Identifier: BSD-3-Clause
"""Triton kernels: packing, gathering, combining, signals. Only their modules import triton."""

import torch


def runs_on(device: torch.device) -> bool:
    """Tell whether the runtime uses these kernels on the device, not operations of torch. (Tests interpret them.)"""
    return device.type == "cuda"
