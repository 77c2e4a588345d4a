# SPDX-License-Identifier: BSD-3-Clause
"""FlashAttention-2, 3 and 4 and torch's own operators as the product calls them, computed by the exact CPU kernel.

Signatures, layouts and conventions are those of flash-attn 2.8, FlashAttention-3 (hopper/, 2026), flash-attn-4 4.0.0b36
and torch 2.15. Gradients come from ``out`` and the [H, T] log-sum-exp that are passed, as they do there.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels import select
from torchtitan_cad.runtime.kernels import varlen as kernels_varlen
from torchtitan_cad.runtime.kernels.base import (
    Merged,
    VarlenArgs,
    compute_dtype,
    row_delta,
)
from torchtitan_cad.runtime.kernels.cpu import CpuKernel

NAMES = {
    2: "flash_attn.flash_attn_interface",
    3: "flash_attn_interface",
    4: "flash_attn.cute.interface",
}
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
PLAIN = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
FORWARD_OPTIONS = {
    2: {**PLAIN, "return_softmax": False},
    3: {"pack_gqa": False},
    4: {"pack_gqa": False, "return_lse": True},
}
"""Arguments that must be passed, PLAIN ones backward, too."""
CUDNN_FORWARD = (
    "query key value cu_seq_q cu_seq_k max_q max_k is_causal? scale? window_size? enable_gqa? seqused_k? block_table? "
    "num_splits? backend?"
)
CUDNN_BACKWARD = (
    "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal "
    "rng_state scale? window_size? backend?"
)
CUDNN_BACKEND = 3
OTHER_NAMES = (
    "query=q key=k value=v grad_out=dout softmax_lse=lse logsumexp=lse scale=softmax_scale causal=is_causal "
    "cum_seq_q=cu_seqlens_q cum_seq_k=cu_seqlens_k cu_seq_q=cu_seqlens_q cu_seq_k=cu_seqlens_k max_q=max_seqlen_q "
    "max_k=max_seqlen_k"
)
NAME_HERE = dict(pair.split("=") for pair in OTHER_NAMES.split())
"""What an argument is called here, of all that libraries call it."""


class Recorder:
    """The arguments that the fakes were called with."""

    def __init__(self):
        self.max_q: list[int] = []
        self.max_k: list[int] = []
        self.same_offsets: list[bool] = []
        self.deterministic: list[bool] = []
        self.dims: set[tuple[int, int]] = set()

    def call(self, arguments: dict[str, Any]) -> VarlenArgs:
        cu_q, cu_k = (arguments[f"cu_seqlens_{x}"] for x in "qk")
        max_q, max_k = (arguments[f"max_seqlen_{x}"] for x in "qk")
        causal = arguments["is_causal"]
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert type(causal) is bool
        assert max_q >= int(cu_q.diff().max())
        assert max_k >= int(cu_k.diff().max())
        left, right = arguments.get("window_size") or [
            arguments.get(f"window_size_{side}", -1) for side in ("left", "right")
        ]
        is_bounded = causal if arguments["is_of_torch"] else left >= 0
        assert right == (0 if is_bounded else -1)
        self.max_q.append(max_q)
        self.max_k.append(max_k)
        self.same_offsets.append(cu_q is cu_k)
        return VarlenArgs.from_numpy(
            cu_q.numpy(),
            cu_k.numpy(),
            causal=causal,
            scale=arguments["softmax_scale"],
            window=left + 1 if left >= 0 else None,
        )


def attend(
    arguments: dict[str, Any], seen: Recorder, empty_lse: float
) -> tuple[Tensor, Tensor]:
    """out and [H, T] log-sum-exp; rows without keys have ``empty_lse``."""
    q, k, v = (arguments[name] for name in "qkv")
    seen.dims.add((k.shape[2], v.shape[2]))
    out, lse = CpuKernel().forward(q, k, v, seen.call(arguments))
    return out, lse.masked_fill(lse == -torch.inf, empty_lse).t().contiguous()


def attend_backward(
    arguments: dict[str, Any], seen: Recorder, empty_lse: float
) -> tuple[Tensor, ...]:
    """dq, dk, dv in q's dtype."""
    q, k, v, dout, out, lse = (
        arguments[name] for name in ("q", "k", "v", "dout", "out", "lse")
    )
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == torch.float32
    assert out.shape == dout.shape == (*q.shape[:2], v.shape[2])
    seen.dims.add((k.shape[2], v.shape[2]))
    assert all(x.is_contiguous() for x in (lse, out, dout))
    assert not (torch.isinf(lse) & (lse != empty_lse)).any()
    merged = Merged(
        lse.masked_fill(lse == empty_lse, -torch.inf).t(), row_delta(dout, out)
    )
    return tuple(
        x.to(q.dtype)
        for x in CpuKernel().backward(dout, q, k, v, merged, seen.call(arguments))
    )


