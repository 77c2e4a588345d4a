# SPDX-License-Identifier: BSD-3-Clause
"""The common base of CUDA kernels that call a library's forward and backward functions (FlashAttention, cuDNN).

These functions take bf16 and fp16, have log-sum-exps [Hq, Tq], and return gradients in the inputs' dtype. Tasks without
query rows must have no keys. Where they take heads of one size only, narrower ones are padded with zeros, which changes
neither scores nor outputs.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.kernels.base import AttentionKernel, Merged, VarlenArgs


class BackwardInputs(NamedTuple):
    """Tensors that the libraries' backwards take: rows [T, H, D], and the log-sum-exp [Hq, Tq], contiguous."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class FusedKernel(AttentionKernel, Protocol):
    """A kernel whose subclasses define ``run`` and ``run_backward``.

    Attributes:
        library: name of the library, for messages.
        remedy: advice in the message for a head dim that the library does not take.
        min_head_dim, max_head_dim: smallest and largest head dim.
        unequal: head dims of keys, and of values, that the library takes although they differ.
        empty_lse: log-sum-exp of a row without keys in backward.
    """

    library: object
    min_head_dim: int = 8
    max_head_dim: int = 256
    unequal: tuple[range, range] = range(0), range(0)
    empty_lse: float = torch.inf
    remedy: str = "set cad.kernel = 'varlen'"

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        """Return out [Tq, Hq, Dv], lse [Hq, Tq] of a call that has rows."""
        ...

    def run_backward(
        self, inputs: BackwardInputs, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of a call that has rows."""
        ...

    def padded_dims(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the head dims of keys and of values that the library gets: equal ones, unless it takes others."""
        keys, values = self.unequal
        if head_dim in keys and value_dim in values:
            return head_dim, value_dim
        largest = max(head_dim, value_dim)
        return largest, largest

    def check(self, dtype: torch.dtype, shape: AttentionShape) -> None:
        """Raise a ValueError unless the library takes this dtype, such heads and windows on this device."""
        title = f"cad.kernel = {self.name!r} ({self.library})"
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{title} takes bf16 or fp16 queries, got {dtype}; set training.mixed_precision_param = 'bfloat16', "
                "and training.dtype, too, where TP or a pipeline trains without FSDP"
            )
        if shape.window is not None and self.squares_only:
            raise ValueError(
                f"{title} takes no windows, but layers of this model attend to {shape.window} keys; set cad.kernel = "
                "'auto'"
            )
        dim, value_dim = self.padded_dims(shape.head_dim, shape.out_dim)
        is_allowed = dim % 8 == 0 and self.min_head_dim <= dim <= self.max_head_dim
        if dim == value_dim and not is_allowed:
            raise ValueError(
                f"{title} takes head dims that are multiples of 8, at least {self.min_head_dim} and at most "
                f"{self.max_head_dim} on this device, got {dim}; {self.remedy}"
            )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        """Return out [Tq, Hq, Dv] in q's dtype, lse [Tq, Hq] fp32, a view of [Hq, Tq]."""
        value_dim = v.shape[2]
        if call.max_q == 0 or call.max_k == 0:
            out = q.new_zeros(*q.shape[:2], value_dim)
            return out, q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        key_size, value_size = self.padded_dims(q.shape[2], value_dim)
        q = _padded(q, key_size)
        k = _padded(k, key_size)
        v = _padded(v, value_size)
        out, lse = self.run(q, k, v, call)
        return _narrowed(out, value_dim), lse.t()

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        merged: Merged,
        call: VarlenArgs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv in the shapes of q, k and v, in q's dtype."""
        if call.max_q == 0 or call.max_k == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dim = q.shape[2]
        value_dim = v.shape[2]
        key_size, value_size = self.padded_dims(dim, value_dim)
        q = _padded(q, key_size)
        k = _padded(k, key_size)
        v = _padded(v, value_size)
        dout = _padded(dout.contiguous(), value_size)
        lse, delta, out = merged
        if out is None:
            assert delta is not None, "backward needs delta or out"
            from torchtitan_cad.runtime.triton.delta import prepare_statistics

            out, lse = prepare_statistics(
                dout, lse.contiguous(), delta.contiguous(), empty_lse=self.empty_lse
            )
        else:
            out = _padded(out, value_size)
            lse = lse.t().contiguous()
        inputs = BackwardInputs(dout, q, k, v, out, lse)
        dq, dk, dv = self.run_backward(inputs, call)
        return _narrowed(dq, dim), _narrowed(dk, dim), _narrowed(dv, value_dim)


def _padded(x: Tensor, dim: int) -> Tensor:
    """Return [T, H, D] with zeros behind every head up to ``dim`` elements."""
    return x if dim == x.shape[2] else F.pad(x, (0, dim - x.shape[2]))


def _narrowed(x: Tensor, dim: int) -> Tensor:
    return x if dim == x.shape[2] else x[..., :dim].contiguous()
