# SPDX-License-Identifier: BSD-3-Clause
"""Core attention in plain PyTorch, without torchtitan: python examples/two_ranks.py.

Two processes hold documents of different lengths. Each computes what the plan gives it; outputs and gradients come back
to the rank that holds the tokens, and are those of ordinary attention.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan_cad.planning import (
    AttentionShape,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.ops import core_attention
from torchtitan_cad.runtime.transport.collective import CollectiveTransport

DOCUMENTS = [[2048], [512, 512, 1024]]
"""Tokens of the documents of each rank."""
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=32, dtype_bytes=4)


def train(rank: int, store: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(DOCUMENTS)
    )
    device = torch.device("cpu")
    kernel = get_kernel("auto", device, SHAPE)
    transport = CollectiveTransport(dist.group.WORLD)
    engine = CoreAttentionEngine(
        kernel, transport, rank=rank, device=device, scale=SHAPE.head_dim**-0.5
    )
    register_engine("example", engine)

    # All ranks know all lengths, so all make the same plan; it is used under a key.
    documents = iter(range(sum(map(len, DOCUMENTS))))
    layout = TokenLayout.from_segments(
        [[(next(documents), 0, n) for n in lengths] for lengths in DOCUMENTS]
    )
    plan = make_plan(layout, SHAPE, PlannerConfig())
    engine.add_plan(7, plan)

    torch.manual_seed(rank)
    tokens = sum(DOCUMENTS[rank])
    heads = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
    q, k, v = (
        torch.randn(tokens, n, SHAPE.head_dim, requires_grad=True) for n in heads
    )
    out, _ = core_attention(q, k, v, torch.tensor(7), "example")
    out.square().sum().backward()

    gradients = [x.grad for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    reference = ordinary_attention(q, k, v, DOCUMENTS[rank])
    reference.square().sum().backward()
    torch.testing.assert_close(out, reference)
    torch.testing.assert_close(
        gradients, [x.grad for x in (q, k, v)], rtol=1e-4, atol=1e-4
    )
    work = f"{plan.stats.loads_before[rank]} tiles at home, {plan.stats.loads[rank]} computed here"
    print(
        f"rank {rank}: {work}; output and gradients agree with ordinary attention",
        flush=True,
    )
    dist.destroy_process_group()


def ordinary_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Causal attention of each document. q [T, Hq, D], k and v [T, Hkv, D]."""
    parts = [[part.transpose(0, 1) for part in x.split(lengths)] for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    outs = [
        attend(*qkv, is_causal=True, enable_gqa=True)
        for qkv in zip(*parts, strict=True)
    ]
    return torch.cat([out.transpose(0, 1) for out in outs])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"{folder}/store",), nprocs=len(DOCUMENTS))