def make_fake(generation: int, seen: Recorder) -> ModuleType:
    """The package of a generation."""
    empty_lse = torch.inf if generation == 2 else -torch.inf

    def forward(arguments):
        assert FORWARD_OPTIONS[generation].items() <= arguments.items()
        return *attend(arguments, seen, empty_lse), torch.empty(0), torch.empty(2)

    def backward(arguments):
        assert generation > 2 or PLAIN.items() <= arguments.items()
        seen.deterministic.append(arguments["deterministic"])
        grads = attend_backward(arguments, seen, empty_lse)
        if generation == 4:
            return grads
        for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
            arguments[name].copy_(grad)
        return (torch.empty(0),)

    module = ModuleType(NAMES[generation])
    for text, run in ((FORWARD[generation], forward), (BACKWARD[generation], backward)):
        name, parameters = text.split(": ")
        setattr(module, name, _function(parameters.split(), run))
    return module


def fake_operator(op: torch._ops.OpOverload, seen: Recorder) -> Callable[..., Any]:
    """One of the two operators behind torch's FlashAttention-2."""

    def run(arguments):
        assert arguments["dropout_p"] == 0.0
        assert arguments["max_seqlen_k"] == int(arguments["cu_seqlens_k"].diff().max())
        assert all(arguments[name].is_contiguous() for name in "qkv")
        if "dout" in arguments:
            return attend_backward(arguments, seen, torch.inf)
        assert arguments.get("num_splits") == (
            1
            if kernels_varlen._takes(function, "num_splits")
            and torch.__version__ >= "2.13"
            else None
        )
        return *attend(arguments, seen, torch.inf), *[torch.empty(0)] * 3

    function = _function(
        [f"{argument.name}?" for argument in op._schema.arguments], run
    )
    function._schema = op._schema  # type: ignore[attr-defined]
    return function


def fake_cudnn(seen: Recorder) -> SimpleNamespace:
    """The operators behind torch's cuDNN attention of packed rows."""

    def forward(arguments):
        assert arguments["enable_gqa"]
        assert arguments["backend"] == CUDNN_BACKEND
        return *attend(arguments, seen, torch.inf), torch.zeros(2)

    def backward(arguments):
        assert arguments["backend"] == CUDNN_BACKEND
        assert isinstance(arguments["rng_state"], Tensor)
        return attend_backward(arguments, seen, torch.inf)

    return SimpleNamespace(
        _varlen_attn=_function(CUDNN_FORWARD.split(), forward),
        _varlen_attn_backward=_function(CUDNN_BACKWARD.split(), backward),
    )


def _function(
    parameters: list[str], run: Callable[[dict[str, Any]], Any]
) -> Callable[..., Any]:
    """A function of these parameters, which calls ``run`` with the arguments by their names here."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    made = [
        inspect.Parameter(
            name.rstrip("?"),
            kind,
            default=None if name.endswith("?") else inspect.Parameter.empty,
        )
        for name in parameters
    ]
    signature = inspect.Signature(made)

    def function(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        arguments = {NAME_HERE.get(name, name): x for name, x in bound.items()}
        return run(arguments | {"is_of_torch": "query" in bound})

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def install(
    monkeypatch,
    *modules: ModuleType,
    capability: tuple[int, int] = (9, 0),
    with_cudnn: bool = False,
):
    """Makes ``modules`` the FlashAttention packages of a test, whose device has this capability and maybe cuDNN."""
    # there is no device to launch on
    monkeypatch.setattr(select, "_launch", lambda *_: None)
    # imports triton, before which interpreting must be chosen
    from torch.nn.attention import (
        varlen,
    )

    known = {module.__name__: module for module in modules}
    for name in NAMES.values():
        monkeypatch.setitem(sys.modules, name, known.get(name))  # None: not installed
    if with_cudnn:
        monkeypatch.setattr(varlen, "_CUDNN_ATTENTION_BACKEND", 3, raising=False)
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda index: with_cudnn)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: capability
    )
    use_torch(monkeypatch)


COMPONENTS = 3


def use_torch(monkeypatch):
    """Makes kernels take their statistics from here, without Triton and on the CPU."""
    statistics = SimpleNamespace(prepare_statistics=prepare_statistics)
    monkeypatch.setitem(sys.modules, "torchtitan_cad.runtime.triton.delta", statistics)


def prepare_statistics(dout, lse, delta, *, empty_lse: float) -> tuple[Tensor, Tensor]:
    """The sum is put on the largest components of the whole row, where Triton's kernel takes them from its quarters."""
    assert all(x.is_contiguous() for x in (dout, lse, delta))
    dtype = compute_dtype(dout.dtype)
    index = dout.abs().topk(min(COMPONENTS, dout.shape[-1]), dim=-1).indices
    limit = torch.finfo(dout.dtype).max
    remaining = delta.to(dtype)
    components = []
    for factor in dout.gather(-1, index).to(dtype).unbind(-1):
        component = (
            torch.where(factor == 0, 0.0, remaining / factor)
            .clamp(-limit, limit)
            .to(dout.dtype)
        )
        remaining = remaining - factor * component.to(dtype)
        components.append(component)
    out = torch.zeros_like(dout).scatter_(-1, index, torch.stack(components, -1))
    return out, lse.float().masked_fill(lse.isinf(), empty_lse).t().contiguous()
