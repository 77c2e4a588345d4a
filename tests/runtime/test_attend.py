"""Gathering the rows of kernel calls, and the whole engine with the Triton kernels under Triton's interpreter."""

import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.plans import random_layout, random_plan
from tests.runtime.interpreter import interpret
from tests.runtime.kernels_reference import assert_results_as_exact
from tests.runtime.processes import run_processes, values
from tests.sets import needs_triton, params
from torchtitan_cad.planning import TASK_DTYPE, AttentionShape, Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.exchange import calls as kernel_calls
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.attend import RowSpace, TaskRunner
from torchtitan_cad.runtime.call import BACKWARD, Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.transport import build_transport

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 4)


def all_tables(plan) -> list[PlanTables]:
    return [PlanTables.from_exchange(plan.exchange(r), True, CPU, 1.0) for r in range(plan.layout.num_ranks)]


@pytest.fixture
def uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of any number of rows."""
    monkeypatch.setattr(kernel_calls, "MOST_ROWS", 10**6)


@pytest.mark.parametrize("seed", range(5))
def test_causal_tasks_are_divided_into_squares(seed: int, uncut: None) -> None:
    """Rectangles of the keys before them join the others in one unmasked call; test_engine.py checks the results."""
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, random_layout(rng, num_ranks=3), SHAPE, aligned=False, split_kv=True)
    for rank in range(3):
        divided = PlanTables.from_exchange(plan.exchange(rank), True, CPU, 1.0, squares_only=True)
        assert [call.args.causal for call in divided.calls] in ([], [True], [False], [True, False])


def test_a_call_of_many_rows_is_cut_between_tasks() -> None:
    """Rank 1 has few tokens and serves a document of many, in nine tasks of ever more keys."""
    layout = TokenLayout.from_segments([[(0, 0, 1024), (1, 0, 512)], [(0, 1024, 128)]])
    tasks = [(0, start, start + 128, 0, start + 128, 1) for start in range(0, 1152, 128)] + [(1, 0, 512, 0, 512, 0)]
    plan = Plan.from_tasks(layout, SHAPE, PlannerConfig(split_kv=False), np.array(tasks, dtype=TASK_DTYPE))
    first, second = all_tables(plan)
    assert len(first.calls) == 1
    rows = [2 * int(call.args.cu_q[-1]) + int(call.args.cu_k[-1]) for call in second.calls]
    assert 1 < len(rows) <= kernel_calls.MOST_CALLS + 1
    assert max(rows) - min(rows) <= 2 * (2 * 128 + 1152)
    assert sum(len(call.args.q_start) for call in second.calls) == 9


def test_a_plan_that_moves_nothing_is_not_halved() -> None:
    plan = make_plan(TokenLayout.from_segments([[(0, 0, 512), (1, 0, 256)]]), SHAPE, PlannerConfig(planner="home"))
    assert PlanTables.from_exchange(plan.exchange(0), False, CPU, 1.0, two_rounds=True).is_plain


def test_rows_in_order_are_not_copied(uncut: None) -> None:
    """Rank 0 serves the head of its document for itself, rank 1 the tail and an unmasked task."""
    layout = TokenLayout.from_segments([[(0, 0, 512), (1, 0, 256)], [(2, 0, 100)]])
    tasks = [(0, 0, 384, 0, 384, 0), (0, 384, 512, 384, 512, 1), (0, 384, 512, 0, 384, 0), (1, 0, 256, 0, 256, 1)]
    tasks.append((2, 0, 100, 0, 100, 1))
    plan = Plan.from_tasks(layout, SHAPE, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE))
    first, second = all_tables(plan)
    (diagonal, rectangle) = first.calls
    assert diagonal.q_rows == diagonal.kv_rows == rectangle.kv_rows == slice(0, 384)
    assert rectangle.q_rows == slice(384, 512)
    assert first.copied_bytes(SHAPE) == 0
    local = torch.randn(768, 2, 16)
    (view,) = RowSpace([local], [local[:0]]).take(rectangle.q_rows)
    assert view.data_ptr() == local[384].data_ptr()
    rows = 128 + 256 + 100  # a call of local and received rows: all of them, queries and keys
    assert second.copied_bytes(SHAPE) == rows * (4 + 2 * 2) * 16 * 4


@pytest.mark.parametrize("seed", range(5))
def test_copied_bytes_are_those_of_gathered_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, num_ranks=3)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    for rank_tables in all_tables(plan):
        n = rank_tables.keys.num_local
        local_q, local_kv = torch.zeros(n, 4, 16), torch.zeros(n, 2, 16)
        queries = RowSpace([local_q], [torch.zeros(rank_tables.queries.num_served, 4, 16)])
        keys = RowSpace([local_kv] * 2, [torch.zeros(rank_tables.keys.num_served, 2, 16)] * 2)
        own = {x.untyped_storage().data_ptr() for x in (local_q, local_kv) if x.numel()}
        copied = sum(
            x.numel() * 4
            for call in rank_tables.calls
            for x in (*queries.take(call.q_rows), *keys.take(call.kv_rows))
            if x.numel() and x.untyped_storage().data_ptr() not in own
        )
        assert rank_tables.copied_bytes(SHAPE) == copied


class ForgetfulKernel(CpuKernel):
    """Sees that no rows of earlier calls are in memory when it is called, and notes how many rows each call has."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []
        self.sizes: list[int] = []

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *rows, merged, _ = args
        rows += [merged.lse, merged.delta]
        assert all(seen() is None for seen in self.seen)
        self.seen += [weakref.ref(x) for x in rows]
        self.sizes.append(2 * len(rows[0]) + len(rows[2]))
        return super().backward(*args)


