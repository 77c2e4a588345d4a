# SPDX-License-Identifier: BSD-3-Clause
"""Core attention as one operator and as three steps: gradients, one graph for many plans, the order of the steps."""

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from tests.lib.observer import observe
from tests.lib.refusals import refusal
from tests.lib.sets import params
from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.engine import (
    CoreAttentionEngine,
    get_engine,
    register_engine,
)
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.ops import _core_attention, core_attention, read_key
from torchtitan_cad.runtime.steps import combine, dispatch, step

CPU = torch.device("cpu")
SHAPE = AttentionShape(2, 1, 16, 4)
DIM = SHAPE.num_heads * SHAPE.head_dim
ENGINE = "test_steps"
KEEP_ORDER = {"reorder_for_peak_memory": False}
"""options of Inductor, which otherwise moves a wait right behind its start to save memory (torch 2.11 to 2.15)"""
LENGTHS = [[24], [1, 23], [13, 4, 7], [6, 6, 6, 6]]
LAYERS = 2

events: list[str] = []


@torch.library.custom_op("torchtitan_cad_test::mark", mutates_args=())
def mark(x: Tensor, name: str) -> Tensor:
    """A copy of ``x``, and a record of when it was made."""
    events.append(name)
    return x.clone()


@mark.register_fake
def _mark_fake(x: Tensor, name: str) -> Tensor:
    return x.clone()


def _mark_gradient(ctx, grad: Tensor) -> tuple[Tensor, None]:
    return mark(grad, f"{ctx.name} backward"), None


def _mark_context(ctx, inputs, output) -> None:
    ctx.name = inputs[1]


mark.register_autograd(_mark_gradient, setup_context=_mark_context)


def trace(step: str, key: int) -> None:
    if not step.startswith("compute"):
        events.append(f"{step} {'AB'[key % 2]}")


@pytest.fixture(autouse=True)
def _engine() -> Iterator[None]:
    engine = CoreAttentionEngine(
        get_kernel("cpu", CPU), None, rank=0, device=CPU, scale=0.25
    )
    for key, lengths in enumerate(LENGTHS):
        layout = TokenLayout.from_segments([[(d, 0, n) for d, n in enumerate(lengths)]])
        engine.add_plan(key, make_plan(layout, SHAPE, PlannerConfig(planner="home")))
    observe(engine, trace)
    register_engine(ENGINE, engine)
    torch._dynamo.reset()
    yield
    assert not engine.pending


def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = x.view(-1, SHAPE.num_heads, SHAPE.head_dim)
    return q, q[:, :1] * 2, q[:, 1:] * 3


def ping_pong(
    a: Tensor, b: Tensor, weights: Tensor, key_a: Tensor, key_b: Tensor
) -> Tensor:
    """All layers of both nano-batches [24, DIM] in one function, as the loop over the blocks runs them."""
    xs, keys, names = [a, b], [key_a, key_b], "AB"
    pending: list[tuple] = [(), ()]
    for layer in range(LAYERS + 1):
        for i in (0, 1):
            if layer:
                token, *qkv = pending[i]
                xs[i] = xs[i] + combine(token, *qkv, keys[i], ENGINE).flatten(1)
            xs[i] = torch.tanh(mark(xs[i] @ weights[layer], f"work {layer} {names[i]}"))
            if layer < LAYERS:
                qkv = project(xs[i])
                pending[i] = (dispatch(*qkv, keys[i], ENGINE), *qkv)
        if layer < LAYERS:
            for i in (0, 1):
                token, *qkv = pending[i]
                pending[i] = (step(token, "attend", keys[i], ENGINE), *qkv)
    return torch.cat(xs)


def attention_in_parts(
    q: Tensor, k: Tensor, v: Tensor, key: Tensor, early: bool
) -> Tensor:
    how = ", undivided" if early else ""
    token = step(dispatch(q, k, v, key, ENGINE), "attend_first" + how, key, ENGINE)
    token = step(mark(token, "meanwhile"), "attend_rest" + how, key, ENGINE)
    return combine(token, q, k, v, key, ENGINE)


def undivided(
    a: Tensor, b: Tensor, weights: Tensor, key_a: Tensor, key_b: Tensor
) -> Tensor:
    xs = []
    for x, key in ((a, key_a), (b, key_b)):
        for layer in range(LAYERS + 1):
            x = torch.tanh(x @ weights[layer])
            if layer < LAYERS:
                x = x + core_attention(*project(x), key, ENGINE).flatten(1)
        xs.append(x)
    return torch.cat(xs)


def train(
    function, seed: int, keys: tuple[int, int], dtype=torch.float32
) -> tuple[list[Tensor], list[str]]:
    """Output and gradients, and what happened in which order."""
    torch.manual_seed(seed)
    a, b = (torch.randn(24, DIM).to(dtype).requires_grad_() for _ in range(2))
    weights = (torch.randn(LAYERS + 1, DIM, DIM) / DIM**0.5).to(dtype).requires_grad_()
    events.clear()
    out = function(a, b, weights, *(torch.tensor(key) for key in keys))
    gradients = torch.autograd.grad(out.square().sum(), (a, b, weights))
    return [out.detach(), *gradients], list(events)


