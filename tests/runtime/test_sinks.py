# SPDX-License-Identifier: BSD-3-Clause
"""Outputs rescaled by their log-sum-exp, as attention sinks need it: exact forward and backward, in every variant.

A sink is a score without a value, one per head: softmax over the keys and it is sigmoid(lse - sink) x softmax over the
keys. So gradients flow through the log-sum-exp.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from tests.lib.kernels_reference import offsets
from tests.lib.plans import random_layout, random_plan
from tests.lib.rows import CPU, SHAPES, Tensors, layout_order
from tests.lib.sets import matrix, seeds
from tests.lib.threaded import run_ranks, thread_transports
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime import steps
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.ops import core_attention, core_attention_with_lse
from torchtitan_cad.runtime.tick_engine import TickCall, TickEngine

SHAPE = SHAPES["gqa 8:2"]
ENGINE = "test_sinks"
LENGTHS = [[24], [13, 4, 7]]


def in_steps(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, engine: str, **shared: Tensor
) -> tuple[Tensor, Tensor]:
    token = steps.dispatch(q, k, v, key, engine, **shared)
    token = steps.step(token, "attend_first", key, engine)
    token = steps.step(token, "attend_rest", key, engine)
    return steps.combine_with_lse(token, q, k, v, key, engine, **shared)


VARIANTS: list[Callable[..., tuple[Tensor, Tensor]]] = [
    core_attention_with_lse,
    in_steps,
]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    return out * torch.sigmoid(lse - sinks).unsqueeze(-1).to(out.dtype)


def dense_with_sinks(
    layout: TokenLayout, tensors: Tensors, sinks: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Output and gradients of q, k, v and sinks, rows in the order of ``Tensors``.

    In fp64 sinks are scores of the softmax. In fp32 they scale the output, as in models: where they are far below the
    log-sum-exp, the gradient of the sigmoid has lost digits of 1 - x.
    """
    order, cu = layout_order(layout), offsets(layout.doc_lengths.tolist())
    q, k, v, dout = (torch.cat(xs)[order].to(dtype) for xs in tensors.fields)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks.detach().to(dtype))]
    group, outs = q.shape[1] // k.shape[1], []
    for begin, end in pairwise(cu):
        queries, keys, values = (
            q[begin:end],
            k[begin:end].repeat_interleave(group, 1),
            v[begin:end],
        )
        scores = torch.einsum("qhd,khd->qhk", queries, keys) * q.shape[-1] ** -0.5
        hidden = ~torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
        column = leaves[3].view(1, -1, 1).expand(end - begin, -1, 1)
        in_softmax = dtype == torch.float64
        probs = (
            torch.cat([scores, column], -1).softmax(-1)[..., :-1]
            if in_softmax
            else scores.softmax(-1)
        )
        out = torch.einsum("qhk,khd->qhd", probs, values.repeat_interleave(group, 1))
        outs.append(
            out if in_softmax else with_sinks(out, scores.logsumexp(-1), leaves[3])
        )
    out = torch.cat(outs)
    gradients = torch.autograd.grad(out, leaves, dout)
    back = torch.argsort(order)
    return [out.detach()[back], *(x[back] for x in gradients[:3]), gradients[3]]


