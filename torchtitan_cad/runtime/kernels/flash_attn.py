# SPDX-License-Identifier: BSD-3-Clause
"""Attention on CUDA with the flash-attn packages: FlashAttention-2, 3 and 4, whichever is installed.

It calls the functions behind the packages' autograd, which take the softmax statistics of a merged row. No other module
of the runtime imports these packages.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
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
        unequal: as ``FusedKernel.unequal``; FlashAttention-4 takes none of them on compute capability 9.
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

    def forward_arguments(
        self, tensors: Sequence[Tensor | None], call: VarlenArgs
    ) -> dict[str, Any]:
        """Return the arguments of the forward for q, k and v."""
        options = {**self.forward_options, **_window(call)}
        return {
            **dict(zip("qkv", tensors, strict=True)),
            **_lengths(call, "causal"),
            **options,
        }

    def backward_arguments(
        self, tensors: Sequence[Tensor | None], call: VarlenArgs
    ) -> dict[str, Any]:
        """Return the arguments of the backward for dout, q, k, v, out, lse [Hq, Tq] and gradients to fill."""
        names = (
            "dout",
            "q",
            "k",
            "v",
            "out",
            self.lse,
            *(() if self.makes_gradients else ("dq", "dk", "dv")),
        )
        options = {
            **self.backward_options,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        return {
            **dict(zip(names, tensors, strict=False)),
            **_lengths(call, self.causal),
            **options,
            **_window(call),
        }

    def load(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Import the forward and the backward.

        Raises:
            ImportError, OSError, RuntimeError: the package cannot be imported.
            AttributeError, TypeError: a function is missing, or has other arguments in the installed version.
        """
        module = importlib.import_module(self.module)
        nothing = VarlenArgs.from_numpy([0], [0], causal=True, scale=1.0)
        return (
            _function(
                module, self.forward, self.forward_arguments([None] * 3, nothing)
            ),
            _function(
                module, self.backward, self.backward_arguments([None] * 9, nothing)
            ),
        )


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
        *(
            3,
            "flash_attn_interface",
            (9,),
            "_flash_attn_forward",
            "_flash_attn_backward",
            _UNPACKED,
        ),
        causal="is_causal",
        unequal=(range(136, 193, 8), range(104, 129, 8)),
    ),
    Library(
        *(
            4,
            "flash_attn.cute.interface",
            (9, 10, 11),
            "_flash_attn_fwd",
            "_flash_attn_bwd",
        ),
        forward_options={**_UNPACKED, "return_lse": True},
        lse="lse",
        makes_gradients=True,
        unequal=(range(192, 193), range(128, 129)),
    ),
    Library(
        *(2, "flash_attn.flash_attn_interface", (8, 9, 10, 11, 12)),
        *("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
        forward_options={**_PLAIN, "return_softmax": False},
        backward_options=_PLAIN,
        empty_lse=torch.inf,
    ),
)
"""libraries that are looked for"""


class FlashAttnKernel(FusedKernel):
    """A FlashAttention package on packed rows. Tasks may have no keys. Raises the errors of ``Library.load``."""

    name = "flash_attn"

    def __init__(self, library: Library) -> None:
        self.library = library
        self.empty_lse = library.empty_lse
        self._forward, self._backward = library.load()

    def __str__(self) -> str:
        return f"flash_attn, {self.library}"

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        """Run the package's forward."""
        out, lse, *_ = self._forward(**self.library.forward_arguments((q, k, v), call))
        return out, lse

    def run_backward(
        self, inputs: BackwardInputs, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the package's backward."""
        gradients = tuple[Tensor, ...]()
        if not self.library.makes_gradients:
            gradients = tuple(map(torch.empty_like, (inputs.q, inputs.k, inputs.v)))
        arguments = self.library.backward_arguments((*inputs, *gradients), call)
        made = self._backward(**arguments)
        dq, dk, dv = gradients or made
        return dq, dk, dv


def find_kernels(device: torch.device) -> tuple[list[FlashAttnKernel], list[str]]:
    """Return the usable kernels on ``device``, and the reasons why others are not usable."""
    kernels = []
    reasons = []
    for library in LIBRARIES:
        try:
            kernel = FlashAttnKernel(library)
        except (ImportError, AttributeError, TypeError, OSError, RuntimeError) as error:
            reasons.append(f"flash_attention_{library.generation}: {error}")
            continue
        major, minor = torch.cuda.get_device_capability(device)
        if major in library.capabilities:
            kernel.max_head_dim = 128 if library.generation == 4 and major > 9 else 256
            kernel.unequal = (
                FusedKernel.unequal
                if library.generation == 4 and major == 9
                else library.unequal
            )
            kernels.append(kernel)
        else:
            reasons.append(
                f"{library} is not made for compute capability {major}.{minor}"
            )
    return kernels, reasons


def _lengths(call: VarlenArgs, causal: str) -> dict[str, Any]:
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": max(call.max_q, _MIN_BOUND),
        "max_seqlen_k": max(call.max_k, _MIN_BOUND),
        "softmax_scale": call.scale,
        causal: call.causal,
    }


def _window(call: VarlenArgs) -> dict[str, int]:
    """Return the arguments of a call with a window: keys to the left and to the right of a query's own position."""
    return (
        {}
        if call.window is None
        else {"window_size_left": call.window - 1, "window_size_right": 0}
    )


def _function(module: Any, name: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    """Return ``module.name``. Raises TypeError unless it takes ``arguments``."""
    function = getattr(module, name)
    # the function inside a torch.library.custom_op
    plain = getattr(function, "_init_fn", function)
    try:
        inspect.signature(plain).bind(**arguments)
    except TypeError as error:
        raise TypeError(
            f"{module.__name__}.{name} of another version is needed: {error}"
        ) from None
    return function
