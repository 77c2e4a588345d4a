# SPDX-License-Identifier: BSD-3-Clause
"""Transports between processes: exchanges, peers that fail, misuse, and messages of rows."""

import os
import re
import signal
import time
import weakref

import numpy as np
import pytest
import torch

from tests.lib.exchanges import (
    exchange_at_random,
    make_route,
    start,
    symmetric,
)
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from tests.lib.sets import matrix, params
from tests.lib.threaded import needs_linux
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat, hide_storage
from torchtitan_cad.runtime.transport.base import Routes


@pytest.mark.parametrize("num_ranks", params([3, 4, 8], [3]))
@pytest.mark.parametrize(
    "name", ["collective", pytest.param("symm_mem", marks=needs_linux)]
)
def test_random_exchanges_with_random_delays(name, num_ranks):
    """Every row arrives unharmed, however ranks differ in pace."""
    arguments = (name, num_ranks, 100, 0.004)
    received = values(run_processes(num_ranks, exchange_at_random, *arguments))
    assert sum(received) > 1000


@needs_linux
@pytest.mark.parametrize(
    "hosts",
    params(
        [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 1, 2, 3), (0, 1, 0)],
        [(0, 1, 0)],
    ),
)
def test_random_exchanges_inside_hosts_and_between_them(hosts):
    arguments = "symm_mem", len(hosts), 100, 0.004, "cpu", hosts
    received = values(run_processes(len(hosts), exchange_at_random, *arguments))
    assert sum(received) > 1000


def exchange_until(group, last, end, hosts=None):
    """Exchanges among all, all of one call if it ``hoards``; in exchange 6 rank ``last`` does as ``end`` says."""
    transport = symmetric(group, timeout_s=1.0, hosts=hosts)
    rank = group.rank()
    to_the_next = np.roll(np.eye(group.size(), dtype=int), 1, axis=1)  # a row
    hoards = end == "hoards"
    call = transport.begin()
    for exchange in range(12):
        number = exchange if hoards else exchange // 2
        route = make_route(to_the_next, rank, None, buffer=number % BUFFERS_PER_CALL)
        is_last = rank == last and exchange >= 6
        if is_last and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_last and end == "silent":
            time.sleep(4)
        if not hoards:
            call = transport.begin()
        part = torch.full((1, 8), float(exchange))
        pending = start(transport, [part], route, f"exchange {exchange}", call)
        assert pending.wait()[0].view(torch.float32)[0, 0] == exchange
        if not (is_last and hoards):
            pending.release()


def check_failure(error: Exception, said: str):
    assert isinstance(error, PeerError)
    assert re.search(said, str(error))


@needs_linux
@pytest.mark.parametrize(
    ("end", "hosts"),
    [
        ("killed", None),
        ("silent", (0, 0, 1, 1)),
        pytest.param("silent", None, marks=matrix),
        pytest.param("killed", (0, 0, 1, 1), marks=matrix),
    ],
)
def test_a_peer_that_is_gone_is_named_in_time(end, hosts):
    """Rank 0 waits for rows of rank 3, rank 2 to send it some; rank 1 depends on both and stops after them."""
    results = run_processes(4, exchange_until, 3, end, hosts, timeout_s=120)
    if end == "killed":
        assert results[3] == -signal.SIGKILL
    failed = "exchange 'exchange 6' of rank {} failed: rank 3 has not {}"
    check_failure(results[0], failed.format(0, "sent its rows"))
    check_failure(results[2], failed.format(2, "begun to receive for 1.0 s"))
    if hosts is None:
        late = (
            "rank 1 failed: rank (0 has not sent its rows|2 has not begun to receive)"
        )
        check_failure(results[1], late)


@needs_linux
def test_a_peer_that_hoards_its_buffer_is_named():
    """Rank 1 goes on without releasing: it is told at once; rank 0 waits for room in rank 1's buffer."""
    results = run_processes(2, exchange_until, 1, "hoards", timeout_s=120)
    assert isinstance(results[1], RuntimeError)
    taken = (
        "'exchange 8' would use the buffer of exchange 'exchange 6', which is in flight"
    )
    assert taken in str(results[1])
    failed = "'exchange 8' of rank 0 failed: rank 1 has not begun to receive for 1.0 s"
    check_failure(results[0], failed)


def fill_both_buffers(group):
    memory_of_another = weakref.ref(symmetric(group)._memory)
    assert memory_of_another() is None
    transport = symmetric(group, buffer_bytes=1024)
    rank = group.rank()
    swap = 1 - np.eye(2, dtype=int)
    first, second = (make_route(swap, rank, None, buffer=buffer) for buffer in (0, 1))
    twice = Routes([first, first])
    # 1,200 and 512 bytes
    sent = [torch.full((1, floats), float(rank)) for floats in (300, 128)]
    call = transport.begin()
    pending = transport.start([[x] for x in sent], twice, "both", call)
    for part, message in zip(sent, pending.wait(), strict=True):
        (received,) = RowFormat([part]).unpack(message)
        assert torch.equal(received, torch.full_like(part, 1.0 - rank))
    pending.release()
    with refusal("'wide'", 1040):
        start(transport, [torch.zeros(1, 257)], second, "wide", transport.begin())


@needs_linux
def test_buffers_hold_two_messages_are_never_exceeded_and_given_back():
    values(run_processes(2, fill_both_buffers))


def test_a_copied_view_is_an_error_that_names_the_setting():
    message = torch.zeros(5, 32, dtype=torch.uint8)
    with refusal(remedy="cad.backward", error=RuntimeError):
        RowFormat([message]).reveal(hide_storage(message).clone(), 5)
