# SPDX-License-Identifier: BSD-3-Clause
"""Core attention as one operator and as steps: gradients, one graph for many plans, the order of the steps.

One rank has a plan for each of LENGTHS. Results are out and the log-sum-exp, as attention sinks need it, and heads of
keys share their last elements, as in multi-head latent attention.
"""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.lib.observer import observe
from tests.lib.refusals import refusal
from tests.lib.rows import CPU, SHAPES, Tensors
from tests.lib.sets import matrix
from torchtitan_cad.planning import PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.runtime.engine import (
    CoreAttentionEngine,
    get_engine,
    register_engine,
)
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.ops import (
    _core_attention,
    core_attention,
    read_key,
)
from torchtitan_cad.runtime.steps import combine, dispatch, step

SHAPE = SHAPES["mla"]
ENGINE = "test_steps"
LENGTHS = [[24], [1, 23], [13, 4, 7], [6, 6, 6, 6]]
Attend = Callable[..., tuple[Tensor, Tensor]]


events: list[str] = []


@torch.library.custom_op("torchtitan_cad_test::other_work", mutates_args=())
def other_work(x: Tensor, name: str) -> Tensor:
    events.append(name)
    return x.clone()


other_work.register_fake(lambda x, name: x.clone())
other_work.register_autograd(lambda ctx, grad: (other_work(grad, "backward"), None))


def in_steps(
    q,
    k,
    v,
    key,
    engine: str,
    shared: Tensor | None = None,
    work: Callable[[Tensor, str], Tensor] = lambda token, name: token,
) -> tuple[Tensor, Tensor]:
    token = dispatch(q, k, v, shared, key, engine)
    token = work(token, "forward")
    token = step(token, "attend", key, engine)
    out, lse, *_ = combine(token, q, k, v, shared, key, engine)
    return out, lse


def beside_work(*rows, shared):
    """In steps, with other work between them."""
    return in_steps(*rows, shared=shared, work=other_work)


ATTEND = pytest.mark.parametrize("attend", [core_attention, in_steps])
IN_STEPS = [
    "start_forward",
    "forward",
    "attend_forward",
    "finish_forward",
    "start_backward",
    "attend_backward",
    "backward",
    "finish_backward",
]


def leaves_of(rows: Tensors) -> list[Tensor]:
    """q, k, v and what the heads of keys share."""
    own = (rows.q, rows.k, rows.v, rows.shared)
    return [x[0].clone().requires_grad_() for x in own]


def results_of(attend: Attend, rows: Tensors, key) -> list[Tensor]:
    """Out, lse, and the gradients of q, k, v and of the shared part."""
    *qkv, shared = leaves = leaves_of(rows)
    results = attend(*qkv, torch.tensor([key]), ENGINE, shared=shared)
    gradients = torch.autograd.grad(results, leaves, [rows.dout[0], rows.dlse[0]])
    return [*(x.detach() for x in results), *gradients]


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


@ATTEND
def test_gradients_of_both_results_match_finite_differences(rows, attend):
    """Central differences err by their step squared, 1e-12, and by a rounding over the step, 1e-10."""

    def attend_by_the_second_plan(q, k, v, shared):
        return attend(q, k, v, torch.tensor([1]), ENGINE, shared=shared)

    assert torch.autograd.gradcheck(
        attend_by_the_second_plan, leaves_of(rows), fast_mode=True, atol=1e-7
    )


@pytest.mark.parametrize(
    ("attend", "backend"),
    [
        (core_attention, "aot_eager"),
        pytest.param(core_attention, "inductor", marks=matrix),
        (beside_work, "aot_eager"),
        (beside_work, "inductor"),
    ],
)
def test_one_graph_for_all_plans(rows, attend, backend):
    """Other work between steps stays there."""
    graphs = []

    def counting(graph_module, example_inputs):
        graphs.append(graph_module)
        return torch._dynamo.lookup_backend(backend)(graph_module, example_inputs)

    compiled = torch.compile(attend, backend=counting, fullgraph=True)
    for key in range(len(LENGTHS)):
        expected = results_of(core_attention, rows, key)
        events.clear()
        assert all(map(torch.equal, results_of(compiled, rows, key), expected))
        in_order = [event for event in events if not event.startswith("compute")]
        assert in_order == IN_STEPS or attend is core_attention
    assert len(graphs) == 1


def test_operator_registration(rows):
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (*leaves_of(rows), torch.tensor([1]), ENGINE)
    torch.library.opcheck(_core_attention, arguments, test_utils=tests)


# Misuse ---------------------------------------------------------------------------------------------------------------


def test_a_key_on_the_device_is_refused():
    with refusal("plan_key", error=RuntimeError):
        read_key(torch.empty(1, dtype=torch.int64, device="meta"))


CALL = (*(torch.zeros(24, 4, 16) for _ in range(3)), None, torch.tensor(1), ENGINE)


def attend_and_finish(token):
    combine(step(token, "attend", *CALL[4:]), *CALL)


def test_one_core_attention_by_a_plan_at_a_time(rows):
    token = dispatch(*CALL)
    with refusal(error=RuntimeError):
        dispatch(*CALL)
    attend_and_finish(token)


def test_a_step_without_the_first_is_an_error(rows):
    with refusal(error=RuntimeError):
        step(torch.zeros(1), "attend", *CALL[4:])


def test_what_a_failed_engine_has_left_is_not_in_the_way_of_the_next(rows):
    failed = get_engine(ENGINE)
    successor = copy.copy(failed)
    successor.pending = {}
    dispatch(*CALL)
    register_engine(ENGINE, successor)
    attend_and_finish(dispatch(*CALL))
    failed.pending.clear()
