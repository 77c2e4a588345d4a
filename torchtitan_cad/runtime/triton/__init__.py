"""Triton kernels: packing, gathering, combining, signals. Only their modules import triton."""

import torch


def runs_on(device: torch.device) -> bool:
    """Whether the runtime takes these kernels there, or else operations of torch. (Tests interpret them on the CPU.)"""
    return device.type == "cuda"
