"""Modules with the functions of FlashAttention-2, 3 and 4 that the product calls, computed by the exact CPU kernel.

Signatures, layouts and conventions are those of flash-attn 2.8, FlashAttention-3 (hopper/, 2026) and flash-attn-4
4.0.0b36. Gradients come from ``out`` and the [H, T] log-sum-exp that are passed, as they do there.
"""

import sys
from collections.abc import Callable
from types import ModuleType

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


class Recorder:
    """What the fakes were called with."""

    def __init__(self) -> None:
        self.max_q: list[int] = []
        self.max_k: list[int] = []
        self.deterministic: list[bool] = []

    def call(self, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, causal: bool) -> VarlenArgs:
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert type(causal) is bool
        assert max_q >= int(cu_q.diff().max())
        assert max_k >= int(cu_k.diff().max())
        self.max_q.append(max_q)
        self.max_k.append(max_k)
        return VarlenArgs.from_numpy(cu_q.numpy(), cu_k.numpy(), causal=causal, scale=scale)


def forward(q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs, empty_lse: float) -> tuple[Tensor, Tensor]:
    out, lse = CpuKernel().forward(q, k, v, call)
    return out, lse.masked_fill(lse == -torch.inf, empty_lse).t().contiguous()


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: VarlenArgs, empty_lse: float
) -> tuple[Tensor, Tensor, Tensor]:
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert out.shape == dout.shape == q.shape
    assert out.is_contiguous()
    assert dout.is_contiguous()
    assert not (torch.isinf(lse) & (lse != empty_lse)).any()
    lse = lse.masked_fill(lse == empty_lse, -torch.inf).t()
    dq, dk, dv = CpuKernel().backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def fake_2(seen: Recorder) -> ModuleType:
    module = ModuleType(NAMES[2])

    def _flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
        return_softmax=False,
        block_table=None,
        leftpad_k=None,
        seqused_k=None,
        zero_tensors=False,
    ):
        assert (dropout_p, window_size_left, softcap, alibi_slopes, return_softmax) == (0.0, -1, 0.0, None, False)
        call = seen.call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        return *forward(q, k, v, call, torch.inf), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
        zero_tensors=False,
    ):
        assert (dropout_p, window_size_left, softcap, alibi_slopes) == (0.0, -1, 0.0, None)
        call = seen.call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        seen.deterministic.append(deterministic)
        grads = backward(dout, q, k, v, out, softmax_lse, call, torch.inf)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return torch.empty(0)

    module._flash_attn_varlen_forward = _flash_attn_varlen_forward
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return module


def fake_3(seen: Recorder) -> ModuleType:
    module = ModuleType(NAMES[3])

    def _flash_attn_forward(
        q,
        k,
        v,
        k_new=None,
        v_new=None,
        qv=None,
        out_=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        cu_seqlens_k_new=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        page_table=None,
        kv_batch_idx=None,
        leftpad_k=None,
        rotary_cos=None,
        rotary_sin=None,
        seqlens_rotary=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        softmax_scale=None,
        causal=False,
        window_size_left=-1,
        window_size_right=-1,
        attention_chunk=0,
        softcap=0.0,
        rotary_interleaved=True,
        scheduler_metadata=None,
        num_splits=1,
        pack_gqa=None,
        sm_margin=0,
    ):
        assert pack_gqa is False
        call = seen.call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        return *forward(q, k, v, call, -torch.inf), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        sequed_q=None,
        sequed_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dq=None,
        dk=None,
        dv=None,
        softmax_scale=None,
        is_causal=False,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        deterministic=False,
        sm_margin=0,
    ):
        call = seen.call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal)
        seen.deterministic.append(deterministic)
        grads = backward(dout, q, k, v, out, softmax_lse, call, -torch.inf)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            target.copy_(grad)
        return torch.empty(0)

    module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return module


def fake_4(seen: Recorder) -> ModuleType:
    module = ModuleType(NAMES[4])

    def _flash_attn_fwd(
        q,
        k,
        v,
        qv=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        min_seqlen_k=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        softcap=None,
        window_size_left=None,
        window_size_right=None,
        learnable_sink=None,
        num_splits=1,
        pack_gqa=None,
        return_lse=False,
        out=None,
        lse=None,
    ):
        assert pack_gqa is False
        assert return_lse is True
        call = seen.call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        return *forward(q, k, v, call, -torch.inf), None, None, None

    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        softcap=0.0,
        window_size_left=None,
        window_size_right=None,
        pack_gqa=False,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        deterministic=False,
        dq=None,
        dk=None,
        dv=None,
    ):
        call = seen.call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
        seen.deterministic.append(deterministic)
        return backward(dout, q, k, v, out, lse, call, -torch.inf)

    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return module


FAKES: dict[int, Callable[[Recorder], ModuleType]] = {2: fake_2, 3: fake_3, 4: fake_4}


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
