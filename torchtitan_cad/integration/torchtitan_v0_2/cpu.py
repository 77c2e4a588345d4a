# SPDX-License-Identifier: BSD-3-Clause
"""Run torchtitan 0.2.2 on CPU ranks over gloo.

torchtitan assumes an accelerator in nine places. `enable_cpu` adapts those places from outside, so that stock
torchtitan code, configuration and parallelism run unmodified on a laptop or in CI. It changes nothing when an
accelerator is available, and nothing about what is computed.
"""

import functools
import importlib
import os
import resource
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

_enabled = False


def enable_cpu() -> bool:
    """Make torchtitan train on CPU when there is no accelerator, and return whether it will.

    Call it once per process, before anything of torchtitan is imported; later calls do nothing. Raises RuntimeError if
    torchtitan is already imported, so that it has already settled on a device type.
    """
    global _enabled
    if _enabled:
        return True
    if torch.accelerator.is_available():
        return False
    if "torchtitan" in sys.modules:
        raise RuntimeError(
            "torchtitan was imported before enable_cpu() and has bound its device type to 'cuda', but this process has "
            "no accelerator. Start training with `python -m torchtitan_cad.train`, or call "
            "torchtitan_cad.integration.torchtitan_v0_2.cpu.enable_cpu() before the first import of torchtitan."
        )
    _replace_moe_triton_kernels()
    _count_integers()
    _offload_to_memory_that_is_not_pinned()
    _import_torchtitan_with_cpu_device()
    _force_sum_reduction_in_fsdp()
    _name_one_backend()
    _drop_missing_profiler_activity()
    # `torch.nn.attention.varlen` has no CPU kernel, and varlen is torchtitan's attention for packed documents.
    from torchtitan_cad.runtime.kernels.torch_varlen_cpu import register_cpu_varlen

    register_cpu_varlen()
    # Every rank would warn at every start; random operators on CPU ranks have the support that torchtitan needs.
    warnings.filterwarnings("ignore", r"DTensor .* may not have complete support on cpu device mesh")
    _enabled = True
    return True


class _CpuDeviceModule(ModuleType):
    """`torch.cpu` plus the device queries torchtitan makes of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(torch.cpu, name)
        except AttributeError:
            raise AttributeError(f"torch.cpu has no {name!r}: this torchtitan feature needs an accelerator") from None

    @staticmethod
    def current_device() -> int:
        """0, not `torch.cpu`'s "cpu": it is passed to `barrier(device_ids=...)`, which wants integers."""
        return 0

    @staticmethod
    def get_device_name(device: torch.device | str | None = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: torch.device | str | None = None) -> SimpleNamespace:
        """Return the one field that torchtitan reads, bytes of memory."""
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: torch.device | str | None = None) -> dict[str, int]:
        """Return the process's peak resident set as the caching allocator's peaks (ru_maxrss is in KiB)."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: torch.device | str | None = None) -> None:
        """Nothing to do: the kernel keeps one peak for the life of the process."""

    @staticmethod
    def empty_cache() -> None:
        """Nothing to do: CPU memory is not cached by torch."""


def _offload_to_memory_that_is_not_pinned() -> None:
    """`training.enable_cpu_offload` takes FSDP2's default, memory that an accelerator has pinned."""
    from torch.distributed import fsdp

    @dataclass
    class NotPinned(fsdp.CPUOffloadPolicy):
        pin_memory: bool = False

    fsdp.CPUOffloadPolicy = NotPinned  # type: ignore[misc]


def _name_one_backend() -> None:
    """`training.enable_cpu_offload` asks for gloo beside the backend of the device, which on CPU is gloo already."""
    from torchtitan.distributed import utils

    init_distributed = utils.init_distributed

    @functools.wraps(init_distributed)
    def with_one_backend(*args: Any, enable_cpu_backend: bool = False, **kwargs: Any) -> int:
        return init_distributed(*args, **kwargs)

    utils.init_distributed = with_one_backend


