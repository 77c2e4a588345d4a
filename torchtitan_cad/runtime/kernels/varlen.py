# SPDX-License-Identifier: BSD-3-Clause
"""Attention on CUDA with the FlashAttention-2 that torch ships, through its raw forward and backward ops.

The raw ops are those behind ``torch.nn.attention.varlen``, whose public function drops the gradient of the log-sum-exp
and does not take merged statistics.
"""

from functools import cache

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.fused import BackwardInputs, FusedKernel

_forward_op = torch.ops.aten._flash_attention_forward.default
_backward_op = torch.ops.aten._flash_attention_backward.default


class VarlenKernel(FusedKernel):
    """FlashAttention-2 on packed rows, head dims up to 256. Tasks may have no keys."""

    name = "varlen"
    library = "FlashAttention-2"
    remedy = "set model.flavor to a model with such heads"

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        """Run the forward op."""
        # One split: with more, the order of summation would depend on the other tasks of the call. torch 2.12 has the
        # argument and is reported to refuse it for FlashAttention-2, which splits no packed rows.
        takes_splits = _takes(_forward_op, "num_splits") and torch.__version__ >= "2.13"
        splits = {"num_splits": 1} if takes_splits else {}
        out, lse, *_ = _forward_op(
            q,
            k,
            v,
            *_positional(call),
            False,
            scale=call.scale,
            **_window(call),
            **splits,
        )
        return out, lse

    def run_backward(
        self, inputs: BackwardInputs, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the backward op. A row without keys has the log-sum-exp +inf, so that its probabilities are 0."""
        dq, dk, dv = _backward_op(
            *inputs,
            *_positional(call),
            *_without_dropout(inputs.q.device),
            scale=call.scale,
            **_window(call),
        )
        return dq, dk, dv


@cache
def _without_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the backward op's state of random numbers, which it does not read."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(
        0, device=device
    )


def _positional(call: VarlenArgs) -> tuple[Tensor, Tensor, int, int, float, bool]:
    """Return the arguments cum_seq_q .. is_causal that the forward and the backward op share.

    max_q is an upper bound to them. 1 would select FlashAttention-2's decoding path, which lays out LSE differently.
    """
    return call.cu_q, call.cu_k, max(call.max_q, 2), call.max_k, 0.0, call.causal


def _window(call: VarlenArgs) -> dict[str, int]:
    left = -1 if call.window is None else call.window - 1
    return {"window_size_left": left, "window_size_right": 0 if call.causal else -1}


@cache
def _takes(op: torch._ops.OpOverload, argument: str) -> bool:
    """Tell whether this torch version's ``op`` has the argument (``num_splits`` is new after 2.11)."""
    return any(a.name == argument for a in op._schema.arguments)
