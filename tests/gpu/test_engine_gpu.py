# SPDX-License-Identifier: BSD-3-Clause
"""The engine on a CUDA device: exact, and without synchronisation or new device memory in the steady state.

One rank, with plans that cut its documents at random, so that every kernel but those of the exchange takes part. The
kernels that combine partials are compared with torch operations there.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.lib.device import ON_GPU, no_synchronisation
from tests.lib.plans import random_plan
from tests.lib.rows import Tensors, assert_ranks_as_exact, dense
from tests.runtime.test_combine import compare_orders
from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import get_kernel

pytestmark = ON_GPU

DEVICE = torch.device("cuda", 0)
SHAPE = AttentionShape(8, 2, 128, 2)
LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 1300), (1, 0, 128), (2, 0, 700), (3, 0, 64)]]
)


def make_engine(num_plans: int) -> CoreAttentionEngine:
    engine = CoreAttentionEngine(
        get_kernel("varlen", DEVICE),
        None,
        rank=0,
        device=DEVICE,
        scale=SHAPE.head_dim**-0.5,
    )
    rng = np.random.default_rng(0)
    for key in range(num_plans):
        engine.add_plan(
            key, random_plan(rng, LAYOUT, SHAPE, aligned=False, split_kv=True)
        )
    return engine


def run(engine: CoreAttentionEngine, tensors: Tensors, key: int) -> list[torch.Tensor]:
    q, k, v, dout = tensors.q[0], tensors.k[0], tensors.v[0], tensors.dout[0]
    saved = Saved(q, k, v, *engine.forward(q, k, v, key))
    return [saved.out, saved.lse, *engine.backward(dout, saved, key)]


def random_tensors(dtype: torch.dtype) -> Tensors:
    torch.manual_seed(0)
    return Tensors.random(LAYOUT, SHAPE, dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cut_documents_are_as_exact_as_whole_ones(dtype):
    tensors = random_tensors(dtype)
    reference = dense(LAYOUT, tensors.to("cpu"))
    engine = make_engine(10)
    whole = CoreAttentionEngine(
        engine.kernel, None, rank=0, device=DEVICE, scale=engine.scale
    )
    whole.add_plan(0, make_plan(LAYOUT, SHAPE, PlannerConfig(planner="home")))
    assert whole.plan(0).is_plain
    undivided = [x.cpu() for x in run(whole, tensors, 0)]
    for key in range(10):
        assert_ranks_as_exact(
            [[x.cpu() for x in run(engine, tensors, key)]], [undivided], reference
        )


def test_the_steady_state_neither_synchronises_nor_asks_for_device_memory():
    engine, tensors = make_engine(20), random_tensors(torch.bfloat16)
    for key in range(20):
        run(engine, tensors, key)
    before = torch.cuda.memory_stats(DEVICE)["num_device_alloc"]
    with no_synchronisation():
        for key in range(20):
            run(engine, tensors, key)
    assert torch.cuda.memory_stats(DEVICE)["num_device_alloc"] == before


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums in the same order every time: FlashAttention adds up dq as its blocks finish."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_a_plan_added_behind_a_slow_stream_is_waited_for():
    tensors = random_tensors(torch.bfloat16)
    engine = make_engine(1)
    expected = run(engine, tensors, 0)
    torch.cuda.synchronize()
    slow = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(slow):
        # about 0.1 s, which the copies of the tables wait for
        torch.cuda._sleep(200_000_000)
        engine.add_plan(
            1,
            random_plan(
                np.random.default_rng(0), LAYOUT, SHAPE, aligned=False, split_kv=True
            ),
        )
    results = run(engine, tensors, 1)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(10))
def test_kernels_combine_as_torch_does(seed):
    compare_orders(seed, torch.device("cuda"))
