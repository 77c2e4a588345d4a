"""Rates that are measured when a job starts."""

import time

import pytest
import torch
from torch import Tensor

from tests.runtime.threaded import run_ranks, thread_transports
from torchtitan_cad.planning import AttentionShape, TileAreaCost
from torchtitan_cad.runtime import rates
from torchtitan_cad.runtime.kernels import get_kernel

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 4)


class SleepingKernel:
    """Takes 10 ms forward and 20 ms backward."""

    def forward(self, q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        return q, q[..., 0]

    def backward(self, *_: object) -> None:
        time.sleep(0.02)


def test_attention_is_timed_forward_and_backward_per_unit_of_cost() -> None:
    tiles = 8 * 9 // 2  # of 128, in a causal document of 1024 tokens
    seconds = rates.attention_seconds(SleepingKernel(), SHAPE, torch.float32, CPU, TileAreaCost(128))
    assert 0.03 / tiles <= seconds < 0.3 / tiles
    assert rates.attention_seconds(get_kernel("cpu", CPU), SHAPE, torch.float32, CPU, TileAreaCost(128)) > 0


def test_linear_work_is_timed_per_token_and_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product of 1024 tokens with 256 x 256 weights, forward and twice that backward."""
    assert 0 < rates.linear_seconds(10**6, 256, torch.float32, CPU) < 1
    monkeypatch.setattr(rates, "median_milliseconds", lambda run, *_: run() is None or 2.0)
    assert rates.linear_seconds(5 * 256 * 256, 256, torch.float32, CPU) == pytest.approx(3 * 5 * 2e-3 / 1024)


def test_the_link_is_that_of_rows_from_all_others() -> None:
    delay_s = 0.05
    transports = thread_transports(3, max_delay_s=delay_s)
    for bandwidth in run_ranks(3, lambda r: rates.link_bytes_per_second(transports[r], r, 3, CPU)):
        assert 1e5 < bandwidth < 1e12
    transports = thread_transports(2, buffer_bytes=4096)
    (few, _) = run_ranks(2, lambda r: rates.link_bytes_per_second(transports[r], r, 2, CPU))
    assert few > 0


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_more_rows_than_there_is_room_for(num_ranks: int) -> None:
    received: list[int] = []

    class Counting:
        buffer_bytes = 10 * 4096 + 1

        def begin(self) -> int:
            return 0

        def start(self, messages, routes, phase, call):
            received.extend(route.num_received for route in routes)
            return self

        def wait(self) -> None:
            pass

        def release(self) -> None:
            pass

    rates.link_bytes_per_second(Counting(), 0, num_ranks, CPU)
    assert set(received) == {10}
