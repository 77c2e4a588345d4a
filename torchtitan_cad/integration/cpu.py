# SPDX-License-Identifier: BSD-3-Clause
"""What torchtitan of any version needs to train on CPU ranks over gloo.

Nothing here changes what is computed.
"""

import importlib
import os
import resource
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_enabled = False


def enable_cpu(before_import: Callable[[], None] | None = None) -> bool:
    """Make torchtitan train on CPU when there is no accelerator, and return whether it will.

    Call it before anything of torchtitan is imported; later calls do nothing. Raises RuntimeError if that is too late.

    Args:
        before_import: replaces what this version of torchtitan must not import.
    """
    global _enabled
    if _enabled:
        return True
    if torch.accelerator.is_available():
        return False
    if "torchtitan.tools.utils" in sys.modules:
        raise RuntimeError(
            "torchtitan was imported before enable_cpu() and has bound its device type to 'cuda', but this process has "
            "no accelerator; start training with `python -m torchtitan_cad.train`, or call enable_cpu() first"
        )
    _adapt_torch()
    if before_import is not None:
        before_import()
    # torchtitan has no setting for the device: it binds `device_type`, "cuda" by default, when first imported.
    # The patch ends with that import, because torch itself asks the same functions what hardware is present.
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=_device_module()),
    ):
        importlib.import_module("torchtitan.tools.utils")
    _enabled = True
    return True


def _adapt_torch() -> None:
    """Let torch do on CPU ranks what torchtitan asks of it."""
    _count_integers()
    force_sum_reduction_in_fsdp()
    _drop_missing_profiler_activity()
    _exchange_unequal_parts()
    # `torch.nn.attention.varlen` has no CPU kernel, and varlen is torchtitan's attention for packed documents.
    from torchtitan_cad.integration.cpu_varlen import register_cpu_varlen

    register_cpu_varlen()
    # Every rank would warn at every start; random operators on CPU ranks have the support that torchtitan needs.
    warnings.filterwarnings(
        "ignore", r"DTensor .* may not have complete support on cpu device mesh"
    )


def _device_module() -> SimpleNamespace:
    """Return `torch.cpu` plus the device queries torchtitan makes of `torch.cuda`."""
    properties = SimpleNamespace(
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    queries = {
        # not `torch.cpu`'s "cpu": it is passed to `barrier(device_ids=...)`, which wants integers
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        "get_device_name": lambda device: "CPU",
        "get_device_properties": lambda device=None: properties,
        "memory_stats": _memory_stats,
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
    }
    return SimpleNamespace(**vars(torch.cpu) | queries)


def _memory_stats(device: torch.device) -> dict[str, int]:
    """Return the process's peak resident set as the caching allocator's peaks (ru_maxrss is in KiB)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "active_bytes.all.peak": peak,
        "reserved_bytes.all.peak": peak,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _count_integers() -> None:
    """torchtitan counts the tokens of experts by `torch.histc` of integers, which has no CPU kernel.

    fp64 holds every integer below 2^53, so the counts are the same.
    """
    original = torch.histc

    def histc(input: torch.Tensor, **options: Any) -> torch.Tensor:
        if input.is_floating_point():
            return original(input, **options)
        return original(input.double(), **options).to(input.dtype)

    torch.histc = histc  # type: ignore[assignment]


def force_sum_reduction_in_fsdp() -> None:
    """torchtitan divides gradients itself and sets FSDP2's factor, for which FSDP2 uses PREMUL_SUM; gloo has only SUM.

    Every `apply_fsdp` of torchtitan calls `set_gradient_divide_factor` on every FSDP module, so that is where the
    public switch is turned. The arithmetic is the same: the factor is 1.
    """
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: FSDPModule, factor: float) -> None:
        original(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor  # type: ignore[method-assign]


def _drop_missing_profiler_activity() -> None:
    """Without CUDA or XPU torchtitan profiles the activities [CPU, None]; torch 2.13 rejects the None."""
    original = torch.profiler.profile.__init__

    def init(
        self: torch.profiler.profile, *, activities: Any = None, **kwargs: Any
    ) -> None:
        if activities is not None:
            activities = [activity for activity in activities if activity is not None]
        original(self, activities=activities, **kwargs)

    torch.profiler.profile.__init__ = init  # type: ignore[method-assign]


def _exchange_unequal_parts() -> None:
    """torchtitan 0.3.0's experts exchange tokens by `all_to_all`, which gloo does for parts of one size alone."""

    def all_to_all(
        output_tensor_list: list[torch.Tensor],
        input_tensor_list: list[torch.Tensor],
        group: Any = None,
    ) -> None:
        received = [len(part) for part in output_tensor_list]
        sent = [len(part) for part in input_tensor_list]
        came = torch.cat(output_tensor_list)
        rows = torch.cat(input_tensor_list)
        dist.all_to_all_single(came, rows, received, sent, group)
        torch._foreach_copy_(output_tensor_list, came.split(received))

    dist.all_to_all = all_to_all  # type: ignore[assignment]
