"""Speed of the attention kernels on a GPU, and of the kernels around them.

    python -m bench.attention_gpu [--kernel flash_attn] [--output bench/results/attention_gpu.json]

Attention: one undivided causal document against one call of many shards, each the last rows of such a document with
all its keys, with as much work altogether. Fused rebatching costs nothing where both reach the same rate. TFLOP/s count
4 D operations forward and 10 D backward per query head and query-key pair.

Bandwidth: gathering, merging and summing rows, and what backward needs beside dO (delta, and the surrogate of O), in
bytes read and written, beside a copy.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.attend import RowSpace
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.kernels import AttentionKernel, VarlenArgs, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.profiling import device_name
from torchtitan_cad.runtime.timing import median_milliseconds


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    device: str = "cuda"
    kernel: str = "auto"
    """As the key cad.kernel."""
    length: int = 16_384
    """Tokens of the undivided document, and of the prefix that shards attend to."""
    shards: tuple[int, ...] = (128, 256, 512, 2048)
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    rows: int = 65_536
    """Rows of query heads that are gathered, merged and summed."""
    repeats: int = 20
    output: Path | None = None
    """JSON file for the figures."""

    @property
    def shape(self) -> AttentionShape:
        """Of the attention."""
        return AttentionShape(*self.heads, self.head_dim, dtype_bytes=2)


def visible_pairs(num_q: int, num_k: int, causal: bool = True) -> int:
    """Query-key pairs of the last ``num_q`` rows of a document of ``num_k`` tokens."""
    return num_q * num_k - causal * num_q * (num_q - 1) // 2


def shard_call(kernel: AttentionKernel, shard: int, options: Options) -> VarlenArgs:
    """As many shards as have the pairs of the undivided document; unmasked if they are no squares but must be."""
    length, causal = options.length, shard == options.length or not kernel.squares_only
    tasks = max(1, round(visible_pairs(length, length) / visible_pairs(shard, length, causal)))
    cu_q, cu_k = ([step * task for task in range(tasks + 1)] for step in (shard, length))
    return VarlenArgs.from_numpy(cu_q, cu_k, causal=causal, scale=options.head_dim**-0.5, device=options.device)


def measure_attention(kernel: AttentionKernel, shard: int, options: Options) -> dict[str, Any]:
    """TFLOP/s of one call of shards; ``shard`` = the document's length is the undivided document."""
    device, dim = torch.device(options.device), options.head_dim
    call = shard_call(kernel, shard, options)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, dim, device=device, dtype=dtype)

    tasks = len(call.q_start)
    num_q, num_k = tasks * shard, tasks * options.length
    q, dout = rows(num_q, options.heads[0]), rows(num_q, options.heads[0])
    k, v = rows(num_k, options.heads[1]), rows(num_k, options.heads[1])
    out, lse = kernel.forward(q, k, v, call)
    delta = row_delta(dout, out)
    forward = median_milliseconds(lambda: kernel.forward(q, k, v, call), device, options.repeats)
    backward = median_milliseconds(
        lambda: kernel.backward(dout, q, k, v, Merged(lse, delta), call), device, options.repeats
    )
    work = tasks * visible_pairs(shard, options.length, call.causal) * options.heads[0] * dim
    return {
        "shard": shard,
        "tasks": tasks,
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": 4 * work / forward / 1e9,
        "backward_tflops": 10 * work / backward / 1e9,
    }


def measure_bandwidth(options: Options) -> list[dict[str, Any]]:
    """Rows gathered from two places, merged two to one, and summed two to one, as after two calls or two servers; delta
    and the surrogate of O for half of them."""
    device, rows = torch.device(options.device), options.rows
    tail = (options.heads[0], options.head_dim)
    narrow = torch.randn(2 * rows, *tail, device=device, dtype=torch.bfloat16)
    lse = torch.randn(2 * rows, tail[0], device=device)
    order = np.random.default_rng(0).permutation(2 * rows)
    space, picked = RowSpace([narrow[:rows]], [narrow[rows:]]), torch.from_numpy(order).to(device)
    combination = Combination.build([order[:rows] % rows, order[rows:] % rows], rows, device)
    target = torch.empty_like(narrow)
    parts, lses = [narrow[:rows], narrow[rows:]], [lse[:rows], lse[rows:]]
    delta = row_delta(*parts)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: target.copy_(narrow), 2 * narrow.nbytes),
        "gather": (lambda: space.take(picked), 2 * narrow.nbytes),
        "merge": (lambda: combination.merge([parts, lses], narrow), (narrow.nbytes + lse.nbytes) * 3 // 2),
        "sum": (lambda: combination.add([parts], narrow), narrow.nbytes * 3 // 2),
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
        milliseconds = median_milliseconds(run, device, options.repeats)
        figures.append({"name": name, "ms": milliseconds, "gigabytes_per_second": num_bytes / milliseconds / 1e6})
    return figures


def main(options: Options) -> None:
    device = torch.device(options.device)
    kernel = get_kernel(options.kernel, device, options.shape)
    print(f"torch {torch.__version__}, {device_name(device)}, kernel {kernel}, heads {options.heads}")
    print("shard  tasks  forward: ms  TFLOP/s  of undivided  backward: ms  TFLOP/s  of undivided")
    attention = []
    for shard in (options.length, *options.shards):
        row = measure_attention(kernel, shard, options)
        attention.append(row)
        shares = [row[f"{name}_tflops"] / attention[0][f"{name}_tflops"] for name in ("forward", "backward")]
        print(
            f"{shard:5}  {row['tasks']:5}  {row['forward_ms']:11.3f}  {row['forward_tflops']:7.1f}  {shares[0]:12.3f}"
            f"  {row['backward_ms']:12.3f}  {row['backward_tflops']:7.1f}  {shares[1]:12.3f}"
        )
    bandwidth = measure_bandwidth(options)
    print("\nkernel         ms     GB/s  of copy")
    for row in bandwidth:
        share = row["gigabytes_per_second"] / bandwidth[0]["gigabytes_per_second"]
        print(f"{row['name']:9}  {row['ms']:6.3f}  {row['gigabytes_per_second']:7.1f}  {share:7.3f}")
    if options.output:
        settings = {key: value for key, value in dataclasses.asdict(options).items() if key != "output"}
        document = {"torch": torch.__version__, "device": device_name(device), "kernel": str(kernel)}
        document |= {"options": settings, "attention": attention, "bandwidth": bandwidth}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    import tyro  # only here: bench.gpu runs where it is missing

    main(tyro.cli(Options))
