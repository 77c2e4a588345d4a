# SPDX-License-Identifier: BSD-3-Clause
"""Choosing the kernel for ``cad.kernel``: by name, or the first that can run, the same on all ranks."""

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.kernels.base import (
    AttentionKernel,
    Merged,
    VarlenArgs,
    random_rows,
    row_delta,
)
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.cudnn import CudnnKernel
from torchtitan_cad.runtime.kernels.flash_attn import LIBRARIES, FlashAttnKernel
from torchtitan_cad.runtime.kernels.varlen import VarlenKernel
from torchtitan_cad.runtime.transport.base import gather

KERNELS = ("auto", "varlen", "flash_attn", "cudnn", "cpu")
"""values of ``cad.kernel``"""

ROWS = 128
"""rows of the call by which a kernel is tried"""

_SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)

_logger = logging.getLogger(__name__)


def get_kernel(
    name: str,
    device: torch.device | str,
    shape: AttentionShape = _SHAPE,
    group: dist.ProcessGroup | None = None,
) -> AttentionKernel:
    """Return the kernel for the TOML key ``cad.kernel``, and log the reasons against those that "auto" prefers.

    Args:
        name: one of ``KERNELS``. "auto" is "cpu" on CPU. On CUDA it is the first that can run of FlashAttention-4 and
            3, cuDNN, and FlashAttention-2 of its own package and of torch; "flash_attn" is the first of its packages.
        device: device of the model's tensors.
        shape: heads of a rank and their size, which the kernel must take in bf16.
        group: gloo group of ranks that choose together and must all call.

    Raises:
        ValueError: the kernel is unknown, does not run on ``device``, is not installed, or does not take the heads.
    """
    kernel, reason = choose_kernel(name, device, shape, group)
    if name == "auto" and torch.device(device).type == "cuda":
        _logger.info(f"cad.kernel = 'auto': {kernel}; {reason}")
        if remark := slower_than_possible(kernel, torch.device(device)):
            _logger.warning(remark)
    return kernel


def choose_kernel(
    name: str,
    device: torch.device | str,
    shape: AttentionShape = _SHAPE,
    group: dist.ProcessGroup | None = None,
) -> tuple[AttentionKernel, str]:
    """Return the choice of ``get_kernel`` and its reason, without logging."""
    device = torch.device(device)
    match name, device.type:
        case "auto" | "cpu", "cpu":
            return CpuKernel(), "the one for CPU ranks"
        case "varlen", "cuda":
            return VarlenKernel(), "as set"
        case "auto" | "flash_attn" | "cudnn", "cuda":
            return _first(name, device, shape, group)
    if name in KERNELS:
        raise ValueError(
            f"cad.kernel = {name!r} does not run on {device.type} tensors; set cad.kernel = 'auto' on cuda or cpu"
        )
    raise ValueError(
        f"cad.kernel = {name!r} is unknown; set one of {', '.join(map(repr, KERNELS))}"
    )


def slower_than_possible(kernel: AttentionKernel, device: torch.device) -> str | None:
    """Return what to install if ``kernel`` is FlashAttention-2 on a device with faster libraries; otherwise None."""
    if "FlashAttention-2" not in f"{kernel}, {getattr(kernel, 'library', None)}":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return None
    package = "flash-attn-4 or FlashAttention-3" if major == 9 else "flash-attn-4"
    return (
        f"{kernel} is FlashAttention-2, far below what a device of compute capability {major}.{minor} can do: "
        f"install {package} and set cad.kernel = 'auto'"
    )


def usable_kernels(
    name: str, device: torch.device, shape: AttentionShape
) -> tuple[dict[str, AttentionKernel], list[str]]:
    """Return the CUDA kernels of a name that can run, by title, the preferred first; and reasons against the others."""
    usable: dict[str, AttentionKernel] = {}
    reasons = list[str]()
    version_4, version_3, version_2 = (
        partial(FlashAttnKernel, library, device) for library in LIBRARIES
    )
    makers: list[tuple[str, Callable[[], AttentionKernel]]] = [
        ("flash_attn", version_4),
        ("flash_attn", version_3),
        ("cudnn", partial(CudnnKernel, device)),
        ("flash_attn", version_2),
        ("varlen", VarlenKernel),
    ]
    for kernel_name, make in makers:
        if name not in ("auto", kernel_name):
            continue
        try:
            kernel = make()
            kernel.check(torch.bfloat16, shape)
            _launch(kernel, shape, device)
        except ValueError as error:
            reasons.append(str(error))
        except Exception as error:
            # packages and their compilers have exceptions of their own
            reasons.append(f"{kernel_name} failed: {type(error).__name__}: {error}")
        else:
            usable[str(kernel)] = kernel
    return usable, reasons


def _launch(
    kernel: AttentionKernel, shape: AttentionShape, device: torch.device
) -> None:
    """Run a forward and a backward over few rows, to see whether the kernel runs on this device."""
    call = VarlenArgs.from_numpy(
        [0, ROWS],
        [0, ROWS],
        causal=True,
        scale=shape.head_dim**-0.5,
        window=shape.window,
        device=device,
    )
    q, k, v, dout = random_rows(shape, torch.bfloat16, call)
    out, lse = kernel.forward(q, k, v, call)
    kernel.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call)


def _first(
    name: str,
    device: torch.device,
    shape: AttentionShape,
    group: dist.ProcessGroup | None,
) -> tuple[AttentionKernel, str]:
    """Return the first kernel of a name that can run on all ranks of the group, and the reasons against the others.

    Raises:
        ValueError: on all ranks; there is none.
    """
    usable, reasons = usable_kernels(name, device, shape)
    if group is not None:
        for rank, titles in gather(list(usable), group).items():
            for title in usable.keys() - titles:
                del usable[title]
                reasons.append(f"{title} cannot be used on rank {rank}")
    for kernel in usable.values():
        return kernel, "; ".join(reasons) or "the preferred one"
    raise ValueError(
        f"cad.kernel = {name!r} cannot be used: {'; '.join(reasons)}; install what is missing, or set "
        "cad.kernel = 'auto'"
    )
