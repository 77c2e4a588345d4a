"""Core attention recorded once and replayed over other plans, as a CUDA graph would; and padded tables as such."""

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.plans import random_layout, random_plan
from tests.runtime.interpreter import interpret, interpreted_transport
from tests.runtime.processes import run_processes, values
from tests.runtime.rows import CPU, SHAPES, SquareKernel, Tensors, assert_same_bits, execute
from tests.runtime.tape import Tape, record_kernels
from tests.runtime.threaded import needs_linux
from tests.sets import needs_triton, seeds
from torchtitan_cad.planning import AttentionShape, Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.replay import TableSizes

Run = Callable[[], list[Tensor]]
Recording = tuple[list[Tensor], Callable[[], None]]
"""Results, and what replays into them."""


def random_plans(layout: TokenLayout, shape: AttentionShape, count: int) -> list[Plan]:
    rng = np.random.default_rng(0)
    return [random_plan(rng, layout, shape, aligned=False, split_kv=True) for _ in range(count)]


def common_sizes(plans: list[Plan]) -> TableSizes:
    ranks = range(plans[0].layout.num_ranks)
    return TableSizes.covering([TableSizes.needed(plan.exchange(rank)) for plan in plans for rank in ranks])


@needs_linux
@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_padding_changes_nothing(seed: int, keep: bool) -> None:
    """Sizes larger than any plan needs, one of which moves nothing: rows that stand for nothing in every table."""
    torch.manual_seed(seed)
    layout, shape = random_layout(np.random.default_rng(seed), 3, 200), SHAPES["gqa 8:2"]
    whole = TokenLayout.from_segments([[(0, 0, 80 + seed), (1, 0, 7)], [], [(2, 0, 50)]])
    plans = [*random_plans(layout, shape, 2), make_plan(whole, shape, PlannerConfig(planner="home"))]
    for plan in plans:
        tensors = Tensors.random(plan.layout, shape)
        sizes = TableSizes(*(size + 3 for size in astuple(common_sizes([plan]))))
        plain = execute(plan, tensors, keep=keep, symmetric=True)
        padded = execute(plan, tensors, keep=keep, symmetric=True, sizes=sizes)
        assert_same_bits(padded, plain)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    layout, shape = random_layout(np.random.default_rng(0), 1, 200), SHAPES["mha"]
    small, large = sorted(random_plans(layout, shape, 2), key=lambda plan: len(plan.tasks))
    assert len(small.tasks) < len(large.tasks)
    sizes = TableSizes.needed(small.exchange(0))
    engine = CoreAttentionEngine(CpuKernel(), None, rank=0, device=CPU, scale=1.0, sizes=sizes)
    engine.add_plan(0, small)
    with pytest.raises(ValueError, match=r"a plan needs \w+ = \d+, but tables were made for \d+"):
        engine.add_plan(1, large)


def test_kernels_that_take_squares_only_have_no_fixed_sizes() -> None:
    with pytest.raises(ValueError, match=r"no squares: set cad\.kernel = 'varlen'"):
        CoreAttentionEngine(SquareKernel(), None, rank=0, device=CPU, scale=1.0, sizes=TableSizes(1, 1, 1, 1, 1, 1))


def test_plans_are_not_copied_without_sizes() -> None:
    """Their tensors may happen to have the same shapes, but numbers on the host would stay."""
    layout, shape = random_layout(np.random.default_rng(0), 1, 200), SHAPES["mha"]
    engine = CoreAttentionEngine(CpuKernel(), None, rank=0, device=CPU, scale=1.0)
    for key, plan in enumerate(random_plans(layout, shape, 2)):
        engine.add_plan(key, plan)
    with pytest.raises(ValueError, match="copying plans takes an engine with sizes"):
        engine.copy_plan(0, 1)


