# SPDX-License-Identifier: BSD-3-Clause
"""Rows of ranks to attend to, the engine over them on threaded ranks, and what it is compared with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.lib.kernels_reference import assert_results_as_exact, dense_in_fp64, offsets
from tests.lib.threaded import BUFFER_BYTES, run_ranks, thread_transports
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import VarlenArgs, compute_dtype
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.select import get_kernel

CPU = torch.device("cpu")
SHAPES = {
    "gqa 8:2": AttentionShape(8, 2, 16, 4),
    "mha": AttentionShape(4, 4, 16, 4),
    "mla": AttentionShape(4, 4, 24, 4, value_dim=16, shared_dim=8),
}


@dataclass
class Tensors:
    """Per rank: q, k, v, the gradient of the output and, where there are, that of the log-sum-exp, and the part of keys
    that all heads share."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    dout: list[Tensor]
    dlse: list[Tensor] = field(default_factory=list)
    shared: list[Tensor] = field(default_factory=list)

    @classmethod
    def random(
        cls, layout, shape, dtype=torch.float32, *, with_dlse: bool = False
    ) -> "Tensors":
        counts = layout.tokens_per_rank.tolist()
        heads = shape.num_heads
        kv_heads = shape.num_kv_heads

        def rows(heads, dim):
            return [torch.randn(n, heads, dim).to(dtype) for n in counts]

        keys = rows(kv_heads, shape.key_dim), rows(kv_heads, shape.out_dim)
        made = cls(rows(heads, shape.head_dim), *keys, rows(heads, shape.out_dim))
        if shape.shared_dim:
            made.shared = rows(1, shape.shared_dim)
        if with_dlse:
            made.dlse = [
                torch.randn(n, heads, dtype=compute_dtype(dtype)) for n in counts
            ]
        return made

    def of_rank(self, rank) -> list[Tensor]:
        """Without ``shared``."""
        kinds = (self.q, self.k, self.v, self.dout, self.dlse)
        return [xs[rank] for xs in kinds if xs]

    def shared_of_rank(self, rank) -> Tensor | None:
        return self.shared[rank] if self.shared else None

    def mapped(self, change: Callable[[list[Tensor]], list[Tensor]]) -> "Tensors":
        return Tensors(*(change(xs) if xs else [] for xs in vars(self).values()))

    def to(self, device: torch.device | str) -> "Tensors":
        return self.mapped(lambda xs: [x.to(device) for x in xs])


def empty_rows(tokens, shape, device=CPU) -> tuple[Any, ...]:
    """bf16 q, k, v, dout, and what heads of keys share or None."""
    heads = shape.num_heads
    kv_heads = shape.num_kv_heads
    sizes = [
        (heads, shape.head_dim),
        (kv_heads, shape.key_dim),
        (kv_heads, shape.out_dim),
        (heads, shape.out_dim),
    ]
    rows = [
        torch.empty(tokens, *size, dtype=torch.bfloat16, device=device)
        for size in (*sizes, (1, shape.shared_dim))
    ]
    return *rows[:4], rows[4] if shape.shared_dim else None


class SquareKernel(CpuKernel):
    """Takes no causal task but squares."""

    squares_only = True

    def forward(self, q, k, v, call):
        self._require_squares(call)
        return super().forward(q, k, v, call)

    def backward(self, *args):
        self._require_squares(args[-1])
        return super().backward(*args)

    def _require_squares(self, call):
        assert not call.causal or np.array_equal(call.cu_q_host, call.cu_k_host)


