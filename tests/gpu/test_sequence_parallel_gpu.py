# SPDX-License-Identifier: BSD-3-Clause
"""The side stream as a CUDA stream: nothing is read before it is there, nor overwritten before it was read."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.lib.accuracy import assert_as_exact
from tests.lib.device import ON_GPU
from torchtitan_cad.runtime.tp_overlap.sequence_parallel import Boundary
from torchtitan_cad.runtime.tp_overlap.side_stream import PendingWork, SideStream, Work

pytestmark = ON_GPU

SHAPE = (2, 512, 256)
EPS = 1e-5
SLEEP = 5_000_000


class SlowSideStream(SideStream):
    """Every piece of work begins late, and so does what it reads."""

    def start(self, work: Work, inputs: Sequence[Tensor]) -> PendingWork:
        def late() -> tuple[Tensor, ...]:
            torch.cuda._sleep(SLEEP)
            return work()

        return super().start(late, inputs)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_late_lane_gives_the_same_values_and_gradients(group):
    device = torch.device("cuda")
    side_stream = SlowSideStream(device)
    for seed in range(10):
        torch.manual_seed(seed)
        leaves = [torch.randn(SHAPE, device=device), torch.randn(SHAPE, device=device)]
        leaves.append(torch.rand(SHAPE[-1], device=device))
        other, reference = (
            results_of(torch_norm, [x.to(dtype) for x in leaves])
            for dtype in (torch.float32, torch.float64)
        )

        def late_norm(y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
            torch.cuda._sleep(SLEEP)
            boundary = Boundary(side_stream, group)
            # the summand is not kept: its memory is free from here on
            token = boundary.start(2 * y, x, weight, EPS)
            poison = [torch.full(SHAPE, torch.nan, device=device) for _ in range(4)]
            results = [*boundary.wait(token)]
            del poison
            return results

        for values in zip(results_of(late_norm, leaves), other, reference, strict=True):
            assert_as_exact(*values)


def torch_norm(y: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    h = x + 2 * y
    return [h, F.rms_norm(h, weight.shape, weight, EPS)]


def results_of(
    norm: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """h, its norm, and gradients of the inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    h, g = norm(*inputs)
    return [
        h.detach(),
        g.detach(),
        *torch.autograd.grad(h.square().sum() + torch.sin(g).sum(), inputs),
    ]


def test_the_caller_goes_on_meanwhile():
    device = torch.device("cuda")
    side_stream = SideStream(device)
    x = torch.ones(1, device=device)

    def slow() -> tuple[Tensor, ...]:
        torch.cuda._sleep(500_000_000)
        return (x + 1,)

    (x + 1).sum().item()  # loads the kernels, which may wait for all streams
    pending = side_stream.start(slow, [x])
    done = torch.cuda.Event()
    (x + 1).sum()
    done.record()
    done.synchronize()
    assert not side_stream.stream.query(), (
        "the caller's own work waited for the side stream"
    )
    (result,) = pending.wait()
    assert result.item() == 2
