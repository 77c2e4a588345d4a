# SPDX-License-Identifier: BSD-3-Clause
"""Joined servers: what they compute is what the ranks would, and whatever goes wrong with them costs no result."""

import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.refusals import refusal
from tests.lib.rows import (
    CPU,
    SHAPES,
    Tensors,
    assert_same_bits,
    execute,
)
from tests.lib.waiting import eventually
from torchtitan_cad import __version__
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.servers import JoinedServer, assign_to_servers
from torchtitan_cad.runtime.directions import FORWARD
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.servers import client
from torchtitan_cad.runtime.servers.client import ServerPool
from torchtitan_cad.runtime.servers.registry import JobCard, Registry, open_store
from torchtitan_cad.runtime.servers.request import Request
from torchtitan_cad.runtime.servers.wire import Connection, ServerMessage, WireError
from torchtitan_cad.tools import attention_server as server
from torchtitan_cad.tools.attention_server import AttentionServer

LAYOUT = TokenLayout.from_segments(
    [[(0, 0, 300), (1, 0, 100)], [(2, 0, 201), (3, 0, 100)]]
)
JOB = 77
TOKEN = "a token"
NEAR = 1e12


def plan_with_servers(heads: str) -> Plan:
    plan = make_plan(LAYOUT, SHAPES[heads], PlannerConfig(min_shard=64, tile=64))
    servers = [JoinedServer(number, 1.0, NEAR) for number in (0, 1)]
    served = assign_to_servers(plan, servers, 1e-3)
    assert len(served.stand_ins.seconds) == 2
    return served


@settings(max_examples=12)
@given(
    heads=st.sampled_from([*SHAPES]),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_lost_answers_leave_the_same_bits(heads, seed, share):
    plan = plan_with_servers(heads)
    torch.manual_seed(seed)
    tensors = Tensors.random(LAYOUT, plan.shape)
    rng = random.Random(seed)
    are_lost = []

    def ask(server, request, seconds):
        """Compute at once what is not lost."""
        are_lost.append(rng.random() < share)
        results = request.compute(get_kernel("cpu", CPU))
        return None if are_lost[-1] else SimpleNamespace(result=lambda: results)

    at_home = execute(plan, tensors)
    pool = SimpleNamespace(ask=ask)
    assert_same_bits(execute(plan, tensors, servers=pool), at_home)
    assert len(are_lost) >= 4
    assert all(are_lost) == (share == 1.0) or 0 < share < 1


# A store, a job and its servers ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _joins_at_once(monkeypatch):
    monkeypatch.setattr(server, "attention_seconds", lambda *_, **__: 1e-4)
    monkeypatch.setattr(server, "RETRY_S", 0.1)
    monkeypatch.setattr(server, "REJOIN_S", 0.0)


@pytest.fixture
def store() -> dist.TCPStore:
    return open_store("localhost", 0, hosts=True)


def open_job(store, version=__version__):
    card = JobCard("float32", SHAPES["gqa 8:2"], cost_tile=128)
    registry_of(store).publish(card, version)


def registry_of(store, token=TOKEN) -> Registry:
    return Registry(open_store("localhost", store.port, hosts=False), JOB, token)


def pool_of(store) -> ServerPool:
    return ServerPool(registry_of(store), 0, unit=1e-4, share=1.0)


def use_servers(pool, count):
    """Make lists until ``count`` servers are on one."""

    def are_used():
        pool.take_lists([pool.look()])
        return len(pool.listed) == count

    assert eventually(are_used, 20), pool.listed


def server_at(port, token=TOKEN) -> AttentionServer:
    return AttentionServer("localhost", port, token, CPU)


@contextmanager
def serving(store, count=1) -> Iterator[list[AttentionServer]]:
    """Servers in threads of this process."""
    servers = [server_at(store.port) for _ in range(count)]
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(one.run) for one in servers]
        try:
            yield servers
        finally:
            for one in servers:
                one.leave()
    for end in running:
        end.result()


def request_of(tokens=64) -> Request:
    shape = SHAPES["gqa 8:2"]
    args = VarlenArgs.from_numpy([0, tokens], [0, tokens], causal=True, scale=0.25)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    rows = [torch.randn(tokens, count, shape.head_dim) for count in heads]
    return Request(FORWARD, rows, args)


# Servers that fail ----------------------------------------------------------------------------------------------------


Behave = Callable[[Connection], None]


def answer_raw(job: int = JOB, length: int = 7, total: int = 0) -> Behave:
    """Send a head and some text."""

    def behave(connection):
        text = torch.zeros(7, dtype=torch.uint8)
        for part in (torch.tensor([job, length, total]), text):
            connection._group.send([part], 0, 0).wait()

    return behave


def answer_with(shape: tuple[int, ...], dtype=torch.float32, kind="results") -> Behave:
    def behave(connection):
        tensors = [torch.zeros(shape, dtype=dtype), torch.zeros(shape[:2])]
        Connection.send(connection, ServerMessage(kind, {}, tensors), 5)

    return behave


def say_nothing(connection):
    pass


