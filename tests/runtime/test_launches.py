# SPDX-License-Identifier: BSD-3-Clause
"""Launches of the path for CUDA, counted on the CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.lib.counted import COUNTED, COUNTED_SHAPE
from tests.lib.fake_flash_attn import Recorder, fake_operator
from tests.lib.interpreter import interpret, interpreted_transport
from tests.lib.processes import run_processes, values
from tests.lib.rows import CPU, empty_rows
from tests.lib.sets import needs_triton
from tests.lib.tape import Tape, record_kernels
from tests.lib.threaded import needs_linux
from torchtitan_cad.planning import (
    TASK_DTYPE,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import varlen
from torchtitan_cad.runtime.transport.base import Transport


@pytest.mark.matrix
@needs_linux
@needs_triton
def test_launches_of_a_layer():
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


def test_launches_of_a_layer_that_moves_nothing(monkeypatch):
    """Those of stock, and one each way that lays out the log-sum-exp."""
    tape = Tape()
    for name in ("_forward_op", "_backward_op"):
        fake = fake_operator(getattr(varlen, name), Recorder())
        monkeypatch.setattr(varlen, name, partial(tape.run, "flash_attention", fake))
    monkeypatch.setattr(varlen, "_takes", lambda op, argument: False)
    layout = TokenLayout.from_segments([[(0, 0, 96), (1, 0, 40)]])
    passes = passes_of_a_layer(make_plan(layout, COUNTED_SHAPE), None, 0)
    varlen._without_dropout(CPU)  # made once
    tape._entries.clear()
    for number, run in enumerate(passes, 1):
        with tape:
            run()
        assert tape.launches() == {"flash_attention": number, "clone": number}


def passes_of_a_layer(
    plan: Plan, transport: Transport | None, rank: int
) -> list[Callable[[], Any]]:
    """Forward and backward; the forward has run once."""
    engine = CoreAttentionEngine(
        varlen.VarlenKernel(), transport, rank=rank, device=CPU, scale=0.25
    )
    engine.add_plan(0, plan)
    tokens = int(plan.layout.tokens_per_rank[rank])
    q, k, v, dout, _ = empty_rows(tokens, plan.shape)
    for x in (q, k, v, dout):
        x.normal_()
    saved = Saved(q, k, v, *engine.begin_forward(q, k, v, 0).run())
    return [
        lambda: engine.begin_forward(q, k, v, 0).run(),
        lambda: engine.begin_backward(dout, saved, 0).run(),
    ]


def count(group: dist.ProcessGroup) -> tuple[dict[str, int], dict[str, int]]:
    """Launches by name of one layer's forward and backward, once the buffers of the transport have been in use."""
    interpret(everywhere=True)
    tape = Tape()

    def attend(*args: Any, **kwargs: Any) -> Any:
        return tape.run("flash_attention", *args, **kwargs)

    def counted(function: Callable[[], Any]) -> dict[str, int]:
        nonlocal tape
        tape = Tape()
        with tape:
            function()
        assert all(x is transport._memory._record for x in tape.numbers_read()), (
            "the host waits for the device"
        )
        return dict(tape.launches())

    record_kernels(lambda: tape)
    varlen._takes = lambda op, argument: False
    for name in ("_forward_op", "_backward_op"):
        setattr(
            varlen,
            name,
            partial(attend, fake_operator(getattr(varlen, name), Recorder())),
        )
    transport = interpreted_transport(group, 2**24)
    layout, tasks = COUNTED
    plan = Plan.from_tasks(
        layout, COUNTED_SHAPE, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE)
    )
    forward, backward = passes_of_a_layer(plan, transport, group.rank())
    backward()
    return counted(forward), counted(backward)
