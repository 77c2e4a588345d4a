# SPDX-License-Identifier: BSD-3-Clause
"""Attention on CUDA with cuDNN, as stock ``torch.nn.attention.varlen`` uses it from torch 2.15 on.

It calls the operators behind that function. Before 2.15, torch's cuDNN attention of packed rows returned its
log-sum-exp in another layout and built its graph in every call.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _SDPBackend

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.fused import BackwardInputs, FusedKernel

_BACKEND = int(_SDPBackend.CUDNN_ATTENTION.value)
_MIN_BOUND = 256
"""rows: smallest bound on the length of tasks that is passed to cuDNN, which has different code for a single row, and
before 9.24 no code that torch trusts for 128 rows or less."""


class CudnnKernel(FusedKernel):
    """cuDNN on packed rows, head dims up to 128, every task with keys.

    Its causal mask is top-left, so causal tasks must be squares. It builds and keeps a graph for every new combination
    of bounds, tasks and rows, in some 40 ms. The backward's workspace grows with tasks x longest task.

    Raises:
        ValueError: torch, cuDNN or the device is too old; then stock varlen attention is not cuDNN's, either.
    """

    name = "cudnn"
    library = "cuDNN"
    squares_only = True
    max_head_dim = 128

    def __init__(self, device: torch.device) -> None:
        from torch.nn.attention import (
            varlen,  # registers the operators; it imports triton
        )

        if not hasattr(varlen, "_CUDNN_ATTENTION_BACKEND"):
            raise ValueError(f"cudnn needs torch 2.15, here is {torch.__version__}")
        if not varlen._should_use_cudnn(device.index or 0):
            major, minor = torch.cuda.get_device_capability(device)
            raise ValueError(
                "cudnn needs cuDNN 9.18 and compute capability 9 or 10, here are cuDNN "
                f"{torch.backends.cudnn.version()} and {major}.{minor}"
            )

    def check(self, dtype: torch.dtype, shape: AttentionShape) -> None:
        """Raise a ValueError unless ``FusedKernel.check`` is content, and sums need not be deterministic."""
        super().check(dtype, shape)
        if torch.are_deterministic_algorithms_enabled():
            raise ValueError(
                "cad.kernel = 'cudnn' sums gradients in any order, but debug.deterministic is true; "
                "set cad.kernel = 'varlen'"
            )

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        """Run the forward operator."""
        out, lse, _ = torch.ops.torch_attn._varlen_attn(
            q, k, v, *_shared(call), **_options(call), enable_gqa=True
        )
        return out, lse

    def run_backward(
        self, inputs: BackwardInputs, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the backward operator. It does not read its argument for random numbers, so an offset is passed."""
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            *inputs, *_shared(call), call.cu_q, **_options(call)
        )
        return dq, dk, dv


def _shared(call: VarlenArgs) -> tuple[Tensor, Tensor, int, int, bool]:
    """Return the arguments cu_seq_q .. is_causal that both operators share.

    Raises:
        ValueError: a causal task is not square.
    """
    if call.causal and not np.array_equal(call.cu_q_host, call.cu_k_host):
        raise ValueError(
            "cad.kernel = 'cudnn' takes causal tasks of as many keys as queries only: divide them first"
        )
    # Passing one tensor for both saves the launches that cuDNN makes for the second tensor.
    cu_k = call.cu_q if call.causal else call.cu_k
    return (
        call.cu_q,
        cu_k,
        max(call.max_q, _MIN_BOUND),
        max(call.max_k, _MIN_BOUND),
        call.causal,
    )


def _options(call: VarlenArgs) -> dict[str, Any]:
    window = [-1, 0 if call.causal else -1]
    return {"scale": call.scale, "window_size": window, "backend": _BACKEND}
