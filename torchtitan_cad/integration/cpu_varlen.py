# SPDX-License-Identifier: BSD-3-Clause
"""CPU implementations of the custom ops behind ``torch.nn.attention.varlen``, built on ``CpuKernel``.

PyTorch ships these ops for CUDA only. With these implementations, stock varlen attention trains on the CPU, in eager
mode and compiled, with the same arithmetic as core attention disaggregation: a reference run to compare with.
Works for torch 2.11 (no ``enable_gqa`` and later arguments; the op supports fewer key heads) to 2.15.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import Merged, VarlenArgs, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel


@cache
def register_cpu_varlen() -> None:
    """Register the CPU forward and backward of ``torch_attn::_varlen_attn``; further calls do nothing."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, in query's layout where it has its shape, lse [Hq, Tq] of FlashAttention-2, and an unused state."""
    out, lse = CpuKernel().forward(query, key, value, _tasks(query, *call))
    if out.shape == query.shape:  # else values are narrower than keys
        out = _like(query, out)
    return out, lse.t().contiguous(), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients like query, key and value."""
    merged = Merged(lse.t(), row_delta(grad_out, out))
    forward_call = call[:5] + call[6:]  # backward has a random state in between
    tasks = _tasks(query, *forward_call)
    gradients = CpuKernel().backward(grad_out, query, key, value, merged, tasks)
    dq, dk, dv = map(_like, (query, key, value), gradients)
    return dq, dk, dv


def _tasks(
    query: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    *others: Any,
) -> VarlenArgs:
    """Return the call's tasks: whole documents, so the default document positions are right."""
    left, right = window_size or (-1, -1)
    return VarlenArgs.from_numpy(
        cu_seq_q.numpy(),
        cu_seq_k.numpy(),
        causal=is_causal or right == 0,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=left + 1 if left >= 0 else None,
    )


def _like(template: Tensor, values: Tensor) -> Tensor:
    """``values`` with the dtype and strides that the op's fake implementation (``empty_like``) promises."""
    return torch.empty_like(template).copy_(values)
