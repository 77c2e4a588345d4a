# SPDX-License-Identifier: BSD-3-Clause
"""Rows of kernel calls, in place or gathered, and the whole engine with interpreted Triton kernels."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from tests.lib.interpreter import interpret, interpreted_transport
from tests.lib.kernels_reference import assert_results_as_exact
from tests.lib.plans import random_layout, random_plan
from tests.lib.processes import run_processes, values
from tests.lib.rows import CPU, Tensors
from tests.lib.sets import matrix, needs_triton, params
from tests.lib.threaded import needs_linux
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

SHAPE = AttentionShape(4, 2, 16, 4)


def test_rows_in_order_are_not_copied(monkeypatch):
    """Rank 0 serves the head of its document for itself, rank 1 the tail and an unmasked task."""
    monkeypatch.setattr(kernel_calls, "MOST_ROWS", 10**6)  # so that no call is cut
    layout = TokenLayout.from_segments([[(0, 0, 512), (1, 0, 256)], [(2, 0, 100)]])
    tasks = [
        (0, 0, 384, 0, 384, 0),
        (0, 384, 512, 384, 512, 1),
        (0, 384, 512, 0, 384, 0),
        (1, 0, 256, 0, 256, 1),
        (2, 0, 100, 0, 100, 1),
    ]
    plan = Plan.from_tasks(
        layout, SHAPE, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE)
    )
    first, second = (
        PlanTables.from_exchange(plan.exchange(rank), True, CPU, 1.0)
        for rank in range(2)
    )
    diagonal, rectangle = first.calls
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
    sizes = (5, 9), (0, 4), (6, 0)
    counts = None, 0, 1, 300
    for num_kinds, (num_local, num_received), count in product((1, 3), sizes, counts):
        local = []
        received = []
        for dtype, tail in kinds[:num_kinds]:
            local.append(torch.randn(num_local, *tail).to(dtype))
            message = torch.randn(num_received, math.prod(tail) + 8).to(dtype)
            received.append(message[:, 8:].unflatten(1, tail))
        total = num_local + num_received
        rows = None if count is None else torch.randint(0, total, (count,))
        results = GatheredRows(local, received).gather(rows)
        for result, *both in zip(results, local, received, strict=True):
            joined = torch.cat(both)
            assert torch.equal(result, joined if rows is None else joined[rows])
            assert result.is_contiguous()


@matrix
@needs_triton
def test_gathered_rows_are_local_or_received():
    values(run_processes(1, gather_and_compare))


def execute_in_both_ways(group, seed: int, dtype: torch.dtype) -> int:
    """Computes a random plan with Triton kernels as exactly as with torch operations; returns the tasks served."""
    interpret()
    rank = group.rank()
    if rank == 0:  # combines its own results before others' return
        kernel_calls.MOST_UNCOMBINED = 0
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, num_ranks=group.size(), max_length=80)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    torch.manual_seed(0)
    rows = Tensors.random(layout, SHAPE, dtype).of_rank(rank)
    precise = [x.double() for x in rows]
    results = []
    for (*qkv, dout), with_triton in ((rows, False), (precise, False), (rows, True)):
        triton.runs_on = lambda device, answer=with_triton: answer
        transport = build_transport("collective", group, CPU)
        engine = CoreAttentionEngine(
            CpuKernel(), transport, rank=rank, device=CPU, scale=0.25
        )
        engine.add_plan(0, plan)
        saved = Saved(*qkv, *engine.forward(*qkv, 0))
        results.append((saved.out, saved.lse, *engine.backward(dout, saved, 0)))
    by_torch, reference, by_triton = results
    assert_results_as_exact(by_triton, by_torch, reference)
    return sum(len(call.args.q_start) for call in engine.plan(0).calls)


@needs_triton
@pytest.mark.parametrize(
    "dtype", params([torch.float32, torch.bfloat16], [torch.float32])
)
def test_the_engine_computes_the_same_with_triton_kernels(dtype):
    served = values(run_processes(2, execute_in_both_ways, 1, dtype, timeout_s=240))
    assert min(served) > 0


def execute_elsewhere(group) -> bool:
    """Rank 0 computes all of rank 1's attention; tells whether results of this rank lie in its receive buffers."""
    interpret(everywhere=True)
    rank = group.rank()
    layout = TokenLayout.from_segments([[(0, 0, 8)], [(1, 0, 64)]])
    shape = AttentionShape(4, 4, 16, 4)
    tasks = [(0, 0, 8, 0, 8, 0), (1, 0, 64, 0, 64, 0)]
    plan = Plan.from_tasks(
        layout, shape, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE)
    )
    torch.manual_seed(0)
    *qkv, dout = Tensors.random(layout, shape).of_rank(rank)
    # queries come home in one message, keys and values in two
    transport = interpreted_transport(group, 20_480)
    engine = CoreAttentionEngine(
        CpuKernel(), transport, rank=rank, device=CPU, scale=0.25
    )
    engine.add_plan(0, plan)
    saved = Saved(*qkv, *engine.forward(*qkv, 0))
    results = [saved.out, saved.lse, *engine.backward(dout, saved, 0)]
    alone = CoreAttentionEngine(CpuKernel(), None, rank=0, device=CPU, scale=0.25)
    alone.add_plan(
        0, make_plan(TokenLayout.from_segments([[(0, 0, len(dout))]]), shape)
    )
    kept = Saved(*qkv, *alone.forward(*qkv, 0))
    expected = [kept.out, kept.lse, *alone.backward(dout, kept, 0)]
    assert all(map(torch.equal, results, expected))
    buffers = transport._memory.own
    begin = buffers.data_ptr()
    end = begin + buffers.numel()
    return any(begin <= result.data_ptr() < end for result in results)


@needs_linux
@needs_triton
def test_results_do_not_lie_where_peers_will_write():
    assert values(run_processes(2, execute_elsewhere, timeout_s=240)) == [False] * 2