def _replace_moe_triton_kernels() -> None:
    """`import torchtitan` reaches one Triton file, whose kernels do not run on CPU; CPU builds of torch lack triton.

    Only that file is replaced: a fake `triton` module would make dynamo and Inductor believe Triton is installed.
    """
    name = "torchtitan.models.moe.kernels"
    replacement = ModuleType(name)
    replacement.generate_permute_indices = _generate_permute_indices  # type: ignore[attr-defined]
    sys.modules[name] = replacement


def _generate_permute_indices(
    tokens_per_expert_group: torch.Tensor, experts_per_rank: int, num_ranks: int, max_len: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order tokens that lie by rank, then by expert, into slots of their experts.

    Args:
        tokens_per_expert_group: [num_ranks * experts_per_rank] tokens of every rank for every expert.
        max_len: slots in all.
        alignment: slots of an expert are a multiple of it, at least one.

    Returns:
        [max_len] int32 token of every slot, -1 for none; [experts_per_rank] int32 slots of every expert and their sums.
    """
    experts = torch.arange(experts_per_rank).repeat(num_ranks).repeat_interleave(tokens_per_expert_group)
    tokens = tokens_per_expert_group.view(num_ranks, experts_per_rank).sum(0)
    sizes = tokens.clamp_min(alignment).add(alignment - 1).div(alignment, rounding_mode="floor") * alignment
    # Slots of an expert that remain empty shift what follows.
    shifts = (sizes - tokens).cumsum(0) - (sizes - tokens)
    slots = torch.arange(len(experts)) + shifts.repeat_interleave(tokens)
    indices = torch.full((max_len,), -1, dtype=torch.int32)
    indices[slots] = experts.argsort(stable=True).to(torch.int32)
    return indices, sizes.to(torch.int32), sizes.cumsum(0).to(torch.int32)


def _count_integers() -> None:
    """torchtitan counts the tokens of experts by `torch.histc` of integers, which has no CPU kernel.

    fp64 holds every integer below 2^53, so the counts are the same.
    """
    original = torch.histc

    def histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        if input.is_floating_point() or input.device.type != "cpu":
            return original(input, bins, min, max)
        return original(input.double(), bins, min, max).to(input.dtype)

    torch.histc = histc  # type: ignore[assignment]


def _import_torchtitan_with_cpu_device() -> None:
    """torchtitan has no setting for the device: it binds `device_type`, "cuda" by default, when first imported.

    The patch ends with that import, because torch itself asks the same functions what hardware is present.
    """
    device_module = _CpuDeviceModule("torchtitan_cad.cpu_device")
    with (
        mock.patch("torch._utils._get_available_device_type", return_value="cpu"),
        mock.patch("torch._utils._get_device_module", return_value=device_module),
    ):
        importlib.import_module("torchtitan.tools.utils")


def _force_sum_reduction_in_fsdp() -> None:
    """torchtitan divides gradients itself and sets FSDP2's factor, for which FSDP2 uses PREMUL_SUM; gloo has only SUM.

    Every `apply_fsdp` of torchtitan calls `set_gradient_divide_factor` on every FSDP module, so that is where the
    public switch is turned. The arithmetic is the same: the factor is 1.
    """
    from torch.distributed.fsdp import FSDPModule

    original = FSDPModule.set_gradient_divide_factor

    @functools.wraps(original)
    def set_gradient_divide_factor(self: FSDPModule, factor: float) -> None:
        original(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor  # type: ignore[method-assign]


def _drop_missing_profiler_activity() -> None:
    """Without CUDA or XPU torchtitan profiles the activities [CPU, None]; torch 2.13 rejects the None."""
    original = torch.profiler.profile.__init__

    @functools.wraps(original)
    def init(self: torch.profiler.profile, *, activities: Any = None, **kwargs: Any) -> None:
        if activities is not None:
            activities = [activity for activity in activities if activity is not None]
        original(self, activities=activities, **kwargs)

    torch.profiler.profile.__init__ = init  # type: ignore[method-assign]
