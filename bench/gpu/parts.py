"""What is run, in order: correctness first, then what the goals ask for."""

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
        limit_s: seconds after which its process is ended.
        least_s: with fewer seconds left it is not begun.
        needs: modules without which it is skipped.
    """

    name: str
    title: str
    function: str
    limit_s: float
    least_s: float
    arguments: Sequence[str] = ()
    needs: Sequence[str] = ()


def _test(name: str, limit_s: float) -> Part:
    file = f"tests/gpu/test_{name}_gpu.py"
    return Part(f"test-{name}", file, "bench.gpu.pytest_part:run", limit_s, 15, (file,), ("pytest", "hypothesis"))


ENVIRONMENT = Part("environment", "GPU, driver, packages", "bench.gpu.environment:describe", 150, 0)

PARTS = (
    ENVIRONMENT,
    _test("kernels", 90),
    _test("combine", 60),
    _test("engine", 60),
    _test("transport", 90),
    _test("graphs", 100),
    _test("sequence_parallel", 45),
    _test("pingpong", 90),
    Part("layer", "Launches, synchronisations, allocations", "bench.gpu.layer:measure", 90, 20, needs=("triton",)),
    Part("plain", "A layer with nothing to move", "bench.gpu.plain_layer:measure", 60, 15),
    Part("attention", "Shards against the undivided document", "bench.gpu.speed:attention", 60, 15),
    Part("bandwidth", "Memory-bound kernels against a copy", "bench.gpu.speed:bandwidth", 60, 15, needs=("triton",)),
    Part("put", "The put kernel beside a GEMM", "bench.gpu.put_gemm:measure", 60, 15, needs=("triton",)),
    Part("replay", "All ranks of a plan, one after another", "bench.gpu.speed:replayed", 180, 40),
    _test("profiling", 90),
    Part("profile", "torchtitan-cad profile", "bench.gpu.speed:profile", 120, 30, needs=("tqdm",)),
)


def find_part(name: str) -> Part:
    """The part of that name; raises ValueError with the names there are."""
    for part in PARTS:
        if part.name == name:
            return part
    raise ValueError(f"there is no part {name!r}: choose among {', '.join(part.name for part in PARTS)}")
