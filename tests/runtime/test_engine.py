"""The engine on threaded ranks against an fp64 reference and against undivided attention."""

import numpy as np
import pytest
import torch

from tests.plans import random_layout, random_plan
from tests.runtime.rows import (
    CPU,
    SHAPES,
    TRANSPORTS,
    Tensors,
    assert_ranks_as_exact,
    dense,
    execute,
    undivided,
)
from tests.runtime.threaded import run_ranks, thread_transports
from tests.sets import params, seeds
from tests.support.observer import observe
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout, make_plan, validate_plan
from torchtitan_cad.planning.exchange import calls
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.tables import PlanTables


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("backward", ["resend", "keep"])
@TRANSPORTS
def test_any_plan_is_as_exact_as_undivided_attention(
    monkeypatch: pytest.MonkeyPatch, seed: int, shape: AttentionShape, backward: str, symmetric: bool
) -> None:
    monkeypatch.setattr(calls, "CUT_AT", 8)  # so that two rounds of these tasks are cut inside one
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=int(rng.integers(1, 5)))
    tensors = Tensors.random(layout, shape)
    plan = random_plan(rng, layout, shape, aligned=False, split_kv=True)
    validate_plan(plan)
    reference = dense(layout, tensors)
    whole = undivided(layout, shape, tensors)
    keep = backward == "keep"
    other = None if keep else random_plan(rng, layout, shape, aligned=False, split_kv=True)  # as in ticks
    options = {"keep": keep, "symmetric": symmetric, "backward": other}
    for two_rounds in (False, True):
        for squares_only in (False, True):
            mine = execute(plan, tensors, two_rounds=two_rounds, squares_only=squares_only, **options)
            assert_ranks_as_exact(mine, whole, reference)


@pytest.mark.parametrize("seed", seeds(2, 8))
@TRANSPORTS
def test_tile_aligned_plans_without_split_keys_are_bit_identical(seed: int, symmetric: bool) -> None:
    rng = np.random.default_rng(100 + seed)
    torch.manual_seed(seed)
    shape = SHAPES["gqa 8:2"]
    layout = random_layout(rng, num_ranks=int(rng.integers(2, 5)), max_length=900)
    tensors = Tensors.random(layout, shape)
    plan = random_plan(rng, layout, shape, aligned=True, split_kv=False)
    mine = execute(plan, tensors, symmetric=symmetric)
    for got, want in zip(mine, undivided(layout, shape, tensors), strict=True):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_planned_and_home_plans_agree_and_delays_change_nothing() -> None:
    rng = np.random.default_rng(5)
    torch.manual_seed(5)
    shape = SHAPES["gqa 8:2"]
    layout = TokenLayout.from_segments([[(0, 0, 1500)], [(1, 0, 700), (2, 0, 800)], [(3, 0, 129)], []])
    tensors = Tensors.random(layout, shape)
    plan = make_plan(layout, shape, PlannerConfig(split_kv=False))
    assert plan.moves_rows
    home = execute(make_plan(layout, shape, PlannerConfig(planner="home")), tensors)
    reference = dense(layout, tensors)
    for delay in (0.0, float(rng.random()) * 0.01):
        mine = execute(plan, tensors, max_delay_s=delay)
        for got, want in zip(mine, home, strict=True):
            assert torch.equal(got[0], want[0])
        assert_ranks_as_exact(mine, home, reference)


@TRANSPORTS
def test_the_default_planner_splits_keys_and_is_as_exact_as_undivided_attention(symmetric: bool) -> None:
    torch.manual_seed(6)
    shape = AttentionShape(num_heads=4, num_kv_heads=1, head_dim=16, dtype_bytes=4)
    layout = TokenLayout.from_segments([[(0, 0, 1536)], [(1, 0, 150)], [(2, 0, 50)], []])
    tensors = Tensors.random(layout, shape)
    plan = make_plan(layout, shape)
    assert (plan.tasks["kv_end"] != plan.tasks["q_end"]).any(), "no rectangle: nothing is tested"
    reference = dense(layout, tensors)
    mine = execute(plan, tensors, symmetric=symmetric)
    assert_ranks_as_exact(mine, undivided(layout, shape, tensors), reference)


