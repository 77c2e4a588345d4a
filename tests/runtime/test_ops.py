"""The operator: autograd, fake kernels, and one compiled graph for many plans."""

import pytest
import torch
from torch import Tensor

from tests.accuracy import assert_as_exact
from tests.sets import params
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.ops import _core_attention, core_attention, read_key

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 4)
ENGINE = "test_ops"
LENGTHS = [[40], [1, 39], [13, 20, 7], [10, 10, 10, 10], [39, 1]]


@pytest.fixture(autouse=True)
def _engine() -> None:
    engine = CoreAttentionEngine(get_kernel("cpu", CPU), None, rank=0, device=CPU, scale=0.25)
    for key, lengths in enumerate(LENGTHS):
        layout = TokenLayout.from_segments([[(d, 0, n) for d, n in enumerate(lengths)]])
        engine.add_plan(key, make_plan(layout, SHAPE, PlannerConfig(planner="home")))
    register_engine(ENGINE, engine)
    torch._dynamo.reset()


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(40, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    return q, k, v


def test_gradients_match_finite_differences() -> None:
    """Central differences err by their step squared, 1e-12, and by a rounding over the step, 1e-10."""
    torch.manual_seed(0)
    key = torch.tensor([2])
    q, k, v = (x[:, :, :4].detach().clone().requires_grad_() for x in inputs(torch.float64))
    assert torch.autograd.gradcheck(
        lambda q, k, v: core_attention(q, k, v, key, ENGINE), (q, k, v), fast_mode=True, atol=1e-7
    )


def test_operator_registration() -> None:
    torch.library.opcheck(
        _core_attention,
        (*inputs(), torch.tensor([1]), ENGINE),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


@pytest.mark.parametrize("backend", params(["aot_eager", "inductor"], ["aot_eager"]))
def test_one_graph_serves_all_plans(backend: str) -> None:
    graphs = 0

    def counting(graph_module: torch.fx.GraphModule, example_inputs: list):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend(backend)(graph_module, example_inputs)

    def block(q: Tensor, k: Tensor, v: Tensor, key: Tensor) -> Tensor:
        return core_attention(q * 2, k, v, key, ENGINE).square()

    compiled = torch.compile(block, backend=counting, fullgraph=True)
    for key in range(len(LENGTHS)):
        rows = inputs()
        results = []
        for function, dtype in ((compiled, torch.float32), (block, torch.float32), (block, torch.float64)):
            q, k, v = (x.detach().to(dtype).requires_grad_() for x in rows)
            out = function(q, k, v, torch.tensor([key, key]))
            results.append((out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))))
        for got, other, reference in zip(*results, strict=True):
            assert_as_exact(got, other, reference)
    assert graphs == 1


def test_a_key_on_the_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="host tensor"):
        read_key(torch.empty(1, dtype=torch.int64, device="meta"))
