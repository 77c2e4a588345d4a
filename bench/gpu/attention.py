# SPDX-License-Identifier: BSD-3-Clause
"""Speed of the attention kernel that auto chooses, and of the memory-bound kernels around it.

Attention: one undivided causal document against one call of many shards, each the last rows of such a document with
all its keys, with as much work altogether. Fused rebatching costs nothing where both reach the same rate. TFLOP/s count
4 D operations forward and 10 D backward per query head and query-key pair.

Bandwidth: gathering, merging and summing rows, and what backward needs beside dO (delta, and the surrogate of O), in
bytes read and written, beside a copy.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.parts import Emit
from tests.lib.workloads import SHAPE
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.attend import RowSpace
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.kernels.base import (
    AttentionKernel,
    Merged,
    VarlenArgs,
    row_delta,
)
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.timing import median_milliseconds


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes on one device.

    Attributes:
        length: tokens of the undivided document, and of the prefix that shards attend to.
        rows: rows of query heads that are gathered, merged and summed.
    """

    device: torch.device
    shape: AttentionShape = SHAPE
    length: int = 16_384
    shards: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    rows: int = 65_536
    repeats: int = 20

    @property
    def dtype(self) -> torch.dtype:
        """bf16; the CPU kernel is exact in fp32."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16


def sizes_of(device: str) -> Sizes:
    """Sizes that say something on a GPU, and toy ones on the CPU."""
    if device == "cuda":
        return Sizes(torch.device(device, 0))
    return Sizes(
        torch.device(device),
        AttentionShape(4, 2, 16, 4),
        256,
        (64, 128),
        rows=64,
        repeats=1,
    )


def attention(device: str, emit: Emit) -> None:
    """TFLOP/s of one call of shards, and their share of the undivided document's."""
    sizes = sizes_of(device)
    kernel = get_kernel("auto", sizes.device, sizes.shape)
    emit("kernel", str(kernel))
    whole = measure_attention(kernel, sizes.length, sizes)
    emit("undivided", whole)
    rows = []
    for shard in sizes.shards:
        row = measure_attention(kernel, shard, sizes)
        for name in ("forward", "backward"):
            row[f"{name}_share"] = row[f"{name}_tflops"] / whole[f"{name}_tflops"]
        rows.append(row)
        emit("shards", rows)


def bandwidth(device: str, emit: Emit) -> None:
    """GB/s of every memory-bound kernel, and its share of a copy's."""
    from bench.gpu.putting import Putting, programs
    from torchtitan_cad.runtime.triton import put

    sizes = sizes_of(device)
    rows = measure_bandwidth(sizes)
    emit("kernels", _with_shares(rows))
    everywhere = (
        4 * torch.cuda.get_device_properties(0).multi_processor_count
        if device == "cuda"
        else 2
    )
    putting = Putting(sizes.rows, sizes.device)
    for name, most in (("pack", put.PROGRAMS), ("pack on all SMs", everywhere)):
        with programs(most):
            milliseconds = median_milliseconds(putting.run, sizes.device, sizes.repeats)
        rows.append(
            {
                "name": name,
                "ms": milliseconds,
                "gigabytes_per_second": putting.num_bytes / milliseconds / 1e6,
            }
        )
    emit("kernels", _with_shares(rows))


