# SPDX-License-Identifier: BSD-3-Clause
"""Host time of the launches of a layer, forward and backward, without a GPU.

    python -m bench.launches                            # this checkout
    python -m bench.launches --checkouts ../before .    # several in turns, in one run

Triton compiles its kernels and launches nothing (tests/lib/mock_driver.py), attention returns memory, and tensors
are small, so that what is left is Python: the engine, the transport, and the arguments of kernels. Times are CPU time
of the thread, as the machine may have other work.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import tyro

LAYERS = 300
ROUNDS = 3


def measure() -> str:
    """Returns figures of the checkout that is on the path."""
    from tests.lib import mock_driver
    from tests.lib.counted import COUNTED
    from tests.lib.rows import empty_rows
    from torchtitan_cad.planning import TASK_DTYPE, AttentionShape, Plan, PlannerConfig
    from torchtitan_cad.runtime import triton
    from torchtitan_cad.runtime.call import Saved
    from torchtitan_cad.runtime.engine import CoreAttentionEngine
    from torchtitan_cad.runtime.kernels import varlen
    from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory
    from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport

    torch.set_num_threads(1)
    triton.runs_on = lambda device: True  # type: ignore[assignment]
    varlen._forward_op = lambda q, *_, **__: (
        torch.empty_like(q),
        torch.empty(q.shape[1::-1]),
        None,
    )
    varlen._backward_op = lambda dout, q, k, v, *_, **__: tuple(
        map(torch.empty_like, (q, k, v))
    )
    varlen._takes = lambda *_: False

    def allocate(num_bytes: int) -> DeviceMemory:
        own = torch.empty(num_bytes, dtype=torch.uint8)
        return DeviceMemory(own, [own.data_ptr()] * 2, None)

    layout, tasks = COUNTED
    shape = AttentionShape(32, 8, 128, 2)
    device = torch.device("cpu")
    transport = SymmetricTransport(range(2), 0, allocate, lambda: 600.0, 2**24)
    engine = CoreAttentionEngine(
        varlen.VarlenKernel(), transport, rank=0, device=device, scale=0.1
    )
    engine.add_plan(
        0,
        Plan.from_tasks(
            layout, shape, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE)
        ),
    )
    q, k, v, dout, shared = empty_rows(int(layout.tokens_per_rank[0]), shape)

    def run_layer() -> float:
        begin = time.thread_time()
        results = engine.begin_forward(q, k, v, 0, shared).run()
        engine.begin_backward(dout, Saved(q, k, v, *results, shared=shared), 0).run()
        return 1e6 * (time.thread_time() - begin)

    for _ in range(5):
        run_layer()
    mock_driver.launches.clear()
    times = [run_layer() for _ in range(LAYERS)]
    launches = sum(mock_driver.launches.values()) // LAYERS
    median = statistics.median(times)
    of_layer = f"{median:.0f} us a layer (least {min(times):.0f})"
    return (
        f"{launches} launches of Triton, {of_layer}, {median / launches:.0f} a launch"
    )


def main(checkouts: list[Path] | None = None) -> None:
    """Print the figures of every checkout, in turns."""
    for _ in range(ROUNDS):
        for checkout in checkouts or [Path()]:
            environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
            command = [sys.executable, str(Path(__file__).resolve()), "--measure"]
            run = subprocess.run(
                command,
                cwd=checkout,
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            )
            print(f"{checkout}: {run.stdout.strip()}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(measure())
    else:
        tyro.cli(main)
