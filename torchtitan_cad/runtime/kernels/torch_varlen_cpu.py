"""CPU implementations of the custom ops behind ``torch.nn.attention.varlen``, built on ``cpu.CpuKernel``.

PyTorch ships these ops for CUDA only. With them registered, stock varlen attention trains on the CPU, in eager mode and
compiled, with the very arithmetic that core attention disaggregation uses there: the twin to compare runs with.
Works for torch 2.11 (no ``enable_gqa`` and later arguments; the op takes fewer key heads as they are) to 2.15.
"""

from functools import cache

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import Merged, VarlenArgs, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel

_FULL, _CAUSAL = [-1, -1], [-1, 0]


@cache
def register_cpu_varlen() -> None:
    """Register the CPU forward and backward of ``torch_attn::_varlen_attn``; further calls do nothing."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """out like query, lse [Hq, Tq] as FlashAttention-2 lays it out, and an unused random state.

    Raises:
        ValueError: a sliding window, paged keys or per-sequence key counts.
    """
    if cu_seq_k is None or seqused_k is not None or block_table is not None:
        raise ValueError("varlen_attn on the CPU supports neither seqused_k nor block_table; pass cu_seq_k only")
    call = _call(query, cu_seq_q, cu_seq_k, is_causal, scale, window_size)
    out, lse = CpuKernel().forward(query, key, value, call)
    return _like(query, out), lse.t().contiguous(), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients like query, key and value."""
    call = _call(query, cu_seq_q, cu_seq_k, is_causal, scale, window_size)
    dq, dk, dv = CpuKernel().backward(grad_out, query, key, value, Merged(lse.t(), row_delta(grad_out, out)), call)
    return _like(query, dq), _like(key, dk), _like(value, dv)


def _call(
    query: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    is_causal: bool,
    scale: float | None,
    window_size: list[int] | None,
) -> VarlenArgs:
    """Return the call's tasks: whole documents, so the default document positions are right."""
    window = _FULL if window_size is None else list(window_size)
    if window not in (_FULL, _CAUSAL):
        raise ValueError(f"varlen_attn on the CPU supports window_size (-1, -1) and (-1, 0), got {tuple(window)}")
    return VarlenArgs.from_numpy(
        cu_seq_q.numpy(),
        cu_seq_k.numpy(),
        causal=is_causal or window == _CAUSAL,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )


def _like(template: Tensor, values: Tensor) -> Tensor:
    """``values`` with the dtype and strides that the op's fake implementation (``empty_like``) promises."""
    return torch.empty_like(template).copy_(values)
