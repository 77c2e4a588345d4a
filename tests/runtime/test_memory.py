# SPDX-License-Identifier: BSD-3-Clause
"""What jobs take to be allocated and kept against what the engine does, with kernels that only make their results."""

import math
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lib.rows import empty_rows
from torchtitan_cad.planning import AttentionShape, Plan, TokenLayout, make_plan
from torchtitan_cad.planning.keeping import most_working_bytes
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.runtime import attend, engine, row_tables
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.tools.simulation import working_memory

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


TAKE = attend.RowSpace.take


def take(space: attend.RowSpace, rows: Tensor | slice | None) -> list[Tensor]:
    """Rows in one pass, as on a device; those in order are not copied."""
    received = len(space.received[0])
    if isinstance(rows, slice) or (rows is None and not received):
        return TAKE(space, rows)
    num_rows = len(space.local[0]) + received if rows is None else len(rows)
    return [x.new_empty(num_rows, *x.shape[1:]) for x in space.local]


def measured(plan: Plan, rank: int, *, keep: bool) -> tuple[int, int]:
    """Most bytes alive in a pass, with its results and the rows that it keeps, and the bytes of these rows."""
    engine = CoreAttentionEngine(
        Results(),
        Buffers(2**24),
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
        out, lse, *kept = call.finish()
    kept_bytes = sum(x.untyped_storage().nbytes() for x in kept)
    with LiveBytes(*kept) as backward:
        backward_call = engine.begin_backward(
            dout, Saved(q, k, v, out, lse, *kept, shared), 0
        ).send()
        backward_call.attend()
        backward_call.finish()
    return max(forward.most, backward.most + kept_bytes), kept_bytes


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, LATENT], ids=["gqa", "latent"])
def test_the_engine_allocates_and_keeps_what_is_taken_into_account(
    monkeypatch, shape, keep
):
    """FlashAttention's own allocations are left out."""
    monkeypatch.setattr(row_tables, "Combination", Combination)
    monkeypatch.setattr(
        engine,
        "row_delta",
        lambda dout, _: dout.new_empty(dout.shape[:2], dtype=torch.float32),
    )
    monkeypatch.setattr(attend.RowSpace, "take", take)
    monkeypatch.setattr(working_memory._RowSizes, "temporary", lambda *_: 0)
    layout = TokenLayout.from_segments(
        [[(0, 0, 3000)], [(1, 0, 700), (2, 0, 300)], [(3, 0, 1000)], []]
    )
    plan = make_plan(layout, shape)
    assert plan.moves_rows
    most_kept = 0
    for rank in range(layout.num_ranks):
        allocated, kept_bytes = measured(plan, rank, keep=keep)
        most_kept = max(most_kept, kept_bytes)
        if not keep and not shape.shared_dim:
            passes = working_memory.working_memory(plan, rank, 2**24)
            formula = max(one_pass.most for one_pass in passes)
            assert allocated == pytest.approx(formula, rel=0.02), f"rank {rank}"
        working = most_working_bytes(shape, 3000, 3000, documents=2)
        assert allocated <= working + kept_bytes, f"rank {rank}"
    limit = plan.most_rows.kept_bytes(RowBytes.of(shape))
    assert 0.5 * limit < most_kept <= limit if keep else most_kept == 0
