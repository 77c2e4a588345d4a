# SPDX-License-Identifier: BSD-3-Clause
"""All parts, in order: first what proves most, then tests, then the speed of single kernels."""

import itertools
from collections.abc import Callable, Iterator, Sequence
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
        run: 1 or 2, the run of at most ``RUN_S`` that it belongs to.
    """

    name: str
    title: str
    function: str
    seconds: float
    arguments: Sequence[str] = ()
    needs: Sequence[str] = ()
    timed: bool = True
    run: int = 1


RUNS = (1, 2)
RUN_S = 480.0
"""seconds: a run's budget; ``expected_seconds`` of its parts are less"""
AT_ONCE = 4
"""parts: those that are not timed run so many at once"""


def _test(name: str, seconds: float, *, timed: bool = False, run: int = 1) -> Part:
    file = f"tests/gpu/test_{name}_gpu.py"
    needs = ("pytest", "hypothesis")
    return Part(
        f"test-{name}",
        file,
        "bench.gpu.pytest_part:run",
        seconds,
        (file,),
        needs,
        timed,
        run,
    )


def _sharing(
    name: str,
    title: str,
    seconds: float,
    arguments: tuple[str, str, str],
    run: int = 1,
) -> Part:
    return Part(
        name,
        title,
        "bench.gpu.sharing:measure",
        seconds,
        arguments,
        ("bench.gpu.sharing", "triton"),
        run=run,
    )


def in_groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield timed parts one by one, and those between them together."""
    for timed, group in itertools.groupby(parts, lambda part: part.timed):
        if timed:
            yield from ([part] for part in group)
        else:
            yield list(group)


def expected_seconds(parts: Sequence[Part]) -> float:
    """Return the seconds that parts should take together."""
    return sum(
        max(
            max(part.seconds for part in group),
            sum(part.seconds for part in group) / AT_ONCE,
        )
        for group in in_groups(parts)
    )


ENVIRONMENT = Part(
    "environment", "GPU, driver, packages", "bench.gpu.environment:describe", 12
)

PARTS = (
    ENVIRONMENT,
    Part(
        "planner",
        "The planner's compiled code",
        "bench.gpu.speed:warm_planner",
        30,
        needs=("numba",),
    ),
    _sharing(
        "sharing",
        "Two ranks on halves of the GPU, DDP",
        65,
        ("2", "ddp", "stock,cad,two nano-batches"),
    ),
    _sharing(
        "sharing-fsdp2",
        "Two ranks on halves, FSDP2",
        60,
        ("2", "fsdp2", "stock,cad,loader's homes"),
    ),
    _sharing(
        "sharing-compiled",
        "Two ranks on halves, FSDP2 and torch.compile",
        95,
        ("2", "fsdp2 compiled", "stock,cad,two nano-batches"),
    ),
    _sharing(
        "sharing-of-4",
        "Four ranks on quarters of the GPU, DDP",
        60,
        ("4", "ddp", "stock,cad"),
        run=2,
    ),
    Part(
        "partition",
        "Ranks on partitions of the GPU",
        "bench.gpu.partition:measure",
        28,
        needs=("triton",),
    ),
    Part(
        "ordering",
        "Rows and their word through host memory",
        "bench.gpu.ordering:measure",
        18,
        needs=("triton",),
    ),
    Part(
        "sending",
        "An exchange beside other work",
        "bench.gpu.sending:measure",
        15,
        needs=("triton",),
    ),
    _test("training", 130),
    _test("transport", 30),
    _test("nvshmem", 50),
    _test("pingpong", 40, run=2),
    _test("kernels", 55, run=2),
    _test("engine", 60, run=2),
    Part(
        "sanitizer",
        "compute-sanitizer",
        "bench.gpu.sanitizer:measure",
        60,
        (),
        ("triton",),
        timed=False,
        run=2,
    ),
    Part(
        "layer",
        "Launches, synchronisations, allocations",
        "bench.gpu.layer:measure",
        20,
        needs=("triton",),
        run=2,
    ),
    Part(
        "plain",
        "A layer with nothing to move",
        "bench.gpu.plain_layer:measure",
        22,
        run=2,
    ),
    Part(
        "choice",
        "Attention kernels that auto chooses from",
        "bench.gpu.speed:kernels",
        15,
        run=2,
    ),
    Part(
        "attention",
        "Shards against the undivided document",
        "bench.gpu.attention:attention",
        15,
        run=2,
    ),
    Part(
        *(
            "bandwidth",
            "Memory-bound kernels against a copy",
            "bench.gpu.attention:bandwidth",
            12,
        ),
        needs=("triton",),
        run=2,
    ),
    Part(
        "replay",
        "All ranks of a plan, one after another",
        "bench.gpu.speed:replayed",
        110,
        run=2,
    ),
)
