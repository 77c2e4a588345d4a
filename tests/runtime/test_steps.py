# SPDX-License-Identifier: BSD-3-Clause
"""Core attention as one operator and as steps: gradients, one graph for many plans, the order of the steps.

Plans, rows and gradients of both results are arbitrary. So are those of models that rescale outputs by the log-sum-exp,
as attention sinks need it, and of keys whose heads share their last elements, as in multi-head latent attention.
"""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.observer import observe
from tests.lib.plans import random_layout, random_plan
from tests.lib.refusals import refusal
from tests.lib.rows import CPU, SHAPES, Tensors, assert_ranks_as_exact, dense, undivided
from tests.lib.sets import matrix
from tests.lib.threaded import run_ranks, thread_transports
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.runtime.engine import (
    CoreAttentionEngine,
    get_engine,
    register_engine,
)
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.ops import (
    _core_attention,
    core_attention,
    core_attention_with_lse,
    read_key,
)
from torchtitan_cad.runtime.steps import combine, combine_with_lse, dispatch, step
from torchtitan_cad.runtime.tick_engine import TickCall, TickEngine

SHAPE = SHAPES["mla"]
ENGINE = "test_steps"
LENGTHS = [[24], [1, 23], [13, 4, 7], [6, 6, 6, 6]]
Attend = Callable[..., tuple[Tensor, Tensor]]


def in_steps(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, engine: str, **shared: Tensor
) -> tuple[Tensor, Tensor]:
    token = dispatch(q, k, v, key, engine, **shared)
    token = step(token, "attend", key, engine)
    return combine_with_lse(token, q, k, v, key, engine, **shared)


ATTEND = pytest.mark.parametrize("attend", [core_attention_with_lse, in_steps])
BACKENDS = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=matrix)]
)


def results_of(
    attend: Attend, tensors: Tensors, rank: int, engine: str, key: int = 0
) -> list[Tensor]:
    """Out, lse, and the gradients of q, k, v and of the shared part, if there is one."""
    *qkv, dout, dlse = tensors.of_rank(rank)
    shared = tensors.shared[rank : rank + 1]
    leaves = [x.clone().requires_grad_() for x in (*qkv, *shared)]
    options = {"shared": leaves[3]} if shared else {}
    results = attend(*leaves[:3], torch.tensor([key]), engine, **options)
    gradients = torch.autograd.grad(results, leaves, [dout, dlse])
    return [*(x.detach() for x in results), *gradients]


def check_ranks(
    plan: Plan,
    make_engine: Callable[..., CoreAttentionEngine],
    attend_on: Callable[[CoreAttentionEngine, Tensors, int, str], list[Tensor]],
) -> None:
    """The results of all ranks are as exact as those of undivided attention."""
    tensors = Tensors.random(plan.layout, plan.shape, with_dlse=True)
    transports = thread_transports(plan.layout.num_ranks)

    def body(rank: int) -> list[Tensor]:
        engine = make_engine(
            kernel=CpuKernel(),
            transport=transports[rank],
            rank=rank,
            device=CPU,
            scale=plan.shape.head_dim**-0.5,
        )
        engine.add_plan(0, plan)
        name = f"{ENGINE} {rank}"
        register_engine(name, engine)
        return attend_on(engine, tensors, rank, name)

    results = run_ranks(plan.layout.num_ranks, body)
    whole = undivided(plan.layout, plan.shape, tensors)
    assert_ranks_as_exact(results, whole, dense(plan.layout, tensors))


@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@pytest.mark.parametrize("heads", ["gqa 8:2", "mla"])
@ATTEND
def test_any_plan_by_both(attend, heads, keep):
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    layout = random_layout(rng, num_ranks=3, max_length=300)
    plan = random_plan(rng, layout, SHAPES[heads], aligned=False, split_kv=True)
    kept_bytes = math.inf if keep else 0.0
    check_ranks(
        plan,
        partial(CoreAttentionEngine, kept_bytes=kept_bytes),
        lambda _, *rows: results_of(attend, *rows),
    )


def attend_in_tick(
    engine: TickEngine, tensors: Tensors, rank: int, name: str
) -> list[Tensor]:
    is_mine = len(tensors.q[rank]) > 0
    calls = [TickCall(forward, keys=(0,), attends=is_mine) for forward in (True, False)]
    engine.begin_tick(calls, microbatch=0 if is_mine else None)
    q, k, v, dout, dlse = tensors.of_rank(rank)
    results = [dout, dlse, q, k, v, tensors.shared[rank]]
    if is_mine:
        results = results_of(core_attention_with_lse, tensors, rank, name)
    engine.end_tick()
    return results


def test_ranks_without_tokens_serve_in_ticks():
    layout = TokenLayout.from_segments([[(0, 0, 300)], [(1, 0, 40)], []])
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    assert plan.exchange(2).keys.num_received
    check_ranks(plan, partial(TickEngine, SHAPE, torch.float32), attend_in_tick)


# One rank, with a plan for each of LENGTHS ----------------------------------------------------------------------------


events: list[str] = []


