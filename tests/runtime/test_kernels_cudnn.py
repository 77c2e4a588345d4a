"""The cudnn kernel's marshalling, on the CPU: the operators' signatures, layouts and conventions of torch 2.15."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from tests.runtime import statistics
from tests.runtime.fake_flash_attn import install
from tests.runtime.kernels_reference import check_marshalling
from torchtitan_cad.runtime.kernels import VarlenArgs, cudnn, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel

CUDNN = 3
"""Number of the backend."""


def fake_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None,
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None, backend=1,
):  # fmt: skip
    assert enable_gqa
    assert backend == CUDNN
    call = top_left(cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size)
    out, lse = CpuKernel().forward(query, key, value, call)
    return out, lse.t().contiguous(), torch.zeros(2)


def fake_varlen_attn_backward(
    grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state, scale=None,
    window_size=None, backend=1,
):  # fmt: skip
    assert backend == CUDNN
    assert isinstance(rng_state, Tensor)
    assert lse.shape == (query.shape[1], query.shape[0])
    assert all(x.is_contiguous() for x in (grad_out, out, lse))
    call = top_left(cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size)
    grads = CpuKernel().backward(grad_out, query, key, value, Merged(lse.t(), row_delta(grad_out, out)), call)
    return tuple(x.to(query.dtype) for x in grads)


def top_left(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float, window) -> VarlenArgs:
    """What cuDNN computes: each query's keys are those up to its own number in the task."""
    assert window == [-1, 0 if causal else -1]
    assert max_q >= 256 <= max_k
    assert max_q >= int(cu_q.diff().max())
    assert max_k >= int(cu_k.diff().max())
    assert cu_k is cu_q or not causal
    return VarlenArgs.from_numpy(cu_q.numpy(), cu_k.numpy(), causal=causal, scale=scale)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> cudnn.CudnnKernel:
    fakes = SimpleNamespace(_varlen_attn=fake_varlen_attn, _varlen_attn_backward=fake_varlen_attn_backward)
    monkeypatch.setattr(torch.ops, "torch_attn", fakes)
    statistics.use_torch(monkeypatch)
    return cudnn.CudnnKernel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("len_q", "len_k", "causal"),
    [([300, 1, 40], [300, 1, 40], True), ([130, 9], [257, 5], False), ([1], [5], False)],
)
def test_marshalling(kernel: cudnn.CudnnKernel, len_q, len_k, causal: bool, dtype: torch.dtype) -> None:
    check_marshalling(kernel, len_q, len_k, causal, dtype)


def test_what_it_does_not_take(kernel: cudnn.CudnnKernel) -> None:
    for dtype, dim, message in (
        (torch.float32, 64, "'cudnn' .*mixed_precision_param"),
        (torch.bfloat16, 136, "at most 128 on this device, got 136; set cad.kernel = 'varlen'"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.check(dtype, dim)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match=r"in any order, but debug\.deterministic is true; set cad\.kernel"):
            kernel.check(torch.bfloat16, 64)
    finally:
        torch.use_deterministic_algorithms(False)


def test_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, capability=(9, 0), with_cudnn=True)
    assert get_kernel("cudnn", "cuda").squares_only
    install(monkeypatch, capability=(8, 0))
    with pytest.raises(ValueError, match=r"'cudnn' needs cuDNN 9\.18 and .*, here are cuDNN .* and 8\.0; set"):
        get_kernel("cudnn", "cuda")
    monkeypatch.delattr(varlen, "_CUDNN_ATTENTION_BACKEND")
    with pytest.raises(ValueError, match=r"'cudnn' needs torch 2\.15, here is .*; set cad\.kernel = 'auto'"):
        get_kernel("cudnn", "cuda")