def random_rows(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(24, heads, 16, dtype=dtype, requires_grad=True)
        for heads in (2, 1, 1)
    ]


def test_gradients_match_finite_differences():
    """Central differences err by their step squared, 1e-12, and by a rounding over the step, 1e-10."""
    rows = [
        x[:, :, :4].detach().clone().requires_grad_()
        for x in random_rows(torch.float64)
    ]
    key = torch.tensor([2])
    assert torch.autograd.gradcheck(
        lambda *qkv: core_attention(*qkv, key, ENGINE), rows, fast_mode=True, atol=1e-7
    )


def test_operator_registration():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        _core_attention,
        (*random_rows(), None, torch.tensor([1]), ENGINE),
        test_utils=tests,
    )


def test_a_key_on_the_device_is_refused():
    with refusal("plan_key", error=RuntimeError):
        read_key(torch.empty(1, dtype=torch.int64, device="meta"))


def test_steps_give_what_the_undivided_operator_gives_in_turns_of_the_nano_batches():
    """The bits are the same: it is the same computation, and a gradient's two summands are the same in either order."""
    results, order = train(ping_pong, 0, (0, 1))
    assert all(map(torch.equal, results, train(undivided, 0, (0, 1))[0]))
    check_order(order)


@pytest.mark.parametrize("function", [ping_pong, undivided])
@pytest.mark.parametrize("backend", params(["aot_eager", "inductor"], ["aot_eager"]))
def test_one_graph_for_all_plans_keeps_the_order(function, backend):
    graphs = 0

    def counting(graph_module: torch.fx.GraphModule, example_inputs: list):
        nonlocal graphs
        graphs += 1
        if backend == "inductor":
            return torch._inductor.compile(
                graph_module, example_inputs, options=KEEP_ORDER
            )
        return torch._dynamo.lookup_backend(backend)(graph_module, example_inputs)

    compiled = torch.compile(function, backend=counting, fullgraph=True)
    for seed, keys in enumerate([(0, 1), (2, 3), (2, 1)]):
        results, order = train(compiled, seed, keys)
        others, references = (
            train(undivided, seed, keys, dtype)[0]
            for dtype in (torch.float32, torch.float64)
        )
        for got, other, reference in zip(results, others, references, strict=True):
            assert_as_exact(got, other, reference)
        if function is ping_pong:
            check_order(order)
    assert graphs == 1


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_attention_in_parts(backend, early):
    """Plans with one round are computed in the first part of forward and the second of backward, or vice versa."""
    compiled = torch.compile(attention_in_parts, backend=backend, fullgraph=True)
    rows = random_rows(torch.float64)
    for key in (0, 2):
        events.clear()
        got = [compiled(*rows, torch.tensor(key), early)]
        got += torch.autograd.grad(got[0].square().sum(), rows)
        order = [event.removesuffix(" A") for event in events]
        want = [core_attention(*rows, torch.tensor(key), ENGINE)]
        want += torch.autograd.grad(want[0].square().sum(), rows)
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True)
        )
        assert order == [
            "start_forward",
            *["attend_first_forward"] * early,
            "meanwhile",
            "attend_forward",
            "finish_forward",
            "start_backward",
            *["attend_first_backward"] * (not early),
            "meanwhile backward",
            "attend_backward",
            "finish_backward",
        ]


def check_order(order: list[str]) -> None:
    """Everything of the loop once, and the other nano-batch's work or attention between two steps of one."""
    steps = [event for event in order if not event.startswith("work")]
    assert len(steps) == len(set(steps)) * LAYERS == 2 * 6 * LAYERS
    for mine, other in ("AB", "BA"):
        for direction in ("forward", "backward"):
            kinds = [
                f"{step}_{direction} {mine}" for step in ("start", "attend", "finish")
            ]
            for begin, end in itertools.pairwise(kinds):
                at = 0
                for _ in range(LAYERS):
                    start = order.index(begin, at)
                    at = order.index(end, start)
                    between = order[start + 1 : at]
                    assert any(
                        event.endswith((other, f"{other} backward"))
                        for event in between
                    ), (begin, end, order)


def test_one_core_attention_by_a_plan_at_a_time():
    q, k, v = (x.detach() for x in random_rows())
    key = torch.tensor(1)
    token = dispatch(q, k, v, key, ENGINE)
    with refusal(error=RuntimeError):
        dispatch(q, k, v, key, ENGINE)
    combine(step(token, "attend", key, ENGINE), q, k, v, key, ENGINE)


def test_a_part_without_the_first_is_an_error():
    with refusal(error=RuntimeError):
        step(torch.zeros(1), "attend", torch.tensor(1), ENGINE)


def test_what_a_failed_engine_has_left_is_not_in_the_way_of_the_next():
    q, k, v = (x.detach() for x in random_rows())
    key, engine = torch.tensor(1), get_engine(ENGINE)
    successor = copy.copy(engine)
    successor.pending = {}
    dispatch(q, k, v, key, ENGINE)
    try:
        register_engine(ENGINE, successor)
        combine(
            step(dispatch(q, k, v, key, ENGINE), "attend", key, ENGINE),
            q,
            k,
            v,
            key,
            ENGINE,
        )
    finally:
        register_engine(ENGINE, engine)
        engine.pending.clear()