@pytest.fixture
def rows() -> Iterator[Tensors]:
    """Of this rank, whose engine tells of its steps."""
    engine = CoreAttentionEngine(CpuKernel(), None, rank=0, device=CPU, scale=0.25)
    for key, lengths in enumerate(LENGTHS):
        layout = TokenLayout.from_segments([[(d, 0, n) for d, n in enumerate(lengths)]])
        engine.add_plan(key, make_plan(layout, SHAPE, PlannerConfig(planner="home")))
    observe(engine, lambda step, key: events.append(step))
    register_engine(ENGINE, engine)
    torch.compiler.reset()
    torch.manual_seed(0)
    yield Tensors.random(layout, SHAPE, torch.float64, with_dlse=True)
    assert not engine.pending


def leaves_of(rows: Tensors) -> list[Tensor]:
    return [x[0].requires_grad_() for x in (rows.q, rows.k, rows.v, rows.shared)]


@ATTEND
def test_gradients_of_both_results_match_finite_differences(rows, attend):
    """Central differences err by their step squared, 1e-12, and by a rounding over the step, 1e-10."""

    def attend_by_the_second_plan(q, k, v, shared):
        return attend(q, k, v, torch.tensor([1]), ENGINE, shared=shared)

    assert torch.autograd.gradcheck(
        attend_by_the_second_plan, leaves_of(rows), fast_mode=True, atol=1e-7
    )


@ATTEND
def test_either_result_may_be_unused(rows, attend):
    """Gradients are linear in those of the results; without that of lse they have the bits of ``core_attention``."""
    leaves = *qkv, shared = leaves_of(rows)
    call = (*qkv, torch.tensor([1]), ENGINE)
    out, lse = (x.square().sum() for x in attend(*call, shared=shared))
    alone = core_attention(*call, shared=shared).square().sum()
    of_out, of_lse, of_both, of_alone = (
        torch.autograd.grad(loss, leaves, retain_graph=True)
        for loss in (out, lse, out + lse, alone)
    )
    assert all(map(torch.equal, of_out, of_alone))
    assert not of_lse[2].any()
    for both, first, second in zip(of_both, of_out, of_lse, strict=True):
        torch.testing.assert_close(both, first + second)


@BACKENDS
@ATTEND
def test_one_graph_for_all_plans(rows, attend, backend):
    graphs = []

    def counting(graph_module: torch.fx.GraphModule, example_inputs: list):
        graphs.append(graph_module)
        return torch._dynamo.lookup_backend(backend)(graph_module, example_inputs)

    compiled = torch.compile(attend, backend=counting, fullgraph=True)
    for key in range(len(LENGTHS)):
        results = (
            results_of(function, rows, 0, ENGINE, key)
            for function in (attend, compiled)
        )
        assert all(map(torch.equal, *results))
    assert len(graphs) == 1


@torch.library.custom_op("torchtitan_cad_test::other_work", mutates_args=())
def other_work(x: Tensor, name: str) -> Tensor:
    events.append(name)
    return x.clone()


other_work.register_fake(lambda x, name: x.clone())
other_work.register_autograd(lambda ctx, grad: (other_work(grad, "backward"), None))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_other_work_between_steps(rows, backend):
    def attend(q: Tensor, k: Tensor, v: Tensor, key: Tensor) -> Tensor:
        token = dispatch(q, k, v, key, ENGINE)
        token = other_work(token, "forward")
        token = step(token, "attend", key, ENGINE)
        return combine(token, q, k, v, key, ENGINE)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    qkv = [torch.randn(24, 4, 16, requires_grad=True) for _ in range(3)]
    for key in (torch.tensor(0), torch.tensor(2)):
        out = core_attention(*qkv, key, ENGINE)
        want = torch.autograd.grad(out.square().sum(), qkv)
        events.clear()
        got = compiled(*qkv, key)
        gradients = torch.autograd.grad(got.square().sum(), qkv)
        assert torch.equal(got, out)
        assert all(map(torch.equal, gradients, want))
        assert [event for event in events if not event.startswith("compute")] == [
            "start_forward",
            "forward",
            "attend_forward",
            "finish_forward",
            "start_backward",
            "attend_backward",
            "backward",
            "finish_backward",
        ]


def test_operator_registration(rows):
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (*leaves_of(rows), torch.tensor([1]), ENGINE)
    torch.library.opcheck(_core_attention, arguments, test_utils=tests)


# Misuse ---------------------------------------------------------------------------------------------------------------


def test_a_key_on_the_device_is_refused():
    with refusal("plan_key", error=RuntimeError):
        read_key(torch.empty(1, dtype=torch.int64, device="meta"))


CALL = (*(torch.zeros(24, 4, 16) for _ in range(3)), torch.tensor(1), ENGINE)


def attend_and_finish(token: Tensor) -> None:
    combine(step(token, "attend", *CALL[3:]), *CALL)


def test_one_core_attention_by_a_plan_at_a_time(rows):
    token = dispatch(*CALL)
    with refusal(error=RuntimeError):
        dispatch(*CALL)
    attend_and_finish(token)


def test_a_step_without_the_first_is_an_error(rows):
    with refusal(error=RuntimeError):
        step(torch.zeros(1), "attend", *CALL[3:])


def test_what_a_failed_engine_has_left_is_not_in_the_way_of_the_next(rows):
    failed = get_engine(ENGINE)
    successor = copy.copy(failed)
    successor.pending = {}
    dispatch(*CALL)
    register_engine(ENGINE, successor)
    attend_and_finish(dispatch(*CALL))
    failed.pending.clear()
