# SPDX-License-Identifier: BSD-3-Clause
"""Run torchtitan 0.3.0 on CPU ranks over gloo."""

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.integration.cpu import adapt_torch, import_with_cpu_device


@functools.cache
def enable_cpu() -> bool:
    """Make torchtitan train on CPU when there is no accelerator, and return whether it will.

    Call it before anything of torchtitan is imported. Raises RuntimeError if that is too late.
    """
    if torch.accelerator.is_available():
        return False
    if "torchtitan.tools.utils" in sys.modules:
        raise RuntimeError(
            "torchtitan was imported first, and has bound its device type to 'cuda', but this process has no "
            "accelerator; start training with `python -m torchtitan_cad.train`"
        )
    adapt_torch()
    import_with_cpu_device()
    _name_one_backend()
    _exchange_unequal_parts()
    return True


def _name_one_backend() -> None:
    """`training.enable_cpu_offload` asks for gloo beside the backend of the device, which on CPU is gloo already."""
    from torchtitan.distributed import utils

    init_distributed = utils.init_distributed

    @functools.wraps(init_distributed)
    def with_one_backend(
        *args: Any, enable_cpu_backend: bool = False, **options: Any
    ) -> int:
        return init_distributed(*args, **options)

    utils.init_distributed = with_one_backend


def _exchange_unequal_parts() -> None:
    """Experts' tokens travel by ``all_to_all``, which gloo does for parts of one size alone, unlike the one below."""

    def all_to_all(
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> None:
        received = [len(part) for part in output_tensor_list]
        sent = [len(part) for part in input_tensor_list]
        came = torch.cat(output_tensor_list)
        dist.all_to_all_single(
            came, torch.cat(input_tensor_list), received, sent, group
        )
        for part, rows in zip(output_tensor_list, came.split(received), strict=True):
            part.copy_(rows)

    dist.all_to_all = all_to_all
