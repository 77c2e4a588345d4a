"""Transports between processes: random exchanges with delays, peers that fail, misuse and capacities."""

import os
import re
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.runtime.exchanges import ONE_EACH, exchange_at_random, make_route, start, symmetric
from tests.runtime.processes import run_processes, values
from tests.runtime.threaded import needs_compiler
from tests.sets import params
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import MIN_TRIP_BYTES
from torchtitan_cad.runtime import symm_cpu
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.transport import SLOTS_PER_CALL, Capacity, Routes, Slots, SymmetricTransport
from torchtitan_cad.runtime.transport.memory import CpuMemory


@pytest.mark.parametrize("num_ranks", params([2, 4, 8], [4]))
@pytest.mark.parametrize("name", ["collective", pytest.param("symm_mem", marks=needs_compiler)])
def test_random_exchanges_with_random_delays(name: str, num_ranks: int) -> None:
    """Every row arrives unharmed, however ranks differ in pace; buffers grow on all ranks alike."""
    results = values(run_processes(num_ranks, exchange_at_random, name, num_ranks, 100, 0.004))
    assert sum(rows for rows, _ in results) > 1000
    assert len({slot_bytes for _, slot_bytes in results}) == 1


def symmetric_of_fixed_size(group: dist.ProcessGroup, capacity: Capacity) -> SymmetricTransport:
    symm_cpu.load()
    allocate = partial(CpuMemory.allocate, group=group)
    return SymmetricTransport(range(group.size()), group.rank(), allocate, lambda: 60.0, capacity, fixed=True)


def ring_of_ranks(num_ranks: int) -> np.ndarray:
    """Every rank sends one row to the next."""
    return np.roll(np.eye(num_ranks, dtype=int), 1, axis=1)


def exchange_until(group: dist.ProcessGroup, last: int, end: str, timeout_s: float) -> None:
    """Exchanges among all, all of one call if it ``hoards``; in exchange 6 rank ``last`` does as ``end`` says."""
    transport, rank = symmetric(group, timeout_s), group.rank()
    routes = [make_route(ring_of_ranks(group.size()), rank, None, slot=slot) for slot in range(SLOTS_PER_CALL)]
    call = transport.begin(0)
    for exchange in range(12):
        route = routes[exchange // (1 if end == "hoards" else 2) % SLOTS_PER_CALL]
        if exchange == 6 and rank == last:
            match end:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "silent":
                    time.sleep(5 * timeout_s)
        if end != "hoards":
            call = transport.begin(0)
        pending = start(transport, [torch.full((1, 8), float(exchange))], route, f"exchange {exchange}", call)
        assert pending.wait()[0].view(torch.float32)[0, 0] == exchange
        if not (end == "hoards" and rank == last and exchange >= 6):
            pending.release()


@needs_compiler
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


@needs_compiler
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


@needs_compiler
def test_an_exchange_is_waited_for_and_released_once() -> None:
    values(run_processes(2, misuse))


def exceed_capacity(group: dist.ProcessGroup) -> tuple[int, ...]:
    transport = symmetric_of_fixed_size(group, Capacity(queries=5, keys=2, slot_bytes=(160, 1000)))
    route = make_route(ONE_EACH, group.rank(), None)
    transport.prepare([Routes([route])])
    pending = start(transport, [torch.zeros(sum(route.send_counts), 8)], route, "fits", 0)
    pending.wait()
    pending.release()
    for kind, counts, message in (
        ("queries", 4 * ONE_EACH, "cad.max_recv_queries = 5: a plan has a rank that receives 8 rows"),
        ("keys", 3 * ONE_EACH, "cad.max_recv_keys = 2: a plan has a rank that receives 6 rows"),
    ):
        large = make_route(counts, group.rank(), None)
        large.kind = kind
        with pytest.raises(ValueError, match=message):
            transport.prepare([Routes([large])])
    with pytest.raises(ValueError, match="brings some rank 1024 bytes"):
        start(transport, [torch.zeros(sum(route.send_counts), 128)], route, "wide", 0)
    with pytest.raises(ValueError, match=r"brings some rank 1025 bytes.* to mean 1024"):
        transport.begin(0, 1025)
    return transport.slot_bytes


@needs_compiler
def test_a_fixed_capacity_is_never_exceeded() -> None:
    assert values(run_processes(2, exceed_capacity)) == 2 * [(512, 1024)]


def start_with_capacity(group: dist.ProcessGroup, buffer_bytes: int | None) -> list[tuple[int, ...]]:
    """Where memory can grow, a capacity says what to begin with."""
    capacity = Capacity(queries=5, keys=2, slot_bytes=(50000, 300))
    transport = symmetric(group, capacity=capacity, slots=Slots(2, buffer_bytes))
    sizes = [transport.slot_bytes]
    for num_bytes in ((50000, 300), (50200,), (100000, 600)):
        transport.begin(*num_bytes)
        sizes.append(transport.slot_bytes)
    return sizes


@needs_compiler
def test_capacity_is_the_first_size_and_growth_is_geometric() -> None:
    assert values(run_processes(2, start_with_capacity, None)) == 2 * [
        [(50176, 512), (50176, 512), (62976, 512), (120320, 1024)]
    ]


@needs_compiler
def test_growth_beyond_the_bytes_that_plans_keep_is_the_least() -> None:
    assert values(run_processes(2, start_with_capacity, 51200)) == 2 * [
        [(50176, 512), (50176, 512), (51200, 512), (100352, 1024)]
    ]


def test_capacity_in_rows_holds_the_engines_widest_rows() -> None:
    """dO, Q, log-sum-exp and delta; K and V; and what returns in one trip."""
    shape, many = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, dtype_bytes=2), 10**7
    slots = partial(Capacity.of_rows, shape=shape)
    assert slots(many, 0, keep=False).slot_bytes == (many * (2 * 64 + 2 * 16), MIN_TRIP_BYTES)
    assert slots(many, many, keep=True).slot_bytes == (many * (64 + 2 * 16), many * 2 * 32)
    assert slots(1, 1, keep=False).slot_bytes == (MIN_TRIP_BYTES, MIN_TRIP_BYTES)
