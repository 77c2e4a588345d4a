# SPDX-License-Identifier: BSD-3-Clause
"""Core attention recorded once: replayed over other plans, as a CUDA graph would, with padded tables; and counted."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lib.counted import COUNTED, COUNTED_SHAPE
from tests.lib.fake_flash_attn import Recorder, fake_operator
from tests.lib.interpreter import interpret, interpreted_transport
from tests.lib.plans import random_layout, random_plan
from tests.lib.processes import run_processes, values
from tests.lib.replay import ReplayEngine, TableSizes
from tests.lib.rows import CPU, SHAPES, Tensors, assert_same_bits, execute
from tests.lib.sets import needs_triton, seeds
from tests.lib.tape import Tape, record_kernels
from tests.lib.threaded import needs_linux
from torchtitan_cad.planning import (
    TASK_DTYPE,
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import varlen
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.cpu import CpuKernel

Run = Callable[[], list[Tensor]]
Recording = tuple[list[Tensor], Callable[[], None]]
"""Results, and what replays into them."""


def random_plans(layout: TokenLayout, shape: AttentionShape, count: int) -> list[Plan]:
    rng = np.random.default_rng(0)
    return [
        random_plan(rng, layout, shape, aligned=False, split_kv=True)
        for _ in range(count)
    ]


def common_sizes(plans: list[Plan]) -> TableSizes:
    ranks = range(plans[0].layout.num_ranks)
    return TableSizes.covering(
        [TableSizes.needed(plan.exchange(rank)) for plan in plans for rank in ranks]
    )


@needs_linux
@pytest.mark.parametrize("keep", [False, True], ids=["resend", "keep"])
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_padding_changes_nothing(seed: int, keep: bool) -> None:
    """Sizes larger than any plan needs, one of which moves nothing: rows that stand for nothing in every table."""
    torch.manual_seed(seed)
    layout, shape = (
        random_layout(np.random.default_rng(seed), 3, 200),
        SHAPES["gqa 8:2"],
    )
    whole = TokenLayout.from_segments(
        [[(0, 0, 80 + seed), (1, 0, 7)], [], [(2, 0, 50)]]
    )
    plans = [
        *random_plans(layout, shape, 2),
        make_plan(whole, shape, PlannerConfig(planner="home")),
    ]
    plans.append(make_plan(layout, replace(shape, window=20)))
    for plan in plans:
        tensors = Tensors.random(plan.layout, shape)
        sizes = TableSizes(*(size + 3 for size in astuple(common_sizes([plan]))))
        plain = execute(plan, tensors, keep=keep, symmetric=True)
        padded = execute(plan, tensors, keep=keep, symmetric=True, sizes=sizes)
        assert_same_bits(padded, plain)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    layout, shape = random_layout(np.random.default_rng(0), 1, 200), SHAPES["mha"]
    small, large = sorted(
        random_plans(layout, shape, 2), key=lambda plan: len(plan.tasks)
    )
    assert len(small.tasks) < len(large.tasks)
    sizes = TableSizes.needed(small.exchange(0))
    engine = ReplayEngine(CpuKernel(), None, rank=0, device=CPU, scale=1.0, sizes=sizes)
    engine.add_plan(0, small)
    with pytest.raises(
        ValueError, match=r"a plan needs \w+ = \d+, but tables were made for \d+"
    ):
        engine.add_plan(1, large)


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
            return function(
                *rows,
                VarlenArgs.from_numpy(*offsets, causal=call.causal, scale=call.scale),
            )

        tape = self._get_tape()
        return run_on_device() if tape is None else tape.run("attention", run_on_device)


def check_replays(
    engine: ReplayEngine,
    plans: list[Plan],
    tensors: Tensors,
    record: Callable[[Run], Recording],
) -> None:
    """Records forward and backward by the first plan, and replays them over all plans, without other runs between.

    Args:
        record: runs a function, and returns its results and a function that replays it into them.
    """
    rank, recorded = engine.rank, len(plans)
    for key, plan in enumerate([*plans, plans[0]]):
        engine.add_plan(key, plan)
    rows = [x.to(engine.device) for x in tensors.of_rank(rank)]
    q, k, v, dout, *dlse = rows

    def run(key: int) -> list[Tensor]:
        saved = Saved(q, k, v, *engine.forward(q, k, v, key))
        return [saved.out, saved.lse, *engine.backward(dout, saved, key, *dlse)]

    keys = [*range(len(plans)), 1]
    given = [[torch.randn_like(x) for x in rows] for _ in keys]
    expected = []
    for key, values_of_rows in zip(keys, given, strict=True):
        for x, values_of_x in zip(rows, values_of_rows, strict=True):
            x.copy_(values_of_x)
        expected.append([x.clone() for x in run(key)])
    run(recorded)
    forward, replay_forward = record(lambda: list(engine.forward(q, k, v, recorded)))
    backward, replay_backward = record(
        lambda: list(engine.backward(dout, [q, k, v, *forward], recorded, *dlse))
    )
    results = [*forward[:2], *backward]
    for key, values_of_rows, want in zip(keys, given, expected, strict=True):
        for x, values_of_x in zip(rows, values_of_rows, strict=True):
            x.copy_(values_of_x)
        for x in results:
            x.fill_(torch.nan)
        engine.copy_plan(key, recorded)
        replay_forward()
        replay_backward()
        for name, mine, theirs in zip(
            ("out", "lse", "dq", "dk", "dv"), results, want, strict=True
        ):
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
    # of three ranks, one is empty
    layout = random_layout(np.random.default_rng(46), group.size(), 40)
    plans = random_plans(layout, shape, 2)
    transport = interpreted_transport(group, 2**20, replayable=True)
    engine = ReplayEngine(
        DeviceKernel(get_tape),
        transport,
        rank=rank,
        device=CPU,
        scale=1.0,
        kept_bytes=math.inf if keep else 0.0,
        sizes=common_sizes(plans),
    )
    torch.manual_seed(0)
    check_replays(engine, plans, Tensors.random(layout, shape, with_dlse=True), record)
    return sum(plan.exchange(rank).queries.num_received for plan in plans)


@pytest.mark.matrix
@needs_linux
@needs_triton
@pytest.mark.parametrize(
    ("num_ranks", "keep"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)]
)
def test_recorded_attention_follows_the_plan(num_ranks: int, keep: bool) -> None:
    assert (
        sum(
            values(
                run_processes(
                    num_ranks, replay_on_interpreted_devices, keep, timeout_s=240
                )
            )
        )
        > 50
    )


# Launches of the path for CUDA, counted on the CPU --------------------------------------------------------------------


_T = TypeVar("_T")


@pytest.mark.matrix
@needs_linux
@needs_triton
def test_launches_of_a_layer() -> None:
    """Two exchanges in either direction: each says that it is ready, waits for that, puts, posts and waits for rows."""
    for forward, backward in values(run_processes(2, count, timeout_s=240)):
        assert forward == {
            "put_rows": 2,
            "post": 4,
            "wait": 4,
            "gather_rows": 4,  # per call once of queries, once of keys and values
            "flash_attention": 2,
            "merge_rows": 2,  # of remote rows, and at home
        }, forward
        assert backward == {
            "row_delta": 1,
            "put_rows": 2,
            "post": 4,
            "wait": 4,
            "gather_rows": 4,
            "prepare_statistics": 2,
            "flash_attention": 2,
            "sum_rows": 4,  # of dq, and of dk and dv, of remote rows and at home
        }, backward


@pytest.mark.matrix
@needs_linux
@needs_triton
@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 2)])
def test_launches_of_a_layer_between_hosts(hosts: tuple[int, ...]) -> None:
    """For ranks of other hosts, one launch packs the rows of a kind; without near ranks nothing is put or signalled."""
    counted = values(run_processes(3, count, hosts, timeout_s=240))
    for rank, (forward, backward) in enumerate(counted):
        is_alone = hosts.count(hosts[rank]) == 1
        sent = (
            {"put_rows": 0, "post": 0, "wait": 0}
            if is_alone
            else {"put_rows": 2, "post": 4, "wait": 4}
        )
        assert {name: forward.get(name, 0) for name in sent} == sent
        assert {name: backward.get(name, 0) for name in sent} == sent
        assert (forward["gather_rows"], backward["gather_rows"]) == (4 + 3, 4 + 4)


def test_launches_of_a_layer_that_moves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of stock, and one each way that lays out the log-sum-exp."""
    tape = Tape()
    for name in ("_forward_op", "_backward_op"):
        fake = fake_operator(getattr(varlen, name), Recorder())
        monkeypatch.setattr(varlen, name, partial(tape.run, "flash_attention", fake))
    monkeypatch.setattr(varlen, "_takes", lambda op, argument: False)
    engine = CoreAttentionEngine(
        varlen.VarlenKernel(), None, rank=0, device=CPU, scale=0.25
    )
    engine.add_plan(
        0,
        make_plan(TokenLayout.from_segments([[(0, 0, 96), (1, 0, 40)]]), COUNTED_SHAPE),
    )
    q, k, v, dout = (
        torch.randn(136, heads, COUNTED_SHAPE.head_dim).bfloat16()
        for heads in (4, 2, 2, 4)
    )
    varlen._without_dropout(CPU)  # made once
    with tape:
        results = engine.forward(q, k, v, 0)
    assert tape.launches() == {"flash_attention": 1, "clone": 1}
    with tape:
        engine.backward(dout, Saved(q, k, v, *results), 0)
    assert tape.launches() == {"flash_attention": 2, "clone": 2}


