# SPDX-License-Identifier: BSD-3-Clause
"""Ping-pong over transformer blocks in plain PyTorch, beside the same blocks undivided, on any device."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lib.accuracy import assert_as_exact
from tests.lib.plans import random_plan
from tests.lib.tables import check_plan
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.planning import (
    Plan,
    PlannerConfig,
    make_plan,
)
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.ops import core_attention

WHOLE = "plain_blocks whole"
NANO_BATCHES = "plain_blocks nano-batches"
Prepare = Callable[[PingPong], None]


class PlainBlock(nn.Module):
    """A pre-norm block with rotary positions and a gated MLP, and its own ``BlockView``."""

    traceable = True
    engine = ""
    rescale = None

    def __init__(self, dim, shape):
        super().__init__()
        self.head_dim = shape.head_dim
        queries = shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        self.norms = nn.ModuleList([nn.RMSNorm(dim, eps=1e-5) for _ in range(2)])
        self.widths = [queries, keys, keys]
        self.wqkv = nn.Linear(dim, sum(self.widths), bias=False)
        self.wo = nn.Linear(queries, dim, bias=False)
        self.w13 = nn.Linear(dim, 4 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    @property
    def block(self) -> nn.Module:
        return self

    def project(self, x, rope, positions):
        assert positions is None
        rows = self.wqkv(self.norms[0](x)).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in rows)
        q = _rotate(q, rope)
        k = _rotate(k, rope)
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)

    def finish(self, x, attended):
        h = x + self.wo(attended)
        gate, up = self.w13(self.norms[1](h)).chunk(2, dim=-1)
        return h + self.w2(F.silu(gate) * up)


def _rotate(rows: Tensor, rope) -> Tensor:
    """Rotates [B, S, heads, head_dim] by angles [S, head_dim / 2]."""
    cos, sin = (table[:, None].to(rows.dtype) for table in (rope.cos(), rope.sin()))
    first, second = rows.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class NanoBatchesAndWhole:
    """Blocks, rows of every rank and plans: an undivided one, and some for nano-batches that cut documents.

    Args:
        dim: of the model; ``shape``: of its attention.
        transports: of the ranks, which are threads; None for one alone.
        microbatches: the number that are in flight together, each with plans of its own.
    """

    def __init__(
        self,
        device,
        dtype,
        dim,
        seq_len: int,
        shape,
        seed,
        *,
        rows: int = 2,
        transports: Sequence[Any] = (None,),
        microbatches: int = 1,
        keep: bool = False,
        kernel=None,
    ):
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.dtype = dtype
        blocks = [PlainBlock(dim, shape) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        xs = torch.randn(len(transports), microbatches, rows, seq_len, dim)
        self.blocks.xs = nn.Parameter(xs)  # has a gradient, as what is embedded
        self.blocks.to(device, dtype)
        rates = 1e4 ** -(torch.arange(shape.head_dim // 2) / (shape.head_dim // 2))
        self.rope = torch.outer(torch.arange(seq_len), rates).to(device)

        batch = BatchShape(rows, seq_len, rows)
        begins_of_rows = np.arange(0, rows * seq_len, seq_len)
        starts = [
            np.union1d(begins_of_rows, rng.choice(rows * seq_len, 9))
            for _ in transports
        ]
        halves = nano_layouts(starts, [batch] * len(starts), 0, 1, nano_batches=2)
        plans = [_any_plan(rng, layout, shape) for layout in halves * microbatches]
        kernel = kernel or get_kernel("auto", device, shape)

        def add_engine(name, plans, own, rank=0):
            engine = CoreAttentionEngine(
                kernel,
                own,
                rank=rank,
                device=device,
                scale=shape.head_dim**-0.5,
                kept_bytes=math.inf if keep else 0.0,
            )
            for key, plan in enumerate(plans):
                engine.add_plan(key, plan)
            register_engine(name, engine)

        home = PlannerConfig(planner="home")
        for rank, transport in enumerate(transports):
            (layout,) = nano_layouts(starts[rank : rank + 1], [batch], 0, 1, 1)
            add_engine(f"{WHOLE} {rank}", [make_plan(layout, shape, home)], None)
            add_engine(f"{NANO_BATCHES} {rank}", plans, transport, rank)

    def run_nano_batches(
        self,
        blocks: nn.ModuleList,
        backend: str | None = None,
        rank=0,
        prepare: Prepare | None = None,
    ) -> Callable[..., Tensor]:
        """By the ping-pong loop; ``backend`` compiles its segments, ``prepare`` may change the loop before."""
        views: Any = list(blocks)
        loop = PingPong(views, f"{NANO_BATCHES} {rank}")
        if prepare:
            prepare(loop)
        if backend:
            loop.compile(backend)
        return lambda number=0: loop(
            blocks.xs[rank, number], self.rope, None, 2 * number
        )

    def run_whole(self, blocks: nn.ModuleList, rank=0) -> Callable[..., Tensor]:
        """Block by block; linear work in the blocks' dtype, core attention always in ``dtype``."""

        def run(number=0):
            x = blocks.xs[rank, number]
            for block in blocks:
                qkv = block.project(x, self.rope, None)
                out, _ = core_attention(
                    *(rows.to(self.dtype) for rows in qkv),
                    torch.tensor(0),
                    f"{WHOLE} {rank}",
                )
                x = block.finish(x, out.to(x.dtype).view(*x.shape[:2], -1))
            return x

        return run

    def copied(self, dtype) -> nn.ModuleList:
        return copy.deepcopy(self.blocks).to(dtype)

    def check(self, backend: str | None = None):
        """Output and gradients of one rank's nano-batches err at most twice as much as those of the whole.

        The measure is linear work in a wider dtype: what rounding alone may do.
        """
        wider = torch.float64 if self.dtype == torch.float32 else torch.float32
        halved = self.copied(self.dtype)
        whole = self.copied(self.dtype)
        exact = self.copied(wider)
        results = []
        for blocks, run in (
            (halved, self.run_nano_batches(halved, backend)),
            (whole, self.run_whole(whole)),
            (exact, self.run_whole(exact)),
        ):
            out = run()
            out.to(wider).square().mean().backward()
            gradients = [parameter.grad for parameter in blocks.parameters()]
            results.append([out, *gradients])
        for three in zip(*results, strict=True):
            assert_as_exact(*three)


def _any_plan(rng, layout, shape) -> Plan:
    """Any plan; one of the planner's where some queries are left out."""
    if layout.seg_attends.all():
        plan = random_plan(rng, layout, shape, aligned=False, split_kv=True)
    else:
        plan = make_plan(
            layout,
            shape,
            PlannerConfig(tolerance=0.0, min_shard=int(rng.choice([1, 4])), tile=1),
        )
    check_plan(plan)
    return plan