def execute(
    plan,
    tensors,
    *,
    backward: Plan | None = None,
    keep: bool = False,
    kept_bytes: float = 0.0,
    hosts: Sequence[int] | None = None,
    squares_only: bool = False,
    buffer_bytes=BUFFER_BYTES,
    transports: Sequence[Any] = (),
    servers=None,
) -> list[list[Tensor]]:
    """Results of ``run_layer`` by rank; ``squares_only``: ``SquareKernel``.

    ``servers``: that have joined. ``hosts``: rows travel over the memory of every host, and by messages between hosts.
    """
    num_ranks = plan.layout.num_ranks
    transports = transports or thread_transports(num_ranks, buffer_bytes, hosts)
    scale = plan.shape.head_dim**-0.5

    def body(rank):
        engine = CoreAttentionEngine(
            SquareKernel() if squares_only else get_kernel("cpu", CPU),
            transports[rank],
            rank=rank,
            device=CPU,
            scale=scale,
            kept_bytes=math.inf if keep else kept_bytes,
        )
        engine.servers = servers
        engine.add_plan(7, plan)
        engine.add_plan(8, backward or plan)
        return run_layer(engine, tensors, 7, 8)

    return run_ranks(num_ranks, body)


def run_layer(engine, tensors, key, backward_key: int) -> list[Tensor]:
    """[out, lse, dq, dk, dv, maybe dshared] of the engine's rank."""
    q, k, v, dout, *dlse = tensors.of_rank(engine.rank)
    shared = tensors.shared_of_rank(engine.rank)
    results = engine.begin_forward(q, k, v, key, shared).run()
    saved = Saved(q, k, v, *results, shared=shared)  # type: ignore[misc]
    gradients = engine.begin_backward(dout, saved, backward_key, *dlse).run()
    return [saved.out, saved.lse, *gradients]


def dense(layout, tensors, window=None) -> list[list[Tensor]]:
    """The fp64 reference by autograd; same structure as ``execute``."""
    cu = offsets(layout.doc_lengths.tolist())
    one = on_one_rank(layout, tensors)
    (q, k, v, dout, *dlse), shared = one.of_rank(0), one.shared_of_rank(0)
    own = k.shape[2]
    scale = q.shape[-1] ** -0.5
    call = VarlenArgs.from_numpy(cu, cu, causal=True, scale=scale, window=window)
    if shared is not None:
        k = torch.cat([k, shared.repeat(1, k.shape[1], 1)], dim=2)
    out, lse, dq, dk, dv = dense_in_fp64(q, k, v, dout, call, *dlse)
    dshared = [] if shared is None else [dk[..., own:].sum(dim=1, keepdim=True)]
    return by_rank(layout, [out, lse, dq, dk[..., :own], dv, *dshared])


def assert_same_bits(one: list[list[Tensor]], other: list[list[Tensor]]):
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_ranks_as_exact(
    results: list[list[Tensor]],
    undivided: list[list[Tensor]],
    reference: list[list[Tensor]],
):
    """The results of all ranks together err at most twice as much as undivided attention; layouts as of ``execute``."""
    joined = (
        list(map(torch.cat, zip(*ranks, strict=True)))
        for ranks in (results, undivided, reference)
    )
    assert_results_as_exact(*joined)


def gathered(layout) -> TokenLayout:
    """The same documents whole on one rank: what undivided attention is."""
    return TokenLayout.from_segments(
        [
            [
                (d, 0, n)
                for d, n in zip(
                    layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True
                )
            ]
        ]
    )


def on_one_rank(layout, tensors) -> Tensors:
    order = layout_order(layout)
    return tensors.mapped(lambda xs: [torch.cat(xs)[order]])


def undivided(layout, shape, tensors) -> list[list[Tensor]]:
    """The same kernel over whole documents on one rank, in the layout of ``execute``."""
    one = on_one_rank(layout, tensors)
    return by_rank(
        layout,
        execute(make_plan(gathered(layout), shape, PlannerConfig(planner="home")), one)[
            0
        ],
    )


def by_rank(layout, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Rows ordered by (document, position) back to the ranks, in the layout of ``execute``."""
    order = layout_order(layout)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    sizes = layout.tokens_per_rank.tolist()
    return [
        list(parts)
        for parts in zip(*(x[back].split(sizes) for x in tensors), strict=True)
    ]


def layout_order(layout) -> Tensor:
    """Index of every token among all ranks' rows, by (document, position)."""
    places = []
    row = 0
    for segments in layout.segments():
        for doc, start, length in segments:
            places += [(doc, start + i, row + i) for i in range(length)]
            row += length
    return torch.tensor([r for _, _, r in sorted(places)])