@pytest.mark.parametrize("seed", seeds(1, 4))
@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@pytest.mark.parametrize("attend", VARIANTS)
def test_sinks_over_any_plan(attend, keep, seed):
    """Rows that are split and merged too, in fp32 as exact as a dense computation in fp32."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=3, max_length=300)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    check_sinks(
        plan,
        attend,
        CoreAttentionEngine,
        kept_bytes=math.inf if keep else 0.0,
        two_rounds=attend is in_steps,
    )


def test_sinks_of_a_tick():
    """A rank without tokens serves others."""
    layout = TokenLayout.from_segments([[(0, 0, 300)], [(1, 0, 40)], []])
    plan = random_plan(
        np.random.default_rng(0), layout, SHAPE, aligned=False, split_kv=True
    )
    assert plan.exchange(2).queries.num_received
    check_sinks(
        plan, core_attention_with_lse, partial(TickEngine, SHAPE, torch.float32)
    )


@contextmanager
def in_tick(
    engine: CoreAttentionEngine, *, forward: bool, mine: bool
) -> Iterator[None]:
    if isinstance(engine, TickEngine):
        engine.begin_tick(
            [TickCall(forward=forward, keys=(0,), mine=mine)],
            microbatch=0 if mine else None,
        )
        yield
        engine.end_tick()
    else:
        yield


def check_sinks(
    plan: Plan,
    attend: Callable[..., tuple[Tensor, Tensor]],
    make_engine: Callable[..., CoreAttentionEngine],
    **options: bool,
) -> None:
    layout, scale = plan.layout, SHAPE.head_dim**-0.5
    tensors, sinks = Tensors.random(layout, SHAPE), torch.randn(SHAPE.num_heads) * 3
    transports = thread_transports(layout.num_ranks)

    def body(rank: int) -> list[Tensor]:
        name, kernel = f"{ENGINE} {rank}", CpuKernel()
        engine = make_engine(
            kernel=kernel,
            transport=transports[rank],
            rank=rank,
            device=CPU,
            scale=scale,
            **options,
        )
        engine.add_plan(0, plan)
        register_engine(name, engine)
        *qkv, dout = tensors.of_rank(rank)
        leaves = [x.clone().requires_grad_() for x in (*qkv, sinks)]
        results, mine = (
            [torch.zeros_like(x) for x in (dout, *leaves)],
            len(dout) > 0 or type(engine) is not TickEngine,
        )
        with in_tick(engine, forward=True, mine=mine):
            if mine:
                out = with_sinks(
                    *attend(*leaves[:3], torch.tensor([0]), name), leaves[3]
                )
        with in_tick(engine, forward=False, mine=mine):
            if mine:
                results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        return results

    results = list(zip(*run_ranks(layout.num_ranks, body), strict=True))
    joined = [*map(torch.cat, results[:4]), torch.stack(results[4]).sum(0)]
    others, references = (
        dense_with_sinks(layout, tensors, sinks, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    for name, mine, other, reference in zip(
        ("out", "dq", "dk", "dv", "dsinks"), joined, others, references, strict=True
    ):
        assert_as_exact(mine, other, reference, name)


@pytest.fixture
def engine() -> Iterator[CoreAttentionEngine]:
    """One rank with a plan for each of ``LENGTHS``."""
    shape = AttentionShape(2, 1, 16, 8)
    engine = CoreAttentionEngine(CpuKernel(), None, rank=0, device=CPU, scale=0.25)
    for key, lengths in enumerate(LENGTHS):
        layout = TokenLayout.from_segments([[(d, 0, n) for d, n in enumerate(lengths)]])
        engine.add_plan(key, make_plan(layout, shape, PlannerConfig(planner="home")))
    register_engine(ENGINE, engine)
    torch.compiler.reset()
    yield engine
    assert not engine.pending


def random_rows(dim: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(24, heads, dim, dtype=torch.float64, requires_grad=True)
        for heads in (2, 1, 1)
    ]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("attend", VARIANTS)
def test_gradients_of_both_results_match_finite_differences(attend):
    def attend_by_the_second_plan(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*qkv, torch.tensor([1]), ENGINE)

    assert torch.autograd.gradcheck(
        attend_by_the_second_plan, random_rows(dim=4), fast_mode=True, atol=1e-7
    )


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("attend", VARIANTS)
def test_either_result_may_be_unused(attend):
    """Gradients are linear in those of the results; without that of lse they have the bits of ``core_attention``."""
    rows, key = random_rows(), torch.tensor([1])
    of_out, of_lse, of_both = (
        torch.autograd.grad(
            sum(result.square().sum() for result in attend(*rows, key, ENGINE)[used]),
            rows,
        )
        for used in (slice(0, 1), slice(1, 2), slice(0, 2))
    )
    alone = torch.autograd.grad(core_attention(*rows, key, ENGINE).square().sum(), rows)
    assert all(map(torch.equal, of_out, alone))
    assert not of_lse[2].any()
    for both, first, second in zip(of_both, of_out, of_lse, strict=True):
        torch.testing.assert_close(both, first + second)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("attend", VARIANTS)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=matrix)]
)
def test_one_graph_with_sinks(attend, backend):
    """The graph takes other plans without being compiled anew."""
    rows, sinks, graphs = (
        random_rows(),
        torch.randn(2, dtype=torch.float64, requires_grad=True),
        0,
    )

    def counting(
        graph_module: torch.fx.GraphModule, example_inputs: list
    ) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph_module, example_inputs)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, key: Tensor) -> Tensor:
        return with_sinks(*attend(q, k, v, key, ENGINE), sinks)

    compiled = torch.compile(run, backend=counting, fullgraph=True)
    for key in (torch.tensor([0]), torch.tensor([1])):
        results = []
        for function in (compiled, run):
            out = function(*rows, sinks, key)
            results.append(
                [out, *torch.autograd.grad(out.square().sum(), [*rows, sinks])]
            )
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert graphs == 1
