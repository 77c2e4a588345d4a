# SPDX-License-Identifier: BSD-3-Clause
"""Transports between processes: exchanges, peers that fail, misuse; memory that ranks share, and messages of rows."""

import os
import re
import signal
import time
import weakref
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.lib.exchanges import (
    ONE_EACH,
    RecordingMemory,
    exchange_at_random,
    make_route,
    start,
    symmetric,
)
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from tests.lib.sets import params
from tests.lib.threaded import needs_linux
from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.exchange.messages import RowBytes
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.kernels.base import compute_dtype
from torchtitan_cad.runtime.packing import RowFormat, hide_storage
from torchtitan_cad.runtime.transport import (
    BUFFERS_PER_CALL,
    Routes,
    SymmetricTransport,
    memory,
)


@pytest.mark.parametrize("num_ranks", params([2, 4, 8], [4]))
@pytest.mark.parametrize(
    "name", ["collective", pytest.param("symm_mem", marks=needs_linux)]
)
def test_random_exchanges_with_random_delays(name, num_ranks):
    """Every row arrives unharmed, however ranks differ in pace."""
    assert (
        sum(
            values(
                run_processes(
                    num_ranks, exchange_at_random, name, num_ranks, 100, 0.004
                )
            )
        )
        > 1000
    )


@needs_linux
@pytest.mark.parametrize(
    "hosts",
    params(
        [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1), (0, 1, 2, 3), (0, 1)],
        [(0, 1, 0, 1), (0, 1)],
    ),
)
def test_random_exchanges_inside_hosts_and_between_them(hosts):
    arguments = "symm_mem", len(hosts), 100, 0.004, "cpu", hosts
    assert sum(values(run_processes(len(hosts), exchange_at_random, *arguments))) > 1000


def exchange_until(
    group: dist.ProcessGroup,
    last: int,
    end: str,
    timeout_s: float,
    hosts: Sequence[int] | None = None,
) -> None:
    """Exchanges among all, all of one call if it ``hoards``; in exchange 6 rank ``last`` does as ``end`` says."""
    transport, rank = symmetric(group, timeout_s, hosts=hosts), group.rank()
    to_the_next = np.roll(np.eye(group.size(), dtype=int), 1, axis=1)  # a row
    routes = [
        make_route(to_the_next, rank, None, buffer=buffer)
        for buffer in range(BUFFERS_PER_CALL)
    ]
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
        pending = start(
            transport,
            [torch.full((1, 8), float(exchange))],
            route,
            f"exchange {exchange}",
            call,
        )
        assert pending.wait()[0].view(torch.float32)[0, 0] == exchange
        if not (end == "hoards" and rank == last and exchange >= 6):
            pending.release()


@needs_linux
@pytest.mark.parametrize("end", params(["killed", "silent"], ["killed"]))
def test_a_peer_that_is_gone_is_named_in_time(end):
    """Rank 0 waits for rows of rank 3, rank 2 to send it some; rank 1 depends on both and stops after them."""
    results = run_processes(4, exchange_until, 3, end, 1.0, timeout_s=120)
    if end == "killed":
        assert results[3] == -signal.SIGKILL
    assert isinstance(results[0], PeerError)
    assert (
        "exchange 'exchange 6' of rank 0 failed: rank 3 has not sent its rows for 1.0 s"
        in str(results[0])
    )
    assert isinstance(results[2], PeerError)
    assert (
        "exchange 'exchange 6' of rank 2 failed: rank 3 has not begun to receive for 1.0 s"
        in str(results[2])
    )
    assert isinstance(results[1], PeerError)
    late = "of rank 1 failed: (rank 0 has not sent its rows|rank 2 has not begun to receive)"
    assert re.search(late, str(results[1]))


@needs_linux
@pytest.mark.parametrize("end", params(["killed", "silent"], ["silent"]))
def test_a_peer_on_another_host_that_is_gone_is_named_in_time(end):
    """Rank 0 waits for rows of rank 3; rank 2, of the same host as rank 3, for that to receive."""
    results = run_processes(4, exchange_until, 3, end, 1.0, (0, 0, 1, 1), timeout_s=120)
    assert isinstance(results[0], PeerError)
    assert (
        "exchange 'exchange 6' of rank 0 failed: rank 3 has not sent its rows"
        in str(results[0])
    )
    assert isinstance(results[2], PeerError)
    assert (
        "exchange 'exchange 6' of rank 2 failed: rank 3 has not begun to receive for 1.0 s"
        in str(results[2])
    )


