# SPDX-License-Identifier: BSD-3-Clause
"""A layer whose plan moves nothing, against torch's varlen attention."""

import inspect
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from bench.gpu.parts import Emit
from torchtitan_cad.integration.cpu_varlen import register_cpu_varlen
from torchtitan_cad.planning import (
    TASK_DTYPE,
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
)
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.ops import core_attention
from torchtitan_cad.runtime.timing import median_milliseconds

ENGINE = "bench.gpu plain"
LAYERS = 4
"""In a row, so that the host is ahead of the device but for the first."""
ROUNDS = 5
"""rounds in which both take turns, as clocks drift"""


def measure(device: str, emit: Emit) -> None:
    """Forward and backward of both by autograd; the same documents, heads and key heads."""
    on_gpu = device == "cuda"
    where = torch.device(device, 0) if on_gpu else torch.device(device)
    shape = AttentionShape(32, 8, 128, 2) if on_gpu else AttentionShape(2, 1, 16, 4)
    unit = 1024 if on_gpu else 16
    lengths = [16 * unit, *[4 * unit] * 2, *[unit] * 8]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    tokens = sum(lengths)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    qkv = [
        torch.randn(
            tokens, n, shape.head_dim, device=where, dtype=dtype, requires_grad=True
        )
        for n in heads
    ]
    dout = torch.randn_like(qkv[0])
    kernel = _register(lengths, shape, where)
    packaged = _ours
    stock = _stock(lengths, where)

    def repeat(attend: Callable[..., Tensor]) -> None:
        for _ in range(LAYERS):
            torch.autograd.grad(attend(*qkv), qkv, dout)

    with torch.no_grad():
        error = (packaged(*qkv).float() - stock(*qkv).float()).abs().max()
    emit("kernel", kernel)
    emit("largest_difference", float(error))
    times: dict[str, list[float]] = {"ours": [], "stock": []}
    for _ in range(ROUNDS if on_gpu else 1):
        for name, attend in (("ours", packaged), ("stock", stock)):
            milliseconds = median_milliseconds(
                lambda attend=attend: repeat(attend), where, 5 if on_gpu else 1
            )
            times[name].append(milliseconds / LAYERS)
    medians = {name: statistics.median(values) for name, values in times.items()}
    emit("milliseconds", medians)
    emit("rounds", times)
    emit("over_stock", medians["ours"] / medians["stock"])


def _register(lengths: list[int], shape: AttentionShape, device: torch.device) -> str:
    """An engine of one rank whose plan leaves every document whole; returns its kernel's name."""
    layout = TokenLayout.from_segments(
        [[(doc, 0, length) for doc, length in enumerate(lengths)]]
    )
    tasks = np.array(
        [(doc, 0, length, 0, length, 0) for doc, length in enumerate(lengths)],
        dtype=TASK_DTYPE,
    )
    kernel = get_kernel("auto", device, shape)
    engine = CoreAttentionEngine(
        kernel, None, rank=0, device=device, scale=shape.head_dim**-0.5
    )
    engine.add_plan(
        0, Plan.from_tasks(layout, shape, PlannerConfig(planner="home"), tasks)
    )
    register_engine(ENGINE, engine)
    return str(kernel)


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return core_attention(q, k, v, torch.tensor(0), ENGINE)[0]


def _stock(lengths: list[int], device: torch.device) -> Callable[..., Tensor]:
    if device.type == "cpu":
        register_cpu_varlen()
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    # Newer versions want to be told; the operator below takes fewer key heads in all of them.
    grouped = (
        {"enable_gqa": True}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters
        else {}
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        longest = max(lengths)
        return varlen_attn(
            q, k, v, offsets, offsets, longest, longest, window_size=(-1, 0), **grouped
        )

    return attend