def test_rows_of_one_call_at_a_time_are_in_memory_and_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run in another order than the plan's, which that of their results does not show."""
    layout = TokenLayout.from_segments([[(1, 0, 300), (0, 0, 100)]])
    tasks = [(0, 0, 100, 0, 100, 0), (1, 0, 200, 0, 200, 0), (1, 200, 300, 0, 200, 0), (1, 200, 300, 200, 300, 0)]
    plan = Plan.from_tasks(layout, SHAPE, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE))
    torch.manual_seed(0)
    q, dout, k, v = (torch.randn(400, heads, 16) for heads in (4, 4, 2, 2))
    lse, delta = torch.full((400, 4), 5.0), torch.randn(400, 4)

    def run(most: int) -> tuple[list[int], list[Tensor]]:
        monkeypatch.setattr(kernel_calls, "MOST_ROWS", most)
        kernel, gathered = ForgetfulKernel(), []
        rank_tables = PlanTables.from_exchange(plan.exchange(0), False, CPU, 0.25)
        queries, keys = (RowSpace(xs, [x[:0] for x in xs]) for xs in ([dout, lse, delta, q], [k, v]))
        compute = functools.partial(BACKWARD.compute, kernel, False)
        progress = TaskRunner(rank_tables, queries, keys, compute, lambda: gathered.append(len(kernel.sizes)))
        dqs, dks, dvs = zip(*progress.finish(), strict=True)
        assert gathered == [len(rank_tables.calls) - 1], "not before the last call"
        (q_trip,), (kv_trip,) = rank_tables.queries.home, rank_tables.keys.home
        return kernel.sizes, [*q_trip.combination.add([dqs], [q]), *kv_trip.combination.add([dks, dvs], [k, k])]

    (uncut, want), (cut, got) = run(kernel_calls.MOST_ROWS), run(1)
    assert len(uncut) == 2 < len(cut)
    for sizes in (uncut, cut):
        assert sizes == sorted(sizes, reverse=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


def gather_and_compare(group) -> None:
    interpret()
    torch.manual_seed(0)
    from torchtitan_cad.runtime.triton.gather import gather_rows

    kinds = (torch.bfloat16, (8, 128)), (torch.float16, (3, 20)), (torch.float32, (7,))
    for num_kinds in (1, 3):
        for num_local, num_received in ((5, 9), (0, 4), (6, 0)):
            local, received = [], []
            for dtype, tail in kinds[:num_kinds]:
                size = int(np.prod(tail))
                local.append(torch.randn(num_local, *tail).to(dtype))
                received.append(torch.randn(num_received, size + 8).to(dtype)[:, 8:].unflatten(1, tail))
            for count in (None, 0, 1, 300):
                rows = None if count is None else torch.randint(0, num_local + num_received, (count,))
                got = gather_rows(local, received, rows)
                for mine, *both in zip(got, local, received, strict=True):
                    assert torch.equal(mine, torch.cat(both) if rows is None else torch.cat(both)[rows])
                    assert mine.is_contiguous()


@needs_triton
def test_gathered_rows_are_local_or_received() -> None:
    values(run_processes(1, gather_and_compare))


def execute_in_both_ways(group, seed: int, dtype: torch.dtype) -> int:
    """Computes a random plan with Triton kernels as exactly as with torch operations; returns the tasks served."""
    interpret()
    if group.rank() == 0:  # combines its own results before others' return
        kernel_calls.MOST_UNCOMBINED = 0
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, num_ranks=group.size(), max_length=150)
    plan = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    torch.manual_seed(group.rank())
    q, k, v, dout = (
        torch.randn(int(layout.tokens_per_rank[group.rank()]), heads, 16).to(dtype) for heads in (4, 2, 2, 4)
    )
    results = []
    for rows in ([q, k, v, dout], [x.double() for x in (q, k, v, dout)], [q, k, v, dout]):
        transport = build_transport("collective", group, CPU)
        engine = CoreAttentionEngine(CpuKernel(), transport, rank=group.rank(), device=CPU, scale=0.25)
        engine.add_plan(0, plan)
        saved = Saved(*rows[:3], *engine.forward(*rows[:3], 0))
        results.append((saved.out, saved.lse, *engine.backward(rows[3], saved, 0)))
        if len(results) == 2:
            triton.runs_on = lambda device: True
    with_torch, reference, with_triton = results
    assert_results_as_exact(with_triton, with_torch, reference)
    return sum(len(call.args.q_start) for call in engine.plan(0).calls)


@needs_triton
@pytest.mark.parametrize("dtype", params([torch.float32, torch.bfloat16], [torch.float32]))
def test_the_engine_computes_the_same_with_triton_kernels(dtype: torch.dtype) -> None:
    assert min(values(run_processes(2, execute_in_both_ways, 1, dtype, timeout_s=240))) > 0
