# SPDX-License-Identifier: BSD-3-Clause
"""Joined servers: what they compute is what the ranks would, and whatever goes wrong with them costs no result."""

import contextlib
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.refusals import refusal
from tests.lib.rows import (
    CPU,
    SHAPES,
    SquareKernel,
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
from torchtitan_cad.runtime.servers import client, server
from torchtitan_cad.runtime.servers.client import OwedAnswer, RankRates, ServerPool
from torchtitan_cad.runtime.servers.registry import JobCard, Registry, digest_of
from torchtitan_cad.runtime.servers.request import Request
from torchtitan_cad.runtime.servers.server import AttentionServer
from torchtitan_cad.runtime.servers.wire import (
    ANSWER,
    ECHO,
    Connection,
    ServerMessage,
    WireError,
)

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


def done(results: Sequence[Tensor]) -> OwedAnswer:
    """An answer that has come."""
    answer: OwedAnswer = Future()
    answer.set_result(results)
    return answer


class Answers:
    """A pool that computes at once what ``is_lost`` does not lose; it counts both."""

    def __init__(self, is_lost: Callable[[], bool]) -> None:
        self.is_lost = is_lost
        self.num_lost = 0
        self.num_answered = 0

    def ask(self, server: int, request: Request, seconds: float) -> Any:
        if self.is_lost():
            self.num_lost += 1
            return None
        self.num_answered += 1
        return done(request.compute(get_kernel("cpu", CPU)))


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
    some = Answers(lambda: rng.random() < share)
    at_home = execute(plan, tensors)
    assert_same_bits(execute(plan, tensors, servers=some), at_home)
    assert some.num_lost + some.num_answered >= 4
    assert (some.num_answered == 0) == (share == 1.0) or 0 < share < 1


# A store, a job and its servers ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _joins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "attention_seconds", lambda *_: 1e-4)
    monkeypatch.setattr(server, "MOST_PAUSE_S", 0.0)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))


def open_job(store: dist.TCPStore, job: int = JOB, version: str = __version__) -> None:
    shape = asdict(SHAPES["gqa 8:2"])
    digest = digest_of(TOKEN, job)
    card = JobCard(job, version, "float32", shape, ranks=2, digest=digest)
    registry_of(store).open_job(card)


def registry_of(store: dist.TCPStore, token: str = TOKEN) -> Registry:
    timeout = timedelta(seconds=20)
    client = dist.TCPStore("localhost", store.port, is_master=False, timeout=timeout)
    return Registry(client, token)


def pool_of(store: dist.TCPStore, job: int = JOB) -> ServerPool:
    rates = RankRates(1e-4, 1e-4, 1.0)
    return ServerPool(
        registry_of(store), job, rank=0, group=0, rates=rates, pinned=False
    )


