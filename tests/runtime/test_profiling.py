# SPDX-License-Identifier: BSD-3-Clause
"""Measuring: kernels for a profile, and the rates that a job measures when it starts."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.refusals import refusal
from tests.lib.threaded import TIMEOUT_S, run_ranks, thread_transports
from torchtitan_cad.planning import AttentionShape, TileAreaCost
from torchtitan_cad.runtime import rates
from torchtitan_cad.runtime.kernels import VarlenArgs, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged
from torchtitan_cad.runtime.timing import WARM_UP
from torchtitan_cad.tools.profiling import (
    MOST_RETRIES,
    ProfileGrid,
    measure_profile,
)

CPU = torch.device("cpu")
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=4)


class ClockedKernel:
    """A kernel that takes a millisecond a task and key tile on a clock of its own, and twice that backward."""

    name = "clocked"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(
            "torchtitan_cad.runtime.timing.time.perf_counter", lambda: self.now
        )

    def check(self, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
        if dtype != torch.float32:
            raise ValueError(f"clocked takes no {dtype}")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        assert not call.causal
        assert q.shape == (call.cu_q_host[-1], 4, 8)
        assert k.shape == v.shape == (call.cu_k_host[-1], 2, 8)
        assert (call.q_start >= call.max_k).all()
        self.calls.append((call.max_q, call.max_k))
        self.now += 1e-3 * len(call.q_start) * call.max_k / 128
        return torch.empty_like(q), q.new_empty(q.shape[:2])

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        merged: Merged,
        call: VarlenArgs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert dout.shape == q.shape
        assert merged.lse.shape == merged.delta.shape == q.shape[:2]
        self.now += 2e-3 * len(call.q_start) * call.max_k / 128
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def test_times_are_those_of_a_task(monkeypatch):
    kernel, cells = ClockedKernel(monkeypatch), []
    grid = ProfileGrid((32, 256), (128, 256, 1024), repeats=3)
    profile = measure_profile(
        kernel, SHAPE, torch.float32, CPU, grid, lambda: cells.append(len(kernel.calls))
    )
    want = torch.tensor([[1.0, 2.0, 8.0]] * 2)
    torch.testing.assert_close(torch.tensor(profile.forward_ms), want)
    torch.testing.assert_close(torch.tensor(profile.backward_ms), 2 * want)
    calls = 1 + WARM_UP + grid.repeats
    assert cells == [calls * (i + 1) for i in range(grid.num_cells)]
    assert kernel.calls[::calls] == [
        (q, k) for q in grid.q_lengths for k in grid.kv_lengths
    ]
    assert (profile.kernel, profile.dtype, profile.head_dim, profile.tile) == (
        "clocked",
        "float32",
        8,
        128,
    )


def test_noisy_cells_are_measured_again(monkeypatch):
    """A disturbance of one cell's repeats is gone the second time; one that stays is kept, after two more rounds."""
    for disturbed in (1, 100):
        kernel, seen = ClockedKernel(monkeypatch), 0
        undisturbed = kernel.forward

        def forward(
            q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
        ) -> tuple[Tensor, Tensor]:
            nonlocal seen
            if call.max_k == 256:
                seen += 1
                calls, index = divmod(seen, 1 + WARM_UP + 4)
                kernel.now += 1.0 * (calls < disturbed) * (index % 2)  # noqa: B023
            return undisturbed(q, k, v, call)  # noqa: B023

        kernel.forward = forward  # type: ignore[method-assign]
        grid = ProfileGrid((128,), (128, 256, 512), repeats=4)
        profile = measure_profile(kernel, SHAPE, torch.float32, CPU, grid)
        measured = 1 if disturbed == 1 else MOST_RETRIES
        assert len(kernel.calls) == (grid.num_cells + measured) * (
            1 + WARM_UP + grid.repeats
        )
        assert profile.noisy_cells() == ([] if disturbed == 1 else [(128, 256)])
        assert profile.forward_ms[0][1] == pytest.approx(2.0)


def test_cells_larger_than_the_memory_are_refused(monkeypatch):
    kernel = ClockedKernel(monkeypatch)
    with refusal():
        measure_profile(
            kernel, SHAPE, torch.float32, CPU, ProfileGrid((128,), (128, 2**30), 1)
        )
    assert not kernel.calls


def test_what_cannot_be_measured_is_refused_first(monkeypatch):
    kernel = ClockedKernel(monkeypatch)
    with refusal("grid.kv_lengths", "[100]"):
        measure_profile(
            kernel, SHAPE, torch.float32, CPU, ProfileGrid((128,), (100,), 1)
        )
    with refusal():
        measure_profile(
            kernel, SHAPE, torch.float64, CPU, ProfileGrid((128,), (128,), 1)
        )
    assert not kernel.calls


class SleepingKernel:
    """Takes 10 ms forward and 20 ms backward."""

    def forward(self, q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        time.sleep(0.01)
        return q, q[..., 0]

    def backward(self, *_: object) -> None:
        time.sleep(0.02)


def test_attention_is_timed_forward_and_backward_per_unit_of_cost():
    tiles = 8 * 9 // 2  # of 128, in a causal document of 1024 tokens
    seconds = rates.attention_seconds(
        SleepingKernel(), SHAPE, torch.float32, CPU, TileAreaCost(128)
    )
    assert 0.03 / tiles <= seconds < 0.3 / tiles
    assert (
        rates.attention_seconds(
            get_kernel("cpu", CPU), SHAPE, torch.float32, CPU, TileAreaCost(128)
        )
        > 0
    )


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


def slowest_of_threads(num_ranks: int) -> Callable[[list[float], object], list[float]]:
    """Return a maximum over ranks that are threads, in place of that over a group."""
    values_of_ranks: list[list[float]] = []
    all_here, all_read = (
        threading.Barrier(num_ranks),
        threading.Barrier(num_ranks, values_of_ranks.clear),
    )

    def slowest(values: list[float], group: object) -> list[float]:
        values_of_ranks.append(values)
        all_here.wait(TIMEOUT_S)
        greatest = [max(of_ranks) for of_ranks in zip(*values_of_ranks, strict=True)]
        all_read.wait(TIMEOUT_S)
        return greatest

    return slowest


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "slowest", lambda values, group: values)


ALL = ~np.eye(3, dtype=bool)


def test_the_link_is_measured_apart_from_the_exchange(alone):
    link, seconds = rates.link_rate(Link(), 0, ALL, CPU, None)
    assert 3e7 < link < 1.3e8
    assert 0.001 <= seconds < 0.02


def test_no_more_rows_than_there_is_room_for(alone):
    link = Link()
    link.buffer_bytes = 10 * rates.ROW_BYTES + 1
    rates.link_rate(link, 0, ALL, CPU, None)
    assert max(link.received) == 10


@pytest.mark.parametrize("together", [True, False])
def test_ranks_exchange_with_those_of_their_host_or_of_others(monkeypatch, together):
    """Rows are counted alike on all ranks also where hosts have different numbers of ranks."""
    monkeypatch.setattr(rates, "slowest", slowest_of_threads(3))
    host, transports = np.array([0, 0, 1]), thread_transports(3)
    sends = ALL & ((host[:, None] == host) == together)
    for link, seconds in run_ranks(
        3, lambda r: rates.link_rate(transports[r], r, sends, CPU, None)
    ):
        assert link > 0 < seconds
