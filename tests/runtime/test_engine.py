"""The engine on threaded ranks against an fp64 reference and against undivided attention."""

from itertools import product
from typing import Any

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
    assert_same_bits,
    dense,
    execute,
    undivided,
)
from tests.runtime.threaded import thread_transports
from tests.sets import seeds
from torchtitan_cad.planning import AttentionShape, Plan, PlannerConfig, TokenLayout, make_plan, validate_plan
from torchtitan_cad.planning.exchange import calls
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.tables import PlanTables

SHAPE = SHAPES["gqa 8:2"]
LAYOUT = TokenLayout.from_segments([[(0, 0, 1500)], [(1, 0, 700), (2, 0, 800)], [(3, 0, 129)], []])
HOME = PlannerConfig(planner="home")


def check_exactness(plan: Plan, tensors: Tensors, *runs: dict[str, Any]) -> None:
    """Each run, by its options of ``execute``, errs at most twice as much as undivided attention."""
    whole, reference = undivided(plan.layout, plan.shape, tensors), dense(plan.layout, tensors)
    for options in runs:
        assert_ranks_as_exact(execute(plan, tensors, **options), whole, reference)


@pytest.mark.parametrize("seed", seeds(1, 6))
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (SHAPES["mha"], torch.float32),
        (SHAPE, torch.float32),
        (SHAPE, torch.bfloat16),
        pytest.param(SHAPE, torch.float16, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("backward", ["resend", "keep"])
@TRANSPORTS
def test_any_plan_is_as_exact_as_undivided_attention(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    shape: AttentionShape,
    dtype: torch.dtype,
    backward: str,
    symmetric: bool,
) -> None:
    monkeypatch.setattr(calls, "CUT_AT", 8)  # so that two rounds of these tasks are cut inside one
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=int(rng.integers(1, 5)))
    plan = random_plan(rng, layout, shape, aligned=False, split_kv=True)
    validate_plan(plan)
    keep = backward == "keep"
    other = None if keep else random_plan(rng, layout, shape, aligned=False, split_kv=True)  # as in ticks
    options = {"keep": keep, "symmetric": symmetric, "backward": other}
    runs = [
        {**options, "two_rounds": two_rounds, "squares_only": squares_only}
        for two_rounds, squares_only in product((False, True), repeat=2)
    ]
    check_exactness(plan, Tensors.random(layout, shape, dtype), *runs)


@pytest.mark.parametrize("seed", seeds(2, 8))
@TRANSPORTS
def test_tile_aligned_plans_without_split_keys_are_bit_identical(seed: int, symmetric: bool) -> None:
    """Every plan gives the same forward, so gradients are those of the backward plan used for both, whatever delays."""
    rng = np.random.default_rng(100 + seed)
    torch.manual_seed(seed)
    layout = random_layout(rng, num_ranks=int(rng.integers(2, 5)), max_length=900)
    tensors = Tensors.random(layout, SHAPE)
    plan, backward = (random_plan(rng, layout, SHAPE, aligned=True, split_kv=False) for _ in range(2))
    assert plan.fingerprint() != backward.fingerprint()
    mine = execute(plan, tensors, backward=backward, symmetric=symmetric)
    whole = undivided(layout, SHAPE, tensors)
    assert_same_bits([of_rank[:2] for of_rank in mine], [of_rank[:2] for of_rank in whole])
    assert_same_bits(mine, execute(backward, tensors))
    assert_same_bits(mine, execute(plan, tensors, backward=backward, max_delay_s=0.005))


@pytest.mark.parametrize("moves", ["forward", "backward"])
def test_one_direction_may_stay_at_home(moves: str) -> None:
    torch.manual_seed(1)
    tensors = Tensors.random(LAYOUT, SHAPE)
    home, away = make_plan(LAYOUT, SHAPE, HOME), make_plan(LAYOUT, SHAPE, PlannerConfig(split_kv=False))
    assert home.stats.total_bytes == 0 < away.stats.total_bytes
    forward, backward = (away, home) if moves == "forward" else (home, away)
    assert_same_bits(execute(forward, tensors, backward=backward), execute(backward, tensors))


def random_plans() -> tuple[Plan, Plan]:
    """Plans for either direction."""
    rng = np.random.default_rng(0)
    forward, other = (random_plan(rng, LAYOUT, SHAPE, aligned=False, split_kv=True) for _ in range(2))
    return forward, Plan.from_tasks(LAYOUT, SHAPE.for_backward(), other.config, other.tasks)


@pytest.mark.parametrize("plans", [random_plans(), [make_plan(LAYOUT, SHAPE, HOME)] * 2], ids=["random", "home"])
def test_planned_bytes_are_those_that_travel(plans: tuple[Plan, Plan]) -> None:
    """Nothing, if all rows are at home."""
    transports = thread_transports(LAYOUT.num_ranks)
    execute(plans[0], Tensors.random(LAYOUT, SHAPE), backward=plans[1], transports=transports)
    for direction, plan in zip(("forward", "backward"), plans, strict=True):
        assert sum(transport.sent[direction] for transport in transports) == plan.stats.total_bytes


def test_a_plan_that_moves_nothing_gives_the_kernel_its_own_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients have the bits of those that are computed by delta."""
    layout = TokenLayout.from_segments([[(0, 0, 300), (1, 0, 50)]])
    tensors, plan = Tensors.random(layout, SHAPE), make_plan(layout, SHAPE)
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
