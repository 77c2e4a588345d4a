"""Kernels on CUDA tensors that hold nothing: what their operators make of the arguments, without a GPU.

The operators' own functions for such tensors (their "fake" or "meta" implementations) check shapes and say what results
look like. What needs a package or a torch that is not installed is skipped.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as stock

from tests.runtime import statistics
from tests.runtime.kernels_reference import offsets
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.kernels import VarlenArgs, cudnn, varlen
from torchtitan_cad.runtime.kernels.base import Merged
from torchtitan_cad.runtime.kernels.fused import FusedKernel

DEVICE = torch.device("cuda", 0)
HEADS, DIM = (8, 2), 64
KERNELS = {
    "varlen": varlen.VarlenKernel,
    "cudnn": pytest.param(
        cudnn.CudnnKernel,
        marks=pytest.mark.skipif(
            not hasattr(stock, "_CUDNN_ATTENTION_BACKEND"),
            reason="torch before 2.15 has no cuDNN attention of packed rows",
        ),
    ),
}
EVERY_CALL = pytest.mark.parametrize(
    ("len_q", "len_k", "causal"),
    [([300, 1, 20], [300, 1, 20], True), ([130, 20], [257, 4], False), ([1], [1], True), ([], [], True)],
)
needs_copies = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="torch built without CUDA copies no CUDA tensors, even such ones"
)
EVERY_KERNEL = pytest.mark.parametrize("make_kernel", KERNELS.values(), ids=KERNELS.keys())


@pytest.fixture(autouse=True)
def _fake_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches of Triton kernels need a GPU, so statistics are prepared by operations of torch."""
    monkeypatch.setattr(triton, "runs_on", lambda device: False)
    statistics.use_torch(monkeypatch)
    monkeypatch.setattr(varlen, "_without_dropout", varlen._without_dropout.__wrapped__)  # keeps no fake tensors
    with FakeTensorMode():
        yield


def make_call(len_q: list[int], len_k: list[int], *, causal: bool) -> VarlenArgs:
    call = VarlenArgs.from_numpy(offsets(len_q), offsets(len_k), causal=causal, scale=0.125)
    return replace(call, cu_q=call.cu_q.to(DEVICE), cu_k=call.cu_k.to(DEVICE))


def rows(count: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, heads, DIM, dtype=dtype, device=DEVICE)


def assert_like(results: tuple[torch.Tensor, ...], likes: tuple[torch.Tensor, ...]) -> None:
    for result, like in zip(results, likes, strict=True):
        assert (result.shape, result.dtype, result.device) == (like.shape, like.dtype, DEVICE)
        assert result.is_contiguous()


@EVERY_KERNEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@EVERY_CALL
def test_forward(make_kernel: type[FusedKernel], dtype: torch.dtype, len_q, len_k, causal: bool) -> None:
    q, k, v = rows(sum(len_q), HEADS[0], dtype), *(rows(sum(len_k), HEADS[1], dtype) for _ in range(2))
    out, lse = make_kernel().forward(q, k, v, make_call(len_q, len_k, causal=causal))
    assert_like((out,), (q,))
    assert (lse.shape, lse.dtype, lse.device) == (q.shape[:2], torch.float32, DEVICE)


@needs_copies
@EVERY_KERNEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_out", [False, True], ids=["delta", "out"])
@EVERY_CALL
def test_backward(
    make_kernel: type[FusedKernel], dtype: torch.dtype, with_out: bool, len_q, len_k, causal: bool
) -> None:
    """The gradient of the output is not contiguous."""
    q, k, v = rows(sum(len_q), HEADS[0], dtype), *(rows(sum(len_k), HEADS[1], dtype) for _ in range(2))
    dout = rows(sum(len_q), HEADS[0], dtype).transpose(0, 1).contiguous().transpose(0, 1)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=DEVICE)
    call = make_call(len_q, len_k, causal=causal)
    merged = Merged(lse, out=torch.empty_like(q)) if with_out else Merged(lse, lse)
    assert_like(make_kernel().backward(dout, q, k, v, merged, call), (q, k, v))


def test_bottom_right_masks() -> None:
    """FlashAttention-2 takes causal tasks with more keys than queries; cuDNN would see other keys, and refuses."""
    call = make_call([40, 60], [40, 90], causal=True)
    q, k, v = rows(100, HEADS[0], torch.bfloat16), *(rows(130, HEADS[1], torch.bfloat16) for _ in range(2))
    out, _ = varlen.VarlenKernel().forward(q, k, v, call)
    assert_like((out,), (q,))
    with pytest.raises(ValueError, match="as many keys as queries only"):
        cudnn.CudnnKernel().forward(q, k, v, call)
