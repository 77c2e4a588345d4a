"""The formula for working memory against what the engine allocates, with kernels that allocate their results alone."""

import dataclasses
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.memory import LAYOUTS, measure
from torchtitan_cad.planning import AttentionShape, Plan, TokenLayout, make_plan, memory
from torchtitan_cad.runtime import attend, engine, tables
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import CallArgs
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport import Route

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=16, dtype_bytes=2)


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages made in this context, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in known | self._seen:
                storage, num_bytes = x.untyped_storage(), x.untyped_storage().nbytes()
                self._seen.add(key)
                self.now += num_bytes
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, key, num_bytes)
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


class Results:
    """A kernel that makes nothing but its results."""

    name = "results"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: CallArgs) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def backward(self, dout, q, k, v, lse, delta, call: CallArgs) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class NoCombination:
    """Combines nothing, and allocates nothing."""

    def merge(self, *_, fresh: bool) -> None:
        pass

    def add(self, *_, fresh: bool) -> None:
        pass


class Buffers:
    """A transport whose rows are there already."""

    name, replayable = "buffers", False

    def __init__(self) -> None:
        self._rows = torch.zeros(2**24, dtype=torch.uint8)

    def prepare(self, routes) -> None:
        pass

    def begin(self, num_bytes: int) -> int:
        return 0

    def start(self, parts, route: Route, phase: str, call: int) -> "Buffers":
        self._next = [*getattr(self, "_next", []), (route.num_received, RowFormat(parts).row_bytes)]
        return self

    def wait(self) -> Tensor:
        rows, row_bytes = self._next.pop(0)
        return self._rows[: rows * row_bytes].view(rows, row_bytes)

    def release(self) -> None:
        pass


def take(space: attend.RowSpace, rows: Tensor | slice | None) -> Tensor:
    """Rows in one pass, as on a device; a copy of those that lie in order, too."""
    if isinstance(rows, slice):
        num_rows = rows.stop - rows.start
    else:
        num_rows = len(space.local) + len(space.received) if rows is None else len(rows)
    return space.local.new_empty(num_rows, *space.local.shape[1:])


def new_delta(dout: Tensor, out: Tensor) -> Tensor:
    return dout.new_empty(dout.shape[:2], dtype=torch.float32)


def measured(plan: Plan, rank: int) -> tuple[int, int]:
    """Most bytes alive in forward and in backward, their results included."""
    kernel, transport = Results(), Buffers()
    executor = CoreAttentionEngine(kernel, transport, rank=rank, device=CPU, scale=1.0)  # type: ignore[arg-type]
    executor.add_plan(0, plan)
    n, m = int(plan.layout.queries_per_rank[rank]), int(plan.layout.tokens_per_rank[rank])
    q, k = torch.zeros(n, 8, 16, dtype=torch.bfloat16), torch.zeros(m, 2, 16, dtype=torch.bfloat16)
    with LiveBytes() as forward:
        out, lse, *kept = executor.forward(q, k, k, 0)
    with LiveBytes() as backward:
        executor.backward(q, q, k, k, out, lse, *kept, 0)
    return forward.most, backward.most


def test_the_formula_is_what_the_engine_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what FlashAttention itself allocates, and if no rows are read in place."""
    monkeypatch.setattr(tables, "build_combination", lambda *_: NoCombination())
    monkeypatch.setattr(engine, "row_delta", new_delta)
    monkeypatch.setattr(attend.RowSpace, "take", take)
    monkeypatch.setattr(memory._Bytes, "temporary", lambda *_: 0)
    layout = TokenLayout.from_segments([[(0, 0, 3000)], [(1, 0, 700), (2, 0, 300)], [(3, 0, 1000)], []])
    plan = make_plan(layout, SHAPE)
    assert plan.moves_rows
    wanted = zip(memory._forward(plan, keep=False), memory._backward(plan, keep=False), strict=True)
    for rank, sizes in enumerate(wanted):
        assert measured(plan, rank) == pytest.approx(sizes, rel=0.02), f"rank {rank}"


@pytest.mark.parametrize("num_ranks", [8, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_receive_buffers_take_two_gigabytes_at_most(name: str, num_ranks: int) -> None:
    """Of Llama 3 8B with 32,768 tokens a rank."""
    sizes = measure(name, num_ranks, (11, 12, 13), nano_batches=1)
    assert sizes.buffers <= 2.0e9
    assert all(size > 0 for size in dataclasses.astuple(sizes))
