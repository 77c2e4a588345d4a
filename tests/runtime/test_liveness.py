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

import pytest
import torch.distributed as dist

from tests.lib.processes import run_processes, values
from tests.lib.sets import params
from torchtitan_cad.runtime.liveness import (
    MOST_EXAMINED,
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

    def __init__(
        self, store: dist.Store, rank: int, world: int = WORLD, **options
    ) -> None:
        options = {"group": range(world), "interval_s": INTERVAL_S} | options
        self.rank, self.step, self.phases = rank, 1, [""]
        self.monitor = PeerMonitor(store, rank, world, **options)
        self.monitor.progress = lambda: (
            self.step,
            len(self.phases) - 1,
            self.phases[-1],
        )
        self.monitor.publish()

    def exchange(self, phase: str) -> None:
        self.phases.append(phase)

    def die(self) -> None:
        """The heartbeats end and nothing is said, as after SIGKILL."""
        self.monitor._closing.set()
        for thread in self.monitor._threads:
            thread.join()


MakeRanks = Callable[..., list[Rank]]


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def make_ranks(store: dist.Store) -> Iterator[MakeRanks]:
    """Makes all ranks of a job, with options of ``PeerMonitor``; they are closed with the test."""
    made: list[Rank] = []

    def make(own_group: bool = False, **options) -> list[Rank]:
        own = [{"group": (rank,)} if own_group else {} for rank in range(WORLD)]
        made.extend(Rank(store, rank, **options, **own[rank]) for rank in range(WORLD))
        return made

    yield make
    for rank in made:
        rank.monitor.close()


@pytest.fixture
def ranks(make_ranks: MakeRanks) -> list[Rank]:
    return make_ranks()


def only(findings: list[str], rank: int, *texts: str) -> str:
    """The one finding, which names the rank first and has the texts."""
    (finding,) = findings
    assert finding.startswith(f"rank {rank} (")
    assert all(text in finding for text in texts), finding
    return finding


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(INTERVAL_S)
    return condition()


def test_dead_peer_is_named_and_logged_once(ranks, caplog):
    ranks[2].die()
    said = "for 0.2 s, last seen at step 1; the job's key-value store answers"
    finding = only(ranks[0].monitor.diagnose(), 2, said)
    assert eventually(lambda: finding in caplog.messages)
    ranks[0].monitor.diagnose()
    assert caplog.messages.count(finding) == 1  # both others watch it


def test_hung_peer_is_named_with_its_phase(make_ranks, caplog):
    """It beats on, but the others have started an exchange that it has not."""
    ranks = make_ranks(stall_s=0.3)
    for rank in ranks:
        rank.exchange("forward rows")
    for rank in (ranks[0], ranks[2]):
        rank.exchange("forward outputs")
    # all have published where they are
    assert eventually(lambda: len(ranks[0].monitor.diagnose()) == 1)
    said = "is alive but behind, at step 1, exchange 1 'forward rows', while this rank is at step 1, exchange 2 'for"
    finding = only(ranks[0].monitor.diagnose(), 1, said)
    assert ranks[1].monitor.diagnose() == []
    assert eventually(lambda: finding in caplog.messages)
    ranks[0].monitor.diagnose()
    assert caplog.messages.count(finding) == 1


def test_steps_but_not_exchanges_are_compared_across_groups(make_ranks):
    """Pipeline stages exchange different numbers of times."""
    ranks = make_ranks(own_group=True)
    ranks[0].exchange("forward rows")
    assert ranks[0].monitor.diagnose() == []
    ranks[0].step = ranks[1].step = 2
    assert eventually(lambda: len(ranks[0].monitor.diagnose()) == 1)
    only(ranks[0].monitor.diagnose(), 2, "is alive but behind, at step 1, while")


def test_peer_that_stopped_and_left_is_not_called_dead(ranks, caplog):
    ranks[1].exchange("forward rows")
    # Noticed before the cause was said.
    assert (
        ranks[0].monitor.find_cause("RuntimeError: connection closed", by_itself=False)
        == []
    )
    assert ranks[1].monitor.find_cause("ValueError: bad batch", by_itself=True) == []
    assert ranks[1].monitor.find_cause("ValueError: then", by_itself=True) == []
    ranks[1].monitor.close()
    first, second = caplog.messages
    assert first.startswith(
        "communication of rank 0 failed at step 1, looking for the cause among its peers: Runtime"
    )
    only(
        [second],
        1,
        "stopped by itself at step 1, exchange 1 'forward rows': ValueError: bad batch",
    )
    for rank in (0, 2):
        assert ranks[rank].monitor.diagnose() == [second]


def test_failed_communication_is_no_cause_if_there_is_a_better_one(ranks):
    for rank in (0, 1):
        ranks[rank].monitor.find_cause(
            "RuntimeError: connection closed", by_itself=False
        )
    assert ranks[0].monitor.diagnose() == []
    said = "stopped after failed communication at step 1: RuntimeError: connection closed (the first to stop)"
    only(ranks[1].monitor.diagnose(), 0, said)
    ranks[2].die()
    for rank in (0, 1):
        only(ranks[rank].monitor.diagnose(), 2, "no sign of life")


def stop_in_two_attempts(group: dist.ProcessGroup) -> list[list[str]]:
    """What a rank finds at the beginning of each of two attempts with one store, in which all ranks stop."""
    findings = list[list[str]]()
    for _ in range(2):
        store = store_of_attempt(dist.distributed_c10d._get_default_store())
        monitor = PeerMonitor(store, group.rank(), group.size(), interval_s=INTERVAL_S)
        dist.barrier()
        findings.append(monitor.diagnose())
        dist.barrier()
        monitor.find_cause("ValueError: bad batch", by_itself=True)
        monitor.close()
        dist.barrier()
    return findings


def test_what_an_earlier_attempt_has_left_in_the_store_is_not_found():
    assert values(run_processes(2, stop_in_two_attempts)) == [[[], []]] * 2


def test_closed_peer_is_well(ranks, caplog):
    ranks[2].monitor.close()
    assert ranks[0].monitor.diagnose() == []
    assert caplog.messages == []


def test_lost_store_is_said_so(caplog):
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False)
    rank = Rank(client, 0)
    del server
    assert eventually(
        lambda: any(
            "has no answer from the job's key-value store, " in m
            for m in caplog.messages
        )
    )
    begin = time.monotonic()
    (finding,) = rank.monitor.diagnose()
    assert (
        "key-value store does not answer: its host, normally rank 0's, or the link to it is gone"
        in finding
    )
    rank.monitor.close()
    assert time.monotonic() - begin < STORE_TIMEOUT_S / 2


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def host(make_ranks: MakeRanks, victim: subprocess.Popen) -> list[Rank]:
    """Ranks of one host, which know each other's processes; rank 1 is to have the victim's."""
    ranks = make_ranks(host_ranks=range(WORLD))
    own = ranks[1].monitor.own
    own.pid, own.host = victim.pid, "host"
    ranks[1].monitor.publish()
    for rank in ranks:
        assert eventually(lambda rank=rank: len(rank.monitor.known) == WORLD - 1)
        rank.monitor.known = rank.monitor._read(rank.monitor._host)
    return ranks


