# SPDX-License-Identifier: BSD-3-Clause
"""Exchanges of TP between two linear layers: the same values and gradients as without ranks, beside other work."""

import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from torchtitan_cad.runtime.tp_overlap.sequence_parallel import (
    Boundary,
    rms_norm_backward,
)
from torchtitan_cad.runtime.tp_overlap.side_stream import SideStream

BATCH = 2
LENGTH = 12
DIM = 8
EPS = 1e-5
CPU = torch.device("cpu")


def inputs(num_ranks: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Summands of all ranks, residual, weight."""
    torch.manual_seed(0)
    partials = [torch.randn(BATCH, LENGTH, DIM) for _ in range(num_ranks)]
    return partials, torch.randn(BATCH, LENGTH, DIM), torch.rand(DIM) + 0.5


def loss_of(h: Tensor, g: Tensor | None, offset: int, rank: int) -> Tensor:
    """This rank's loss: h [B, S / P, dim] are tokens from ``offset`` on; ranks use g [B, S, dim] in different ways."""
    weights = torch.arange(offset, offset + h.shape[1], dtype=h.dtype)[None, :, None]
    loss = (h.square() * (1 + weights)).sum()
    return loss if g is None else loss + (torch.sin(g) * (2 + rank)).sum()


def train_rank(
    group: dist.ProcessGroup, with_partial: bool, with_norm: bool
) -> list[Tensor | None]:
    rank = group.rank()
    size = group.size()
    partials, residual, weight = inputs(size)
    part = LENGTH // size
    partial = partials[rank].requires_grad_() if with_partial else None
    own = residual[:, rank * part : (rank + 1) * part].clone().requires_grad_()
    norm = weight.requires_grad_() if with_norm else None
    side_stream = SideStream(CPU)
    loss = 0.0
    for _ in range(2):  # twice in flight at once
        boundaries = [Boundary(side_stream, group) for _ in range(2)]
        tokens = [boundary.start(partial, own, norm, EPS) for boundary in boundaries]
        time.sleep(0.01 * rank)
        for boundary, token in zip(boundaries, tokens, strict=True):
            h, g = boundary.wait(token)
            loss = loss + loss_of(h, g if with_norm else None, rank * part, rank)
    loss.backward()
    gradients = [x if x is None else x.grad for x in (own, partial, norm)]
    return [h.detach(), g.detach(), *gradients]


def on_one_rank(
    num_ranks: int, with_partial: bool, with_norm: bool, dtype: torch.dtype
) -> list[list[Tensor | None]]:
    """The results of ``train_rank`` on every rank."""
    partials, residual, weight = inputs(num_ranks)
    leaves = [x.to(dtype).requires_grad_() for x in (*partials, residual, weight)]
    *partials, residual, weight = leaves
    h = residual + sum(partials) if with_partial else residual
    g = F.rms_norm(h, (DIM,), weight, EPS) if with_norm else None
    parts = h.chunk(num_ranks, dim=1)
    begins = range(0, LENGTH, LENGTH // num_ranks)
    losses = [
        loss_of(part, g, begin, rank)
        for rank, (part, begin) in enumerate(zip(parts, begins, strict=True))
    ]
    gradients = torch.autograd.grad(4 * sum(losses), leaves, allow_unused=True)
    *dpartials, dresidual, dweight = gradients
    of_own = dresidual.chunk(num_ranks, dim=1)
    return [
        [part.detach(), g if g is None else g.detach(), down, dpartial, dweight]
        for part, down, dpartial in zip(parts, of_own, dpartials, strict=True)
    ]


@pytest.mark.parametrize(
    ("with_partial", "with_norm"), [(True, True), (False, True), (True, False)]
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_equals_one_rank(num_ranks, with_partial, with_norm):
    results = values(run_processes(num_ranks, train_rank, with_partial, with_norm))
    others, references = (
        on_one_rank(num_ranks, with_partial, with_norm, dtype)
        for dtype in (torch.float32, torch.float64)
    )
    for of_rank in zip(results, others, references, strict=True):
        for name, got, other, reference in zip(
            ("h", "g", "dh", "dpartial", "dweight"), *of_rank, strict=True
        ):
            if reference is not None:
                assert_as_exact(got, other, reference, name)
            elif name != "g":  # without a norm g is h
                assert got is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_norm(dtype):
    torch.manual_seed(0)
    dout, x = (torch.randn(3, 5, 16, dtype=dtype) for _ in range(2))
    weight = torch.rand(16, dtype=dtype) + 0.5

    def by_autograd(precision: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(precision).requires_grad_() for t in (x, weight)]
        out = F.rms_norm(leaves[0], (16,), leaves[1], EPS)
        return torch.autograd.grad(out, leaves, dout.to(precision))

    others = by_autograd(torch.float32)
    references = by_autograd(torch.float64)
    results = rms_norm_backward(dout, x, weight, EPS)
    for got, other, reference in zip(results, others, references, strict=True):
        assert got.dtype == dtype
        assert_as_exact(got, other.to(dtype), reference)


Results = tuple[Tensor, ...]


def ones() -> Results:
    return (torch.ones(1),)


def test_a_lane_works_in_order_while_the_caller_goes_on():
    side_stream = SideStream(CPU)
    release = threading.Event()
    order = []

    def first() -> Results:
        assert release.wait(60)
        order.append(1)
        return ones()

    def second() -> Results:
        order.append(2)
        return (torch.ones(1, requires_grad=True) * 2,)

    _, pending = (side_stream.start(work, []) for work in (first, second))
    order.append(0)
    release.set()
    (result,) = pending.wait()
    assert order == [0, 1, 2]
    assert result.item() == 2
    assert not result.requires_grad


def test_what_fails_in_a_lane_is_raised_by_the_wait_and_ends_nothing():
    def fail() -> Results:
        raise RuntimeError("peer lost")

    side_stream = SideStream(CPU)
    failing, working = (side_stream.start(work, []) for work in (fail, ones))
    with refusal(error=RuntimeError):
        failing.wait()
    assert working.wait()[0] == 1


def test_closing_a_lane_ends_its_thread_after_its_work():
    before = set(threading.enumerate())
    side_stream = SideStream(CPU)
    (thread,) = set(threading.enumerate()) - before
    pending = side_stream.start(ones, [])
    side_stream.close()
    thread.join(60)
    assert not thread.is_alive()
    assert pending.wait()[0] == 1


def test_a_lane_keeps_nothing_alive_that_its_work_has_used():
    side_stream = SideStream(CPU)
    used = torch.ones(1)
    gone = weakref.ref(used)
    pending = side_stream.start(lambda used=used: (used + 1,), [used])
    del used
    pending.wait()
    side_stream.start(lambda: (), []).wait()
    assert gone() is None
