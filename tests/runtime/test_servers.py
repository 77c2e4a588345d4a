# SPDX-License-Identifier: BSD-3-Clause
"""Joined servers: what they compute is what the ranks would, and whatever goes wrong with them costs no result."""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.refusals import refusal
from tests.lib.rows import CPU, SHAPES, Tensors, assert_same_bits, execute
from torchtitan_cad import __version__
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout, make_plan
from torchtitan_cad.planning.servers import JoinedServer, assign_to_servers
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.servers import client, server
from torchtitan_cad.runtime.servers.client import RankRates, ServerPool
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
    [[(0, 0, 500), (1, 0, 100)], [(2, 0, 301), (3, 0, 200)]]
)
JOB, TOKEN = 77, "a token"
NEAR = 1e12


def plan_with_servers(heads: str, numbers: tuple[int, ...] = (0, 1)) -> Plan:
    config = PlannerConfig(min_shard=64, tile=64)
    plan = make_plan(LAYOUT, SHAPES[heads], config)
    given_away = assign_to_servers(
        plan, [JoinedServer(number, 1.0, NEAR) for number in numbers], 1e-3
    )
    assert given_away.stand_ins is not None
    assert len(given_away.stand_ins.seconds) == len(numbers)
    return given_away


class Answers:
    """A pool that computes at once what ``is_lost`` does not lose; it counts both."""

    def __init__(self, is_lost: Callable[[], bool]) -> None:
        self.is_lost, self.num_lost, self.num_answered = is_lost, 0, 0

    def ask(self, server: int, request: Request, seconds: float) -> "Answer | None":
        if self.is_lost():
            self.num_lost += 1
            return None
        self.num_answered += 1
        return Answer(request)


@dataclass
class Answer:
    request: Request

    def wait(self) -> tuple[torch.Tensor, ...]:
        return self.request.compute(get_kernel("cpu", CPU))


@given(
    heads=st.sampled_from([*SHAPES]),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
)
def test_any_lost_answers_leave_the_same_bits(
    heads: str, seed: int, share: float
) -> None:
    plan = plan_with_servers(heads)
    torch.manual_seed(seed)
    tensors = Tensors.random(LAYOUT, plan.shape)
    rng = np.random.default_rng(seed)
    lock = threading.Lock()

    def is_lost() -> bool:
        with lock:
            return bool(rng.random() < share)

    some = Answers(is_lost)
    assert_same_bits(
        execute(plan, tensors, servers=some),
        execute(plan, tensors, servers=None),
    )
    assert some.num_lost + some.num_answered >= 4
    assert (some.num_answered == 0) == (share == 1.0) or 0 < share < 1


def test_results_are_those_of_the_plan_without_servers() -> None:
    plan = plan_with_servers("gqa 8:2")
    without = make_plan(LAYOUT, plan.shape, plan.config)
    torch.manual_seed(1)
    tensors = Tensors.random(LAYOUT, plan.shape, torch.float64)
    for found, wanted in zip(
        execute(plan, tensors), execute(without, tensors), strict=True
    ):
        torch.testing.assert_close(found, wanted)


# A store, a job and its servers ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _joins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "attention_seconds", lambda *_: 1e-4)
    monkeypatch.setattr(server, "MOST_PAUSE_S", 0.0)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))


