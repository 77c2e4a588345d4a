"""Transports between processes: random exchanges with delays, peers that fail, misuse and full buffers."""

import os
import re
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.runtime.exchanges import ONE_EACH, exchange_at_random, make_route, start, symmetric
from tests.runtime.processes import run_processes, values
from tests.runtime.threaded import needs_linux
from tests.sets import params
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.transport import BUFFERS_PER_CALL, Routes


@pytest.mark.parametrize("num_ranks", params([2, 4, 8], [4]))
@pytest.mark.parametrize("name", ["collective", pytest.param("symm_mem", marks=needs_linux)])
def test_random_exchanges_with_random_delays(name: str, num_ranks: int) -> None:
    """Every row arrives unharmed, however ranks differ in pace."""
    assert sum(values(run_processes(num_ranks, exchange_at_random, name, num_ranks, 100, 0.004))) > 1000


def exchange_until(group: dist.ProcessGroup, last: int, end: str, timeout_s: float) -> None:
    """Exchanges among all, all of one call if it ``hoards``; in exchange 6 rank ``last`` does as ``end`` says."""
    transport, rank = symmetric(group, timeout_s), group.rank()
    to_the_next = np.roll(np.eye(group.size(), dtype=int), 1, axis=1)  # a row
    routes = [make_route(to_the_next, rank, None, buffer=buffer) for buffer in range(BUFFERS_PER_CALL)]
    call = transport.begin()
    for exchange in range(12):
        route = routes[exchange // (1 if end == "hoards" else 2) % BUFFERS_PER_CALL]
        if exchange == 6 and rank == last:
            match end:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "silent":
                    time.sleep(5 * timeout_s)
        if end != "hoards":
            call = transport.begin()
        pending = start(transport, [torch.full((1, 8), float(exchange))], route, f"exchange {exchange}", call)
        assert pending.wait()[0].view(torch.float32)[0, 0] == exchange
        if not (end == "hoards" and rank == last and exchange >= 6):
            pending.release()


@needs_linux
@pytest.mark.parametrize("end", params(["killed", "silent"], ["killed"]))
def test_a_peer_that_is_gone_is_named_in_time(end: str) -> None:
    """Rank 0 waits for rows of rank 3, rank 2 to send it some; rank 1 depends on both and stops after them."""
    results = run_processes(4, exchange_until, 3, end, 1.0, timeout_s=120)
    if end == "killed":
        assert results[3] == -signal.SIGKILL
    assert isinstance(results[0], PeerError)
    assert "exchange 'exchange 6' of rank 0 failed: rank 3 has not sent its rows for 1.0 s" in str(results[0])
    assert isinstance(results[2], PeerError)
    assert "exchange 'exchange 6' of rank 2 failed: rank 3 has not begun to receive for 1.0 s" in str(results[2])
    assert isinstance(results[1], PeerError)
    assert re.search(
        "of rank 1 failed: (rank 0 has not sent its rows|rank 2 has not begun to receive)", str(results[1])
    )


@needs_linux
def test_a_peer_that_hoards_its_buffer_is_named() -> None:
    """Rank 1 goes on without releasing: it is told at once; rank 0 waits for room in rank 1's buffer."""
    results = run_processes(2, exchange_until, 1, "hoards", 1.0, timeout_s=120)
    assert isinstance(results[1], RuntimeError)
    message = "exchange 'exchange 8' would use the buffer of exchange 'exchange 6', which is in flight"
    assert message in str(results[1])
    assert isinstance(results[0], PeerError)
    message = "exchange 'exchange 8' of rank 0 failed: rank 1 has not begun to receive for 1.0 s"
    assert message in str(results[0])


def misuse(group: dist.ProcessGroup) -> None:
    transport = symmetric(group)
    route = make_route(ONE_EACH, group.rank(), None)
    parts = [torch.zeros(sum(route.send_counts), 8)]
    pending = start(transport, parts, route, "first", 0)
    with pytest.raises(RuntimeError, match="exchange 'first' is started: it cannot be released now"):
        pending.release()
    pending.wait()
    with pytest.raises(RuntimeError, match="exchange 'first' is waited for: it cannot be waited for now"):
        pending.wait()
    pending.release()
    with pytest.raises(RuntimeError, match="exchange 'first' is released"):
        pending.release()


@needs_linux
def test_an_exchange_is_waited_for_and_released_once() -> None:
    values(run_processes(2, misuse))


def exceed_a_buffer(group: dist.ProcessGroup) -> None:
    transport = symmetric(group, buffer_bytes=512)
    route = make_route(ONE_EACH, group.rank(), None)
    transport.prepare([Routes([route])])
    pending = start(transport, [torch.zeros(sum(route.send_counts), 64)], route, "fits", transport.begin())
    pending.wait()
    pending.release()
    message = (
        "exchange 'wide' brings some rank 544 bytes, but a receive buffer has 512: set a larger cad.receive_buffer"
    )
    with pytest.raises(ValueError, match=message):
        start(transport, [torch.zeros(sum(route.send_counts), 65)], route, "wide", transport.begin())


@needs_linux
def test_a_buffer_is_never_exceeded() -> None:
    values(run_processes(2, exceed_a_buffer))