@needs_linux
def test_a_peer_that_hoards_its_buffer_is_named():
    """Rank 1 goes on without releasing: it is told at once; rank 0 waits for room in rank 1's buffer."""
    results = run_processes(2, exchange_until, 1, "hoards", 1.0, timeout_s=120)
    assert isinstance(results[1], RuntimeError)
    assert (
        "exchange 'exchange 8' would use the buffer of exchange 'exchange 6', which is in flight"
        in str(results[1])
    )
    assert isinstance(results[0], PeerError)
    assert (
        "exchange 'exchange 8' of rank 0 failed: rank 1 has not begun to receive for 1.0 s"
        in str(results[0])
    )


def misuse(group: dist.ProcessGroup) -> None:
    transport = symmetric(group)
    route = make_route(ONE_EACH, group.rank(), None)
    parts = [torch.zeros(sum(route.send_counts), 8)]
    pending = start(transport, parts, route, "first", 0)
    with refusal("'first'", "started", None, RuntimeError):
        pending.release()
    pending.wait()
    with refusal("'first'", "waited for", None, RuntimeError):
        pending.wait()
    pending.release()
    with refusal("'first'", "released", None, RuntimeError):
        pending.release()


@needs_linux
def test_an_exchange_is_waited_for_and_released_once():
    values(run_processes(2, misuse))


def fill_both_buffers(group: dist.ProcessGroup) -> None:
    transport, swap = symmetric(group, buffer_bytes=1024), 1 - np.eye(2, dtype=int)
    routes = Routes([make_route(swap, group.rank(), None) for _ in range(2)])
    # 1,200 and 512 bytes
    both = [[torch.full((1, floats), float(group.rank()))] for floats in (300, 128)]
    pending = transport.start(both, routes, "both", call := transport.begin())
    with refusal("'late'", "'both'", None, RuntimeError):
        start(
            transport,
            [torch.zeros(1, 8)],
            make_route(swap, group.rank(), None, buffer=1),
            "late",
            call,
        )
    for sent, message in zip(both, pending.wait(), strict=True):
        (received,) = RowFormat(sent).unpack(message)
        assert torch.equal(received, torch.full_like(sent[0], 1.0 - group.rank()))
    pending.release()
    for buffer, floats, num_bytes in ((0, 300, 2736), (1, 257, 1040)):
        routes = Routes(
            [
                make_route(swap, group.rank(), None, buffer=buffer)
                for _ in range(2 - buffer)
            ]
        )
        with refusal("'wide'", num_bytes):
            transport.start(
                [[torch.zeros(1, floats)] for _ in routes],
                routes,
                "wide",
                transport.begin(),
            )


@needs_linux
def test_buffers_hold_two_messages_and_are_never_exceeded():
    values(run_processes(2, fill_both_buffers))


# Memory that ranks share ----------------------------------------------------------------------------------------------


def exchange_and_leave(group: dist.ProcessGroup) -> list[int]:
    """Numbers of mappings of this process: with a transport, and once it is gone."""
    transport, rank = symmetric(group), group.rank()
    route = make_route(ONE_EACH, rank, None)
    pending = start(
        transport,
        [torch.full((sum(route.send_counts), 4), rank)],
        route,
        "only",
        transport.begin(),
    )
    assert (pending.wait()[0].view(torch.int64) == 1 - rank).all()
    pending.release()
    mapped = number_of_mappings()
    del pending, transport
    return [mapped, number_of_mappings()]


@needs_linux
def test_memory_is_allocated_once_and_given_back():
    """Each rank maps its own and its peer's."""
    assert values(run_processes(2, exchange_and_leave)) == [[2, 0]] * 2


@needs_linux
def test_the_memory_of_another_container_is_not_taken_for_a_peers(monkeypatch):
    """There a peer has the process id and the file that this rank has here."""

    def peer_alike(
        named_path: tuple[str, str], group: object
    ) -> dict[int, tuple[str, str]]:
        name, path = named_path
        return {
            0: named_path,
            1: (
                name.translate(str.maketrans("0123456789abcdef", "f0123456789abcde")),
                path,
            ),
        }

    monkeypatch.setattr(memory, "gather", peer_alike)
    with (
        memory.CpuMemory.reserve(4096) as file,
        refusal(error=RuntimeError),
    ):
        memory.CpuMemory.share(file, memory.NearRanks(None, None, range(2), 2))


