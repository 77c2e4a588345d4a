# SPDX-License-Identifier: BSD-3-Clause
"""CUDA graphs of core attention, forward and backward, replayed over 20 plans; and padded tables need no allocation."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.gpu.test_transport_gpu import share_one_device
from tests.lib.device import ON_GPU, no_synchronisation
from tests.lib.plans import random_layout
from tests.lib.processes import run_processes, values
from tests.lib.replay import ReplayEngine
from tests.lib.rows import Tensors
from tests.lib.sets import needs_triton
from tests.runtime.test_replay import (
    Recording,
    Run,
    check_replays,
    common_sizes,
    random_plans,
)
from torchtitan_cad.planning import AttentionShape, Plan
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.kernels import get_kernel
from torchtitan_cad.runtime.transport import build_transport

pytestmark = [*ON_GPU, needs_triton]
SHAPE = AttentionShape(8, 2, 128, 2)
NUM_PLANS = 20


def capture(run: Run) -> Recording:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = run()
    return results, graph.replay


def build_engine(
    plans: list[Plan], group: dist.ProcessGroup | None, keep: bool = False
) -> ReplayEngine:
    device = share_one_device()
    return ReplayEngine(
        get_kernel("varlen", device),
        build_transport("symm_mem", group, device, 2**26, replayable=True)
        if group
        else None,
        rank=group.rank() if group else 0,
        device=device,
        scale=SHAPE.head_dim**-0.5,
        kept_bytes=math.inf if keep else 0.0,
        sizes=common_sizes(plans),
    )


def random_job(num_ranks: int) -> tuple[list[Plan], Tensors]:
    torch.manual_seed(0)
    layout = random_layout(np.random.default_rng(1), num_ranks, 2000)
    return random_plans(layout, SHAPE, NUM_PLANS), Tensors.random(
        layout, SHAPE, torch.bfloat16, with_dlse=True
    )


def replay_on_one_device(group: dist.ProcessGroup, keep: bool) -> None:
    # Also fills what is allocated with NaN.
    torch.use_deterministic_algorithms(True)
    plans, tensors = random_job(group.size())
    check_replays(
        build_engine(plans, group if group.size() > 1 else None, keep),
        plans,
        tensors,
        capture,
    )


@pytest.mark.parametrize(("num_ranks", "keep"), [(1, False), (2, False), (4, True)])
def test_captured_attention_follows_the_plan(num_ranks: int, keep: bool) -> None:
    values(run_processes(num_ranks, replay_on_one_device, keep, timeout_s=300))


def run_without_allocation(group: dist.ProcessGroup) -> tuple[int, int]:
    """Device allocations and their bytes while 20 plans run, after the first of them ran once."""
    plans, tensors = random_job(group.size())
    engine = build_engine(plans, group)
    q, k, v, dout = (
        xs[group.rank()].to(engine.device)
        for xs in (tensors.q, tensors.k, tensors.v, tensors.dout)
    )

    def run(key: int) -> None:
        engine.backward(dout, Saved(q, k, v, *engine.forward(q, k, v, key)), key)

    engine.add_plan(0, plans[0])
    run(0)
    for key, plan in enumerate(plans[1:], 1):
        engine.add_plan(key, plan)
    run(0)  # tables of the other plans may have taken what the first run left free
    before = torch.cuda.memory_stats()
    with no_synchronisation():
        for key in range(NUM_PLANS):
            run(key)
    after = torch.cuda.memory_stats()
    names = "num_device_alloc", "reserved_bytes.all.peak"
    return tuple(after[name] - before[name] for name in names)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_padded_tables_need_no_memory_after_the_first_plan(num_ranks: int) -> None:
    assert (
        values(run_processes(num_ranks, run_without_allocation, timeout_s=300))
        == [(0, 0)] * num_ranks
    )
