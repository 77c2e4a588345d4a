"""Rates that are measured when a job starts."""

import time

import numpy as np
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


class Link:
    """A transport on which a byte takes 10 ns and an exchange 1 ms more."""

    buffer_bytes = 2**30

    def __init__(self) -> None:
        self.received: list[int] = []

    def begin(self) -> int:
        return 0

    def start(self, messages, routes, phase, call):
        (route,) = routes
        assert len(messages[0][0]) == sum(route.send_counts)
        self.received.append(route.num_received)
        time.sleep(0.001 + route.num_received * rates.ROW_BYTES * 1e-8)
        return self

    def wait(self) -> None:
        pass

    def release(self) -> None:
        pass


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "slowest", lambda values, group: values)


ALL = ~np.eye(3, dtype=bool)


def test_the_link_is_measured_apart_from_the_exchange(alone: None) -> None:
    link, seconds = rates.link_rate(Link(), 0, ALL, CPU, None)
    assert 3e7 < link < 1.3e8
    assert 0.001 <= seconds < 0.02


def test_no_more_rows_than_there_is_room_for(alone: None) -> None:
    link = Link()
    link.buffer_bytes = 10 * rates.ROW_BYTES + 1
    rates.link_rate(link, 0, ALL, CPU, None)
    assert max(link.received) == 10


@pytest.mark.parametrize("together", [True, False])
def test_ranks_exchange_with_those_of_their_host_or_of_others(alone: None, together: bool) -> None:
    """Rows are counted alike on all ranks also where hosts have different numbers of ranks."""
    host, transports = np.array([0, 0, 1]), thread_transports(3)
    sends = ALL & ((host[:, None] == host) == together)
    for link, seconds in run_ranks(3, lambda r: rates.link_rate(transports[r], r, sends, CPU, None)):
        assert link > 0 < seconds
