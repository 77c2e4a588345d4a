# SPDX-License-Identifier: BSD-3-Clause
"""The whole engine with interpreted Triton kernels."""

import numpy as np
import pytest
import torch

from tests.lib.interpreter import interpret, interpreted_transport
from tests.lib.kernels_reference import assert_results_as_exact
from tests.lib.plans import random_layout, random_plan
from tests.lib.processes import run_processes, values
from tests.lib.rows import CPU, Tensors
from tests.lib.sets import needs_triton, params
from tests.lib.threaded import needs_linux
from torchtitan_cad.planning import (
    TASK_DTYPE,
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
)
from torchtitan_cad.planning.exchange import calls as kernel_calls
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.transport.build import build_transport

SHAPE = AttentionShape(4, 2, 16, 4)


def served_by_the_other() -> Plan:
    """Rank 0 computes all of rank 1's attention: queries come home in one message, keys and values in two."""
    layout = TokenLayout.from_segments([[(0, 0, 8)], [(1, 0, 24)]])
    tasks = np.array([(0, 0, 8, 0, 8, 0), (1, 0, 24, 0, 24, 0)], dtype=TASK_DTYPE)
    shape = AttentionShape(4, 4, 16, 4)
    return Plan.from_tasks(layout, shape, PlannerConfig(), tasks)


def execute_in_both_ways(group, dtype: torch.dtype) -> int:
    """Computes plans with Triton kernels as exactly as with torch operations; returns the tasks served of a random one.

    With Triton's, results do not lie where peers will write.
    """
    interpret()
    import triton.language as tl

    from torchtitan_cad.runtime.triton import put

    # many blocks, and several of them by one program
    put.PROGRAMS = 2
    put.BLOCK_ROWS = tl.constexpr(16)
    rank = group.rank()
    if rank == 0:  # combines its own results before others' return
        kernel_calls.MOST_UNCOMBINED = 0
    rng = np.random.default_rng(1)
    layout = random_layout(rng, num_ranks=group.size(), max_length=12)
    drawn = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    over_memory = interpreted_transport(group, 10_240)
    over_gloo = build_transport("collective", group, CPU)
    torch.manual_seed(0)
    for plan in (served_by_the_other(), drawn):
        rows = Tensors.random(plan.layout, plan.shape, dtype).of_rank(rank)
        precise = [x.double() for x in rows]
        results = []
        for (*qkv, dout), with_triton in (
            (rows, False),
            (precise, False),
            (rows, True),
        ):
            triton.runs_on = lambda device, answer=with_triton: answer
            transport = over_memory if with_triton else over_gloo
            engine = CoreAttentionEngine(
                CpuKernel(), transport, rank=rank, device=CPU, scale=0.25
            )
            engine.add_plan(0, plan)
            saved = Saved(*qkv, *engine.begin_forward(*qkv, 0).run())
            results.append(
                (saved.out, saved.lse, *engine.begin_backward(dout, saved, 0).run())
            )
        by_torch, reference, by_triton = results
        assert_results_as_exact(by_triton, by_torch, reference)
        buffers = over_memory._memory.own
        begin = buffers.data_ptr()
        end = begin + buffers.numel()
        assert not any(begin <= x.data_ptr() < end for x in by_triton)
    return sum(len(call.args.q_start) for call in engine.plan(0).calls)


@needs_linux
@needs_triton
@pytest.mark.parametrize(
    "dtype", params([torch.float32, torch.bfloat16], [torch.float32])
)
def test_the_engine_computes_the_same_with_triton_kernels(dtype):
    served = values(run_processes(2, execute_in_both_ways, dtype, timeout_s=240))
    assert min(served) > 0
