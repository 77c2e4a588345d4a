"""Modules with the functions of FlashAttention-2, 3 and 4 that the product calls, computed by the exact CPU kernel.

Signatures, layouts and conventions are those of flash-attn 2.8, FlashAttention-3 (hopper/, 2026) and flash-attn-4
4.0.0b36. Gradients come from ``out`` and the [H, T] log-sum-exp that are passed, as they do there.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from tests.runtime import statistics
from torchtitan_cad.runtime.kernels import VarlenArgs
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel

NAMES = {2: "flash_attn.flash_attn_interface", 3: "flash_attn_interface", 4: "flash_attn.cute.interface"}
CAPABILITIES = {2: (8, 0), 3: (9, 0), 4: (10, 0)}
FORWARD = {
    2: "_flash_attn_varlen_forward: q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    "causal window_size_left? window_size_right? softcap? alibi_slopes? return_softmax? block_table? leftpad_k? "
    "seqused_k? zero_tensors?",
    3: "_flash_attn_forward: q k v k_new? v_new? qv? out_? cu_seqlens_q? cu_seqlens_k? cu_seqlens_k_new? seqused_q? "
    "seqused_k? max_seqlen_q? max_seqlen_k? page_table? kv_batch_idx? leftpad_k? rotary_cos? rotary_sin? "
    "seqlens_rotary? q_descale? k_descale? v_descale? softmax_scale? causal? window_size_left? window_size_right? "
    "attention_chunk? softcap? rotary_interleaved? scheduler_metadata? num_splits? pack_gqa? sm_margin?",
    4: "_flash_attn_fwd: q k v qv? cu_seqlens_q? cu_seqlens_k? seqused_q? seqused_k? max_seqlen_q? max_seqlen_k? "
    "min_seqlen_k? page_table? softmax_scale? causal? softcap? window_size_left? window_size_right? learnable_sink? "
    "num_splits? pack_gqa? return_lse? out? lse?",
}
BACKWARD = {
    2: "_flash_attn_varlen_backward: dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "deterministic rng_state? zero_tensors?",
    3: "_flash_attn_backward: dout q k v out softmax_lse cu_seqlens_q? cu_seqlens_k? sequed_q? sequed_k? "
    "max_seqlen_q? max_seqlen_k? dq? dk? dv? softmax_scale? is_causal? window_size_left? window_size_right? softcap? "
    "deterministic? sm_margin?",
    4: "_flash_attn_bwd: q k v out dout lse softmax_scale? causal? softcap? window_size_left? window_size_right? "
    "pack_gqa? cu_seqlens_q? cu_seqlens_k? max_seqlen_q? max_seqlen_k? deterministic? dq? dk? dv?",
}
"""Name and parameters of each generation's functions; those with a question mark have defaults."""
PLAIN = {"dropout_p": 0.0, "window_size_left": -1, "softcap": 0.0, "alibi_slopes": None}
FORWARD_OPTIONS = {
    2: {**PLAIN, "return_softmax": False},
    3: {"pack_gqa": False},
    4: {"pack_gqa": False, "return_lse": True},
}
BACKWARD_OPTIONS: dict[int, dict[str, Any]] = {2: PLAIN, 3: {}, 4: {}}
"""What must be passed."""


class Recorder:
    """What the fakes were called with."""

    def __init__(self) -> None:
        self.max_q: list[int] = []
        self.max_k: list[int] = []
        self.deterministic: list[bool] = []

    def call(self, given: dict[str, Any]) -> VarlenArgs:
        cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
        max_q, max_k = given["max_seqlen_q"], given["max_seqlen_k"]
        causal = given["is_causal" if "is_causal" in given else "causal"]
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert type(causal) is bool
        assert max_q >= int(cu_q.diff().max())
        assert max_k >= int(cu_k.diff().max())
        self.max_q.append(max_q)
        self.max_k.append(max_k)
        return VarlenArgs.from_numpy(cu_q.numpy(), cu_k.numpy(), causal=causal, scale=given["softmax_scale"])


def make_fake(generation: int, seen: Recorder) -> ModuleType:
    """The package of a generation."""
    empty_lse = torch.inf if generation == 2 else -torch.inf

    def forward(given: dict[str, Any]) -> tuple[Tensor, ...]:
        assert FORWARD_OPTIONS[generation].items() <= given.items()
        out, lse = CpuKernel().forward(given["q"], given["k"], given["v"], seen.call(given))
        return out, lse.masked_fill(lse == -torch.inf, empty_lse).t().contiguous(), torch.empty(0), torch.empty(2)

    def backward(given: dict[str, Any]) -> tuple[Tensor, ...]:
        assert BACKWARD_OPTIONS[generation].items() <= given.items()
        seen.deterministic.append(given["deterministic"])
        dout, q, k, v, out = (given[name] for name in ("dout", "q", "k", "v", "out"))
        lse = given["lse" if generation == 4 else "softmax_lse"]
        assert lse.shape == (q.shape[1], q.shape[0])
        assert lse.dtype == torch.float32
        assert out.shape == dout.shape == q.shape
        assert all(x.is_contiguous() for x in (lse, out, dout))
        assert not (torch.isinf(lse) & (lse != empty_lse)).any()
        merged = Merged(lse.masked_fill(lse == empty_lse, -torch.inf).t(), row_delta(dout, out))
        grads = [x.to(q.dtype) for x in CpuKernel().backward(dout, q, k, v, merged, seen.call(given))]
        if generation == 4:
            return tuple(grads)
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            given[name].copy_(grad)
        return (torch.empty(0),)

    module = ModuleType(NAMES[generation])
    for text, run in ((FORWARD[generation], forward), (BACKWARD[generation], backward)):
        name, parameters = text.split(": ")
        setattr(module, name, _function(parameters.split(), run))
    return module


def _function(parameters: list[str], run: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function of these parameters, which calls ``run`` with the arguments by name."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made = [
        inspect.Parameter(name.rstrip("?"), kind, default=None if name.endswith("?") else inspect.Parameter.empty)
        for name in parameters
    ]
    signature = inspect.Signature(made)

    def function(*args: Any, **kwargs: Any) -> Any:
        return run(signature.bind(*args, **kwargs).arguments)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


FAKES: dict[int, Callable[[Recorder], ModuleType]] = {each: partial(make_fake, each) for each in NAMES}


def install(
    monkeypatch: pytest.MonkeyPatch,
    *modules: ModuleType,
    capability: tuple[int, int] = (9, 0),
    with_cudnn: bool = False,
) -> None:
    """For this test the FlashAttention packages are ``modules``, and the device has this capability and maybe cuDNN."""
    known = {module.__name__: module for module in modules}
    for name in NAMES.values():
        monkeypatch.setitem(sys.modules, name, known.get(name))  # None: not installed
    if with_cudnn:
        monkeypatch.setattr(varlen, "_CUDNN_ATTENTION_BACKEND", 3, raising=False)
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda index: with_cudnn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    statistics.use_torch(monkeypatch)
