# SPDX-License-Identifier: BSD-3-Clause
"""Triton kernels: packing, gathering, combining, signals. Only their modules import triton."""

import torch

TENSOR_BITS = 4
"""bits: partials lie in at most 2^4 tensors, so that the number of a tensor and a row of it (below
``planning.exchange.tables.MAX_ROWS``) make an int32."""


def runs_on(device: torch.device) -> bool:
    """Tell whether the runtime uses these kernels on the device, not operations of torch. (Tests interpret them.)"""
    return device.type == "cuda"
