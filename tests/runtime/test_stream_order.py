# SPDX-License-Identifier: BSD-3-Clause
"""The order of the runtime's work on streams, on a device that reports what no event orders (tests/lib/ledger).

Every check is also made with mistakes planted, which it must find.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.lib.ledger import needs_ledger, on_ledger
from tests.lib.threaded import run_ranks
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.runtime import engine, streams
from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.transport import symmetric
from torchtitan_cad.runtime.transport.base import all_to_all
from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory
from torchtitan_cad.runtime.transport.far import FarRows

pytestmark = needs_ledger


# The engine over symmetric memory -------------------------------------------------------------------------------------


SHAPE = AttentionShape(2, 1, 16, 4)
LAYERS = 3
SEGMENTS = [[(0, 0, 64)], [(d, 0, 8) for d in range(1, 9)]]


def plan_of_two() -> Plan:
    return make_plan(
        TokenLayout.from_segments(SEGMENTS), SHAPE, PlannerConfig(min_shard=8)
    )


def train(rank, transport):
    """Core attention of two nano-batches in turns, layer by layer, forward and backward."""
    from tests.lib.ledger.ranks import OneKernel

    torch.accelerator.set_device_index(rank)
    device = torch.device("ledger", rank)
    engine = CoreAttentionEngine(
        OneKernel(), transport, rank=rank, device=device, scale=0.25
    )
    nano_batches = (0, 1)
    with torch.Stream(device):
        for key in nano_batches:
            engine.add_plan(key, plan_of_two())
    x = [torch.randn(64, 4, 16).to(device) for _ in nano_batches]
    layers = []
    for _ in range(LAYERS):
        rows = [(y[:, :2] * 1.0, y[:, 2:3] * 1.0, y[:, 3:] * 1.0) for y in x]
        calls = [engine.begin_forward(*rows[key], key).send() for key in nano_batches]
        for call in calls:
            call.attend()
        layers.append([Saved(*rows[key], *calls[key].finish()) for key in nano_batches])
        del rows, calls, call
        for key, saved in enumerate(layers[-1]):
            x[key] = x[key] + torch.cat((saved.out, saved.out), 1)
    for saved in reversed(layers):
        calls = [
            engine.begin_backward(torch.tanh(x[key][:, :2]), saved[key], key).send()
            for key in nano_batches
        ]
        for call in calls:
            call.attend()
        for key in nano_batches:
            x[key] = x[key] + torch.cat(calls[key].finish(), 1)
        del calls, call


@contextmanager
def _sending_at_once(self: DeviceMemory) -> Iterator[None]:
    with self._stream:
        yield


def _without_waits(module: ModuleType) -> AbstractContextManager[object]:
    """Streams do not wait for the events that ``module`` has them wait for."""
    without_waits = SimpleNamespace(
        record_event=streams.record_event, wait_event=lambda *_, **__: None
    )
    return mock.patch.object(module, "streams", without_waits)


def run_engine(mistake: str, hosts: tuple[int, ...] | None) -> list[str]:
    """Races of both ranks, which are on one host or on two."""
    from tests.lib.ledger.ranks import LedgerMemory, ledger_transports

    nothing = property(lambda self: [], lambda self, ignored: None)
    patches = {
        "none": nullcontext(),
        "plans not waited for": _without_waits(engine),
        "sending before rows are there": mock.patch.object(
            DeviceMemory, "sending", _sending_at_once
        ),
        "rows not waited for": mock.patch.object(
            LedgerMemory, "follow", return_value=None
        ),
        "sent rows freed early": _without_waits(symmetric),
        "messages not waited for": mock.patch.object(
            FarRows, "wait_received", return_value=None
        ),
        "sent messages not kept": mock.patch.object(
            FarRows, "packed", nothing, create=True
        ),
    }
    transports = ledger_transports(2, hosts)
    with patches[mistake]:
        run_ranks(2, lambda rank: train(rank, transports[rank]))
    return torch.ops.ledger.races()


@pytest.mark.parametrize("hosts", [None, (0, 1)], ids=["one host", "two hosts"])
def test_the_engine_is_in_order(hosts):
    assert plan_of_two().moves_rows
    assert on_ledger(run_engine, "none", hosts) == []


@pytest.mark.parametrize(
    ("mistake", "hosts"),
    [
        ("plans not waited for", None),
        ("sending before rows are there", None),
        ("rows not waited for", None),
        ("sent rows freed early", None),
        ("sending before rows are there", (0, 1)),
        ("messages not waited for", (0, 1)),
        ("sent messages not kept", (0, 1)),
    ],
)
def test_engines_that_are_not(mistake, hosts):
    assert on_ledger(run_engine, mistake, hosts)


def exchange_on_two_streams(hosts: tuple[int, ...] | None) -> list[str]:
    """Races of exchanges that begin and end on one stream, as of one nano-batch, and then on another."""
    from tests.lib.ledger.ranks import ledger_transports

    transports = ledger_transports(2, hosts)

    def body(rank):
        torch.accelerator.set_device_index(rank)
        routes = all_to_all(rank, ~np.eye(2, dtype=bool), 8)
        for stream in 2 * [torch.Stream(f"ledger:{rank}") for _ in range(2)]:
            with stream:
                rows = torch.zeros(8, 4).to(f"ledger:{rank}")
                pending = transports[rank].start(
                    [[rows]], routes, "rows", transports[rank].begin()
                )
                pending.wait()
                pending.release()

    run_ranks(2, body)
    return torch.ops.ledger.races()


@pytest.mark.parametrize("hosts", [None, (0, 1)], ids=["one host", "two hosts"])
def test_exchanges_of_two_streams_are_in_order(hosts):
    """What one has packed for another host is overwritten by the next only when it has left."""
    assert on_ledger(exchange_on_two_streams, hosts) == []
