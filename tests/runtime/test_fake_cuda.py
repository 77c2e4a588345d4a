# SPDX-License-Identifier: BSD-3-Clause
"""Kernels and the engine's two ranks on CUDA tensors that hold nothing, without a GPU.

Operators check their arguments and say what results look like by their own functions for such tensors (their "fake" or
"meta" implementations). Kernels of Triton are not launched: each launch of the engine checks that its tensors are the
device's. What needs a package or a torch that is not installed is skipped.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import varlen as stock

from tests.lib.fake_flash_attn import use_torch
from tests.lib.kernels_reference import offsets
from tests.lib.refusals import refusal
from tests.lib.rows import empty_rows
from tests.lib.sets import needs_triton
from tests.lib.two_ranks import two_rank_plan
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime import streams, triton
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import VarlenArgs, cudnn, varlen
from torchtitan_cad.runtime.kernels.base import Merged
from torchtitan_cad.runtime.transport import SymmetricTransport, cuda_memory
from torchtitan_cad.runtime.transport import base as transport_base

DEVICE = torch.device("cuda", 0)
DIM = 64
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
needs_copies = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="torch built without CUDA copies no CUDA tensors, even such ones",
)
EVERY_KERNEL = pytest.mark.parametrize(
    "make_kernel", KERNELS.values(), ids=KERNELS.keys()
)


@pytest.fixture
def fake_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches of Triton kernels need a GPU, so statistics are prepared by operations of torch."""
    monkeypatch.setattr(triton, "runs_on", lambda device: False)
    use_torch(monkeypatch)
    # keeps no fake tensors
    monkeypatch.setattr(varlen, "_without_dropout", varlen._without_dropout.__wrapped__)
    with FakeTensorMode():
        yield


def rows(count: int, heads: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, heads, DIM, dtype=dtype, device=DEVICE)


def assert_like(results: Sequence[Tensor], likes: Sequence[Tensor]) -> None:
    for result, like in zip(results, likes, strict=True):
        assert (result.shape, result.dtype) == (like.shape, like.dtype)
        assert result.device == DEVICE
        assert result.is_contiguous()


@pytest.mark.usefixtures("fake_tensors")
@EVERY_KERNEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "copies", [False, pytest.param(True, marks=needs_copies)], ids=["forward", "both"]
)
@pytest.mark.parametrize(
    ("len_q", "len_k", "causal"),
    [
        ([300, 1, 20], [300, 1, 20], True),
        ([130, 20], [257, 4], False),
        ([1], [1], True),
        ([], [], True),
    ],
)
def test_kernel(make_kernel, dtype, copies, len_q, len_k, causal):
    """The gradient of the output is not contiguous."""
    kernel = make_kernel()
    call = VarlenArgs.from_numpy(
        offsets(len_q), offsets(len_k), causal=causal, scale=0.125
    )
    call = replace(call, cu_q=call.cu_q.to(DEVICE), cu_k=call.cu_k.to(DEVICE))
    q, dout = (rows(sum(len_q), 8, dtype) for _ in range(2))
    k, v = (rows(sum(len_k), 2, dtype) for _ in range(2))
    out, lse = kernel.forward(q, k, v, call)
    assert_like((out,), (q,))
    assert (lse.shape, lse.dtype, lse.device) == (q.shape[:2], torch.float32, DEVICE)
    if not copies:
        return
    strided = dout.transpose(0, 1).contiguous().transpose(0, 1)
    for merged in (Merged(lse, out=out), Merged(lse, lse)):
        assert_like(kernel.backward(strided, q, k, v, merged, call), (q, k, v))


@pytest.mark.usefixtures("fake_tensors")
def test_bottom_right_masks():
    """FlashAttention-2 takes causal tasks with more keys than queries; cuDNN would see other keys, and refuses."""
    call = VarlenArgs.from_numpy(
        offsets([40, 60]), offsets([40, 90]), causal=True, scale=0.125
    )
    call = replace(call, cu_q=call.cu_q.to(DEVICE), cu_k=call.cu_k.to(DEVICE))
    q = rows(100, 8, torch.bfloat16)
    k, v = (rows(130, 2, torch.bfloat16) for _ in range(2))
    out, _ = varlen.VarlenKernel().forward(q, k, v, call)
    assert_like((out,), (q,))
    with refusal("cad.kernel"):
        cudnn.CudnnKernel().forward(q, k, v, call)


# The engine: devices, shapes and dtypes of all it passes --------------------------------------------------------------


SHAPE = AttentionShape(32, 8, 128, 2)
LATENT = AttentionShape(16, 16, 192, 2, value_dim=128, shared_dim=64)
ADDRESS = 4096


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for x in value:
            yield from tensors_in(x)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Launches by the kernel's name, within a mode in which tensors hold nothing."""
    from triton.runtime.jit import JITFunction

    counted: Counter[str] = Counter()

    def launch(self: JITFunction, *args: object, **kwargs: object) -> None:
        name = self.fn.__name__
        tensors = tensors_in([*args, *kwargs.values()])
        elsewhere = [x.device for x in tensors if x.device != DEVICE]
        # the host's record
        assert elsewhere == [torch.device("cpu")] * (name == "_wait"), name
        counted[name] += 1

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        assert device == DEVICE
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: ADDRESS)
    monkeypatch.setattr(transport_base, "to_device", copy)
    monkeypatch.setattr(cuda_memory, "to_device", copy)
    monkeypatch.setattr(cuda_memory.DeviceMemory, "overdue", lambda self: None)
    monkeypatch.setattr(streams, "record_event", lambda device: None)
    # keeps no fake tensors
    monkeypatch.setattr(varlen, "_without_dropout", varlen._without_dropout.__wrapped__)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield counted


def allocate(num_bytes: int) -> cuda_memory.DeviceMemory:
    own = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    return cuda_memory.DeviceMemory(own, [ADDRESS] * 2, None)


@needs_copies
@needs_triton
@EVERY_KERNEL
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kept_bytes", [0.0, math.inf], ids=["resend", "keep"])
@pytest.mark.parametrize("shape", [SHAPE, LATENT], ids=["gqa", "latent"])
def test_layer(launches, make_kernel, rank, kept_bytes, shape):
    if shape is LATENT and make_kernel is cudnn.CudnnKernel:
        pytest.skip("cuDNN takes heads of at most 128 elements")
    plan = two_rank_plan(16_384, shape)
    engine = CoreAttentionEngine(
        make_kernel(),
        SymmetricTransport(range(2), rank, allocate, lambda: 20.0, 2**29),
        rank=rank,
        device=DEVICE,
        scale=0.1,
        kept_bytes=kept_bytes,
    )
    engine.add_plan(0, plan)
    tokens = int(plan.layout.tokens_per_rank[rank])
    q, k, v, dout, shared = empty_rows(tokens, shape, DEVICE)
    results = engine.forward(q, k, v, 0, shared)
    assert_like(results[:2], (dout, torch.empty(q.shape[:2], device=DEVICE)))
    exchanging = {"_put_rows", "_gather_rows"}
    forward = Counter(launches)
    assert {"_merge_rows", "_post", "_wait", *exchanging} <= set(forward)
    saved = Saved(q, k, v, *results, shared=shared)
    assert_like(engine.backward(dout, saved, 0), saved.arguments)
    combining = {"_sum_rows", "_row_delta", "_prepare_statistics"}
    assert combining | exchanging <= set(launches - forward)
