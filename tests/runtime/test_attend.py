# SPDX-License-Identifier: BSD-3-Clause
"""The whole engine with interpreted Triton kernels."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.interpreter import interpret, interpreted_transport
from tests.lib.plans import random_layout, random_plan
from tests.lib.processes import run_processes, values
from tests.lib.rows import (
    CPU,
    Tensors,
    assert_ranks_as_exact,
    dense,
    run_layer,
    undivided,
)
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
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.cpu import CpuKernel

SHAPE = AttentionShape(4, 2, 16, 4)


def served_by_the_other() -> Plan:
    """Rank 0 computes all of rank 1's attention: queries come home in one message, keys and values in two."""
    layout = TokenLayout.from_segments([[(0, 0, 8)], [(1, 0, 24)]])
    tasks = np.array([(0, 0, 8, 0, 8, 0), (1, 0, 24, 0, 24, 0)], dtype=TASK_DTYPE)
    shape = AttentionShape(4, 4, 16, 4)
    return Plan.from_tasks(layout, shape, PlannerConfig(), tasks)


def problems(dtype) -> list[tuple[Plan, Tensors]]:
    """Plans of two ranks, and rows; the same in every process."""
    rng = np.random.default_rng(1)
    layout = random_layout(rng, num_ranks=2, max_length=12)
    drawn = random_plan(rng, layout, SHAPE, aligned=False, split_kv=True)
    assert drawn.stats.tasks_moved
    torch.manual_seed(0)
    return [
        (plan, Tensors.random(plan.layout, plan.shape, dtype))
        for plan in (served_by_the_other(), drawn)
    ]


def interpret_plans(group, dtype) -> list[list[Tensor]]:
    """This rank's results of every plan, which do not lie where peers will write."""
    interpret(everywhere=True)
    import triton.language as tl

    from torchtitan_cad.runtime.triton import put

    # many blocks, and several of them by one program
    put.PROGRAMS = 2
    put.BLOCK_ROWS = tl.constexpr(16)
    if group.rank() == 0:  # combines its own results before others' return
        kernel_calls.MOST_UNCOMBINED = 0
    transport = interpreted_transport(group, 10_240)
    engine = CoreAttentionEngine(
        CpuKernel(), transport, rank=group.rank(), device=CPU, scale=0.25
    )
    results = []
    for key, (plan, rows) in enumerate(problems(dtype)):
        engine.add_plan(key, plan)
        results.append(run_layer(engine, rows, key, key))
        storages = {x.untyped_storage().data_ptr() for x in results[-1]}
        assert transport._memory.own.untyped_storage().data_ptr() not in storages
    return results


@needs_linux
@needs_triton
@pytest.mark.parametrize(
    "dtype", params([torch.float32, torch.bfloat16], [torch.float32])
)
def test_plans_are_as_exact_as_undivided_attention(dtype):
    of_ranks = values(run_processes(2, interpret_plans, dtype, timeout_s=240))
    for (plan, rows), *results in zip(problems(dtype), *of_ranks, strict=True):
        whole = undivided(plan.layout, plan.shape, rows)
        assert_ranks_as_exact(results, whole, dense(plan.layout, rows))
