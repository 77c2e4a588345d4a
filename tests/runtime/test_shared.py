# SPDX-License-Identifier: BSD-3-Clause
"""Heads of two sizes, and keys whose heads share their last elements, by every family of operators.

Multi-head latent attention has such keys: the rotary part of a token is the same in all heads.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.plans import random_layout, random_plan
from tests.lib.rows import CPU, SHAPES, Tensors, assert_ranks_as_exact, dense, undivided
from tests.lib.sets import matrix
from tests.lib.threaded import run_ranks, thread_transports
from tests.runtime.test_sinks import VARIANTS
from torchtitan_cad.planning import PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.tick_engine import TickCall, TickEngine

SHAPE = SHAPES["mla"]
ENGINE = "test_shared"
Attend = Callable[..., tuple[Tensor, Tensor]]


def results_of(
    attend: Attend, tensors: Tensors, rank: int, engine: str
) -> list[Tensor]:
    q, k, v, dout, dlse = tensors.of_rank(rank)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, tensors.shared[rank])]
    out, lse = attend(*leaves[:3], torch.tensor([0]), engine, shared=leaves[3])
    return [
        out.detach(),
        lse.detach(),
        *torch.autograd.grad([out, lse], leaves, [dout, dlse]),
    ]


@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@pytest.mark.parametrize("attend", VARIANTS)
def test_any_plan_by_every_family(attend, keep):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    layout = random_layout(rng, num_ranks=3, max_length=300)
    plan, tensors = (
        random_plan(rng, layout, SHAPE, aligned=False, split_kv=True),
        Tensors.random(layout, SHAPE),
    )
    tensors.dlse = [
        torch.randn(n, SHAPE.num_heads) for n in layout.tokens_per_rank.tolist()
    ]
    transports, scale = thread_transports(layout.num_ranks), SHAPE.head_dim**-0.5

    def body(rank: int) -> list[Tensor]:
        engine = CoreAttentionEngine(
            CpuKernel(),
            transports[rank],
            rank=rank,
            device=CPU,
            scale=scale,
            kept_bytes=math.inf if keep else 0.0,
        )
        engine.add_plan(0, plan)
        register_engine(f"{ENGINE} {rank}", engine)
        return results_of(attend, tensors, rank, f"{ENGINE} {rank}")

    mine = run_ranks(layout.num_ranks, body)
    assert_ranks_as_exact(
        mine, undivided(layout, SHAPE, tensors), dense(layout, tensors)
    )


def test_ranks_without_tokens_serve_in_ticks():
    layout = TokenLayout.from_segments([[(0, 0, 300)], [(1, 0, 40)], []])
    plan = random_plan(
        np.random.default_rng(0), layout, SHAPE, aligned=False, split_kv=True
    )
    assert plan.exchange(2).keys.num_received
    torch.manual_seed(0)
    tensors, transports = (
        Tensors.random(layout, SHAPE, with_dlse=True),
        thread_transports(3),
    )
    make = partial(
        TickEngine,
        SHAPE,
        torch.float32,
        kernel=CpuKernel(),
        device=CPU,
        scale=SHAPE.head_dim**-0.5,
    )

    def body(rank: int) -> list[Tensor]:
        engine, mine = make(transport=transports[rank], rank=rank), rank < 2
        engine.add_plan(0, plan)
        register_engine(f"{ENGINE} {rank}", engine)
        q, k, v, dout, dlse = tensors.of_rank(rank)
        results, shared = (
            [dout, dlse, q, k, v, tensors.shared[rank]],
            tensors.shared[rank],
        )
        engine.begin_tick(
            [TickCall(forward=True, keys=(0,), mine=mine)],
            microbatch=0 if mine else None,
        )
        saved = [q, k, v, *engine.forward(q, k, v, 0, shared), shared] if mine else []
        engine.end_tick()
        engine.begin_tick(
            [TickCall(forward=False, keys=(0,), mine=mine)],
            microbatch=0 if mine else None,
        )
        if mine:
            results = [*saved[3:5], *engine.backward(dout, saved, 0, dlse)]
        engine.end_tick()
        return results

    assert_ranks_as_exact(
        run_ranks(3, body), undivided(layout, SHAPE, tensors), dense(layout, tensors)
    )


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=matrix)]
)
@pytest.mark.parametrize("attend", VARIANTS[:2])
def test_compiled(attend, backend):
    layout = TokenLayout.from_segments([[(0, 0, 13), (1, 0, 11)]])
    engine = CoreAttentionEngine(CpuKernel(), None, rank=0, device=CPU, scale=0.25)
    engine.add_plan(0, make_plan(layout, SHAPE, PlannerConfig(planner="home")))
    register_engine(ENGINE, engine)
    torch.manual_seed(0)
    tensors = Tensors.random(layout, SHAPE, torch.float64, with_dlse=True)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    want, got = (results_of(each, tensors, 0, ENGINE) for each in (attend, compiled))
    assert all(map(torch.equal, want, got))
