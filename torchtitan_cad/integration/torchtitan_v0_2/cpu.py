# SPDX-License-Identifier: BSD-3-Clause
"""Run torchtitan 0.2.2 on CPU ranks over gloo.

torchtitan assumes an accelerator in nine places. `enable_cpu` adapts those places from outside, so that stock
torchtitan code, configuration and parallelism run unmodified on a laptop or in CI. It changes nothing when an
accelerator is available, and nothing about what is computed.
"""

import sys
from types import ModuleType

import torch

from torchtitan_cad.integration import cpu


def enable_cpu() -> bool:
    """Make torchtitan train on CPU when there is no accelerator, and return whether it will.

    Call it before anything of torchtitan is imported; later calls do nothing. Raises RuntimeError if that is too late.
    """
    return cpu.enable_cpu(before_import=_replace_moe_triton_kernels)


def _replace_moe_triton_kernels() -> None:
    """`import torchtitan` reaches one Triton file, whose kernels do not run on CPU; CPU builds of torch lack triton.

    Only that file is replaced: a fake `triton` module would make dynamo and Inductor believe Triton is installed.
    """
    name = "torchtitan.models.moe.kernels"
    replacement = ModuleType(name)
    replacement.generate_permute_indices = _generate_permute_indices  # type: ignore[attr-defined]
    sys.modules[name] = replacement


def _generate_permute_indices(
    tokens_per_expert_group: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order tokens that lie by rank, then by expert, into slots of their experts.

    Args:
        tokens_per_expert_group: [num_ranks * experts_per_rank] tokens of every rank for every expert.
        max_len: slots in all.
        alignment: slots of an expert are a multiple of it, at least one.

    Returns:
        [max_len] int32 token of every slot, -1 for none; [experts_per_rank] int32 slots of every expert and their sums.
    """
    experts = (
        torch.arange(experts_per_rank)
        .repeat(num_ranks)
        .repeat_interleave(tokens_per_expert_group)
    )
    tokens = tokens_per_expert_group.view(num_ranks, experts_per_rank).sum(0)
    sizes = (
        tokens.clamp_min(alignment)
        .add(alignment - 1)
        .div(alignment, rounding_mode="floor")
        * alignment
    )
    # Slots of an expert that remain empty shift what follows.
    shifts = (sizes - tokens).cumsum(0) - (sizes - tokens)
    slots = torch.arange(len(experts)) + shifts.repeat_interleave(tokens)
    indices = torch.full((max_len,), -1, dtype=torch.int32)
    indices[slots] = experts.argsort(stable=True).to(torch.int32)
    return indices, sizes.to(torch.int32), sizes.cumsum(0).to(torch.int32)
