# SPDX-License-Identifier: BSD-3-Clause
"""The choice of a kernel, replayed plans and the profile, at the sizes of this run."""

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from bench import replay
from bench.gpu.parts import Emit
from bench.record import Record
from tests.lib.workloads import SHAPE
from torchtitan_cad.planning import AttentionShape, Profile, warm_up
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
        passes = time_attention(kernel, shape, torch.bfloat16, call, repeats=3)
        milliseconds = sum(timing.milliseconds for timing in passes)
        rows.append({"name": name, "milliseconds": milliseconds})
    emit("kernels", rows)


def balanced(device: str, emit: Emit) -> None:
    """Plans of 8 ranks by tiles and by a profile of this device: the slowest rank over the mean of the home plan.

    The profile is measured first, with the kernel that is replayed. Forward and backward are added up.
    """
    options = replay.Options(device, tokens_per_rank=32_768, repeats=3)
    workloads = ["lognormal", "one big", "uniform"]
    num_ranks = 8
    if device == "cpu":
        options = TOY_REPLAY
        workloads = workloads[:1]
        num_ranks = 2
    rows: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder, "profile.json")
        measure_profile(device, measured)
        for workload in workloads:
            drawn = dataclasses.replace(options, workload=workload, profile=measured)
            figures = replay.measure(num_ranks, drawn)
            mean_at_home = statistics.mean(_both_passes(figures["home"]))
            row: Record = {"workload": workload}
            for name in ("home", "planned", "by profile"):
                slowest = max(_both_passes(figures[name]))
                row[f"{name}_over_mean"] = slowest / mean_at_home
                row[f"{name}_megabytes"] = figures[name]["copied_bytes_max"] / 1e6
            rows.append(row)
            emit("plans", rows)


def _both_passes(figures: Record) -> list[float]:
    """Return the milliseconds of every rank, forward and backward."""
    passes = [figures[name]["milliseconds"] for name in ("forward", "backward")]
    return [sum(times) for times in zip(*passes, strict=True)]


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


def profile(device: str, emit: Emit) -> None:
    """The profile that `torchtitan-cad profile` measures with its defaults on a GPU."""
    from torchtitan_cad.tools import profile as command

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "profile.json")
        measure_profile(device, output)
        result = Profile.read(output)
        figures = json.loads(output.read_text())
    emit("table", command.report(result).splitlines())
    emit("noisy_cells", len(result.noisy_cells()))
    emit("profile", figures)


def measure_profile(device: str, output: Path) -> None:
    """Measure a profile with the defaults of a GPU; on a CPU that of the toy's attention."""
    from torchtitan_cad.tools import profile as command

    measurement = command.Options(device="cuda")
    if device != "cuda":
        measurement = command.Options(
            4, 2, 16, device="cpu", q_lengths=(16, 32), kv_lengths=(128, 256), repeats=1
        )
    command.run(output, measurement=measurement)
