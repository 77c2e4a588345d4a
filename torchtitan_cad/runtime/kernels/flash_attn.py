"""Attention on CUDA with the flash-attn packages: FlashAttention-2, 3 and 4, whichever is installed.

What is called are the functions behind the packages' own autograd, which take the softmax statistics of a merged row.
They are found once per process; nothing else in the runtime imports these packages.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.fused import FusedKernel

_MIN_BOUND = 512
"""Least bound on the length of tasks that is passed on. FlashAttention-4 compiles other variants for calls of a single
tile, and FlashAttention-2 and 3 lay out or compute those of a single row differently; a bound may always be larger."""


@dataclass(frozen=True)
class Library:
    """One generation of FlashAttention.

    Attributes:
        generation: 2, 3 or 4. module: where its functions are.
        capabilities: major compute capabilities that it is made for.
        forward: (q, k, v, call) -> out [Tq, Hq, D], lse [Hq, Tq].
        backward: (dout, q, k, v, out, lse [Hq, Tq], call) -> dq, dk, dv.
        empty_lse: how it marks a row without keys.
    """

    generation: int
    module: str
    capabilities: tuple[int, ...]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    empty_lse: float

    def __str__(self) -> str:
        return f"FlashAttention-{self.generation} ({self.module})"


class FlashAttnKernel(FusedKernel):
    """A FlashAttention package on packed rows. Tasks may have no keys."""

    name = "flash_attn"

    def __init__(self, library: Library, capability: tuple[int, int]) -> None:
        self.library = library
        self.empty_lse = library.empty_lse
        self.max_head_dim = 128 if library.generation == 4 and capability[0] > 9 else 256

    def __str__(self) -> str:
        return f"flash_attn, {self.library}"

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        """Run the package's forward."""
        return self.library.forward(q, k, v, call)

    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the package's backward."""
        return self.library.backward(dout, q, k, v, out, lse, call)


def find_kernel(device: torch.device) -> FlashAttnKernel:
    """Return the kernel of the first package that can be used on ``device``.

    Raises:
        ValueError: there is none; says what was looked for and what to do.
    """
    kernels, reasons = find_kernels(device)
    if kernels:
        return kernels[0]
    raise ValueError(
        f"cad.kernel = 'flash_attn' needs a FlashAttention package for this device: {'; '.join(reasons)}; "
        "install flash-attn-4, or flash-attn (2.7 or newer), or set cad.kernel = 'varlen'"
    )


def find_kernels(device: torch.device) -> tuple[list[FlashAttnKernel], list[str]]:
    """Return the kernels of the packages that can be used on ``device``, in order of preference; and why not others."""
    libraries, reasons = find_libraries()
    major, minor = torch.cuda.get_device_capability(device) if libraries else (0, 0)
    fit = [FlashAttnKernel(library, (major, minor)) for library in libraries if major in library.capabilities]
    unfit = [library for library in libraries if major not in library.capabilities]
    return fit, [*(f"{library} is not made for compute capability {major}.{minor}" for library in unfit), *reasons]


@cache
def find_libraries() -> tuple[list[Library], list[str]]:
    """Return the packages that can be imported and have the functions this module calls, in order of preference, and
    why not the others. FlashAttention-3 comes first, being made for compute capability 9.0 alone.
    """
    found, missing = [], []
    for make in (_flash_attention_3, _flash_attention_4, _flash_attention_2):
        try:
            found.append(make())
        except (ImportError, AttributeError, TypeError, OSError, RuntimeError) as error:
            missing.append(f"{make.__name__.strip('_')}: {error}")
    return found, missing


def _flash_attention_2() -> Library:
    name = "flash_attn.flash_attn_interface"
    module = importlib.import_module(name)
    run = _function(module, "_flash_attn_varlen_forward", 3, *_LENGTHS, *_FA2_PLAIN, "return_softmax")
    run_backward = _function(module, "_flash_attn_varlen_backward", 9, *_LENGTHS, *_FA2_PLAIN, "deterministic")

    def forward(q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = run(q, k, v, **_lengths(call), **_FA2_PLAIN, return_softmax=False)
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        run_backward(dout, q, k, v, out, lse, *grads, **_lengths(call), **_FA2_PLAIN, deterministic=_is_deterministic())
        return grads

    return Library(2, name, (8, 9, 10, 11, 12), forward, backward, empty_lse=torch.inf)


_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal")


_FA2_PLAIN = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
"""Arguments for which FlashAttention-2 has no defaults."""


def _flash_attention_3() -> Library:
    name = "flash_attn_interface"
    module = importlib.import_module(name)
    run = _function(module, "_flash_attn_forward", 3, *_LENGTHS, "pack_gqa")
    backward_lengths = [name for name in _LENGTHS if name != "causal"]
    run_backward = _function(
        module, "_flash_attn_backward", 6, *backward_lengths, "is_causal", "dq", "dk", "dv", "deterministic"
    )

    def forward(q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        # By default lengths decide whether a tile holds several query heads: off, so that tiles are always alike.
        out, lse, *_ = run(q, k, v, **_lengths(call), pack_gqa=False)
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        lengths = _lengths(call)
        causal = lengths.pop("causal")
        gradients = {"dq": dq, "dk": dk, "dv": dv, "deterministic": _is_deterministic()}
        run_backward(dout, q, k, v, out, lse, **lengths, is_causal=causal, **gradients)
        return dq, dk, dv

    return Library(3, name, (9,), forward, backward, empty_lse=-torch.inf)


def _flash_attention_4() -> Library:
    name = "flash_attn.cute.interface"
    module = importlib.import_module(name)
    run = _function(module, "_flash_attn_fwd", 3, *_LENGTHS, "pack_gqa", "return_lse")
    run_backward = _function(module, "_flash_attn_bwd", 6, *_LENGTHS, "deterministic")

    def forward(q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = run(q, k, v, **_lengths(call), pack_gqa=False, return_lse=True)
        return out, lse

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = run_backward(q, k, v, out, dout, lse, **_lengths(call), deterministic=_is_deterministic())
        return dq, dk, dv

    return Library(4, name, (9, 10, 11), forward, backward, empty_lse=-torch.inf)


def _lengths(call: VarlenArgs) -> dict[str, Any]:
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": max(call.max_q, _MIN_BOUND),
        "max_seqlen_k": max(call.max_k, _MIN_BOUND),
        "softmax_scale": call.scale,
        "causal": call.causal,
    }


def _function(module: Any, name: str, num_tensors: int, *keywords: str) -> Callable[..., Any]:
    """``module.name``, if it can be called with so many tensors and these keywords.

    Raises:
        AttributeError, TypeError: it is missing, or of a version with other arguments.
    """
    function = getattr(module, name)
    plain = getattr(function, "_init_fn", function)  # what torch.library.custom_op wraps
    try:
        inspect.signature(plain).bind(*[None] * num_tensors, **dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(f"{module.__name__}.{name} of another version is needed: {error}") from None
    return function


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()
