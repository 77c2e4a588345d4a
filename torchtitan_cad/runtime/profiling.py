"""Measuring an attention kernel over query and key lengths, for ``planning.Profile``. Imports torch and planning only.

What is measured is what a server executes: one call over many unmasked tasks. A call has so many of them that the
device is busy, because a plan's calls have many tasks as well; a cell is the call's time over its tasks.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape, Profile
from torchtitan_cad.runtime.kernels import AttentionKernel, CallArgs
from torchtitan_cad.runtime.kernels.tiles import QUERY_TILE

WARM_UP = 2
"""Calls before the first that counts."""

WAVES = 4
"""Blocks of 128 rows x one head, at least, for every multiprocessor of a GPU."""

CPU_ROWS, GPU_ROWS = 2048, 65536
"""Rows of a call where tasks are short, which makes the cost of launching it vanish."""

LONGEST_CALL = 4
"""Most key rows of a call, in multiples of the above, unless a single task has more: bounds the memory."""


@dataclass(frozen=True)
class ProfileGrid:
    """Query and key lengths to measure, in tokens; each cell is the median of ``repeats`` calls."""

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    repeats: int

    @classmethod
    def default(cls, device: torch.device) -> "ProfileGrid":
        """Keys up to 128K tokens on a GPU; up to 4K elsewhere, where it has to be over in a minute or two."""
        if device.type == "cuda":
            return cls(_powers(32, 4096), _powers(QUERY_TILE, 131072), repeats=10)
        return cls((64, 128, 256, 512), _powers(QUERY_TILE, 4096), repeats=5)

    @property
    def num_cells(self) -> int:
        return len(self.q_lengths) * len(self.kv_lengths)


def measure_profile(
    kernel: AttentionKernel,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    grid: ProfileGrid,
    on_cell: Callable[[], object] = lambda: None,
) -> Profile:
    """Times ``kernel`` forward and backward.

    Args:
        on_cell: called after every cell of the grid.

    Raises:
        ValueError: a dtype or head dim that the kernel does not take, or a grid that no profile can have.
    """
    kernel.check(dtype, shape.head_dim)
    nothing = ((1.0,) * len(grid.kv_lengths),) * len(grid.q_lengths)
    profile = Profile(  # made first: a bad grid is an error before the work
        device=device_name(device),
        torch=torch.__version__,
        kernel=kernel.name,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        tile=QUERY_TILE,
        q_lengths=grid.q_lengths,
        kv_lengths=grid.kv_lengths,
        forward_ms=nothing,
        backward_ms=nothing,
        repeats=grid.repeats,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    forward, backward = [], []
    for num_q in grid.q_lengths:
        cells = []
        for num_k in grid.kv_lengths:
            cells.append(_measure_cell(kernel, shape, dtype, device, num_q, num_k, grid.repeats))
            on_cell()
        forward.append(tuple(cell[0] for cell in cells))
        backward.append(tuple(cell[1] for cell in cells))
    return replace(profile, forward_ms=tuple(forward), backward_ms=tuple(backward))


def num_tasks(num_q: int, num_k: int, num_heads: int, device: torch.device) -> int:
    """Tasks of a call: enough rows, and blocks for every multiprocessor, within ``LONGEST_CALL``."""
    rows, blocks = CPU_ROWS, 1
    if device.type == "cuda":
        rows = GPU_ROWS
        blocks = WAVES * torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(-(-rows // max(num_q, num_k)), -(-blocks // (num_heads * -(-num_q // QUERY_TILE))))
    return max(1, min(wanted, LONGEST_CALL * rows // num_k))


def _measure_cell(
    kernel: AttentionKernel,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    num_q: int,
    num_k: int,
    repeats: int,
) -> tuple[float, float]:
    """Milliseconds of one task of ``num_q`` x ``num_k``, forward and backward."""
    tasks = num_tasks(num_q, num_k, shape.num_heads, device)
    offsets = [[length * task for task in range(tasks + 1)] for length in (num_q, num_k)]
    # Keys before queries, as in a plan; the queries begin on a tile, as planned ones do.
    start = -(-num_k // QUERY_TILE) * QUERY_TILE
    call = CallArgs.from_numpy(
        *offsets,
        causal=False,
        scale=shape.head_dim**-0.5,
        device=device,
        q_start=[start] * tasks,
        kv_start=[0] * tasks,
    )

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(tasks * count, heads, shape.head_dim, device=device, dtype=dtype)

    q, dout = rows(num_q, shape.num_heads), rows(num_q, shape.num_heads)
    k, v = rows(num_k, shape.num_kv_heads), rows(num_k, shape.num_kv_heads)
    _, lse = kernel.forward(q, k, v, call)
    delta = torch.zeros_like(lse)
    forward = median_milliseconds(lambda: kernel.forward(q, k, v, call), device, repeats)
    backward = median_milliseconds(lambda: kernel.backward(dout, q, k, v, lse, delta, call), device, repeats)
    return forward / tasks, backward / tasks


def median_milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median over ``repeats`` calls, device time on a GPU and wall-clock elsewhere."""
    for _ in range(WARM_UP):
        run()
    if device.type == "cuda":
        return statistics.median(_event_milliseconds(run, device) for _ in range(repeats))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def _event_milliseconds(run: Callable[[], object], device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end)


def device_name(device: torch.device) -> str:
    """Name of a GPU; for a CPU how many threads measure."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def _powers(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... up to last."""
    return tuple(first << i for i in range((last // first).bit_length()))