class DeviceKernel(CpuKernel):
    """Reads offsets when it runs, from the tensors that a device would read them from; one operation of a tape."""

    def __init__(self, get_tape: Callable[[], Tape | None]) -> None:
        self._get_tape = get_tape

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._run(super().forward, *args)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._run(super().backward, *args)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        *rows, call = args

        def run_on_device() -> Any:
            offsets = [cu.numpy().copy() for cu in (call.cu_q, call.cu_k)]
            for cu, bound in zip(offsets, (call.max_q, call.max_k), strict=True):
                assert np.diff(cu).max() <= bound
            return function(*rows, VarlenArgs.from_numpy(*offsets, causal=call.causal, scale=call.scale))

        tape = self._get_tape()
        return run_on_device() if tape is None else tape.run("attention", run_on_device)


def check_replays(
    engine: CoreAttentionEngine, plans: list[Plan], tensors: Tensors, record: Callable[[Run], Recording]
) -> None:
    """Records forward and backward by the first plan, and replays them over all plans, without other runs between.

    Args:
        record: runs a function, and returns its results and a function that replays it into them.
    """
    rank, recorded = engine.rank, len(plans)
    for key, plan in enumerate([*plans, plans[0]]):
        engine.add_plan(key, plan)
    rows = [xs[rank].to(engine.device) for xs in (tensors.q, tensors.k, tensors.v, tensors.dout)]
    q, k, v, dout = rows

    def run(key: int) -> list[Tensor]:
        saved = Saved(q, k, v, *engine.forward(q, k, v, key))
        return [saved.out, saved.lse, *engine.backward(dout, saved, key)]

    keys = [*range(len(plans)), 1]
    given = [[torch.randn_like(x) for x in rows] for _ in keys]
    expected = []
    for key, values_of_rows in zip(keys, given, strict=True):
        for x, values_of_x in zip(rows, values_of_rows, strict=True):
            x.copy_(values_of_x)
        expected.append([x.clone() for x in run(key)])
    run(recorded)
    forward, replay_forward = record(lambda: list(engine.forward(q, k, v, recorded)))
    backward, replay_backward = record(lambda: list(engine.backward(dout, Saved(q, k, v, *forward), recorded)))
    results = [*forward[:2], *backward]
    for key, values_of_rows, want in zip(keys, given, expected, strict=True):
        for x, values_of_x in zip(rows, values_of_rows, strict=True):
            x.copy_(values_of_x)
        for x in results:
            x.fill_(torch.nan)
        engine.copy_plan(key, recorded)
        replay_forward()
        replay_backward()
        for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), results, want, strict=True):
            assert torch.equal(mine, theirs), f"{name} of plan {key} on rank {rank}"


def replay_on_interpreted_devices(group: dist.ProcessGroup, keep: bool) -> int:
    """Returns the number of query rows that this rank has received."""
    interpret(everywhere=True)
    tape: Tape | None = None

    def get_tape() -> Tape | None:
        return tape

    def record(run: Run) -> Recording:
        nonlocal tape
        with (tape := Tape()) as recording:
            results = run()
        tape = None
        return results, recording.replay

    record_kernels(get_tape)
    rank, shape = group.rank(), AttentionShape(2, 1, 8, 4)
    layout = random_layout(np.random.default_rng(46), group.size(), 40)  # of three ranks, one is empty
    plans = random_plans(layout, shape, 2)
    transport = interpreted_transport(group, 2**20, replayable=True)
    engine = CoreAttentionEngine(
        DeviceKernel(get_tape), transport, rank=rank, device=CPU, scale=1.0, keep=keep, sizes=common_sizes(plans)
    )
    torch.manual_seed(0)
    check_replays(engine, plans, Tensors.random(layout, shape), record)
    return sum(plan.exchange(rank).queries.num_received for plan in plans)


@pytest.mark.matrix
@needs_linux
@needs_triton
@pytest.mark.parametrize(("num_ranks", "keep"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_recorded_attention_follows_the_plan(num_ranks: int, keep: bool) -> None:
    assert sum(values(run_processes(num_ranks, replay_on_interpreted_devices, keep, timeout_s=240))) > 50
