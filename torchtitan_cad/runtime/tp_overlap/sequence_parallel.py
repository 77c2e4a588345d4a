# SPDX-License-Identifier: BSD-3-Clause
"""Sequence-parallel exchange between two linear layers, as a start and a wait (Korthikanti et al. 2022, fig. 6).

Between a row-wise and a column-wise layer are a reduce-scatter over the sequence, the residual, RMSNorm and an
all-gather. They all run on one side stream, so that one piece of other work hides both collectives:

    boundary = Boundary(side_stream, group)
    token = boundary.start(partial, residual, weight, eps)   # backward waits for the gradients
    hidden, gathered = boundary.wait(token)                  # backward starts them

``group`` must not be used by anything else between a start and its wait, forward or backward.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from torchtitan_cad.runtime.tp_overlap.side_stream import PendingWork, SideStream, Work

# Their names up to torch 2.12 are deprecated.
_reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Boundary:
    """One pass between two linear layers.

    Args:
        side_stream: where it runs.
        group: the ranks of tensor parallelism, P of them.
    """

    def __init__(self, side_stream: SideStream, group: dist.ProcessGroup) -> None:
        self.side_stream = side_stream
        self.group = group
        self.started: tuple[Tensor | None, float, bool] = None, 0.0, False
        """Arguments of the last start, for its wait: weight, eps, and True if there is a partial."""
        self._pending: PendingWork | None = None

    def start(
        self,
        partial: Tensor | None,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Start h = residual + reduce_scatter(partial) and g = all_gather(rms_norm(h)).

        Args:
            partial: [B, S, dim] this rank's summand; None: h is the residual.
            residual: [B, S / P, dim] this rank's part of the sequence.
            weight: [dim] weight of the norm, equal on all ranks, as is its gradient. None: no norm and no all-gather.
            eps: epsilon of the norm.

        Returns:
            A token for ``wait``.
        """
        self.started = weight, eps, partial is not None
        return _Start.apply(self, partial, residual, weight)

    def wait(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for h [B, S / P, dim] and g [B, S, dim], empty without a norm."""
        return _Wait.apply(self, token)

    def launch(self, direction: str, work: Work, *inputs: Tensor | None) -> None:
        """Start ``work`` on ``inputs`` on the side stream; for autograd functions, once before each ``collect``."""
        with record_function(f"cad/exchange tp {direction}"):
            self._pending = self.side_stream.start(
                work, [x for x in inputs if x is not None]
            )

    def collect(self, direction: str) -> tuple[Tensor, ...]:
        """Wait for the work started last and return its results."""
        pending = self._pending
        self._pending = None
        assert pending is not None, "a wait follows a start"
        with record_function(f"cad/wait tp {direction}"):
            return pending.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        boundary: Boundary,
        partial: Tensor | None,
        residual: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        group = boundary.group
        _, eps, _ = boundary.started

        def work() -> tuple[Tensor, ...]:
            h = (
                residual.detach()
                if partial is None
                else residual + reduce_scatter(partial, group)
            )
            if weight is None:
                return h, h.new_empty(0)
            return h, all_gather(F.rms_norm(h, weight.shape, weight, eps), group)

        boundary.launch("forward", work, partial, residual, weight)
        ctx.boundary = boundary
        ctx.needed = (partial is not None, True, weight is not None)
        return residual.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.boundary.collect("backward")
        return None, *(
            x if needed else None
            for x, needed in zip(gradients, ctx.needed, strict=True)
        )


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, boundary: Boundary, token: Tensor) -> tuple[Tensor, Tensor]:
        h, g = boundary.collect("forward")
        ctx.boundary = boundary
        weight, ctx.eps, ctx.reduces = boundary.started
        ctx.save_for_backward(*(() if weight is None else (h, weight)))
        return h, g

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dg: Tensor) -> tuple[Tensor | None, ...]:
        boundary = ctx.boundary
        normed = ctx.saved_tensors
        eps = ctx.eps
        reduces = ctx.reduces
        group = boundary.group

        def work() -> tuple[Tensor, ...]:
            """Gradients of partial, residual and weight."""
            dresidual = dh
            dweight = dh.new_empty(0)
            if normed:
                h, weight = normed
                through_norm, dweight = rms_norm_backward(
                    reduce_scatter(dg, group), h, weight, eps
                )
                dresidual = dh + through_norm
                dist.all_reduce(dweight, group=group)
            return (
                all_gather(dresidual, group) if reduces else dh.new_empty(0),
                dresidual,
                dweight,
            )

        boundary.launch("backward", work, dh, dg, *normed)
        return None, dh.new_zeros(1)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum x [B, S, dim] over the ranks; returns this rank's part of the sequence [B, S / P, dim]."""
    batch, length, dim = x.shape
    parts = (
        x.view(batch, group.size(), length // group.size(), dim)
        .transpose(0, 1)
        .flatten(0, 1)
        .contiguous()
    )
    part = parts.new_empty(batch, length // group.size(), dim)
    _reduce_scatter(part, parts, group=group)
    return part


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' parts of the sequence x [B, S / P, dim] to [B, S, dim]."""
    parts = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (group.size(), x.shape[0])).transpose(0, 1).flatten(1, 2)


def rms_norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``F.rms_norm(x, weight.shape, weight, eps)``, x [..., dim] and weight [dim], in fp32."""
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(precise)
    dout = dout.to(precise)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    dnormed = dout * weight
    dx = scale * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    dweight = (dout * normed).flatten(0, -2).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype)