def hang_up(connection):
    raise RuntimeError


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (say_nothing, "late"),
        (hang_up, "onnection|error"),
        (answer_raw(), "sum"),
        (answer_raw(job=JOB + 1), "another job"),
        (answer_raw(length=-1), "negative"),
        (answer_with((64, 8, 15)), "shapes"),
        (answer_with((64, 8, 16), torch.int64), "another dtype"),
        (answer_with((64, 8, 16), kind="echo"), "shapes"),
    ],
)
def test_a_wrong_server_is_struck_off(store, caplog, monkeypatch, behave, reason):
    """The rank gets no results, at once or after a bounded wait, asks it nothing more, and says why."""

    class FalseConnection(Connection):
        """Echoes, and does what ``behave`` does in place of an answer."""

        def send(self, message, timeout_s):
            if message.kind == "echo":
                super().send(message, timeout_s)
            else:
                behave(self)

    monkeypatch.setattr(server, "Connection", FalseConnection)
    monkeypatch.setattr(server, "REJOIN_S", 60.0)
    open_job(store)
    pool = pool_of(store)
    with serving(store):
        use_servers(pool, 1)
        pending = pool.ask(0, request_of(), 0.01)
        begin = time.monotonic()
        assert pending.result(20) is None
        assert time.monotonic() - begin < client.LEAST_WAIT_S + 1.0
        assert pool.ask(0, request_of(), 0.01) is None
        (said,) = (message for message in caplog.messages if "strikes off" in message)
        told = registry_of(store).reason_gone(0)
        assert "server 0 (" in said
        assert "rank 0" in told
        for text in (said, told):
            assert re.search(reason, text)
        use_servers(pool, 0)


def test_an_announcement_with_another_token_is_not_seen(store):
    open_job(store)
    registry_of(store, token="a guess").announce("a test", "cpu", 1e-4)
    assert registry_of(store).servers(known=set()) == []


def test_a_server_that_accepts_no_invitation_is_not_used(store, monkeypatch):
    monkeypatch.setattr(client, "CONNECT_S", 1.0)
    open_job(store)
    registry = registry_of(store)
    card = registry.announce("a test", "cpu", 1e-4)
    pool = pool_of(store)
    begin = time.monotonic()
    assert pool.look() == []
    assert time.monotonic() - begin < client.CONNECT_S  # nobody waits for it
    use_servers(pool, 0)
    # A thread tells the others, after it has taken the server from the pool.
    assert eventually(lambda: "invitation" in str(registry.reason_gone(card.number)))


def test_a_server_leaves_although_the_store_says_nothing(monkeypatch):
    """As what listens at a wrong endpoint, or a store that is stopped."""
    monkeypatch.setattr(server, "_LEAVE_S", 0.1)
    with socket.create_server(("localhost", 0)) as mute:
        one = server_at(mute.getsockname()[1])
        leaver = threading.Timer(0.5, one.leave)
        leaver.start()
        begin = time.monotonic()
        one.run()
        assert time.monotonic() - begin < 5
        leaver.join()


@pytest.mark.parametrize(
    ("version", "token", "key", "remedy"),
    [
        ("0.0.1", TOKEN, "torchtitan_cad 0.0.1", "the same version"),
        (__version__, "a guess", "--token", "first log lines"),
    ],
    ids=["version", "token"],
)
def test_a_server_refuses_another_job(store, version, token, key, remedy):
    open_job(store, version=version)
    with refusal(key, remedy=remedy):
        server_at(store.port, token).run()


def test_a_server_refuses_what_it_cannot_compute(store):
    """Tasks that do not fit: the reason comes back, and the server goes on."""
    open_job(store)
    with serving(store):
        pool = pool_of(store)
        use_servers(pool, 1)
        right = request_of()
        few = [x[:63] for x in right.rows]
        wrong = Request(right.direction, few, right.args)
        with pytest.raises(WireError, match="refuses"):
            pool._links[0].round_trip(wrong, few, None, seconds=0.1)
        results = pool.ask(0, right, 10.0).result(20)
        assert results[0].equal(right.compute(get_kernel("cpu", CPU))[0])
        pool.close()


def test_a_device_that_is_late_with_rows_is_no_fault_of_a_server(store, monkeypatch):
    open_job(store)
    copied = SimpleNamespace(synchronize=lambda: time.sleep(client.LEAST_WAIT_S + 0.2))
    monkeypatch.setattr(client.streams, "record_event", lambda device: copied)
    with serving(store):
        pool = pool_of(store)
        use_servers(pool, 1)
        assert pool.ask(0, request_of(), 0.01).result(20) is not None
        pool.close()


def test_plans_use_the_servers_that_all_ranks_are_connected_to(store):
    one, two, three = (JoinedServer(number, 1.0, NEAR) for number in range(3))
    pool = pool_of(store)
    pool.take_lists([[one, two], [two, three]])
    assert pool.listed == [two]


def test_a_server_that_leaves_is_on_no_further_list(store):
    open_job(store)
    pool = pool_of(store)
    with serving(store, 2) as servers:
        use_servers(pool, 2)
        servers[0].leave()
        use_servers(pool, 1)
        use_servers(pool, 1)
        servers[1].leave()
        use_servers(pool, 0)


def test_servers_that_come_and_go_leak_nothing(store):
    """Ten registrations of one server, all struck off: threads and descriptors are soon as many as after three."""
    open_job(store)
    pool = pool_of(store)
    counts = []
    with serving(store):
        for _ in range(10):
            use_servers(pool, 1)
            number = pool.listed[0].number
            assert pool.ask(number, request_of(), 10.0).result(20) is not None
            pool.strike(number, "the test says so")
            counts.append(in_use())
        most = counts[3] + [3, 6]
        assert eventually(lambda: (in_use() <= most).all()), counts
        pool.close()


def in_use() -> np.ndarray:
    """Threads and descriptors of this process."""
    return np.array([threading.active_count(), len(os.listdir("/dev/fd"))])
