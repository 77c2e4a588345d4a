# SPDX-License-Identifier: BSD-3-Clause
"""Measuring, on a clock of the test's own: kernels for a profile, and the rates that a job measures when it starts."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from tests.lib.rows import CPU
from torchtitan_cad.planning import AttentionShape, TileAreaCost
from torchtitan_cad.runtime import rates
from torchtitan_cad.runtime.kernels.base import Merged, VarlenArgs
from torchtitan_cad.runtime.timing import WARM_UP
from torchtitan_cad.runtime.transport.build import build_transport
from torchtitan_cad.tools.profiling import (
    MOST_RETRIES,
    ProfileGrid,
    measure_profile,
)

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds that have passed, in its attribute ``now``."""
    clock = SimpleNamespace(now=0.0)
    module = "torchtitan_cad.runtime.timing.time.perf_counter"
    monkeypatch.setattr(module, lambda: clock.now)
    return clock


class ClockedKernel:
    """A kernel that takes a millisecond a task and key tile, and twice that backward."""

    name = "clocked"

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.calls = []

    def check(self, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
        if dtype != torch.float32:
            raise ValueError(f"clocked takes no {dtype}")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        assert q.shape == (call.cu_q_host[-1], 4, 8)
        assert k.shape == v.shape == (call.cu_k_host[-1], 2, 8)
        assert call.causal or (call.q_start >= call.max_k).all()
        self.calls.append((call.max_q, call.max_k, call.causal))
        self.clock.now += 1e-3 * len(call.q_start) * call.max_k / 128
        return q, q.new_empty(q.shape[:2])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Merged, call
    ) -> None:
        assert dout.shape == q.shape
        assert merged.lse.shape == merged.delta.shape == q.shape[:2]
        self.clock.now += 2e-3 * len(call.q_start) * call.max_k / 128


@pytest.fixture
def kernel(clock: SimpleNamespace) -> ClockedKernel:
    return ClockedKernel(clock)


def test_times_are_those_of_a_task(kernel):
    grid = ProfileGrid((32, 256), (128, 256, 1024), repeats=3)
    cells = []
    profile = measure_profile(
        kernel, SHAPE, torch.float32, CPU, grid, lambda: cells.append(len(kernel.calls))
    )
    want = np.array([[1.0, 2.0, 8.0]] * 2)
    np.testing.assert_allclose(profile.forward_ms, want)
    np.testing.assert_allclose(profile.backward_ms, 2 * want)
    calls = 1 + WARM_UP + grid.repeats
    assert cells == [calls * (i + 1) for i in range(grid.num_cells)]
    lengths = itertools.product(grid.q_lengths, grid.kv_lengths)
    assert kernel.calls[::calls] == [(*pair, False) for pair in lengths]


@pytest.mark.parametrize(
    ("disturbed", "measured_again", "noisy"),
    [(1, 1, []), (100, MOST_RETRIES, [(128, 256)])],
)
def test_noisy_cells_are_measured_again(kernel, disturbed, measured_again, noisy):
    """A disturbance of one cell's repeats is gone the second time; one that stays is kept, after two more rounds."""
    undisturbed = kernel.forward
    grid = ProfileGrid((128,), (128, 256, 512), repeats=4)
    calls = 1 + WARM_UP + grid.repeats
    seen = 0

    def forward(*rows_and_call):
        nonlocal seen
        if rows_and_call[-1].max_k == 256:
            seen += 1
            measurement, index = divmod(seen, calls)
            kernel.clock.now += 1.0 * (measurement < disturbed) * (index % 2)
        return undisturbed(*rows_and_call)

    kernel.forward = forward  # type: ignore[method-assign]
    profile = measure_profile(kernel, SHAPE, torch.float32, CPU, grid)
    assert len(kernel.calls) == (grid.num_cells + measured_again) * calls
    assert profile.noisy_cells() == noisy
    assert profile.forward_ms[0][1] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("dtype", "keys", "named"),
    [
        (torch.float32, 2**30, ()),  # cells larger than the memory
        (torch.float32, 100, ("grid.kv_lengths", "[100]")),
        (torch.float64, 128, ()),
    ],
)
def test_what_cannot_be_measured_is_refused_first(kernel, dtype, keys, named):
    grid = ProfileGrid((128,), (128, keys) if keys > 128 else (keys,), repeats=1)
    with refusal(*named):
        measure_profile(kernel, SHAPE, dtype, CPU, grid)
    assert not kernel.calls


def test_attention_is_timed_forward_and_backward_per_unit_of_cost(kernel):
    """A causal document of 1024 tokens is 8 tiles of keys, and 36 tiles in all."""
    cost = TileAreaCost(128)
    seconds = rates.attention_seconds(kernel, SHAPE, torch.float32, CPU, cost)
    assert seconds == pytest.approx(0.024 / 36)


class Link:
    """A transport on which a byte takes 10 ns and an exchange 1 ms more."""

    buffer_bytes = 2**30

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.received = []

    def begin(self) -> int:
        return 0

    def start(self, messages, routes, phase, call):
        (route,) = routes
        assert len(messages[0][0]) == sum(route.send_counts)
        self.received.append(route.num_received)
        self.clock.now += 0.001 + route.num_received * rates.ROW_BYTES * 1e-8
        return self

    def wait(self) -> None:
        pass

    def release(self) -> None:
        pass


OTHERS = ~np.eye(3, dtype=bool)


@pytest.fixture
def link(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(rates, "slowest", lambda values, group: values)
    return Link(clock)


def test_the_link_is_measured_apart_from_the_exchange(link):
    rate, seconds = rates.link_rate(link, 0, OTHERS, CPU, None)
    assert rate == pytest.approx(1e8, rel=0.01)
    assert seconds == pytest.approx(0.001, rel=0.1)


def test_no_more_rows_than_there_is_room_for(link):
    link.buffer_bytes = 10 * rates.ROW_BYTES + 1
    rates.link_rate(link, 0, OTHERS, CPU, None)
    assert max(link.received) == 10


def measure_links(group: dist.ProcessGroup) -> list[float]:
    """With ranks of the own host or of others; hosts have different numbers of ranks."""
    host = np.array([0, 0, 1])
    together = host[:, None] == host
    transport = build_transport("collective", group, CPU)
    measured = list[float]()
    for sends in (OTHERS & together, ~together):
        measured += rates.link_rate(transport, group.rank(), sends, CPU, group)
    return measured


def test_ranks_exchange_with_those_of_their_host_or_of_others():
    for measured in values(run_processes(3, measure_links)):
        assert min(measured) > 0