def count(
    group: dist.ProcessGroup, hosts: tuple[int, ...] | None = None
) -> tuple[dict[str, int], dict[str, int]]:
    """Launches by name of one layer's forward and backward, once the buffers of the transport have been in use."""
    interpret(everywhere=True)
    tape: Tape | None = None

    def attend(*args: Any, **kwargs: Any) -> Any:
        return tape.run("flash_attention", *args, **kwargs)

    def counted(function: Callable[..., _T], *args: Any) -> tuple[dict[str, int], _T]:
        nonlocal tape
        tape = Tape()
        with tape:
            result = function(*args)
        assert all(x is transport._memory._record for x in tape.numbers_read()), (
            "the host waits for the device"
        )
        return dict(tape.launches()), result

    record_kernels(lambda: tape)
    varlen._takes = lambda op, argument: False
    for name in ("_forward_op", "_backward_op"):
        setattr(
            varlen,
            name,
            partial(attend, fake_operator(getattr(varlen, name), Recorder())),
        )
    transport = interpreted_transport(group, 2**24, hosts=hosts)
    layout, tasks = COUNTED[group.size()]
    plan = Plan.from_tasks(
        layout, COUNTED_SHAPE, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE)
    )
    engine = CoreAttentionEngine(
        varlen.VarlenKernel(), transport, rank=group.rank(), device=CPU, scale=0.25
    )
    engine.add_plan(0, plan)
    tokens = int(layout.tokens_per_rank[group.rank()])
    q, k, v, dout = (
        torch.randn(tokens, heads, COUNTED_SHAPE.head_dim).bfloat16()
        for heads in (4, 2, 2, 4)
    )
    for _ in range(2):
        forward, results = counted(engine.forward, q, k, v, 0)
        backward, _ = counted(engine.backward, dout, Saved(q, k, v, *results), 0)
    return forward, backward
