# SPDX-License-Identifier: BSD-3-Clause
"""Measuring an attention kernel over query and key lengths, for ``planning.Profile``.

Each measurement is one call over enough unmasked tasks to keep the device busy, as in a plan. A cell of the grid is the
call's time divided by its number of tasks.
"""

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

import numpy as np
import torch

from torchtitan_cad.planning import AttentionShape, Profile
from torchtitan_cad.runtime.kernels.base import AttentionKernel, VarlenArgs
from torchtitan_cad.runtime.kernels.cpu import QUERY_TILE
from torchtitan_cad.runtime.rates import time_attention
from torchtitan_cad.runtime.timing import Timing, device_name

MOST_RETRIES = 2
"""repetitions of the measurement of noisy cells"""

BLOCKS_PER_SM = 4
"""blocks of 128 rows x one head: minimum of a call per multiprocessor of a GPU."""

CPU_ROWS = 2048
GPU_ROWS = 65536
"""rows: minimum of a call, so that the cost of launching it is negligible."""

LONGEST_CALL = 16
"""maximum key rows of a call / CPU_ROWS or GPU_ROWS, unless a single task has more; bounds the memory. A call of 128
queries and 32 heads a task has 256 blocks with it at 131,072 keys; at 64 an H200 is half idle."""


@dataclass(frozen=True)
class ProfileGrid:
    """Query and key lengths to measure, in tokens; each cell is the median of ``repeats`` calls."""

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    repeats: int

    @classmethod
    def default(cls, device: torch.device) -> "ProfileGrid":
        """Return the grid for ``device``: keys up to 128K tokens on a GPU, up to 4K on CPU, for a minute or two."""
        if device.type == "cuda":
            return cls(_powers(32, 4096), _powers(QUERY_TILE, 131072), repeats=10)
        return cls((64, 128, 256, 512), _powers(QUERY_TILE, 4096), repeats=5)

    @property
    def num_cells(self) -> int:
        """Pairs of lengths to measure."""
        return len(self.q_lengths) * len(self.kv_lengths)


Cells: TypeAlias = dict[tuple[int, int], tuple[Timing, Timing]]
"""forward and backward time of a task, by its query and key length"""


def measure_profile(
    kernel: AttentionKernel,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    grid: ProfileGrid,
    on_cell: Callable[[], object] = lambda: None,
) -> Profile:
    """Time ``kernel`` forward and backward. Noisy cells are measured again, up to ``MOST_RETRIES`` times.

    Args:
        on_cell: called after every cell of the grid.

    Raises:
        ValueError: the kernel does not take the dtype or head dim, the grid is not valid for a profile, or a cell does
            not fit in memory.
    """
    kernel.check(dtype, shape.head_dim, shape.out_dim)
    nothing = ((1.0,) * len(grid.kv_lengths),) * len(grid.q_lengths)
    profile = Profile(  # made first: a bad grid is an error before the work
        device=device_name(device),
        torch=torch.__version__,
        kernel=kernel.name,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        dtype=str(dtype).removeprefix("torch."),
        tile=QUERY_TILE,
        q_lengths=grid.q_lengths,
        kv_lengths=grid.kv_lengths,
        forward_ms=nothing,
        backward_ms=nothing,
        repeats=grid.repeats,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    _require_memory(shape, device, grid)
    cells: Cells = {}
    noisy = list(itertools.product(grid.q_lengths, grid.kv_lengths))
    for retry in range(1 + MOST_RETRIES):
        for cell in noisy:
            forward, backward = _measure_cell(
                kernel, shape, dtype, device, *cell, grid.repeats
            )
            before = cells.get(cell, (forward, backward))
            # disturbances only add time
            cells[cell] = (
                min(before[0], forward),
                min(before[1], backward),
            )
            if not retry:
                on_cell()
        profile = _with_cells(profile, cells)
        noisy = profile.noisy_cells()
    return profile


def _with_cells(profile: Profile, cells: Cells) -> Profile:
    """Return the profile with the times of all its cells."""
    lengths = itertools.product(profile.q_lengths, profile.kv_lengths)
    table = np.array([np.ravel(cells[cell]) for cell in lengths]).reshape(
        len(profile.q_lengths), len(profile.kv_lengths), 4
    )
    names = "forward_ms", "forward_spread", "backward_ms", "backward_spread"
    grids: Any = (tuple(map(tuple, grid)) for grid in table.transpose(2, 0, 1).tolist())
    return replace(profile, **dict(zip(names, grids, strict=True)))


def _require_memory(
    shape: AttentionShape, device: torch.device, grid: ProfileGrid
) -> None:
    """Raise ValueError if the tensors of some cell exceed half the device's memory."""
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).total_memory // 2
    else:
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for num_q, num_k in itertools.product(grid.q_lengths, grid.kv_lengths):
        tasks = num_tasks(num_q, num_k, shape.num_heads, device)
        rows = num_q * shape.num_heads + num_k * shape.num_kv_heads
        # q, dq, out, dout; and k, dk, v, dv.
        needed = 2 * tasks * rows * (shape.head_dim + shape.out_dim) * shape.dtype_bytes
        if needed > limit:
            raise ValueError(
                f"tasks of {num_q} queries x {num_k} keys take {needed / 1e9:.3g} GB, more than half of this "
                f"device's {2 * limit / 1e9:.3g} GB: set shorter q_lengths and kv_lengths, or fewer heads"
            )


def num_tasks(num_q: int, num_k: int, num_heads: int, device: torch.device) -> int:
    """Return the number of tasks of a call: enough rows and blocks for the device, within ``LONGEST_CALL``."""
    rows = CPU_ROWS
    blocks = 1
    if device.type == "cuda":
        rows = GPU_ROWS
        blocks = (
            BLOCKS_PER_SM
            * torch.cuda.get_device_properties(device).multi_processor_count
        )
    wanted = max(
        -(-rows // max(num_q, num_k)),
        -(-blocks // (num_heads * -(-num_q // QUERY_TILE))),
    )
    return max(1, min(wanted, LONGEST_CALL * rows // num_k))


def _measure_cell(
    kernel: AttentionKernel,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    num_q: int,
    num_k: int,
    repeats: int,
) -> tuple[Timing, Timing]:
    """Return the forward and backward time of one task of ``num_q`` x ``num_k``."""
    tasks = num_tasks(num_q, num_k, shape.num_heads, device)
    offsets = [
        [length * task for task in range(tasks + 1)] for length in (num_q, num_k)
    ]
    # Keys precede queries and queries begin on a tile, as in a plan.
    q_start = [-(-num_k // QUERY_TILE) * QUERY_TILE] * tasks
    scale = shape.head_dim**-0.5
    call = VarlenArgs.from_numpy(
        *offsets, causal=False, scale=scale, device=device, q_start=q_start
    )
    forward, backward = time_attention(kernel, shape, dtype, call, repeats)
    return Timing(forward.milliseconds / tasks, forward.spread), Timing(
        backward.milliseconds / tasks, backward.spread
    )


def _powers(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... up to last."""
    return tuple(first << i for i in range((last // first).bit_length()))