def end(process: subprocess.Popen) -> None:
    process.kill()
    assert eventually(lambda: has_ended(process.pid))


def not_of_silence(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "no sign of life" not in message]


def test_dead_process_of_the_host_is_named_once(host, victim, caplog):
    host[1].die()
    assert host[0].monitor.name_gone("nothing happened") == []
    victim.kill()
    for rank in (0, 2):
        (clause,) = host[rank].monitor.find_cause(
            "RuntimeError: Connection reset by peer", by_itself=False
        )
        assert clause == f"rank 1 (host, pid {victim.pid}) is gone"
    only(
        not_of_silence(caplog),
        1,
        f"host, pid {victim.pid}) is gone: its process has ended, at step 1; ",
    )


def test_rank_that_a_signal_ends_says_so_and_is_not_called_gone(host, victim, caplog):
    host[1].monitor.announce_signal("SIGTERM")
    end(victim)
    for rank in (0, 2):
        assert host[rank].monitor.name_gone("Connection reset by peer") == []
        host[rank].monitor.announce_signal("SIGTERM")  # the launcher ends the others
    assert not_of_silence(caplog) == [
        f"rank 1 (host, pid {victim.pid}) received SIGTERM at step 1; this ends the job"
    ]


def test_signal_that_follows_a_death_names_the_death(host, victim, caplog):
    host[1].die()
    end(victim)
    for rank in (0, 2):
        host[rank].monitor.announce_signal("SIGTERM")
    only(
        not_of_silence(caplog),
        1,
        f"host, pid {victim.pid}) is gone: its process has ended, at step 1; ",
    )


def test_the_launchers_first_rank_says_that_the_launcher_is_gone(
    make_ranks, monkeypatch, caplog
):
    launcher = os.getppid()
    ranks = make_ranks(host_ranks=range(WORLD), launcher=launcher)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    for rank in reversed(ranks):
        rank.monitor.announce_signal("SIGTERM")
        rank.monitor.close()
    (line,) = not_of_silence(caplog)
    assert f"pid {launcher}) is gone: its process has ended, at step 1" in line


class CountingStore:
    """A client of a store that counts the values which it and its clones read."""

    def __init__(self, store: dist.Store, counts: Counter[str] | None = None) -> None:
        self._store, self.counts = store, Counter[str]() if counts is None else counts

    def __getattr__(self, name: str) -> Callable:
        return getattr(self._store, name)

    def clone(self) -> "CountingStore":
        return CountingStore(self._store.clone(), self.counts)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.counts["values"] += len(keys)
        return self._store.multi_get(keys)

    def get(self, key: str) -> bytes:
        self.counts["values"] += 1
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        self.counts["heartbeats"] += 1
        self._store.set(key, value)


PER_HOST = 8