def connect_to(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore(
        "localhost", store.port, is_master=False, timeout=timedelta(seconds=20)
    )


def open_job(store: dist.TCPStore, **changes: object) -> None:
    values: dict = dict(
        job=JOB,
        version=__version__,
        dtype="float32",
        shape=asdict(SHAPES["gqa 8:2"]),
        ranks=2,
        digest=digest_of(TOKEN, JOB),
    )
    Registry(connect_to(store), TOKEN).open_job(JobCard(**{**values, **changes}))


def pool_of(store: dist.TCPStore, rank: int = 0) -> ServerPool:
    registry = Registry(connect_to(store), TOKEN)
    return ServerPool(registry, JOB, rank, 0, RankRates(1e-4, 1e-4, 1.0), pinned=False)


def use_servers(pool: ServerPool, count: int, timeout_s: float = 20.0) -> int:
    """Make lists until ``count`` servers are on one; returns its number."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        version = pool.make_list()
        pool.take_list(version)
        if len(pool.listed) == count:
            return version
        time.sleep(0.05)
    raise AssertionError(f"{len(pool.listed)} servers after {timeout_s} s, not {count}")


@contextmanager
def serving(
    store: dist.TCPStore, count: int = 1, token: str = TOKEN
) -> Iterator[list[AttentionServer]]:
    """Servers in threads of this process."""
    servers = [
        AttentionServer("localhost", store.port, token, CPU, "cpu", version=__version__)
        for _ in range(count)
    ]
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
    return Request(server.FORWARD, rows, args)


def test_servers_compute_for_two_ranks(store: dist.TCPStore) -> None:
    """Forward and backward of both ranks go through servers, which are then told that the ranks have ended."""
    open_job(store)
    with serving(store, 2):
        pools = [pool_of(store, rank) for rank in range(2)]
        version = use_servers(pools[0], 2)
        pools[1].take_list(version)
        plan = plan_with_servers("gqa 8:2", tuple(s.number for s in pools[0].listed))
        torch.manual_seed(1)
        tensors = Tensors.random(LAYOUT, plan.shape)
        at_home = execute(plan, tensors)
        asked = Answered(pools)
        assert_same_bits(execute(plan, tensors, servers=asked), at_home)
        assert asked.num_answered >= 4
        for pool in pools:
            pool.close()


class Answered:
    """The pools of threaded ranks, whose numbers of queries are even and odd; counts answers."""

    def __init__(self, pools: list[ServerPool]) -> None:
        self.pools, self.num_answered = pools, 0

    def ask(self, number: int, request: Request, seconds: float) -> "Answered.Known":
        pool = self.pools[request.rows[0].shape[0] % 2]
        pending = pool.ask(number, request, seconds)
        assert pending is not None
        results = pending.wait()
        assert results is not None
        self.num_answered += 1
        return self.Known(results)

    @dataclass
    class Known:
        results: Sequence[torch.Tensor]

        def wait(self) -> Sequence[torch.Tensor]:
            return self.results


# Servers that fail ----------------------------------------------------------------------------------------------------


class FalseServer:
    """Announces itself, accepts one rank, echoes, and then does what ``behave`` does with the first request."""

    def __init__(
        self,
        store: dist.TCPStore,
        behave: Callable[[Connection, ServerMessage], None],
        token: str = TOKEN,
    ) -> None:
        self.registry = Registry(connect_to(store), token)
        self.behave = behave
        self.card = self.registry.announce(JOB, "a test", "cpu", 1e-4)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the test has ended
            while not (found := self.registry.invitations(JOB, self.card.number, 0)):
                time.sleep(0.02)
            connection = Connection(found[0], JOB, is_server=True, timeout_s=5)
            while (message := connection.receive(20)).kind == ECHO:
                connection.send(message, 5)
            self.connection = connection  # open until the test ends
            self.behave(connection, message)


def answer_garbage(connection: Connection, message: ServerMessage) -> None:
    body = torch.randint(0, 255, (64,), dtype=torch.uint8)
    words = torch.tensor([1, JOB, ANSWER, message.number, 2, 64, 12345])
    connection._group.send([words], 0, 0).wait()
    connection._group.send([body], 0, 0).wait()


def answer_as(
    kind: int, number_off: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Callable:
    def behave(connection: Connection, message: ServerMessage) -> None:
        tensors = [torch.zeros(shape, dtype=dtype), torch.zeros(shape[:2])]
        connection.send(
            ServerMessage(kind, message.number + number_off, {}, tensors), 5
        )

    return behave


def answer_with_head(*words: int) -> Callable[[Connection, ServerMessage], None]:
    def behave(connection: Connection, message: ServerMessage) -> None:
        connection._group.send([torch.tensor(words)], 0, 0).wait()

    return behave


def answer_with_text(text: str) -> Callable[[Connection, ServerMessage], None]:
    def behave(connection: Connection, message: ServerMessage) -> None:
        padded = text.encode() + b" " * (-len(text) % 16)
        body = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        size, total = len(body), int(body.view(torch.int64).sum())
        words = [1, JOB, ANSWER, message.number, size, size, total]
        connection._group.send([torch.tensor(words)], 0, 0).wait()
        connection._group.send([body], 0, 0).wait()

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
        (answer_garbage, "sum"),
        (answer_with_head(2, JOB, ANSWER, 0, 0, 0, 0), "version 2"),
        (answer_with_head(1, JOB + 1, ANSWER, 0, 0, 0, 0), "another job"),
        (answer_with_head(1, JOB, ANSWER, 0, 5, -1, 0), "-1 bytes"),
        (answer_with_head(1, JOB, ANSWER, 0, 5, 9, 0), "9 bytes"),
        (answer_with_head(1, JOB, ANSWER, 0, 5, 2**36, 0), "no memory|late"),
        (answer_with_text("[" * 100_000), "cannot be read"),
        (answer_with_text('{"tensors": [["Tensor", [3]]]}'), "cannot be read"),
        (answer_with_text('{"tensors": [["float32", [-5, 3]]]}'), "cannot be read"),
        (answer_as(ANSWER, 0, (64, 8, 15)), "shapes"),
        (answer_as(ANSWER, 0, (64, 8, 16), torch.int64), "another dtype"),
        (answer_as(ANSWER, 1, (64, 8, 16)), "another request"),
        (answer_as(ECHO, 0, (64, 8, 16)), "another request"),
    ],
)
def test_a_wrong_server_is_struck_off(
    store: dist.TCPStore,
    caplog: pytest.LogCaptureFixture,
    behave: Callable[[Connection, ServerMessage], None],
    reason: str,
) -> None:
    """The rank gets no results, at once or after a bounded wait, asks it nothing more, and says why."""
    open_job(store)
    false = FalseServer(store, behave)
    pool = pool_of(store)
    use_servers(pool, 1)
    pending = pool.ask(false.card.number, request_of(), 0.01)
    assert pending is not None
    begin = time.monotonic()
    assert pending.wait() is None
    assert time.monotonic() - begin < client.LEAST_WAIT_S + 1.0
    assert pool.ask(false.card.number, request_of(), 0.01) is None
    said = [
        record.message for record in caplog.records if "strikes off" in record.message
    ]
    assert len(said) == 1
    assert re.search(reason, said[0])
    assert "server 0 (a test)" in said[0]
    told = Registry(connect_to(store), TOKEN).reason_gone(JOB, false.card.number)
    assert told is not None
    assert "rank 0" in told
    assert re.search(reason, told)
    use_servers(pool, 0)


def test_an_unsigned_announcement_is_not_used(store: dist.TCPStore) -> None:
    open_job(store)
    false = FalseServer(store, say_nothing, token="a guess")
    pool = pool_of(store)
    assert pool.make_list() == 0
    told = Registry(connect_to(store), TOKEN).reason_gone(JOB, false.card.number)
    assert told is not None
    assert "not signed" in told


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"\xff no text",
        "[" * 100_000,
        '{"number": 7, "place": "of another", "kernel": "cpu", "seconds_per_tile": 1}',
        '{"number": 0, "place": "idle", "kernel": "cpu", "seconds_per_tile": 0}',
    ],
    ids=["none", "bytes", "deep", "number", "speed"],
)
def test_a_wrong_announcement_keeps_no_other_server_away(
    store: dist.TCPStore, text: str | bytes | None
) -> None:
    """One that has no card yet is looked for again; others are struck off, even signed ones."""
    open_job(store)
    registry = Registry(connect_to(store), TOKEN)
    number = registry._store.add(f"{JOB}/servers", 1) - 1
    if isinstance(text, str):
        text = f"{registry._sign(text)} {text}".encode()
    if text is not None:
        registry._store.set(f"{JOB}/server/{number}", text)
    pool = pool_of(store)
    with serving(store):
        use_servers(pool, 1)
        assert [one.number for one in pool.listed] == [1]
        assert (registry.reason_gone(JOB, number) is None) == (text is None)
        pool.close()


def test_a_server_that_accepts_no_invitation_is_not_used(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.3)
    open_job(store)
    registry = Registry(connect_to(store), TOKEN)
    card = registry.announce(JOB, "a test", "cpu", 1e-4)
    pool = pool_of(store)
    assert pool.make_list() == 0
    assert "invitation" in str(registry.reason_gone(JOB, card.number))


def test_a_server_leaves_although_the_store_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As what listens at a wrong endpoint, or a store that is stopped."""
    monkeypatch.setattr(server, "_LEAVE_S", 0.1)
    with socket.create_server(("localhost", 0)) as mute:
        one = AttentionServer(
            "localhost", mute.getsockname()[1], TOKEN, CPU, "cpu", version=__version__
        )
        leaver = threading.Timer(0.5, one.leave)
        leaver.start()
        begin = time.monotonic()
        one.run_in_thread()
        assert time.monotonic() - begin < 5
        leaver.join()


@pytest.mark.parametrize(
    ("changes", "token", "key", "remedy"),
    [
        ({"version": "0.0.1"}, TOKEN, "torchtitan_cad 0.0.1", "the same version"),
        ({}, "a guess", "--token", "first log lines"),
    ],
)
def test_a_server_refuses_another_job(
    store: dist.TCPStore,
    changes: dict[str, object],
    token: str,
    key: str,
    remedy: str,
) -> None:
    open_job(store, **changes)
    card = Registry(connect_to(store), TOKEN)._store
    card.set(
        "job",
        card.get("job").decode().replace("{", '{"field of a later version": 1, ', 1),
    )
    one = AttentionServer(
        "localhost", store.port, token, CPU, "cpu", version=__version__
    )
    with refusal(key, remedy=remedy):
        one.run_in_thread()


def test_a_server_refuses_what_it_cannot_compute(store: dist.TCPStore) -> None:
    """Rows of another dtype, or tasks that do not fit: the reason comes back, and the server goes on."""
    open_job(store)
    with serving(store):
        pool = pool_of(store)
        use_servers(pool, 1)
        link = pool._links[0]
        wrong = request_of()
        halves = Request(wrong.direction, [x.half() for x in wrong.rows], wrong.args)
        for refused in (halves, Request(wrong.direction, wrong.rows[:1], wrong.args)):
            _, answer = link.submit(refused, 0.1)
            with pytest.raises(WireError, match="refuses"):
                answer.result(5)
        pending = pool.ask(0, wrong, 10.0)
        assert pending is not None
        results = pending.wait()
        assert results is not None
        assert results[0].equal(wrong.compute(get_kernel("cpu", CPU))[0])
        pool.close()


def test_a_server_that_leaves_is_on_no_further_list(store: dist.TCPStore) -> None:
    open_job(store)
    pool = pool_of(store)
    with serving(store, 2) as servers:
        use_servers(pool, 2)
        servers[0].leave()
        use_servers(pool, 1)
        use_servers(pool, 1)
        servers[1].leave()
        use_servers(pool, 0)


def test_a_struck_server_joins_again(store: dist.TCPStore) -> None:
    open_job(store)
    pool = pool_of(store)
    with serving(store):
        use_servers(pool, 1)
        number = pool.listed[0].number
        pool.strike(number, "the test says so")
        use_servers(pool, 0)
        use_servers(pool, 1)
        assert pool.listed[0].number == number + 1
        pool.close()


def test_a_server_waits_for_the_next_job(store: dist.TCPStore) -> None:
    open_job(store)
    with serving(store):
        pool = pool_of(store)
        use_servers(pool, 1)
        pool.close()
        open_job(store, job=JOB + 1, digest=digest_of(TOKEN, JOB + 1))
        registry = Registry(connect_to(store), TOKEN)
        deadline = time.monotonic() + 20
        while not registry.servers(JOB + 1, ()):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_servers_that_come_and_go_leak_nothing(store: dist.TCPStore) -> None:
    """20 registrations of one server: threads and descriptors are as many as after the first 5."""
    open_job(store)
    pool = pool_of(store)
    counts = []
    with serving(store):
        for turn in range(20):
            use_servers(pool, 1)
            pending = pool.ask(pool.listed[0].number, request_of(), 10.0)
            assert pending is not None
            assert pending.wait() is not None
            pool.strike(pool.listed[0].number, "the test says so")
            if turn in (5, 19):
                counts.append((threading.active_count(), len(os.listdir("/dev/fd"))))
        pool.close()
    (threads, descriptors), (threads_after, descriptors_after) = counts
    assert threads_after <= threads + 3
    assert descriptors_after <= descriptors + 6