@pytest.mark.parametrize("dtype", params([torch.bfloat16, torch.float16], [torch.bfloat16]))
@TRANSPORTS
def test_half_precision(dtype: torch.dtype, symmetric: bool) -> None:
    rng = np.random.default_rng(3)
    torch.manual_seed(3)
    shape = SHAPES["gqa 8:2"]
    layout = random_layout(rng, num_ranks=3)
    tensors = Tensors.random(layout, shape, dtype)
    reference = dense(layout, tensors)
    plan = random_plan(rng, layout, shape, aligned=False, split_kv=True)
    mine = execute(plan, tensors, symmetric=symmetric)
    assert_ranks_as_exact(mine, undivided(layout, shape, tensors), reference)


def test_rows_that_are_home_never_travel() -> None:
    shape = SHAPES["mha"]
    layout = TokenLayout.from_segments([[(0, 0, 512)], [(1, 0, 512)]])
    plan = make_plan(layout, shape, PlannerConfig(planner="home"))
    transports = thread_transports(2)
    tensors = Tensors.random(layout, shape)

    def body(rank: int) -> None:
        engine = CoreAttentionEngine(get_kernel("cpu", CPU), transports[rank], rank=rank, device=CPU, scale=0.25)
        engine.add_plan(0, plan)
        assert engine.plan(0).is_plain
        engine.forward(tensors.q[rank], tensors.k[rank], tensors.v[rank], 0)

    run_ranks(2, body)
    assert [t.rows_sent for t in transports] == [0, 0]


def test_a_plan_that_moves_nothing_gives_the_kernel_its_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the gradients of one that is computed by delta, to the bit."""
    layout = TokenLayout.from_segments([[(0, 0, 300), (1, 0, 50)]])
    shape = SHAPES["gqa 8:2"]
    tensors, plan = Tensors.random(layout, shape), make_plan(layout, shape)
    mine = execute(plan, tensors)
    monkeypatch.setattr(PlanTables, "is_plain", False)
    others = execute(plan, tensors)
    monkeypatch.undo()
    assert all(map(torch.equal, mine[0], others[0]))
    monkeypatch.setattr("torchtitan_cad.runtime.engine.row_delta", None)  # not called
    assert all(map(torch.equal, execute(plan, tensors)[0], mine[0]))


def test_errors_name_the_plan() -> None:
    engine = CoreAttentionEngine(get_kernel("cpu", CPU), None, rank=0, device=CPU, scale=1.0)
    q = torch.zeros(3, 4, 16)
    with pytest.raises(RuntimeError, match="no plan 5"):
        engine.forward(q, q, q, 5)
    engine.add_plan(5, make_plan(TokenLayout.from_segments([[(0, 0, 2)]]), SHAPES["mha"]))
    with pytest.raises(ValueError, match="plan 5 is for 2 local queries and 2 local tokens, got 3 and 3"):
        engine.forward(q, q, q, 5)


def test_streams_that_use_a_plan_wait_for_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to a device are in the order of the stream on which the plan was added; others must wait for them."""
    order: list[str] = []
    monkeypatch.setattr(streams, "record_event", lambda device: order.append(f"mark {device}") or "copied")
    monkeypatch.setattr(streams, "wait_event", lambda device, event, **_: order.append(f"join {event} {device}"))
    engine = CoreAttentionEngine(get_kernel("cpu", CPU), None, rank=0, device=CPU, scale=0.25)
    observe(engine, lambda step, _: order.append(step))
    plan = make_plan(TokenLayout.from_segments([[(0, 0, 7)]]), SHAPES["mha"], PlannerConfig())
    engine.add_plan(0, plan)
    q, k, v = (torch.randn(7, 4, 16) for _ in range(3))
    saved = Saved(q, k, v, *engine.forward(q, k, v, 0))
    engine.backward(torch.randn_like(saved.out), saved, 0)
    steps = [step for step in order if not step.startswith("compute") and "first" not in step]
    assert steps[:3] == ["mark cpu", "start_forward", "join copied cpu"]
    assert steps[steps.index("start_backward") + 1] == "join copied cpu"
