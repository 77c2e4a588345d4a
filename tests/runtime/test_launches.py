# SPDX-License-Identifier: BSD-3-Clause
"""Launches of the path for CUDA, counted on the CPU."""

import numpy as np

from tests.lib.counted import COUNTED, COUNTED_SHAPE
from tests.lib.hollow import hollow_engine, passes_of_a_layer
from tests.lib.processes import run_processes, values
from tests.lib.sets import needs_triton
from tests.lib.tape import Tape
from torchtitan_cad.planning import (
    TASK_DTYPE,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)

AT_HOME = make_plan(
    TokenLayout.from_segments([[(0, 0, 96), (1, 0, 40)], []]),
    COUNTED_SHAPE,
    PlannerConfig(planner="home"),
)
COUNTED_PLAN = Plan.from_tasks(
    COUNTED[0], COUNTED_SHAPE, PlannerConfig(), np.array(COUNTED[1], dtype=TASK_DTYPE)
)


def count(group, plan) -> list[dict[str, int]]:
    """Launches by name of one layer's forward and backward of this rank, once tables have been in use."""
    engine = hollow_engine(2, group.rank())
    from tests.lib.mock_driver import launches

    forward, backward = passes_of_a_layer(engine, plan)
    results = forward()
    backward(results)
    counts = []
    for run in (forward, lambda: backward(results)):
        launches.clear()
        with Tape() as tape:
            run()
        assert all(x is engine.transport._memory._record for x in tape.read), (
            "the host waits for the device"
        )
        counts.append(dict(launches + tape.launches))
    return counts


@needs_triton
def test_launches_of_a_layer():
    """Two exchanges in either direction: each says that it is ready, waits for that, puts, posts and waits for rows."""
    for forward, backward in values(run_processes(2, count, COUNTED_PLAN)):
        assert forward == {
            "_put_rows": 2,
            "_post": 4,
            "_wait": 4,
            "_gather_rows": 4,  # per call once of queries, once of keys and values
            "flash_attention": 2,
            "_merge_rows": 2,  # of remote rows, and at home
        }
        assert backward == {
            "_row_delta": 1,
            "_put_rows": 2,
            "_post": 4,
            "_wait": 4,
            "_gather_rows": 4,
            "_prepare_statistics": 2,
            "flash_attention": 2,
            "_sum_rows": 4,  # of dq, and of dk and dv, of remote rows and at home
        }


@needs_triton
def test_launches_of_a_layer_that_moves_nothing():
    """Those of stock, and one each way that lays out the log-sum-exp."""
    (counts,) = values(run_processes(1, count, AT_HOME))
    assert counts == [{"flash_attention": 1, "clone": 1}] * 2
