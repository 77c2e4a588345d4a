"""Ping-pong over transformer blocks in plain PyTorch, beside the same blocks undivided, on any device."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.plans import random_plan
from torchtitan_cad.integration.pingpong.loop import PingPong
from torchtitan_cad.planning import AttentionShape, PlannerConfig, make_plan
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts
from torchtitan_cad.runtime.engine import CoreAttentionEngine, register_engine
from torchtitan_cad.runtime.kernels import get_kernel
from torchtitan_cad.runtime.ops import core_attention

ROWS = 2
WHOLE, HALVES = "plain_blocks whole", "plain_blocks halves"


class PlainBlock(nn.Module):
    """A pre-norm block with rotary positions and a gated MLP, and its own ``BlockView``; TP cannot split it."""

    can_split = False

    def __init__(self, dim: int, shape: AttentionShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.norms = nn.ModuleList([nn.RMSNorm(dim, eps=1e-5) for _ in range(2)])
        self.wq, self.wk, self.wv = (nn.Linear(dim, width, bias=False) for width in (queries, keys, keys))
        self.wo = nn.Linear(queries, dim, bias=False)
        self.w1, self.w3, self.w2 = (
            nn.Linear(*sizes, bias=False) for sizes in ((dim, 2 * dim), (dim, 2 * dim), (2 * dim, dim))
        )

    @property
    def block(self) -> nn.Module:
        return self

    def project(self, x: Tensor, rope: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        assert positions is None
        normed = self.norms[0](x)
        q, k, v = (w(normed).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = (_rotate(rows, rope) for rows in (q, k))
        return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        h = x + self.wo(attended)
        normed = self.norms[1](h)
        return h + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


def _rotate(rows: Tensor, rope: Tensor) -> Tensor:
    """Rotates [B, S, heads, head_dim] by angles [S, head_dim / 2]."""
    cos, sin = (table[:, None].to(rows.dtype) for table in (rope.cos(), rope.sin()))
    first, second = rows.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class HalvesAndWhole:
    """Blocks, rows of them and plans: for the batch an undivided one, for its halves some that cut documents at random.

    Args:
        dim: of the model; ``shape``: of its attention.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, dim: int, seq_len: int, shape: AttentionShape, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.dtype = dtype
        blocks = [PlainBlock(dim, shape) for _ in range(3)]
        self.blocks = nn.ModuleList(blocks).to(device, dtype)
        self.x = torch.randn(ROWS, seq_len, dim).to(device, dtype)
        rates = 1e4 ** -(torch.arange(shape.head_dim // 2) / (shape.head_dim // 2))
        self.rope = torch.outer(torch.arange(seq_len), rates).to(device)

        rng = np.random.default_rng(seed)
        starts = [np.union1d([0, seq_len], rng.choice(ROWS * seq_len, 9))]
        kernel = get_kernel("auto", device, shape)
        for name, nano_batches in ((WHOLE, 1), (HALVES, 2)):
            engine = CoreAttentionEngine(kernel, None, rank=0, device=device, scale=shape.head_dim**-0.5)
            for key, layout in enumerate(nano_layouts(starts, BatchShape(ROWS, seq_len, ROWS), 0, 1, nano_batches)):
                plan = make_plan(layout, shape, PlannerConfig(planner="home"))
                if name == HALVES:
                    plan = random_plan(rng, layout, shape, aligned=False, split_kv=True)
                engine.add_plan(key, plan)
            register_engine(name, engine)

    def run_halves(self, blocks: nn.ModuleList, backend: str | None = None) -> Callable[[], Tensor]:
        """By the ping-pong loop; ``backend`` compiles its regions."""
        views: Any = list(blocks)
        loop = PingPong(views, HALVES)
        if backend:
            loop.compile(backend)
        return lambda: loop(self.x, self.rope, None, 0)

    def run_whole(self, blocks: nn.ModuleList) -> Callable[[], Tensor]:
        """Block by block; linear work in the blocks' dtype, core attention always in ``dtype``."""

        def run() -> Tensor:
            x = self.x.to(next(blocks.parameters()).dtype)
            for block in blocks:
                qkv = block.project(x, self.rope, None)
                out = core_attention(*(rows.to(self.dtype) for rows in qkv), torch.tensor(0), WHOLE)
                x = block.finish(x, out.to(x.dtype).view(*x.shape[:2], -1))
            return x

        return run

    def check(self, backend: str | None) -> None:
        """Output and gradients of the halves err at most twice as much as those of the whole.

        The measure is linear work in a wider dtype: what rounding alone may do.
        """
        exact, whole, halved = (copy.deepcopy(self.blocks) for _ in range(3))
        wider = torch.float64 if self.dtype == torch.float32 else torch.float32
        runs = (
            (exact, self.run_whole(exact.to(wider))),
            (whole, self.run_whole(whole)),
            (halved, self.run_halves(halved, backend)),
        )
        results = []
        for blocks, run in runs:
            out = run()
            out.to(wider).square().mean().backward()
            results.append([out, *(parameter.grad for parameter in blocks.parameters())])
        for want, *others in zip(*results, strict=True):
            scale = want.norm()
            assert scale > 0
            of_whole, of_halves = ((other.to(wider) - want).norm() / scale for other in others)
            assert of_halves <= 2 * of_whole + 8 * torch.finfo(self.dtype).eps
