"""The benchmarks of attention, kernels and plans, at the sizes of this run."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench import attention_gpu, replay
from bench.gpu.parts import Emit
from torchtitan_cad.planning import AttentionShape, Profile, warm_up
from torchtitan_cad.runtime.kernels import get_kernel, select
from torchtitan_cad.runtime.timing import median_milliseconds

SHARDS = (128, 256, 512, 1024, 2048)


def warm_planner(device: str, emit: Emit) -> None:
    """Has the planner's code compiled, which the processes of other parts load."""
    lines: list[str] = []
    begin = time.perf_counter()
    warm_up(lines.append)
    emit("seconds", time.perf_counter() - begin)
    emit("log", lines)


def kernels(device: str, emit: Emit) -> None:
    """Milliseconds of every kernel that cad.kernel = "auto" chooses from, or why it is out."""
    if device == "cuda":
        outcomes, reasons = select.compare_kernels(torch.device(device, 0), attention_gpu.Options().shape)
        emit("others", reasons)
    else:
        trial = select.Trial(get_kernel("cpu", device), torch.device(device), AttentionShape(2, 1, 16, 2), rows=256)
        outcomes = [(get_kernel("cpu", device), trial.outcome(get_kernel("cpu", device)))]
    emit("kernels", [{"name": str(kernel), "milliseconds": outcome} for kernel, outcome in outcomes])


def attention(device: str, emit: Emit) -> None:
    """TFLOP/s of one call of shards, and their share of the undivided document's."""
    options = attention_gpu.Options(device, shards=SHARDS)
    if device == "cpu":
        options = attention_gpu.Options(device, length=256, shards=(64, 128), heads=(4, 2), head_dim=16, repeats=1)
    kernel = get_kernel(options.kernel, device, options.shape)
    emit("kernel", str(kernel))
    whole = attention_gpu.measure_attention(kernel, options.length, options)
    emit("undivided", whole)
    rows = []
    for shard in options.shards:
        row = attention_gpu.measure_attention(kernel, shard, options)
        for name in ("forward", "backward"):
            row[f"{name}_share"] = row[f"{name}_tflops"] / whole[f"{name}_tflops"]
        rows.append(row)
        emit("shards", rows)


def bandwidth(device: str, emit: Emit) -> None:
    """GB/s of every memory-bound kernel, and its share of a copy's."""
    from bench.gpu.putting import Putting, programs
    from torchtitan_cad.runtime.triton import put

    options = attention_gpu.Options(device)
    if device == "cpu":
        options = attention_gpu.Options(device, heads=(4, 2), head_dim=16, rows=64, repeats=1)
    rows = attention_gpu.measure_bandwidth(options)
    emit("kernels", _with_shares(rows))
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    everywhere = 4 * torch.cuda.get_device_properties(where).multi_processor_count if device == "cuda" else 2
    putting = Putting(options.rows if device == "cuda" else 40, where)
    for name, most in (("pack", put.PROGRAMS), ("pack on all SMs", everywhere)):
        with programs(most):
            milliseconds = median_milliseconds(putting.run, where, options.repeats)
        rows.append({"name": name, "ms": milliseconds, "gigabytes_per_second": putting.num_bytes / milliseconds / 1e6})
    emit("kernels", _with_shares(rows))


def _with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with its share of the first one's rate, the copy's."""
    return [{**row, "share": row["gigabytes_per_second"] / rows[0]["gigabytes_per_second"]} for row in rows]


def replayed(device: str, emit: Emit) -> None:
    """The plan of 8 and of 64 ranks: the slowest rank's time over the mean of all without moving anything."""
    options = replay.Options(device, ranks=(8, 64), tokens_per_rank=32_768, repeats=1)
    if device == "cpu":
        options = replay.Options(
            device, ranks=(2, 3), tokens_per_rank=256, longest=512, heads=(4, 2), head_dim=16, repeats=1
        )
    rows = []
    for num_ranks in options.ranks:
        figures = replay.measure(num_ranks, options)
        for name in ("forward", "backward"):
            home, planned = figures["home"][name], figures["planned"][name]
            rows.append(
                {
                    "ranks": num_ranks,
                    "pass": name,
                    "home_ms": home["makespan"],
                    "home_over_mean": home["makespan"] / home["mean"],
                    "planned_ms": planned["makespan"],
                    "planned_max_over_mean": planned["makespan"] / planned["mean"],
                    "planned_over_mean": planned["makespan"] / home["mean"],
                    "speedup": figures[f"{name}_speedup"],
                    "planned_load": figures["planned"]["max_over_mean_planned"],
                    "copied_megabytes": figures["planned"]["copied_bytes_max"] / 1e6,
                }
            )
        emit("plans", rows)
        emit(f"milliseconds_of_{num_ranks}_ranks", figures)


def profile(device: str, emit: Emit) -> None:
    """What `torchtitan-cad profile` measures with its defaults on a GPU."""
    from torchtitan_cad.cli import profile_command

    measurement = profile_command.Options(device="cuda")
    if device != "cuda":
        measurement = profile_command.Options(
            2, 1, 16, device="cpu", q_lengths=(16, 32), kv_lengths=(128, 256), repeats=1
        )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "profile.json")
        profile_command.run(output, measurement=measurement)
        result, figures = Profile.read(output), json.loads(output.read_text())
    emit("table", profile_command.report(result).splitlines())
    emit("noisy_cells", len(result.noisy_cells()))
    emit("profile", figures)
