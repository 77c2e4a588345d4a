# SPDX-License-Identifier: BSD-3-Clause
"""The monitor of peers: several ranks in one process, over a TCP store."""

import os
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from tests.lib.processes import run_processes, values
from tests.lib.sets import params
from tests.lib.waiting import eventually
from torchtitan_cad.runtime import liveness
from torchtitan_cad.runtime.liveness import (
    PeerMonitor,
    has_ended,
    store_of_attempt,
)

INTERVAL_S = 0.05
WORLD = 3
STORE_TIMEOUT_S = 300
"""How long the store itself waits for an answer, unless told otherwise."""


class Rank:
    """A rank: its monitor, its training step, and its exchanges."""

    def __init__(self, store, rank, world: int = WORLD, step: int = 1, **options):
        options = {"group": range(world), "interval_s": INTERVAL_S} | options
        self.step = step
        self.phases = [""]
        self.monitor = PeerMonitor(store, rank, world, **options)
        self.monitor.progress = self.progress
        self.monitor.publish()

    def progress(self) -> tuple[int, int, str]:
        return self.step, len(self.phases) - 1, self.phases[-1]

    def die(self):
        """The heartbeats end and nothing is said, as after SIGKILL."""
        self.monitor._closing.set()
        self.monitor._thread.join()


@pytest.fixture(autouse=True)
def _waits_are_short(monkeypatch):
    monkeypatch.setattr(liveness, "_GONE_WAIT_S", 0.01)
    monkeypatch.setattr(liveness, "_LAUNCHER_WAIT_S", 0.01)


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(store) -> Iterator[MakeRank]:
    """Makes a rank, with options of ``PeerMonitor``; it is closed with the test."""
    with ExitStack() as stack:

        def make(rank, *args, on=store, **options):
            made = Rank(on, rank, *args, **options)
            stack.callback(made.monitor.close)
            return made

        yield make


@pytest.fixture
def ranks(make_rank) -> list[Rank]:
    return [make_rank(rank) for rank in range(WORLD)]


def only(findings: list[str], rank, *texts: str) -> str:
    """The one finding, which names the rank first and has the texts."""
    (finding,) = findings
    assert finding.startswith(f"rank {rank} (")
    assert all(text in finding for text in texts), finding
    return finding


def check_logged_once(caplog, rank, text):
    assert eventually(lambda: text in caplog.messages)
    rank.monitor.examine()
    assert caplog.messages.count(text) == 1  # several others watch the peer


def test_dead_peer_is_named_and_logged_once(ranks, caplog):
    """One that has ended in order is well."""
    ranks[1].monitor.close()
    ranks[2].die()
    said = "for 0.2 s, last seen at step 1; the job's key-value store answers"
    finding = only(ranks[0].monitor.examine(), 2, said)
    check_logged_once(caplog, ranks[0], finding)


def test_hung_peer_is_named_with_its_phase(make_rank, caplog):
    """It beats on, but the others have started an exchange that it has not."""
    ranks = [make_rank(rank, stall_s=0.3) for rank in range(WORLD)]
    for rank in ranks:
        rank.phases.append("forward rows")
    for rank in (ranks[0], ranks[2]):
        rank.phases.append("forward outputs")
    # all have published where they are
    assert eventually(lambda: len(ranks[0].monitor.examine()) == 1)
    said = "is alive but behind, at step 1, exchange 1 'forward rows', while rank 0 "
    finding = only(ranks[0].monitor.examine(), 1, said)
    assert finding.endswith(" is at step 1, exchange 2 'forward outputs'")
    assert ranks[1].monitor.examine() == []
    check_logged_once(caplog, ranks[0], finding)


def test_steps_but_not_exchanges_are_compared_across_groups(make_rank):
    """Pipeline stages exchange different numbers of times."""
    ranks = [make_rank(rank, group=[rank]) for rank in range(WORLD)]
    ranks[0].phases.append("forward rows")
    assert ranks[0].monitor.examine() == []
    ranks[0].step = ranks[1].step = 2
    assert eventually(lambda: len(ranks[0].monitor.examine()) == 1)
    only(ranks[0].monitor.examine(), 2, "is alive but behind, at step 1, while")


LOST = "RuntimeError: connection closed"


