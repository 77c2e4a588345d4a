"""The kernel for ``cad.kernel``: by name, or the best of the device that passes its trial, the same on all ranks."""

import logging

import torch
import torch.distributed as dist

from torchtitan_cad.runtime.kernels.base import AttentionKernel
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.flash_attn import find_kernel, find_libraries
from torchtitan_cad.runtime.kernels.trial import disagreement
from torchtitan_cad.runtime.kernels.varlen import VarlenKernel

_logger = logging.getLogger(__name__)


def get_kernel(
    name: str, device: torch.device | str, head_dim: int = 128, group: dist.ProcessGroup | None = None
) -> AttentionKernel:
    """Return the kernel for the TOML key ``cad.kernel``.

    Args:
        name: "varlen", "flash_attn", "cpu" or "auto": on the CPU cpu; on CUDA flash_attn with FlashAttention-3 or 4 if
            one is installed that is made for the device and whose trial agrees with varlen, otherwise varlen.
        device: where the model's tensors live.
        head_dim: of the model; it decides what "auto" may take.
        group: ranks that choose together, all of which must call: if their choices by "auto" differ, all take varlen.

    Raises:
        ValueError: an unknown kernel, or one that does not run on ``device`` or is not installed.
    """
    kernel, reason = choose_kernel(name, device, head_dim)
    if name == "auto" and torch.device(device).type == "cuda":
        if group is not None:
            kernel, reason = _agree(kernel, reason, group)
        _logger.info(f"cad.kernel = 'auto': {kernel}; {reason}")
    return kernel


def choose_kernel(name: str, device: torch.device | str, head_dim: int = 128) -> tuple[AttentionKernel, str]:
    """Choose as ``get_kernel``, with the reason for the choice, and without a word in the log."""
    device = torch.device(device)
    if name == "auto" and device.type == "cuda":
        return _best_on_cuda(device, head_dim)
    return _named_kernel(name, device), "the one for CPU ranks" if name == "auto" else "as set"


def _named_kernel(name: str, device: torch.device) -> AttentionKernel:
    match name, device.type:
        case "auto" | "cpu", "cpu":
            return CpuKernel()
        case "varlen", "cuda":
            return VarlenKernel()
        case "flash_attn", "cuda":
            return find_kernel(device)
        case "cpu" | "varlen" | "flash_attn", _:
            raise ValueError(f"cad.kernel = {name!r} does not run on {device.type} tensors; set cad.kernel = 'auto'")
        case "auto", _:
            raise ValueError(f"cad.kernel = 'auto' knows no kernel for {device.type} tensors; train on cuda or cpu")
        case _:
            raise ValueError(f"cad.kernel = {name!r} is unknown; set one of 'auto', 'varlen', 'flash_attn', 'cpu'")


def _best_on_cuda(device: torch.device, head_dim: int) -> tuple[AttentionKernel, str]:
    varlen = VarlenKernel()
    if not any(library.generation > 2 for library in find_libraries()[0]):
        return varlen, "neither FlashAttention-3 nor 4 is installed"
    try:
        kernel = find_kernel(device)
        kernel.check(torch.bfloat16, head_dim)
        reason = disagreement(kernel, varlen, device, head_dim) if kernel.library.generation > 2 else "no better"
    except Exception as error:  # packages and their compilers have exceptions of their own
        reason = f"{type(error).__name__}: {error}"
    if reason:
        return varlen, f"not flash_attn: {reason}"
    return kernel, "it passed its trial"


def _agree(kernel: AttentionKernel, reason: str, group: dist.ProcessGroup) -> tuple[AttentionKernel, str]:
    """Return this rank's choice if it is that of all ranks of the group, else varlen; and why."""
    choices = [(str(kernel), reason)] * group.size()
    dist.all_gather_object(choices, choices[group.rank()], group=group)
    if all(choice == choices[0][0] for choice, _ in choices):
        return kernel, reason
    ranks = dist.get_process_group_ranks(group)
    differing = next(i for i, (choice, _) in enumerate(choices) if choice != choices[0][0])
    odd = [f"rank {ranks[i]} chose {choices[i][0]} ({choices[i][1]})" for i in (0, differing)]
    return VarlenKernel(), f"the ranks' choices differ: {' and '.join(odd)}"
