# SPDX-License-Identifier: BSD-3-Clause
"""Gathering the rows of kernel calls, and the whole engine with the Triton kernels under Triton's interpreter."""

import numpy as np
import pytest
import torch

from tests.lib.interpreter import interpret
from tests.lib.kernels_reference import assert_results_as_exact
from tests.lib.plans import random_layout, random_plan
from tests.lib.processes import run_processes, values
from tests.lib.sets import matrix, needs_triton, params
from torchtitan_cad.planning import (
    TASK_DTYPE,
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.exchange import calls as kernel_calls
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.attend import RowSpace
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.transport import build_transport

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 4)


def all_tables(plan) -> list[PlanTables]:
    return [
        PlanTables.from_exchange(plan.exchange(r), True, CPU, 1.0)
        for r in range(plan.layout.num_ranks)
    ]


def test_a_call_of_many_rows_is_cut_between_tasks():
    """Rank 1 has few tokens and serves a document of many, in nine tasks of ever more keys."""
    layout = TokenLayout.from_segments([[(0, 0, 1024), (1, 0, 512)], [(0, 1024, 128)]])
    tasks = [
        (0, start, start + 128, 0, start + 128, 1) for start in range(0, 1152, 128)
    ] + [(1, 0, 512, 0, 512, 0)]
    plan = Plan.from_tasks(
        layout, SHAPE, PlannerConfig(split_kv=False), np.array(tasks, dtype=TASK_DTYPE)
    )
    first, second = all_tables(plan)
    assert len(first.calls) == 1
    rows = [
        2 * int(call.args.cu_q[-1]) + int(call.args.cu_k[-1]) for call in second.calls
    ]
    assert 1 < len(rows) <= kernel_calls.MOST_CALLS + 1
    assert max(rows) - min(rows) <= 2 * (2 * 128 + 1152)
    assert sum(len(call.args.q_start) for call in second.calls) == 9


def test_a_plan_that_moves_nothing_is_not_halved():
    plan = make_plan(
        TokenLayout.from_segments([[(0, 0, 512), (1, 0, 256)]]),
        SHAPE,
        PlannerConfig(planner="home"),
    )
    assert PlanTables.from_exchange(
        plan.exchange(0), False, CPU, 1.0, two_rounds=True
    ).is_plain


def test_rows_in_order_are_not_copied(monkeypatch):
    """Rank 0 serves the head of its document for itself, rank 1 the tail and an unmasked task."""
    monkeypatch.setattr(kernel_calls, "MOST_ROWS", 10**6)  # so that no call is cut
    layout = TokenLayout.from_segments([[(0, 0, 512), (1, 0, 256)], [(2, 0, 100)]])
    tasks = [
        (0, 0, 384, 0, 384, 0),
        (0, 384, 512, 384, 512, 1),
        (0, 384, 512, 0, 384, 0),
        (1, 0, 256, 0, 256, 1),
    ]
    tasks.append((2, 0, 100, 0, 100, 1))
    plan = Plan.from_tasks(
        layout, SHAPE, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE)
    )
    first, second = all_tables(plan)
    (diagonal, rectangle) = first.calls
    assert diagonal.q_rows == diagonal.kv_rows == rectangle.kv_rows == slice(0, 384)
    assert rectangle.q_rows == slice(384, 512)
    assert first.copied_bytes(SHAPE) == 0
    local = torch.randn(768, 2, 16)
    (view,) = RowSpace([local], [local[:0]]).take(rectangle.q_rows)
    assert view.data_ptr() == local[384].data_ptr()
    # a call of local and received rows: all of them, queries and keys
    rows = 128 + 256 + 100
    assert second.copied_bytes(SHAPE) == rows * (4 + 2 * 2) * 16 * 4


def gather_and_compare(group) -> None:
    interpret()
    torch.manual_seed(0)
    from torchtitan_cad.runtime.triton.gather import GatheredRows

    kinds = (torch.bfloat16, (8, 128)), (torch.float16, (3, 20)), (torch.float32, (7,))
    for num_kinds in (1, 3):
        for num_local, num_received in ((5, 9), (0, 4), (6, 0)):
            local, received = [], []
            for dtype, tail in kinds[:num_kinds]:
                size = int(np.prod(tail))
                local.append(torch.randn(num_local, *tail).to(dtype))
                received.append(
                    torch.randn(num_received, size + 8)
                    .to(dtype)[:, 8:]
                    .unflatten(1, tail)
                )
            for count in (None, 0, 1, 300):
                rows = (
                    None
                    if count is None
                    else torch.randint(0, num_local + num_received, (count,))
                )
                got = GatheredRows(local, received).gather(rows)
                for mine, *both in zip(got, local, received, strict=True):
                    assert torch.equal(
                        mine, torch.cat(both) if rows is None else torch.cat(both)[rows]
                    )
                    assert mine.is_contiguous()


@matrix
@needs_triton
def test_gathered_rows_are_local_or_received():
    values(run_processes(1, gather_and_compare))


def execute_in_both_ways(group, seed: int, dtype: torch.dtype) -> int:
    """Computes a random plan with Triton kernels as exactly as with torch operations; returns the tasks served."""
    interpret()
    if group.rank() == 0:  # combines its own results before others' return
        kernel_calls.MOST_UNCOMBINED = 0
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, num_ranks=group.size(), max_length=80)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    torch.manual_seed(group.rank())
    q, k, v, dout = (
        torch.randn(int(layout.tokens_per_rank[group.rank()]), heads, 16).to(dtype)
        for heads in (4, 2, 2, 4)
    )
    results = []
    for rows in (
        [q, k, v, dout],
        [x.double() for x in (q, k, v, dout)],
        [q, k, v, dout],
    ):
        transport = build_transport("collective", group, CPU)
        engine = CoreAttentionEngine(
            CpuKernel(), transport, rank=group.rank(), device=CPU, scale=0.25
        )
        engine.add_plan(0, plan)
        saved = Saved(*rows[:3], *engine.forward(*rows[:3], 0))
        results.append((saved.out, saved.lse, *engine.backward(rows[3], saved, 0)))
        if len(results) == 2:
            triton.runs_on = lambda device: True
    with_torch, reference, with_triton = results
    assert_results_as_exact(with_triton, with_torch, reference)
    return sum(len(call.args.q_start) for call in engine.plan(0).calls)


@needs_triton
@pytest.mark.parametrize(
    "dtype", params([torch.float32, torch.bfloat16], [torch.float32])
)
def test_the_engine_computes_the_same_with_triton_kernels(dtype):
    assert (
        min(values(run_processes(2, execute_in_both_ways, 1, dtype, timeout_s=240))) > 0
    )
