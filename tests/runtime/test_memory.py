# SPDX-License-Identifier: BSD-3-Clause
"""The formula for working memory against what the engine allocates, with kernels that allocate their results alone."""

import dataclasses
import math
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lib.attention_memory import LAYOUTS, measure
from tests.lib.rows import empty_rows
from tests.lib.sets import params
from torchtitan_cad.planning import AttentionShape, Plan, TokenLayout, make_plan, memory
from torchtitan_cad.planning.exchange import calls, messages
from torchtitan_cad.runtime import attend, engine, row_tables
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.packing import RowFormat

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=16, dtype_bytes=2)
LATENT = AttentionShape(
    num_heads=4, num_kv_heads=4, head_dim=48, dtype_bytes=2, value_dim=32, shared_dim=16
)


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages made in this context, now and at most; ``known`` tensors were made before."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        }
        result = function(*args, **(kwargs or {}))
        made = [
            x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor)
        ]
        for storage in made:
            key = storage._cdata
            if key not in known | self._seen:
                self._seen.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, key, storage.nbytes())
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


class Results:
    """A kernel that makes nothing but its results."""

    name = "results"
    squares_only = False

    def forward(self, q, k, v, call):
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return q.new_empty(*q.shape[:2], v.shape[2]), lse

    def backward(self, dout, q, k, v, merged, call):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Combination:
    """Allocates what a combination on a device does, and combines nothing."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    @classmethod
    def build(cls, targets, num_rows, device, num_reusable=None):
        return cls(num_rows)

    def merge(self, partials, like):
        out = like.new_empty(self._num_rows, *like.shape[-2:])
        return out, out.new_empty(out.shape[:2], dtype=torch.float32)

    def add(self, parts, like):
        return [x.new_empty(self._num_rows, *x.shape[1:]) for x in like]


class Buffers:
    """A transport whose rows are there already."""

    name = "buffers"

    def __init__(self, buffer_bytes: int) -> None:
        self.rows = torch.zeros(2**24, dtype=torch.uint8)
        self.buffer_bytes = buffer_bytes

    def prepare(self, routes) -> None:
        pass

    def begin(self) -> int:
        return 0

    def start(self, messages, routes, phase, call):
        return Arrived(self.rows, messages, routes)


class Arrived:
    """Keeps what is sent until it is released."""

    def __init__(self, rows, messages, routes) -> None:
        self._rows = []
        self._messages = messages
        for parts, route in zip(messages, routes, strict=True):
            shape = route.num_received, RowFormat(parts).row_bytes
            self._rows.append(rows[: math.prod(shape)].view(shape))

    def wait(self) -> list[Tensor]:
        return self._rows

    def release(self) -> None:
        del self._messages


def take(space: attend.RowSpace, rows: Tensor | slice | None) -> list[Tensor]:
    """Rows in one pass, as on a device."""
    if isinstance(rows, slice):
        return [x[rows] for x in space.local]
    received = len(space.received[0])
    if rows is None and not received:
        return list(space.local)
    num_rows = len(space.local[0]) + received if rows is None else len(rows)
    return [x.new_empty(num_rows, *x.shape[1:]) for x in space.local]


def measured(plan: Plan, rank: int, buffer_bytes: int, *, keep: bool) -> memory.Passes:
    """Most bytes alive in forward, and those while its results travel; the same of backward. Results are included."""
    engine = CoreAttentionEngine(
        Results(),
        Buffers(buffer_bytes),
        rank=rank,
        device=CPU,
        scale=1.0,
        kept_bytes=math.inf if keep else 0.0,
    )
    engine.add_plan(0, plan)
    tokens = int(plan.layout.tokens_per_rank[rank])
    q, k, v, dout, shared = empty_rows(tokens, plan.shape)
    with LiveBytes() as forward:
        call = engine.begin_forward(q, k, v, 0, shared).send()
        call.attend()
        forward_travelling = forward.now
        out, lse, *kept = call.finish()
    kept_bytes = sum(x.untyped_storage().nbytes() for x in kept)
    with LiveBytes(*kept) as backward:
        backward_call = engine.begin_backward(
            dout, Saved(q, k, v, out, lse, *kept, shared), 0
        ).send()
        backward_call.attend()
        backward_travelling = backward.now
        backward_call.finish()
    passes = (
        (forward.most, forward_travelling),
        (backward.most + kept_bytes, backward_travelling + kept_bytes),
    )
    return memory.Passes(*(memory.Pass(*sizes) for sizes in passes))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("buffer_bytes", [2**24, 2**17])
@pytest.mark.parametrize(
    ("shape", "uncombined", "most_rows"),
    [(SHAPE, 100, calls.MOST_ROWS), (SHAPE, 0, 1), (LATENT, 0, calls.MOST_ROWS)],
    ids=["gqa", "combined early", "latent"],
)
def test_the_formula_is_what_the_engine_allocates(
    monkeypatch, shape, uncombined, most_rows, buffer_bytes, keep
):
    """FlashAttention's own allocations and its surrogate are left out."""
    monkeypatch.setattr(row_tables, "Combination", Combination)
    monkeypatch.setattr(
        engine,
        "row_delta",
        lambda dout, _: dout.new_empty(dout.shape[:2], dtype=torch.float32),
    )
    monkeypatch.setattr(attend.RowSpace, "take", take)
    monkeypatch.setattr(memory._Bytes, "temporary", lambda *_: 0)
    monkeypatch.setattr(memory._Bytes, "surrogate", lambda *_: 0)
    monkeypatch.setattr(memory._Bytes, "padding", lambda *_: 0)
    monkeypatch.setattr(calls, "MOST_ROWS", most_rows)
    monkeypatch.setattr(calls, "MOST_UNCOMBINED", uncombined)
    layout = TokenLayout.from_segments(
        [[(0, 0, 3000)], [(1, 0, 700), (2, 0, 300)], [(3, 0, 1000)], []]
    )
    plan = make_plan(layout, shape)
    assert plan.moves_rows
    chunks = plan.most_rows.chunks(messages.RowBytes.of(shape, keep=keep), buffer_bytes)
    several = [len(home) > 1 for home in (chunks.queries_home, chunks.keys_home)]
    assert any(several) is (len(chunks.queries_out) > 1) is (buffer_bytes == 2**17)
    for rank in range(layout.num_ranks):
        wanted = memory.working_memory(plan, rank, buffer_bytes, keep=keep)
        got = measured(plan, rank, buffer_bytes, keep=keep)
        for allocated, formula, several_chunks in zip(
            got, wanted, (several[0], any(several)), strict=True
        ):
            assert allocated.most == pytest.approx(formula.most, rel=0.02), (
                f"rank {rank}"
            )
            assert allocated.travelling <= 1.02 * formula.travelling, f"rank {rank}"
            assert (
                several_chunks or allocated.travelling >= 0.98 * formula.travelling
            ), f"rank {rank}"


def test_of_two_nano_batches_one_travels_while_the_other_computes():
    plans = [
        make_plan(TokenLayout.from_segments([[(0, 0, tokens)], []]), SHAPE)
        for tokens in (3000, 1000)
    ]
    both = memory.attention_memory(plans, ranks=[0])
    passes = [memory.working_memory(plan, 0, 2**24).backward for plan in plans]
    one, other = passes
    turns = one.most + other.travelling, other.most + one.travelling
    assert both.backward == max(turns) > one.most


@pytest.mark.parametrize("num_ranks", params([8, 64], [8]))
@pytest.mark.parametrize("name", params(LAYOUTS, ["one big", "lognormal"]))
def test_buffers_and_working_memory_are_bounded(name, num_ranks):
    """The model is Llama 3 8B, with 32,768 tokens a rank."""
    one, two = (measure(name, num_ranks, (11,), nano) for nano in (1, 2))
    assert max(one.buffers, two.buffers) <= 2.0e9
    assert one.backward <= 2.5 * one.stock_backward
    assert two.backward <= 2.5 * two.stock_backward
    assert two.stock_backward > 0.95 * one.stock_backward  # as many tokens, not divided
    assert all(size > 0 for size in dataclasses.astuple(one))
