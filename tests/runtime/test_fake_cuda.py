# SPDX-License-Identifier: BSD-3-Clause
"""The engine's two ranks on CUDA tensors that hold nothing, without a GPU: devices, shapes and dtypes of all it passes.

Operators check their arguments and say what results look like by their own functions for such tensors (their "fake" or
"meta" implementations). Kernels of Triton are not launched: each launch of the engine checks that its tensors are the
device's. What needs a package or a torch that is not installed is skipped.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import varlen as stock

from tests.lib.rows import empty_rows
from tests.lib.sets import needs_triton
from tests.lib.two_ranks import two_rank_plan
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import cudnn, varlen
from torchtitan_cad.runtime.transport import base as transport_base
from torchtitan_cad.runtime.transport import cuda_memory
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport

DEVICE = torch.device("cuda", 0)
SHAPE = AttentionShape(32, 8, 128, 2)
LATENT = AttentionShape(16, 16, 192, 2, value_dim=128, shared_dim=64)
ADDRESS = 4096
needs_cudnn = pytest.mark.skipif(
    not hasattr(stock, "_CUDNN_ATTENTION_BACKEND"),
    reason="torch before 2.15 has no cuDNN attention of packed rows",
)
needs_copies = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="torch built without CUDA copies no CUDA tensors, even such ones",
)


def assert_like(results: Sequence[Tensor], likes: Sequence[Tensor]) -> None:
    for result, like in zip(results, likes, strict=True):
        assert (result.shape, result.dtype) == (like.shape, like.dtype)
        assert result.device == DEVICE
        assert result.is_contiguous()


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
@pytest.mark.parametrize(
    ("make_kernel", "rank", "kept_bytes", "shape"),
    [
        (varlen.VarlenKernel, 0, 0.0, SHAPE),
        (varlen.VarlenKernel, 1, math.inf, LATENT),
        pytest.param(
            lambda: cudnn.CudnnKernel(DEVICE), 1, 0.0, SHAPE, marks=needs_cudnn
        ),
    ],
    ids=["varlen", "latent", "cudnn"],
)
def test_layer(launches, monkeypatch, make_kernel, rank, kept_bytes, shape):
    monkeypatch.setattr(stock, "_should_use_cudnn", lambda index: True)
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
    results = engine.begin_forward(q, k, v, 0, shared).run()
    assert_like(results[:2], (dout, torch.empty(q.shape[:2], device=DEVICE)))
    exchanging = {"_put_rows", "_gather_rows"}
    forward = Counter(launches)
    assert {"_merge_rows", "_post", "_wait", *exchanging} <= set(forward)
    saved = Saved(q, k, v, *results, shared=shared)
    assert_like(engine.begin_backward(dout, saved, 0).run(), saved.arguments)
    combining = {"_sum_rows", "_row_delta", "_prepare_statistics"}
    assert combining | exchanging <= set(launches - forward)