def test_peer_that_stopped_and_left_is_not_called_dead(ranks, caplog):
    """Who has failed before knows nothing of it."""
    first, second, third = (rank.monitor for rank in ranks)
    ranks[1].phases.append("forward rows")
    assert first.find_cause(LOST, by_itself=False) == []
    for error in ("ValueError: bad batch", "ValueError: then"):
        assert second.find_cause(error, by_itself=True) == []
    second.close()
    assert first.examine() == []
    *_, found = third.find_cause(LOST, by_itself=False)
    noticed, cause, _ = caplog.messages
    looking = "communication of rank 0 failed at step 1, looking for the cause among its peers: Runtime"
    assert noticed.startswith(looking)
    said = (
        "stopped by itself at step 1, exchange 1 'forward rows': ValueError: bad batch"
    )
    only([cause], 1, said)
    assert found == cause


def test_failed_communication_is_no_cause_if_there_is_a_better_one(ranks):
    first, second = (rank.monitor for rank in ranks[:2])
    assert first.find_cause(LOST, by_itself=False) == []
    said = f"stopped after failed communication at step 1: {LOST} (the first to stop)"
    only(second.find_cause(LOST, by_itself=False), 0, said)
    ranks[2].die()
    for monitor in (first, second):
        only(monitor.examine(), 2, "no sign of life")


def stop_in_two_attempts(group) -> list[list[str]]:
    """What a rank finds at the beginning of each of two attempts with one store, in which all ranks stop."""
    findings = list[list[str]]()
    for _ in range(2):
        store = store_of_attempt(dist.distributed_c10d._get_default_store())
        # Ranks beside other tests may be late by an interval of the other tests' length.
        interval_s = 4 * INTERVAL_S
        monitor = PeerMonitor(store, group.rank(), group.size(), interval_s=interval_s)
        dist.barrier()
        findings.append(monitor.find_cause(LOST, by_itself=False))
        dist.barrier()
        monitor.own.has_left = False
        monitor.find_cause("ValueError: bad batch", by_itself=True)
        monitor.close()
        dist.barrier()
    return findings


def test_what_an_earlier_attempt_has_left_in_the_store_is_not_found():
    """What ends the first attempt; of the ranks that lose their links in one, the other is the first to stop."""
    for attempts in values(run_processes(2, stop_in_two_attempts)):
        for findings in attempts:
            assert all(text.endswith("(the first to stop)") for text in findings)


def test_lost_store_is_said_so():
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False)
    monitor = Rank(client, 0).monitor
    del server
    begin = time.monotonic()
    (finding,) = monitor.find_cause(LOST, by_itself=False)
    said = "key-value store does not answer: its host, normally rank 0's, or the link to it is gone"
    assert said in finding
    monitor.close()
    assert time.monotonic() - begin < STORE_TIMEOUT_S / 2


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def host(make_rank, victim) -> list[Rank]:
    """Ranks of one host, which know each other's processes; rank 1 is to have the victim's."""
    ranks = [make_rank(rank, host_ranks=range(WORLD)) for rank in range(WORLD)]
    own = ranks[1].monitor.own
    own.pid = victim.pid
    own.host = "host"
    ranks[1].monitor.publish()
    for monitor in (rank.monitor for rank in ranks):
        assert eventually(lambda known=monitor: len(known.known) == WORLD - 1)
        monitor.known = monitor._read(monitor._host)
    return ranks


def end(process):
    process.kill()
    assert eventually(lambda: has_ended(process.pid))


def not_of_silence(caplog) -> list[str]:
    return [message for message in caplog.messages if "no sign of life" not in message]


def test_dead_process_of_the_host_is_named_once_whatever_follows(host, victim, caplog):
    name = f"host, pid {victim.pid}) is gone"
    host[1].die()
    assert host[0].monitor.name_gone("nothing happened") == []
    end(victim)
    clauses = host[0].monitor.find_cause("Connection reset by peer", by_itself=False)
    assert clauses == [f"rank 1 ({name}"]
    host[2].monitor.announce_signal("SIGTERM")  # the launcher ends the others
    only(not_of_silence(caplog), 1, f"{name}: its process has ended, at step 1; ")


def test_rank_that_a_signal_ends_says_so_and_is_not_called_gone(host, victim, caplog):
    host[1].monitor.announce_signal("SIGTERM")
    end(victim)
    for rank in (host[0], host[2]):
        assert rank.monitor.name_gone("Connection reset by peer") == []
        rank.monitor.announce_signal("SIGTERM")
    said = (
        f"rank 1 (host, pid {victim.pid}) received SIGTERM at step 1; this ends the job"
    )
    assert not_of_silence(caplog) == [said]


