# SPDX-License-Identifier: BSD-3-Clause
"""The engine on a CUDA device: exact, and without synchronisation or new device memory in the steady state.

One rank, with plans that cut its documents at random, so that every kernel but those of the exchange takes part. The
kernels that combine partials are compared with torch operations there.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.lib.device import ON_GPU, cuda_kernels, no_synchronisation
from tests.lib.plans import random_plan
from tests.lib.rows import Tensors, assert_ranks_as_exact, dense, run_layer
from tests.runtime.test_combine import compare_orders
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.select import get_kernel

pytestmark = ON_GPU

DEVICE = torch.device("cuda", 0)
KERNELS = cuda_kernels()
SHAPE = AttentionShape(8, 2, 128, 2)
LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 1300), (1, 0, 128), (2, 0, 700), (3, 0, 64)]]
)


def make_engine(plans, kernel=None) -> CoreAttentionEngine:
    engine = CoreAttentionEngine(
        kernel or get_kernel("varlen", DEVICE),
        None,
        rank=0,
        device=DEVICE,
        scale=SHAPE.head_dim**-0.5,
    )
    for key, plan in enumerate(plans):
        engine.add_plan(key, plan)
    return engine


def random_plans(count) -> list[Plan]:
    rng = np.random.default_rng(0)
    return [
        random_plan(rng, LAYOUT, SHAPE, aligned=False, split_kv=True)
        for _ in range(count)
    ]


def random_tensors(dtype) -> Tensors:
    torch.manual_seed(0)
    return Tensors.random(LAYOUT, SHAPE, dtype).to(DEVICE)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cut_documents_are_as_exact_as_whole_ones(kernel, dtype):
    tensors = random_tensors(dtype)
    reference = dense(LAYOUT, tensors.to("cpu"))
    home = make_plan(LAYOUT, SHAPE, PlannerConfig(planner="home"))
    whole = make_engine([home], kernel)
    assert whole.plan(0).is_plain
    undivided = [x.cpu() for x in run_layer(whole, tensors, 0, 0)]
    engine = make_engine(random_plans(10), kernel)
    for key in range(10):
        results = [x.cpu() for x in run_layer(engine, tensors, key, key)]
        assert_ranks_as_exact([results], [undivided], reference)


def test_the_steady_state_neither_synchronises_nor_asks_for_device_memory():
    engine = make_engine(random_plans(20))
    tensors = random_tensors(torch.bfloat16)
    for key in range(20):
        run_layer(engine, tensors, key, key)
    before = torch.cuda.memory_stats(DEVICE)["num_device_alloc"]
    with no_synchronisation():
        for key in range(20):
            run_layer(engine, tensors, key, key)
    assert torch.cuda.memory_stats(DEVICE)["num_device_alloc"] == before


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums in the same order every time: FlashAttention adds up dq as its blocks finish."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_a_plan_added_behind_a_slow_stream_is_waited_for():
    tensors, (plan,) = random_tensors(torch.bfloat16), random_plans(1)
    engine = make_engine([plan])
    expected = run_layer(engine, tensors, 0, 0)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        # about 0.1 s, which the copies of the tables wait for
        torch.cuda._sleep(200_000_000)
        engine.add_plan(1, plan)
    assert all(map(torch.equal, run_layer(engine, tensors, 1, 1), expected))


@pytest.mark.parametrize("seed", range(3))
def test_kernels_combine_as_torch_does(seed):
    compare_orders(seed, torch.device("cuda"))
