"""Attention on CUDA with the FlashAttention-2 that torch ships, through its raw forward and backward ops.

The raw ops are those behind ``torch.nn.attention.varlen``; its public function drops the gradient of the log-sum-exp
and has no way to pass merged statistics.
"""

from functools import cache

import torch
from torch import Tensor

from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.kernels.base import VarlenArgs, compute_dtype

_forward_op = torch.ops.aten._flash_attention_forward.default
_backward_op = torch.ops.aten._flash_attention_backward.default

_MAX_HEAD_DIM = 256
_SURROGATE_COMPONENTS = 3


class VarlenKernel:
    """FlashAttention-2 on packed rows (``base.AttentionKernel``), bf16 and fp16, head dims up to 256.

    Tasks may have no keys; those without query rows must have none. Gradients come in the inputs' dtype.
    """

    name = "varlen"

    def __str__(self) -> str:
        return self.name

    def check(self, dtype: torch.dtype, head_dim: int) -> None:
        """Raise a ValueError unless FlashAttention-2 takes this dtype and head dim."""
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"cad.kernel = 'varlen' (FlashAttention-2) takes bf16 or fp16 queries, got {dtype}; "
                "set training.mixed_precision_param = 'bfloat16'"
            )
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            raise ValueError(
                f"cad.kernel = 'varlen' (FlashAttention-2) takes head dims that are multiples of 8, "
                f"at most {_MAX_HEAD_DIM}, got {head_dim}; set model.flavor to a model with such heads"
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        """Return out [Tq, Hq, D] in q's dtype, lse [Tq, Hq] fp32, a view of [Hq, Tq].

        Raises:
            ValueError: a dtype or head dim that FlashAttention-2 does not take.
        """
        self.check(q.dtype, q.shape[2])
        if call.max_q == 0 or call.max_k == 0:
            return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        # One split: with more, the order of summation would depend on the other tasks of the call.
        splits = {"num_splits": 1} if _takes(_forward_op, "num_splits") else {}
        out, lse, *_ = _forward_op(q, k, v, *_positional(call), False, scale=call.scale, **_window(call), **splits)
        return out, lse.t()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [Tq, Hq, D], dk and dv [Tk, Hkv, D], in q's dtype.

        Raises:
            ValueError: a dtype or head dim that FlashAttention-2 does not take.
        """
        self.check(q.dtype, q.shape[2])
        if call.max_q == 0 or call.max_k == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dout = dout.contiguous()
        # FlashAttention-2 marks a row without keys by +inf, which gives all its probabilities the value 0.
        out, lse = prepare_statistics(dout, lse, delta, empty_lse=torch.inf)
        rng_state, unused = _without_dropout(q.device)
        dq, dk, dv = _backward_op(
            dout,
            q,
            k,
            v,
            out,
            lse,
            *_positional(call),
            rng_state,
            unused,
            scale=call.scale,
            **_window(call),
        )
        return dq, dk, dv


def prepare_statistics(dout: Tensor, lse: Tensor, delta: Tensor, *, empty_lse: float) -> tuple[Tensor, Tensor]:
    """Return the merged rows' statistics as FlashAttention's backwards take them, in one launch.

    They take ``out``, but use it for delta = rowsum(dout * out) only, so a server can do without the merged ``out``
    (Hq x D values a token) where ``delta`` (Hq values) suffices: the surrogate is an ``out`` with the same sum. The sum
    is put on the largest component of dout, what its rounding leaves over on the second largest, and so on. In bf16
    three components leave about 2^-27 of delta, less than fp32 loses in the sum itself. A row of zeros has delta = 0
    and gets zeros.

    Args:
        dout: contiguous [T, H, D]. lse, delta: [T, H], fp32 (fp64). empty_lse: what an infinite lse becomes.

    Returns:
        out [T, H, D] in dout's dtype, finite for finite arguments, and lse [H, T], contiguous, fp32.
    """
    lse, delta = lse.contiguous(), delta.contiguous()
    if triton.runs_on(dout.device):
        from torchtitan_cad.runtime.triton import delta as kernels

        out, lse_out = torch.empty_like(dout), lse.new_empty(lse.shape[::-1], dtype=torch.float32)
        kernels.prepare_statistics(dout, lse, delta, out, lse_out, _SURROGATE_COMPONENTS, empty_lse)
        return out, lse_out
    return _surrogate_out(dout, delta), lse.float().masked_fill(lse.isinf(), empty_lse).t().contiguous()


def _surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    dtype = compute_dtype(dout.dtype)
    index = dout.abs().topk(min(_SURROGATE_COMPONENTS, dout.shape[-1]), dim=-1).indices
    limit = torch.finfo(dout.dtype).max
    remaining = delta.to(dtype)
    components = []
    for factor in dout.gather(-1, index).to(dtype).unbind(-1):
        component = torch.where(factor == 0, 0.0, remaining / factor).clamp(-limit, limit).to(dout.dtype)
        remaining = remaining - factor * component.to(dtype)
        components.append(component)
    return torch.zeros_like(dout).scatter_(-1, index, torch.stack(components, -1))


@cache
def _without_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the backward op's state of random numbers, which it does not read."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _positional(call: VarlenArgs) -> tuple[Tensor, Tensor, int, int, float, bool]:
    """Return the arguments cum_seq_q .. is_causal that the forward and the backward op share.

    max_q is an upper bound to them. 1 would select FlashAttention-2's decoding path, which lays out LSE differently.
    """
    return call.cu_q, call.cu_k, max(call.max_q, 2), call.max_k, 0.0, call.causal


def _window(call: VarlenArgs) -> dict[str, int]:
    return {"window_size_left": -1, "window_size_right": 0 if call.causal else -1}


@cache
def _takes(op: torch._ops.OpOverload, argument: str) -> bool:
    """Tell whether this torch version's ``op`` has the argument (``num_splits`` is new after 2.11)."""
    return any(a.name == argument for a in op._schema.arguments)
