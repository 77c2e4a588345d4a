"""The engine's two ranks on CUDA tensors that hold nothing, without a GPU: devices, shapes and dtypes of all it passes.

Kernels of Triton are not launched: each launch checks that its tensors are the device's. Attention's operators check
their arguments by their own functions for such tensors.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from bench.gpu.loopback import two_rank_plan
from tests.runtime.test_fake_cuda import DEVICE, EVERY_KERNEL, assert_like, needs_copies
from tests.sets import needs_triton
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import varlen
from torchtitan_cad.runtime.kernels.fused import FusedKernel
from torchtitan_cad.runtime.transport import SymmetricTransport, cuda_memory
from torchtitan_cad.runtime.transport import base as transport_base

pytestmark = [needs_copies, needs_triton]
SHAPE = AttentionShape(32, 8, 128, 2)
ADDRESS, BUFFER_BYTES = 4096, 2**29


def tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for x in value:
            yield from tensors_in(x)


class Memory(cuda_memory.DeviceMemory):
    """Memory whose host record nobody writes."""

    def overdue(self) -> None:
        return None


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Launches by the kernel's name, within a mode in which tensors hold nothing."""
    from triton.runtime.jit import JITFunction

    from torchtitan_cad.runtime.triton import put

    counted: Counter[str] = Counter()

    def launch(self: JITFunction, *args: object, **kwargs: object) -> None:
        name = self.fn.__name__
        wrong = [x.device for x in tensors_in([*args, *kwargs.values()]) if x.device != DEVICE]
        assert wrong == ([torch.device("cpu")] if name == "_wait" else []), f"{name}: {wrong}"  # the host's record
        counted[name] += 1

    def copy(tensor: Tensor, device: torch.device) -> Tensor:
        assert device == DEVICE
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    split = put.split_into_blocks

    def split_for_real(*args: Sequence[int], **kwargs: int | None) -> Tensor:
        with unset_fake_temporarily():
            return split(*args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda self: ADDRESS)
    monkeypatch.setattr(transport_base, "to_device", copy)
    monkeypatch.setattr(cuda_memory, "to_device", copy)
    monkeypatch.setattr(put, "split_into_blocks", split_for_real)
    monkeypatch.setattr(streams, "record_event", lambda device: None)
    monkeypatch.setattr(varlen, "_without_dropout", varlen._without_dropout.__wrapped__)  # keeps no fake tensors
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield counted


def make_engine(kernel: FusedKernel, rank: int, *, keep: bool, two_rounds: bool) -> CoreAttentionEngine:
    def allocate(num_bytes: int) -> Memory:
        return Memory(torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE), [ADDRESS] * 2, None, 1e6)

    transport = SymmetricTransport(range(2), rank, allocate, lambda: 20.0, BUFFER_BYTES)
    return CoreAttentionEngine(kernel, transport, rank=rank, device=DEVICE, scale=0.1, keep=keep, two_rounds=two_rounds)


@EVERY_KERNEL
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@pytest.mark.parametrize("two_rounds", [False, True], ids=["one round", "two rounds"])
def test_layer(launches: Counter[str], make_kernel: type[FusedKernel], rank: int, keep: bool, two_rounds: bool) -> None:
    plan = two_rank_plan(16_384, SHAPE)
    engine = make_engine(make_kernel(), rank, keep=keep, two_rounds=two_rounds)
    engine.add_plan(0, plan)
    tokens = int(plan.layout.tokens_per_rank[rank])
    heads = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads, SHAPE.num_heads
    q, k, v, dout = (torch.empty(tokens, n, SHAPE.head_dim, dtype=torch.bfloat16, device=DEVICE) for n in heads)
    results = engine.forward(q, k, v, 0)
    assert_like(results[:2], (q, torch.empty(q.shape[:2], device=DEVICE)))
    forward = Counter(launches)
    assert forward["_merge_rows"]
    assert {"_put_rows", "_gather_rows", "_post", "_wait"} <= set(forward)
    assert_like(engine.backward(dout, Saved(q, k, v, *results), 0), (q, k, v))
    assert {"_put_rows", "_gather_rows", "_sum_rows", "_row_delta", "_prepare_statistics"} <= set(launches - forward)
