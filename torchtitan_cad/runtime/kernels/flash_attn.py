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
from torchtitan_cad.runtime.kernels.varlen import prepare_statistics

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


class FlashAttnKernel:
    """A FlashAttention package on packed rows (``base.AttentionKernel``): bf16 and fp16, gradients in the same dtype.

    Tasks may have no keys; those without query rows must have none.
    """

    name = "flash_attn"

    def __init__(self, library: Library, capability: tuple[int, int]) -> None:
        self.library, self.capability = library, capability

    def __str__(self) -> str:
        return f"flash_attn, {self.library}"

    def check(self, dtype: torch.dtype, head_dim: int) -> None:
        """Raise a ValueError unless the package takes this dtype and head dim on this device."""
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"cad.kernel = 'flash_attn' ({self.library}) takes bf16 or fp16 queries, got {dtype}; "
                "set training.mixed_precision_param = 'bfloat16'"
            )
        largest = 128 if self.library.generation == 4 and self.capability[0] > 9 else 256
        if head_dim % 8 or head_dim > largest:
            raise ValueError(
                f"cad.kernel = 'flash_attn' ({self.library}) takes head dims that are multiples of 8, at most "
                f"{largest} on this device, got {head_dim}; set cad.kernel = 'varlen'"
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs) -> tuple[Tensor, Tensor]:
        """Return out [Tq, Hq, D] in q's dtype, lse [Tq, Hq] fp32, a view of [Hq, Tq].

        Raises:
            ValueError: a dtype or head dim that the package does not take.
        """
        self.check(q.dtype, q.shape[2])
        if call.max_q == 0 or call.max_k == 0:
            return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        out, lse = self.library.forward(q, k, v, call)
        return out, lse.t()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq [Tq, Hq, D], dk and dv [Tk, Hkv, D], in q's dtype.

        Raises:
            ValueError: a dtype or head dim that the package does not take.
        """
        self.check(q.dtype, q.shape[2])
        if call.max_q == 0 or call.max_k == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dout = dout.contiguous()
        out, lse = prepare_statistics(dout, lse, delta, empty_lse=self.library.empty_lse)
        return self.library.backward(dout, q, k, v, out, lse, call)


def find_kernel(device: torch.device) -> FlashAttnKernel:
    """Return the kernel of the newest package that can be used on ``device``.

    Raises:
        ValueError: there is none; says what was looked for and what to do.
    """
    libraries, reasons = find_libraries()
    capability = torch.cuda.get_device_capability(device) if libraries else (0, 0)
    for library in libraries:
        if capability[0] in library.capabilities:
            return FlashAttnKernel(library, capability)
    unfit = [f"{library} is not made for compute capability {capability[0]}.{capability[1]}" for library in libraries]
    raise ValueError(
        f"cad.kernel = 'flash_attn' needs a FlashAttention package for this device: {'; '.join([*unfit, *reasons])}; "
        "install flash-attn-4, or flash-attn (2.7 or newer), or set cad.kernel = 'varlen'"
    )


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