def use_servers(pool: ServerPool, count: int) -> None:
    """Make lists until ``count`` servers are on one."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pool.take_list(pool.look())
        links = [*pool._links.values()]  # threads strike servers off meanwhile
        if len(pool.listed) == count and all(link.rate for link in links):
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(pool.listed)} servers, not {count}")


def server_at(port: int, token: str = TOKEN) -> AttentionServer:
    return AttentionServer("localhost", port, token, CPU, "cpu", version=__version__)


@contextmanager
def serving(store: dist.TCPStore, count: int = 1) -> Iterator[list[AttentionServer]]:
    """Servers in threads of this process."""
    servers = [server_at(store.port) for _ in range(count)]
    threads = [threading.Thread(target=one.run, daemon=True) for one in servers]
    for thread in threads:
        thread.start()
    try:
        yield servers
    finally:
        for one in servers:
            one.leave()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def request_of(tokens: int = 64) -> Request:
    shape = SHAPES["gqa 8:2"]
    args = VarlenArgs.from_numpy([0, tokens], [0, tokens], causal=True, scale=0.25)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    rows = [torch.randn(tokens, count, shape.head_dim) for count in heads]
    return Request(FORWARD, rows, args)


# Servers that fail ----------------------------------------------------------------------------------------------------


Behave = Callable[[Connection, ServerMessage], None]


class FalseServer:
    """Announces itself, accepts one rank, echoes, and then does what ``behave`` does with the first request."""

    def __init__(
        self, store: dist.TCPStore, behave: Behave, token: str = TOKEN
    ) -> None:
        self.registry = registry_of(store, token)
        self.behave = behave
        self.card = self.registry.announce(JOB, "a test", "cpu", 1e-4)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the test has ended
            while not (found := self.registry.invitations(JOB, self.card.number, 0)):
                time.sleep(0.02)
            connection = Connection(found[0], JOB, is_server=True, timeout_s=5)
            while (message := connection.receive(20)).kind == ECHO:
                connection.send(message, 5)
            self.connection = connection  # open until the test ends
            self.behave(connection, message)


def answer_raw(body: bytes = b"", **head: int) -> Behave:
    """Some numbers of the head are not those of the body."""

    def behave(connection: Connection, message: ServerMessage) -> None:
        content = torch.tensor(list(body), dtype=torch.uint8)
        right = {
            "version": 1,
            "job": JOB,
            "kind": ANSWER,
            "number": message.number,
            "text": len(body),
            "bytes": len(body),
            "sum": int(content.view(torch.int64).sum()),
        }
        words = torch.tensor(list({**right, **head}.values()))
        connection._group.send([words], 0, 0).wait()
        if body:
            connection._group.send([content], 0, 0).wait()

    return behave


def answer_with(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    number_off: int = 0,
    kind: int = ANSWER,
) -> Behave:
    def behave(connection: Connection, message: ServerMessage) -> None:
        tensors = [torch.zeros(shape, dtype=dtype), torch.zeros(shape[:2])]
        number = message.number + number_off
        connection.send(ServerMessage(kind, number, {}, tensors), 5)

    return behave


def say_nothing(connection: Connection, message: ServerMessage) -> None:
    time.sleep(3)


def hang_up(connection: Connection, message: ServerMessage) -> None:
    connection._group = None


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (say_nothing, "late"),
        (hang_up, "onnection|error"),
        (answer_raw(b"garbage " * 8, sum=12345), "sum"),
        (answer_raw(version=2), "version 2"),
        (answer_raw(job=JOB + 1), "another job"),
        (answer_raw(bytes=-1), "-1 bytes"),
        (answer_raw(bytes=2**36), "no memory|late"),
        (answer_raw(b"[" * 100_000), "cannot be read"),
        (answer_raw(b'{"tensors": [["Tensor", [3]]]}  '), "cannot be read"),
        (answer_with((64, 8, 15)), "shapes"),
        (answer_with((64, 8, 16), torch.int64), "another dtype"),
        (answer_with((64, 8, 16), number_off=1), "another request"),
        (answer_with((64, 8, 16), kind=ECHO), "another request"),
    ],
)
def test_a_wrong_server_is_struck_off(store, caplog, behave, reason):
    """The rank gets no results, at once or after a bounded wait, asks it nothing more, and says why."""
    open_job(store)
    number = FalseServer(store, behave).card.number
    pool = pool_of(store)
    use_servers(pool, 1)
    pending = pool.ask(number, request_of(), 0.01)
    begin = time.monotonic()
    assert pending.result(20) is None
    assert time.monotonic() - begin < client.LEAST_WAIT_S + 1.0
    assert pool.ask(number, request_of(), 0.01) is None
    (said,) = (message for message in caplog.messages if "strikes off" in message)
    told = registry_of(store).reason_gone(JOB, number)
    assert "server 0 (a test)" in said
    assert "rank 0" in told
    for text in (said, told):
        assert re.search(reason, text)
    use_servers(pool, 0)


def test_an_unsigned_announcement_is_not_used(store):
    open_job(store)
    false = FalseServer(store, say_nothing, token="a guess")
    assert pool_of(store).look() == []
    told = registry_of(store).reason_gone(JOB, false.card.number)
    assert "not signed" in told


@pytest.mark.parametrize(
    "text",
    [
        b"\xff no text",
        "[" * 100_000,
        '{"place": "idle", "kernel": "cpu", "seconds_per_tile": 0}',
        '{"place": "of no speed", "kernel": "cpu"}',
    ],
    ids=["bytes", "deep", "speed", "field"],
)
def test_a_wrong_announcement_keeps_no_other_server_away(store, text):
    """It is struck off, even if it is signed."""
    open_job(store)
    registry = registry_of(store)
    if isinstance(text, str):
        text = f"{registry._sign(text)} {text}".encode()
    registry._store.set(f"{JOB}/servers", text + b"\n")
    pool = pool_of(store)
    with serving(store):
        use_servers(pool, 1)
        assert [one.number for one in pool.listed] == [1]
        assert registry.reason_gone(JOB, 0) is not None
        pool.close()


def test_a_server_that_accepts_no_invitation_is_not_used(store, monkeypatch):
    monkeypatch.setattr(client, "CONNECT_S", 1.0)
    open_job(store)
    registry = registry_of(store)
    card = registry.announce(JOB, "a test", "cpu", 1e-4)
    pool = pool_of(store)
    begin = time.monotonic()
    assert pool.look() == []
    assert time.monotonic() - begin < client.CONNECT_S  # nobody waits for it
    use_servers(pool, 0)
    # A thread tells the others, after it has taken the server from the pool.
    assert eventually(
        lambda: "invitation" in str(registry.reason_gone(JOB, card.number))
    )


def test_a_server_leaves_although_the_store_says_nothing(monkeypatch):
    """As what listens at a wrong endpoint, or a store that is stopped."""
    monkeypatch.setattr(server, "_LEAVE_S", 0.1)
    with socket.create_server(("localhost", 0)) as mute:
        one = server_at(mute.getsockname()[1])
        leaver = threading.Timer(0.5, one.leave)
        leaver.start()
        begin = time.monotonic()
        one.run_in_thread()
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
    jobs = registry_of(store)._store
    card = jobs.get("job").decode()
    jobs.set("job", card.replace("{", '{"field of a later version": 1, ', 1))
    with refusal(key, remedy=remedy):
        server_at(store.port, token).run_in_thread()


def test_a_kernel_that_takes_squares_alone_does_not_serve(store, monkeypatch):
    """Servers get the tails of causal tasks, which have more keys than queries."""
    open_job(store)
    monkeypatch.setattr(server, "get_kernel", lambda *_: SquareKernel())
    with refusal("--kernel", "cpu", remedy="varlen"):
        server_at(store.port).run_in_thread()


def test_a_server_refuses_what_it_cannot_compute(store):
    """Rows of another dtype, or tasks that do not fit: the reason comes back, and the server goes on."""
    open_job(store)
    with serving(store):
        pool = pool_of(store)
        use_servers(pool, 1)
        right = request_of()
        for rows in ([x.half() for x in right.rows], right.rows[:1]):
            wrong = Request(right.direction, rows, right.args)
            with pytest.raises(WireError, match="refuses"):
                pool._links[0].round_trip(wrong, wrong.rows, None, seconds=0.1)
        results = pool.ask(0, right, 10.0).result(20)
        assert results[0].equal(right.compute(get_kernel("cpu", CPU))[0])
        pool.close()


def test_a_device_that_is_late_with_rows_is_no_fault_of_a_server(store, monkeypatch):
    open_job(store)
    copied = SimpleNamespace(synchronize=lambda: time.sleep(client.LEAST_WAIT_S + 0.2))
    monkeypatch.setattr(client, "_to_host", lambda rows: (rows, copied))
    with serving(store):
        pool = pool_of(store)
        use_servers(pool, 1)
        assert pool.ask(0, request_of(), 0.01).result(20) is not None
        pool.close()


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


def test_a_server_waits_for_the_next_job(store):
    with serving(store):
        for job in (JOB, JOB + 1):
            open_job(store, job)
            pool = pool_of(store, job=job)
            use_servers(pool, 1)
            pool.close()


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
        threads, descriptors = counts[3]
        most = threads + 3, descriptors + 6
        assert eventually(
            lambda: all(
                left <= limit for left, limit in zip(in_use(), most, strict=True)
            )
        ), counts
        pool.close()


def in_use() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir("/dev/fd"))
