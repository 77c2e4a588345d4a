# SPDX-License-Identifier: BSD-3-Clause
"""Attention on CUDA with the packages of FlashAttention-2, 3 and 4, whichever is installed.

It calls the functions behind the packages' autograd, which take the softmax statistics of a merged row. No other module
of the runtime imports these packages.
"""

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.fused import BackwardInputs, FusedKernel

_MIN_BOUND = 512
"""rows: smallest bound on the length of tasks that is passed to the library. FlashAttention-4 compiles other variants
for a single tile, and FlashAttention-2 and 3 have another layout or other code for a single row."""


@dataclass(frozen=True)
class Library:
    """One generation of FlashAttention, and the keyword arguments of its functions.

    Attributes:
        generation: 2, 3 or 4.
        module: the module of its functions.
        capabilities: major compute capabilities that it supports.
        forward, backward: names of the functions. The forward returns out [Tq, Hq, D], lse [Hq, Tq] and more.
        forward_options, backward_options: constant arguments.
        lse, causal: the backward's names of these arguments.
        makes_gradients: True if the backward returns dq, dk and dv; otherwise it fills given tensors.
        empty_lse: log-sum-exp of a row without keys.
        unequal: as ``FusedKernel.unequal``.
    """

    generation: int
    module: str
    capabilities: tuple[int, ...]
    forward: str
    backward: str
    forward_options: dict[str, Any]
    backward_options: dict[str, Any] = field(default_factory=dict)
    lse: str = "softmax_lse"
    causal: str = "causal"
    makes_gradients: bool = False
    empty_lse: float = -torch.inf
    unequal: tuple[range, range] = range(0), range(0)

    def __str__(self) -> str:
        return f"FlashAttention-{self.generation} ({self.module})"


_PLAIN = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
"""arguments without defaults in FlashAttention-2"""
_UNPACKED = {"pack_gqa": False}
"""option: a tile never holds several query heads, so that tiles do not depend on lengths."""
LIBRARIES = (
    Library(
        generation=4,
        module="flash_attn.cute.interface",
        capabilities=(9, 10, 11),
        forward="_flash_attn_fwd",
        backward="_flash_attn_bwd",
        forward_options={**_UNPACKED, "return_lse": True},
        lse="lse",
        makes_gradients=True,
        unequal=(range(192, 193), range(128, 129)),
    ),
    Library(
        generation=3,
        module="flash_attn_interface",
        capabilities=(9,),
        forward="_flash_attn_forward",
        backward="_flash_attn_backward",
        forward_options=_UNPACKED,
        causal="is_causal",
        unequal=(range(136, 193, 8), range(104, 129, 8)),
    ),
    Library(
        generation=2,
        module="flash_attn.flash_attn_interface",
        capabilities=(8, 9, 10, 11, 12),
        forward="_flash_attn_varlen_forward",
        backward="_flash_attn_varlen_backward",
        forward_options={**_PLAIN, "return_softmax": False},
        backward_options=_PLAIN,
        empty_lse=torch.inf,
    ),
)
"""libraries that are looked for, the newest first"""


class FlashAttnKernel(FusedKernel):
    """A FlashAttention package on packed rows. Tasks may have no keys.

    Raises:
        ValueError: the package is not installed, or not made for the device.
    """

    name = "flash_attn"

    def __init__(self, library: Library, device: torch.device) -> None:
        self.library = library
        self.empty_lse = library.empty_lse
        self.unequal = library.unequal
        major, minor = torch.cuda.get_device_capability(device)
        if major not in library.capabilities:
            raise ValueError(
                f"{library} is not made for compute capability {major}.{minor}"
            )
        if library.generation == 4 and major == 9:
            self.unequal = FusedKernel.unequal
            self.min_head_dim = 64  # gradients of heads of 16 are wrong there
        elif library.generation == 4:
            self.max_head_dim = 128
        try:
            module = importlib.import_module(library.module)
            self._forward = getattr(module, library.forward)
            self._backward = getattr(module, library.backward)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            raise ValueError(f"{library} cannot be used: {error}") from error

    def __str__(self) -> str:
        return f"flash_attn, {self.library}"

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        """Run the package's forward."""
        options = {**self.library.forward_options, **_call_arguments(call)}
        out, lse, *_ = self._forward(q=q, k=k, v=v, causal=call.causal, **options)
        return out, lse

    def run_backward(
        self, inputs: BackwardInputs, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the package's backward."""
        library = self.library
        arguments = {
            **inputs._asdict(),
            **library.backward_options,
            **_call_arguments(call),
            library.causal: call.causal,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        arguments[library.lse] = arguments.pop("lse")
        if library.makes_gradients:
            return self._backward(**arguments)
        dq = torch.empty_like(inputs.q)
        dk = torch.empty_like(inputs.k)
        dv = torch.empty_like(inputs.v)
        self._backward(**arguments, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv


def _call_arguments(call: VarlenArgs) -> dict[str, Any]:
    """Return the arguments of a call that all functions name alike."""
    arguments = {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": max(call.max_q, _MIN_BOUND),
        "max_seqlen_k": max(call.max_k, _MIN_BOUND),
        "softmax_scale": call.scale,
    }
    if call.window is not None:
        # keys to the left and to the right of a query's own position
        arguments["window_size_left"] = call.window - 1
        arguments["window_size_right"] = 0
    return arguments
