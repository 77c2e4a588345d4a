# SPDX-License-Identifier: BSD-3-Clause
"""All parts of a run, in order: correctness first, then what the goals ask for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Emit = Callable[[str, Any], None]
"""Gets a figure's name and value as soon as it is known; a later value of the same name replaces it."""


class Skip(Exception):
    """Raised by a part that cannot run here; says why."""


@dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        function: "module:name", called with the device ("cuda" or "cpu"), ``Emit`` and ``arguments``.
        seconds: what it should take on an H100 at most, with compilation. It is ended after twice that, or with the
            budget; with less than half left it is not begun.
        needs: modules without which it is skipped.
        timed: True if nothing else may run beside it.
    """

    name: str
    title: str
    function: str
    seconds: float
    arguments: Sequence[str] = ()
    needs: Sequence[str] = ()
    timed: bool = True


def _test(name: str, seconds: float, timed: bool = False) -> Part:
    file = f"tests/gpu/test_{name}_gpu.py"
    return Part(f"test-{name}", file, "bench.gpu.pytest_part:run", seconds, (file,), ("pytest", "hypothesis"), timed)


ENVIRONMENT = Part("environment", "GPU, driver, packages", "bench.gpu.environment:describe", 15)

PARTS = (
    ENVIRONMENT,
    Part("planner", "The planner's compiled code", "bench.gpu.speed:warm_planner", 45, needs=("numba",)),
    _test("kernels", 40),
    _test("engine", 30),
    _test("transport", 30),
    _test("graphs", 45),
    _test("sequence_parallel", 10),
    _test("pingpong", 40),
    _test("training", 60),
    Part("layer", "Launches, synchronisations, allocations", "bench.gpu.layer:measure", 30, needs=("triton",)),
    Part("plain", "A layer with nothing to move", "bench.gpu.plain_layer:measure", 30),
    Part("choice", "Attention kernels that auto chooses from", "bench.gpu.speed:kernels", 20),
    Part("attention", "Shards against the undivided document", "bench.gpu.attention:attention", 20),
    Part("bandwidth", "Memory-bound kernels against a copy", "bench.gpu.attention:bandwidth", 20, needs=("triton",)),
    Part("put", "The put kernel beside a GEMM", "bench.gpu.putting:measure", 20, needs=("triton",)),
    Part(
        "partition",
        "Ranks on partitions of the GPU: home and planned",
        "bench.gpu.partition:measure",
        40,
        needs=("triton",),
    ),
    Part("sending", "An exchange beside other work", "bench.gpu.sending:measure", 25, needs=("triton",)),
    Part("ordering", "Rows and their word through host memory", "bench.gpu.ordering:measure", 18, needs=("triton",)),
    Part("replay", "All ranks of a plan, one after another", "bench.gpu.speed:replayed", 70),
    _test("profiling", 40, timed=True),
    Part("profile", "torchtitan-cad profile", "bench.gpu.speed:profile", 25, needs=("tqdm",)),
)