def test_the_launchers_first_rank_says_that_the_launcher_is_gone(
    make_rank, monkeypatch, caplog
):
    launcher = os.getppid()
    options = {"host_ranks": range(WORLD), "launcher": launcher}
    ranks = [make_rank(rank, **options) for rank in range(WORLD)]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    for rank in reversed(ranks):
        rank.monitor.announce_signal("SIGTERM")
    (line,) = not_of_silence(caplog)
    assert f"pid {launcher}) is gone: its process has ended, at step 1" in line


class CountingStore:
    """A client of a store that counts the values which it and its clones read."""

    def __init__(self, store, counts: Counter[str] | None = None):
        self._store = store
        self.counts = Counter[str]() if counts is None else counts

    def __getattr__(self, name):
        return getattr(self._store, name)

    def clone(self):
        return CountingStore(self._store.clone(), self.counts)

    def multi_get(self, keys):
        self.counts["values"] += len(keys)
        return self._store.multi_get(keys)

    def get(self, key):
        self.counts["values"] += 1
        return self._store.get(key)

    def set(self, key, value):
        self.counts["heartbeats"] += 1
        self._store.set(key, value)


@pytest.mark.parametrize("world", params((16, 64, 512), (16,)))
def test_every_rank_of_many_names_the_dead_one_and_they_read_little(
    world, store, caplog
):
    """Two groups, as of two pipeline stages. Threads of monitors sleep; the test publishes the heartbeats."""
    counting = CountingStore(store)
    dead = 3 * world // 4 + 3
    silence_s = world / 64
    half = world // 2

    def make(rank):
        first = rank - rank % half
        options = {"group": range(first, first + half), "interval_s": 1000.0}
        monitor = PeerMonitor(counting, rank, world, **options)
        monitor._silence_s = silence_s
        return monitor

    with ThreadPoolExecutor(world) as pool:
        monitors = list(pool.map(make, range(world)))
        alive = [monitor for monitor in monitors if monitor is not monitors[dead]]
        counting.counts.clear()
        answers = [
            pool.submit(monitor.find_cause, LOST, by_itself=False) for monitor in alive
        ]
        while not all(answer.done() for answer in answers):
            for monitor in alive:
                monitor.own.count += 1
                monitor.publish()
            time.sleep(silence_s / 20)
    read = counting.counts["values"]
    for monitor in monitors:
        monitor.close()
    for answer in answers:
        only(answer.result(), dead, "gave no sign of life")
    looks = 2 * 2 * (world - 1)
    told = 2 * 5  # once an interval whether the one that looks has found anything
    assert read <= looks + world * told
    assert len(caplog.messages) == len(alive)


def test_few_values_are_read_while_all_is_well(store, make_rank):
    """Two by every rank: it was all of its host."""
    counting = CountingStore(store)
    world = 16
    monitors = [
        make_rank(
            rank, world, on=counting, host_ranks=range(world), interval_s=0.2
        ).monitor
        for rank in range(world)
    ]
    assert eventually(lambda: all(len(x.known) == world - 1 for x in monitors))
    time.sleep(0.4)  # for those that have read and not noted it
    counting.counts.clear()
    assert eventually(lambda: counting.counts["heartbeats"] >= 6 * world)
    assert counting.counts["values"] <= 1.3 * 2 * counting.counts["heartbeats"]


class HangingStore:
    """A store whose connection can hang, as when the link to its host is cut."""

    def __init__(self, store):
        self._store = store
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name):
        def ask(*arguments):
            assert self.answers.wait(60)
            return getattr(self._store, name)(*arguments)

        return ask

    def clone(self):
        return self

    def set_timeout(self, timeout):
        pass


def test_a_rank_does_not_wait_for_a_store_that_hangs(store, make_rank, monkeypatch):
    """It names whom it knew, and asks once that the store is back."""
    monkeypatch.setattr(liveness, "_STORE_TIMEOUT_S", 0.5)
    hanging = HangingStore(store)
    make_rank(0, 2)
    monitor = make_rank(1, 2, on=hanging, host_ranks=[1]).monitor
    assert eventually(lambda: bool(monitor.known))
    hanging.answers.clear()
    begin = time.monotonic()
    (finding,) = monitor.find_cause("RuntimeError: timed out", by_itself=False)
    assert time.monotonic() - begin < 5
    assert re.search(r"does not answer.*rank 0 \(", finding)
    hanging.answers.set()
    assert eventually(lambda: not monitor._is_lost)