@pytest.mark.parametrize("world", params((16, 64, 512), (16,)))
def test_every_rank_of_many_names_the_dead_one_and_they_read_little(
    world, store, caplog
):
    """Two groups, as of two pipeline stages. Threads of monitors sleep; the test publishes the heartbeats."""
    counting, dead, silence_s = CountingStore(store), 3 * world // 4 + 3, world / 64

    def make(rank: int) -> PeerMonitor:
        host, group = (
            range(rank - rank % size, rank - rank % size + size)
            for size in (PER_HOST, world // 2)
        )
        monitor = PeerMonitor(
            counting, rank, world, group=group, host_ranks=host, interval_s=1000.0
        )
        monitor._silence_s = silence_s
        return monitor

    with ThreadPoolExecutor(world) as pool:
        monitors = list(pool.map(make, range(world)))
        alive = [monitor for monitor in monitors if monitor is not monitors[dead]]
        counting.counts.clear()
        begin = time.monotonic()
        answers = [pool.submit(monitor.diagnose) for monitor in alive]
        while not all(answer.done() for answer in answers):
            for monitor in alive:
                monitor.own.count += 1
                monitor.publish()
            time.sleep(silence_s / 20)
    seconds, read = time.monotonic() - begin, counting.counts["values"]
    print(
        f"{len(alive)} ranks found the dead one in {seconds:.1f} s and read {read} values"
    )
    for monitor in monitors:
        monitor.close()
    for answer in answers:
        only(answer.result(), dead, "gave no sign of life")
    firsts, of_group = world // PER_HOST, min(MOST_EXAMINED, world // 2 - 1)
    # whether a rank has stopped, and once an interval whether the first rank of the host has found one
    told = 3 + 5
    assert (
        read <= 2 * (firsts * (world - 1) + (world - firsts) * of_group) + world * told
    )
    assert caplog.messages == []


def test_few_values_are_read_while_all_is_well(store):
    """Two by every rank, and those of its host and two more by a host's first: it was all of its host by every rank."""
    counting = CountingStore(store)
    hosts = [range(0, PER_HOST), range(PER_HOST, 2 * PER_HOST)]
    ranks = [
        Rank(
            counting,
            rank,
            2 * PER_HOST,
            group=range(2 * PER_HOST),
            host_ranks=host,
            interval_s=0.2,
        )
        for host in hosts
        for rank in host
    ]
    assert eventually(
        lambda: all(rank.monitor.known.keys() >= rank.monitor.watched for rank in ranks)
    )
    time.sleep(0.4)  # for those that have read and not noted it
    counting.counts.clear()
    assert eventually(lambda: counting.counts["heartbeats"] >= 6 * len(ranks))
    values, heartbeats = counting.counts["values"], counting.counts["heartbeats"]
    for rank in ranks:
        rank.monitor.close()
    per_interval = len(ranks) * 2 + len(hosts) * (PER_HOST + 2)
    assert values <= 1.3 * per_interval * heartbeats / len(ranks)


class HangingStore:
    """A store whose connection can hang, as when the link to its host is cut."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.answers = store, threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Callable:
        if name == "clone":
            raise AttributeError(name)

        def ask(*arguments: object) -> object:
            assert self.answers.wait(60)
            return getattr(self._store, name)(*arguments)

        return ask

    def set_timeout(self, timeout: object) -> None:
        pass


def test_a_store_that_hangs_is_said_on_the_hosts_first_rank(store, caplog):
    """The rank does not ask in vain when it fails, names who it knew, and says when the store is back."""
    hanging = HangingStore(store)
    other = Rank(store, 0, 2)
    rank = Rank(hanging, 1, 2, host_ranks=[1])
    assert eventually(lambda: bool(rank.monitor.known))
    rank.step = 7
    hanging.answers.clear()
    lost = re.compile(
        r"rank 1 \(.*\), at step 7, has no answer from the job's key-value store, for [\d.]+ s; rank 0 \("
    )
    assert eventually(lambda: any(lost.match(message) for message in caplog.messages))
    begin = time.monotonic()
    (finding,) = rank.monitor.find_cause("RuntimeError: timed out", by_itself=False)
    assert time.monotonic() - begin < 5
    assert "does not answer" in finding
    assert "rank 0 (" in finding
    hanging.answers.set()
    assert eventually(
        lambda: any(
            "reaches the job's key-value store again" in each
            for each in caplog.messages
        )
    )
    for each in (rank, other):
        each.monitor.close()


def test_a_step_that_takes_far_longer_than_others_is_said_once(store, caplog):
    rank, other = Rank(store, 0, 2, host_ranks=[0]), Rank(store, 1, 2, host_ranks=[1])
    for rank.step in range(2, 6):
        time.sleep(4 * INTERVAL_S)
    waits = re.compile(
        r"rank 0 \(.*\) has been at step 5 for .* where steps took at most 0\.\d s: it waits for a link or a"
    )
    assert eventually(lambda: any(waits.match(message) for message in caplog.messages))
    time.sleep(10 * INTERVAL_S)
    assert sum(bool(waits.match(message)) for message in caplog.messages) == 1
    for each in (rank, other):
        each.monitor.close()
