# SPDX-License-Identifier: BSD-3-Clause
"""Measure this machine's speed of attention, linear work and row exchange, when a job starts."""

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_cad.planning import AttentionShape, TileAreaCost
from torchtitan_cad.runtime.kernels.base import (
    AttentionKernel,
    Merged,
    VarlenArgs,
    random_rows,
)
from torchtitan_cad.runtime.timing import median_milliseconds
from torchtitan_cad.runtime.transport.base import Transport, all_to_all

_REPEATS = 5
_TOKENS = {"cuda": 8192, "cpu": 1024}
"""tokens of the measured document, and rows of the measured matrix product"""
ROW_BYTES = 4096
_FEW_BYTES = 256 << 10
"""bytes that a rank receives in the exchange by which the measured one is sized"""
_MESSAGE_BYTES = {"cuda": 32 << 20, "cpu": 4 << 20}
"""bytes: most that a rank receives in a measured exchange"""
_MESSAGE_SECONDS = 0.1
"""seconds: most that a measured exchange takes, roughly"""
_LINEAR_PASSES = 3
"""matrix products of a linear layer: one forward, two backward"""


def attention_seconds(
    kernel: AttentionKernel,
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    cost: TileAreaCost,
) -> float:
    """Return the seconds of attention per unit of ``cost``, forward and backward, measured on one causal document."""
    tokens = _TOKENS[device.type]
    call = VarlenArgs.from_numpy(
        [0, tokens], [0, tokens], causal=True, scale=shape.head_dim**-0.5, device=device
    )
    seconds = 1e-3 * time_attention(kernel, shape, dtype, call, repeats=_REPEATS)
    return seconds / int(cost.prefix_cost(tokens)[-1])


def time_attention(
    kernel: AttentionKernel,
    shape: AttentionShape,
    dtype: torch.dtype,
    call: VarlenArgs,
    repeats: int,
) -> float:
    """Return the milliseconds of the forward and the backward of a call with random rows."""
    q, k, v, dout = random_rows(shape, dtype, call)
    device = q.device
    lse = kernel.forward(q, k, v, call)[1].contiguous()
    merged = Merged(lse, torch.zeros_like(lse))
    forward = median_milliseconds(
        lambda: kernel.forward(q, k, v, call), device, repeats
    )
    backward = median_milliseconds(
        lambda: kernel.backward(dout, q, k, v, merged, call), device, repeats
    )
    return forward + backward


def linear_seconds(
    parameters: int, dim: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the seconds per token of matrix products with ``parameters``, of width ``dim``, forward and backward."""
    tokens = _TOKENS[device.type]
    generator = torch.Generator(device).manual_seed(0)  # as of random_rows
    x, weight = (
        torch.randn(n, dim, device=device, generator=generator).to(dtype)
        for n in (tokens, dim)
    )
    seconds = 1e-3 * median_milliseconds(lambda: x @ weight.t(), device, _REPEATS)
    return _LINEAR_PASSES * parameters * seconds / (tokens * dim * dim)


def link_rate(
    transport: Transport,
    rank: int,
    sends: np.ndarray,
    device: torch.device,
    group: dist.ProcessGroup,
) -> tuple[float, float]:
    """Return the bytes per second into the slowest rank, and the seconds of an exchange without bytes.

    All ranks of the transport, which are those of the gloo ``group``, must call it together.

    Args:
        sends: bool [ranks, ranks] whether the first sends rows to the second, at the same time as all others.
    """
    senders = int(sends.sum(axis=0).max())

    def measure(num_bytes: int) -> tuple[int, float]:
        per_peer = max(
            1, min(num_bytes, transport.buffer_bytes) // ROW_BYTES // senders
        )
        routes = all_to_all(rank, sends, per_peer)
        rows = torch.zeros(
            per_peer * int(sends[rank].sum()),
            ROW_BYTES,
            dtype=torch.uint8,
            device=device,
        )

        def exchange() -> None:
            pending = transport.start(
                [[rows]], routes, "measurement of the link", transport.begin()
            )
            pending.wait()
            pending.release()

        seconds = 1e-3 * median_milliseconds(exchange, device, _REPEATS)
        return per_peer * senders * ROW_BYTES, slowest([seconds], group)[0]

    _, least = measure(1)
    few, seconds = measure(_FEW_BYTES)
    received, seconds = measure(
        min(_MESSAGE_BYTES[device.type], int(few * _MESSAGE_SECONDS / seconds))
    )
    return received / max(seconds - least, seconds / 2), least


def slowest(values: list[float], group: dist.ProcessGroup) -> list[float]:
    """Return the maximum of each value over the ranks of a gloo group."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor.tolist()
