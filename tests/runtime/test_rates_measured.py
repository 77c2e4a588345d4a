# SPDX-License-Identifier: BSD-3-Clause
"""The rates that a job measures when it starts, on a clock of the test's own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.lib.rows import CPU
from torchtitan_cad.planning import AttentionShape, TileAreaCost
from torchtitan_cad.runtime import rates

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Seconds that have passed, in its attribute ``now``."""
    clock = SimpleNamespace(now=0.0)
    module = "torchtitan_cad.runtime.timing.time.perf_counter"
    monkeypatch.setattr(module, lambda: clock.now)
    return clock


class ClockedKernel:
    """A kernel that takes a millisecond a task and key tile, and twice that backward."""

    def __init__(self, clock: SimpleNamespace):
        self.clock = clock

    def forward(self, q, k, v, call):
        assert q.shape == (call.cu_q_host[-1], 4, 8)
        assert k.shape == v.shape == (call.cu_k_host[-1], 2, 8)
        assert call.causal
        self.clock.now += 1e-3 * len(call.q_start) * call.max_k / 128
        return q, q.new_empty(q.shape[:2])

    def backward(self, dout, q, k, v, merged, call):
        assert dout.shape == q.shape
        assert merged.lse.shape == merged.delta.shape == q.shape[:2]
        self.clock.now += 2e-3 * len(call.q_start) * call.max_k / 128


def test_attention_is_timed_forward_and_backward_per_unit_of_cost(clock):
    """A causal document of 1024 tokens is 8 tiles of keys, and 36 tiles in all."""
    cost = TileAreaCost(128)
    kernel = ClockedKernel(clock)
    seconds = rates.attention_seconds(kernel, SHAPE, torch.float32, CPU, cost)
    assert seconds == pytest.approx(0.024 / 36)


class Link:
    """A transport on which a byte takes 10 ns and an exchange 1 ms more."""

    buffer_bytes = 2**30

    def __init__(self, clock: SimpleNamespace):
        self.clock = clock
        self.received = []

    def begin(self):
        return 0

    def start(self, messages, routes, phase, call):
        (route,) = routes
        assert len(messages[0][0]) == sum(route.send_counts)
        self.received.append(route.num_received)
        self.clock.now += 0.001 + route.num_received * rates.ROW_BYTES * 1e-8
        return self

    def wait(self):
        pass

    def release(self):
        pass


OTHERS = ~np.eye(3, dtype=bool)


@pytest.fixture
def link(clock, monkeypatch) -> Link:
    monkeypatch.setattr(rates, "slowest", lambda values, group: values)
    return Link(clock)


def test_the_link_is_measured_apart_from_the_exchange(link):
    rate, seconds = rates.link_rate(link, 0, OTHERS, CPU, None)
    assert rate == pytest.approx(1e8, rel=0.01)
    assert seconds == pytest.approx(0.001, rel=0.1)
    # no more rows than there is room for
    link.received.clear()
    link.buffer_bytes = 10 * rates.ROW_BYTES + 1
    rates.link_rate(link, 0, OTHERS, CPU, None)
    assert max(link.received) == 10
