# SPDX-License-Identifier: BSD-3-Clause
"""The choice of a kernel and replayed plans, at the sizes of this run."""

import time

import torch

from bench import replay
from bench.gpu.parts import Emit
from bench.record import Record
from tests.lib.workloads import SHAPE
from torchtitan_cad.planning import AttentionShape, warm_up
from torchtitan_cad.runtime.kernels import select
from torchtitan_cad.runtime.kernels.base import AttentionKernel, VarlenArgs
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.rates import time_attention

TOY_REPLAY = replay.Options(
    "cpu",
    ranks=(2, 3),
    tokens_per_rank=256,
    longest=512,
    heads=(4, 2),
    head_dim=16,
    repeats=1,
)


def warm_planner(device: str, emit: Emit) -> None:
    """Has the planner's code compiled, which the processes of other parts load."""
    lines: list[str] = []
    begin = time.perf_counter()
    warm_up(lines.append)
    emit("seconds", time.perf_counter() - begin)
    emit("log", lines)


def kernels(device: str, emit: Emit) -> None:
    """Milliseconds of every kernel that cad.kernel = "auto" chooses from, both passes, and why others are out."""
    where = torch.device(device)
    shape = AttentionShape(2, 1, 16, 2)
    tokens = 256
    found: dict[str, AttentionKernel] = {"cpu": get_kernel("cpu", where)}
    if device == "cuda":
        shape = SHAPE
        tokens = 16_384
        found, reasons = select.usable_kernels("auto", where, shape)
        emit("others", reasons)
    call = VarlenArgs.from_numpy(
        [0, tokens], [0, tokens], causal=True, scale=0.1, device=where
    )
    rows: list[Record] = []
    for name, kernel in found.items():
        milliseconds = time_attention(kernel, shape, torch.bfloat16, call, repeats=3)
        rows.append({"name": name, "milliseconds": milliseconds})
    emit("kernels", rows)


def replayed(device: str, emit: Emit) -> None:
    """The plan of 64 ranks: the slowest rank's time over the mean of all without moving anything."""
    options = replay.Options(device, ranks=(64,), tokens_per_rank=32_768, repeats=3)
    if device == "cpu":
        options = TOY_REPLAY
    rows: list[Record] = []
    for num_ranks in options.ranks:
        figures = replay.measure(num_ranks, options)
        rows += replay.passes(figures)
        emit("plans", rows)
        emit(f"milliseconds_of_{num_ranks}_ranks", figures)
