# SPDX-License-Identifier: BSD-3-Clause
"""Parameters of torchtitan's models by the names that they have under every parallelism."""

import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def unwrapped(name: str) -> str:
    """Return the name from before activation checkpointing, compile and DDP wrapped the modules."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def named_parameters(
    model_parts: list[nn.Module],
) -> Iterator[tuple[str, nn.Parameter]]:
    for part in model_parts:
        for name, parameter in part.named_parameters():
            yield unwrapped(name), parameter


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def initialise(
    model_parts: list[nn.Module],
    seed: int,
    value_of: Callable[[str, Tensor], Tensor | None],
) -> None:
    """Set parameters to what ``value_of`` makes of a name and random numbers, drawn for that name; not where None."""
    for name, parameter in named_parameters(model_parts):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        value = value_of(name, torch.randn(parameter.shape, generator=generator))
        if value is None:
            continue
        if isinstance(parameter, DTensor):
            value = distribute_tensor(
                value, parameter.device_mesh, parameter.placements
            )
        parameter.copy_(value)
