# SPDX-License-Identifier: BSD-3-Clause
"""What jobs take to be allocated and kept against what the engine does, with kernels that only allocate."""

import math
import weakref

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.lib.hollow import hollow_engine, passes_of_a_layer
from tests.lib.processes import run_processes, values
from tests.lib.sets import needs_triton
from torchtitan_cad.planning import AttentionShape, TokenLayout, make_plan
from torchtitan_cad.planning.keeping import most_working_bytes
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.tools.simulation import working_memory

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=16, dtype_bytes=2)
LATENT = AttentionShape(
    num_heads=4, num_kv_heads=4, head_dim=48, dtype_bytes=2, value_dim=32, shared_dim=16
)


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages made in this context, now and at most; ``known`` tensors were made before."""

    def __init__(self, *known: Tensor):
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

    def _free(self, key, num_bytes):
        self._seen.discard(key)
        self.now -= num_bytes


def measured(group, plan, limit) -> list[tuple[int, int]]:
    """Of every rank most bytes alive in a pass, with its results and rows that it keeps, and the bytes of these."""
    sizes = []
    for rank in range(plan.layout.num_ranks):
        engine = hollow_engine(plan.layout.num_ranks, rank, kept_bytes=limit)
        run_forward, run_backward = passes_of_a_layer(engine, plan)
        with LiveBytes() as forward:
            out, lse, *kept = run_forward()
        kept_bytes = sum(x.untyped_storage().nbytes() for x in kept)
        with LiveBytes(*kept) as backward:
            run_backward((out, lse, *kept))
        sizes.append((max(forward.most, backward.most + kept_bytes), kept_bytes))
    return sizes


@needs_triton
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, LATENT], ids=["gqa", "latent"])
def test_the_engine_allocates_and_keeps_what_is_taken_into_account(shape, keep):
    layout = TokenLayout.from_segments(
        [[(0, 0, 3000)], [(1, 0, 700), (2, 0, 300)], [(3, 0, 1000)], []]
    )
    plan = make_plan(layout, shape)
    assert plan.moves_rows
    (sizes,) = values(run_processes(1, measured, plan, math.inf if keep else 0.0))
    for rank, (allocated, kept_bytes) in enumerate(sizes):
        if not keep and not shape.shared_dim:
            passes = working_memory.working_memory(plan, rank, 2**24)
            formula = max(one_pass.most for one_pass in passes)
            assert allocated == pytest.approx(formula, rel=1e-3), f"rank {rank}"
        working = most_working_bytes(shape, 3000, 3000, documents=2)
        assert allocated <= working + kept_bytes, f"rank {rank}"
    limit = plan.most_rows.kept_bytes(RowBytes.of(shape))
    most_kept = max(kept_bytes for _, kept_bytes in sizes)
    assert 0.5 * limit < most_kept <= limit if keep else most_kept == 0
