"""The side stream as a CUDA stream: nothing is read before it is there, nor overwritten before it was read."""

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cad.runtime.tp_overlap.sequence_parallel import Boundary
from torchtitan_cad.runtime.tp_overlap.side_stream import PendingWork, SideStream, Work

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE, EPS, SLEEP = (2, 512, 256), 1e-5, 5_000_000


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


def test_a_late_lane_gives_the_same_values_and_gradients(group: dist.ProcessGroup) -> None:
    device = torch.device("cuda")
    side_stream = SlowSideStream(device)
    for seed in range(10):
        torch.manual_seed(seed)
        x, y = (torch.randn(SHAPE, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2))
        weight = torch.rand(SHAPE[-1], device=device, dtype=torch.float64, requires_grad=True)
        h = x + 2 * y
        want = [h, F.rms_norm(h, weight.shape, weight, EPS)]
        want += torch.autograd.grad(want[0].square().sum() + torch.sin(want[1]).sum(), (x, y, weight))

        torch.cuda._sleep(SLEEP)
        boundary = Boundary(side_stream, group, lambda _: None)
        token = boundary.start(2 * y, x, weight, EPS)  # the summand is not kept: its memory is free from here on
        poison = [torch.full(SHAPE, torch.nan, device=device, dtype=torch.float64) for _ in range(4)]
        got = [*boundary.wait(token)]
        got += torch.autograd.grad(got[0].square().sum() + torch.sin(got[1]).sum(), (x, y, weight))
        del poison
        torch.testing.assert_close(got, want)


def test_the_caller_goes_on_meanwhile() -> None:
    device = torch.device("cuda")
    side_stream, x = SideStream(device), torch.ones(1, device=device)

    def slow() -> tuple[Tensor, ...]:
        torch.cuda._sleep(500_000_000)
        return (x + 1,)

    pending = side_stream.start(slow, [x])
    done = torch.cuda.Event()
    (x + 1).sum()
    done.record()
    done.synchronize()
    assert not side_stream.stream.query(), "the caller's own work waited for the side stream"
    (result,) = pending.wait()
    assert result.item() == 2
