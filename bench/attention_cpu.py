"""Speed of the CPU attention kernel against PyTorch's fused attention, causal documents, fp32.

Run: python bench/attention_cpu.py [--threads 1] [--output attention_cpu.json]. Tokens a second, the best of three runs.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F

from torchtitan_cad.runtime.kernels import VarlenArgs, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged, row_delta

# (query heads, key heads, head dim, document lengths)
CASES = [
    (8, 8, 32, [4096]),
    (16, 4, 16, [1024] * 4),
    (8, 2, 64, [4096]),
    (8, 2, 128, [2048]),
    (4, 2, 32, [200] * 40),
]


def seconds(function: Callable[[], object], repeats: int = 3) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(num_q_heads: int, num_kv_heads: int, dim: int, lengths: list[int]) -> dict[str, float]:
    """Tokens a second, forward and forward plus backward, of the kernel and of one fused call per document."""
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    total, kernel = ends[-1], get_kernel("cpu", "cpu")
    call = VarlenArgs.from_numpy(ends, ends, causal=True, scale=dim**-0.5)
    q, dout = torch.randn(total, num_q_heads, dim), torch.randn(total, num_q_heads, dim)
    k, v = torch.randn(total, num_kv_heads, dim), torch.randn(total, num_kv_heads, dim)
    out, lse = kernel.forward(q, k, v, call)

    def fused(train: bool) -> None:
        for lo, hi in pairwise(ends):
            heads = [x[lo:hi].transpose(0, 1).unsqueeze(0).requires_grad_(train) for x in (q, k, v)]
            result = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=num_q_heads != num_kv_heads)
            if train:
                torch.autograd.grad(result, heads, dout[lo:hi].transpose(0, 1).unsqueeze(0))

    forward = seconds(lambda: kernel.forward(q, k, v, call))
    backward = seconds(lambda: kernel.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call))
    return {
        "forward": total / forward,
        "fused_forward": total / seconds(lambda: fused(False)),
        "train": total / (forward + backward),
        "fused_train": total / seconds(lambda: fused(True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--output", help="write the results to this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads, thousand tokens a second")
    print("heads   dim  documents    forward  (fused)  forward+backward  (fused)")
    results = []
    for num_q_heads, num_kv_heads, dim, lengths in CASES:
        speed = measure(num_q_heads, num_kv_heads, dim, lengths)
        results.append({"heads": [num_q_heads, num_kv_heads], "head_dim": dim, "lengths": lengths, **speed})
        k = {name: value / 1e3 for name, value in speed.items()}
        print(
            f"{num_q_heads:2}:{num_kv_heads:<2}  {dim:4}  {len(lengths):3} x {lengths[0]:<5}  {k['forward']:7.1f}"
            f"  {k['fused_forward']:7.1f}  {k['train']:16.1f}  {k['fused_train']:7.1f}"
        )
    if args.output:
        with open(args.output, "w") as file:
            json.dump({"torch": torch.__version__, "threads": args.threads, "cases": results}, file, indent=2)


if __name__ == "__main__":
    main()
