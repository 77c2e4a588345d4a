"""The common base of CUDA kernels that call a library's forward and backward functions (FlashAttention, cuDNN).

These functions take bf16 and fp16, have log-sum-exps [Hq, Tq], and return gradients in the inputs' dtype. Tasks without
query rows must have no keys.
"""

from typing import Protocol

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import AttentionKernel, Merged, VarlenArgs


class FusedKernel(AttentionKernel, Protocol):
    """A kernel whose subclasses define ``run`` and ``run_backward``.

    Attributes:
        library: name of the library, for messages.
        remedy: advice in the message for a head dim that the library does not take.
        max_head_dim: largest head dim.
        empty_lse: log-sum-exp of a row without keys in backward.
    """

    library: object
    max_head_dim: int = 256
    empty_lse: float = torch.inf
    remedy: str = "set cad.kernel = 'varlen'"

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        """Return out [Tq, Hq, D], lse [Hq, Tq] of a call that has rows."""
        ...

    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv of a call that has rows; ``lse`` [Hq, Tq] contiguous."""
        ...

    def check(self, dtype: torch.dtype, head_dim: int) -> None:
        """Raise a ValueError unless the library takes this dtype and head dim on this device."""
        title = f"cad.kernel = {self.name!r} ({self.library})"
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{title} takes bf16 or fp16 queries, got {dtype}; set training.mixed_precision_param = 'bfloat16'"
            )
        if head_dim % 8 or head_dim > self.max_head_dim:
            raise ValueError(
                f"{title} takes head dims that are multiples of 8, at most {self.max_head_dim} on this device, "
                f"got {head_dim}; {self.remedy}"
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        """Return out [Tq, Hq, D] in q's dtype, lse [Tq, Hq] fp32, a view of [Hq, Tq].

        Raises:
            ValueError: a dtype or head dim that the library does not take.
        """
        self.check(q.dtype, q.shape[2])
        if call.max_q == 0 or call.max_k == 0:
            return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        out, lse = self.run(q, k, v, call)
        return out, lse.t()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Merged, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [Tq, Hq, D], dk and dv [Tk, Hkv, D], in q's dtype.

        Raises:
            ValueError: a dtype or head dim that the library does not take.
        """
        self.check(q.dtype, q.shape[2])
        if call.max_q == 0 or call.max_k == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dout, (lse, delta, out) = dout.contiguous(), merged
        if out is None:
            assert delta is not None, "backward needs delta or out"
            from torchtitan_cad.runtime.triton.delta import prepare_statistics

            out, lse = prepare_statistics(dout, lse.contiguous(), delta.contiguous(), empty_lse=self.empty_lse)
        else:
            lse = lse.t().contiguous()
        return self.run_backward(dout, q, k, v, out, lse, call)