def _with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with its share of the first one's rate, the copy's."""
    return [
        {**row, "share": row["gigabytes_per_second"] / rows[0]["gigabytes_per_second"]}
        for row in rows
    ]


def visible_pairs(num_q: int, num_k: int, causal: bool = True) -> int:
    """Query-key pairs of the last ``num_q`` rows of a document of ``num_k`` tokens."""
    return num_q * num_k - causal * num_q * (num_q - 1) // 2


def shard_call(kernel: AttentionKernel, shard: int, sizes: Sizes) -> VarlenArgs:
    """As many shards as have the pairs of the undivided document; unmasked if they are no squares but must be."""
    length = sizes.length
    causal = shard == sizes.length or not kernel.squares_only
    tasks = max(
        1, round(visible_pairs(length, length) / visible_pairs(shard, length, causal))
    )
    cu_q, cu_k = (
        [step * task for task in range(tasks + 1)] for step in (shard, length)
    )
    return VarlenArgs.from_numpy(
        cu_q, cu_k, causal=causal, scale=sizes.shape.head_dim**-0.5, device=sizes.device
    )


def measure_attention(
    kernel: AttentionKernel, shard: int, sizes: Sizes
) -> dict[str, Any]:
    """TFLOP/s of one call of shards; ``shard`` = the document's length is the undivided document."""
    call = shard_call(kernel, shard, sizes)
    shape = sizes.shape

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(
            count, heads, shape.head_dim, device=sizes.device, dtype=sizes.dtype
        )

    def median(run: Callable[[], object]) -> float:
        return median_milliseconds(run, sizes.device, sizes.repeats)

    tasks = len(call.q_start)
    q, dout = (rows(tasks * shard, shape.num_heads) for _ in range(2))
    k, v = (rows(tasks * sizes.length, shape.num_kv_heads) for _ in range(2))
    out, lse = kernel.forward(q, k, v, call)
    merged = Merged(lse, row_delta(dout, out))
    forward = median(lambda: kernel.forward(q, k, v, call))
    backward = median(lambda: kernel.backward(dout, q, k, v, merged, call))
    work = (
        tasks
        * visible_pairs(shard, sizes.length, call.causal)
        * shape.num_heads
        * shape.head_dim
    )
    return {
        "shard": shard,
        "tasks": tasks,
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": 4 * work / forward / 1e9,
        "backward_tflops": 10 * work / backward / 1e9,
    }


def measure_bandwidth(sizes: Sizes) -> list[dict[str, Any]]:
    """Rows gathered from two places, merged two to one, and summed two to one, as after two calls or two servers; delta
    and the surrogate of O for half of them."""
    device = sizes.device
    rows = sizes.rows
    tail = (sizes.shape.num_heads, sizes.shape.head_dim)
    narrow = torch.randn(2 * rows, *tail, device=device, dtype=torch.bfloat16)
    lse = torch.randn(2 * rows, tail[0], device=device)
    order = np.random.default_rng(0).permutation(2 * rows)
    space = RowSpace([narrow[:rows]], [narrow[rows:]])
    picked = torch.from_numpy(order).to(device)
    combination = Combination.build(
        [order[:rows] % rows, order[rows:] % rows], rows, device
    )
    target = torch.empty_like(narrow)
    parts = [narrow[:rows], narrow[rows:]]
    lses = [lse[:rows], lse[rows:]]
    delta = row_delta(*parts)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: target.copy_(narrow), 2 * narrow.nbytes),
        "gather": (lambda: space.take(picked), 2 * narrow.nbytes),
        "merge": (
            lambda: combination.merge([parts, lses], narrow),
            (narrow.nbytes + lse.nbytes) * 3 // 2,
        ),
        "sum": (lambda: combination.add([parts], [narrow]), narrow.nbytes * 3 // 2),
        "delta": (lambda: row_delta(*parts), narrow.nbytes + delta.nbytes),
    }
    if device.type == "cuda":
        from torchtitan_cad.runtime.triton.delta import prepare_statistics

        runs["surrogate"] = (
            lambda: prepare_statistics(parts[0], lses[0], delta, empty_lse=math.inf),
            narrow.nbytes + 2 * lses[0].nbytes + delta.nbytes,
        )
    figures = []
    for name, (run, num_bytes) in runs.items():
        milliseconds = median_milliseconds(run, device, sizes.repeats)
        figures.append(
            {
                "name": name,
                "ms": milliseconds,
                "gigabytes_per_second": num_bytes / milliseconds / 1e6,
            }
        )
    return figures