def number_of_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("torchtitan_cad" in line and "memfd" in line for line in maps)


def recorded_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[SymmetricTransport, RecordingMemory]:
    memory = RecordingMemory()

    def join(_: torch.device, mark: str | None) -> None:
        memory.steps.extend([(f"join {mark}", [])] if mark else [])

    monkeypatch.setattr(streams, "record_event", lambda _: f"mark {len(memory.steps)}")
    monkeypatch.setattr(streams, "wait_event", join)
    return SymmetricTransport([0, 1], 0, memory.allocate, lambda: 1.0, 512), memory


def test_what_is_being_sent_lives_until_the_stream_of_its_memory_waits_for_it(
    monkeypatch,
):
    """The sending stream reads parts and tables, whose memory belongs to the stream that releases the exchange."""
    transport, memory = recorded_transport(monkeypatch)
    route = make_route(ONE_EACH, 0, torch.zeros(2, dtype=torch.int64))
    part = torch.ones(1, 3)
    read = [weakref.ref(tensor) for tensor in (part, route.rows)]
    pending = start(transport, [part], route, "trial", 0)
    read.append(memory.table)
    del part, route
    assert [step for step, _ in memory.steps] == ["post", "wait", "send"]
    pending.wait()
    assert all(ref() is not None for ref in read)
    pending.release()
    assert [step for step, _ in memory.steps] == [
        "post",
        "wait",
        "send",
        "wait",
        "join mark 3",
    ]
    assert read[0]() is None
    del pending
    assert all(ref() is None for ref in read)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_round_trip_of_mixed_dtypes_and_odd_sizes(num_rows, dtype):
    parts = [
        torch.randn(7, 3, 5).to(dtype),
        torch.randn(7, 3),
        torch.randn(7, 1, 1).to(dtype),
    ]
    rows = torch.tensor([6, 0, 3, 3, 2])[:num_rows]
    row_format = RowFormat(parts)
    message = row_format.pack(parts, rows)
    assert message.dtype == torch.uint8
    assert message.shape == (num_rows, row_format.row_bytes)
    for part, back in zip(parts, row_format.unpack(message), strict=True):
        assert back.dtype == part.dtype
        assert torch.equal(back, part[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sizes",
    [(32, 8, 128, 128, 0), (3, 1, 5, 5, 0), (16, 16, 192, 128, 64), (3, 3, 11, 5, 3)],
)
def test_planned_bytes_are_those_of_the_engines_messages(sizes, dtype):
    heads, kv_heads, head_dim, value_dim, shared_dim = sizes
    of_rows = (
        (heads, head_dim),
        (heads, value_dim),
        (kv_heads, head_dim - shared_dim),
        (kv_heads, value_dim),
    )
    q, out, *keys = (torch.zeros(1, *size, dtype=dtype) for size in of_rows)
    keys += [torch.zeros(1, 1, shared_dim, dtype=dtype)] if shared_dim else []
    statistic = torch.zeros(1, heads, dtype=compute_dtype(dtype))
    shape = AttentionShape(
        heads, kv_heads, head_dim, dtype.itemsize, value_dim, shared_dim
    )
    for keep, backward in (
        (False, [out, q, statistic, statistic]),
        (True, [out, statistic, statistic]),
    ):
        messages = [[q], [out, statistic], backward, [q], keys, keys]
        assert astuple(RowBytes.of(shape, keep=keep)) == tuple(
            RowFormat(parts).row_bytes for parts in messages
        )


def test_a_hidden_message_comes_back_whole():
    message = torch.randint(0, 255, (5, 32), dtype=torch.uint8)
    hidden = hide_storage(message)
    assert hidden.shape == (0,)
    want = message.clone()
    del message
    (rows,) = RowFormat([torch.zeros(0, 32, dtype=torch.uint8)]).reveal(hidden, 5)
    assert torch.equal(rows, want)


def test_a_copied_view_is_an_error_that_names_the_setting():
    message = torch.zeros(5, 32, dtype=torch.uint8)
    with refusal(remedy="cad.backward", error=RuntimeError):
        RowFormat([message]).reveal(hide_storage(message).clone(), 5)
