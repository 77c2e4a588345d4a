"""The monitor of peers: several ranks in one process, over a TCP store."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from torchtitan_cad.runtime import signs
from torchtitan_cad.runtime.liveness import MonitorTimes, PeerMonitor
from torchtitan_cad.runtime.signs import has_ended
from torchtitan_cad.runtime.transport import Routes

INTERVAL_S = 0.05
WORLD = 3
STORE_TIMEOUT_S = 300
"""How long the store itself waits for an answer, unless told otherwise."""


class _NoTransport:
    name = "none"
    replayable = False
    buffer_bytes = 512

    def prepare(self, routes):
        pass

    def begin(self):
        return 0

    def start(self, messages, routes, phase, call):
        return None


class Rank:
    """A rank: its monitor, its training step, and a transport that moves nothing."""

    def __init__(self, store: dist.Store, rank: int, world: int = WORLD, *, stall_s: float = 60.0, **options) -> None:
        options = {"group": range(world)} | options
        self.rank, self.step = rank, 1
        times = MonitorTimes(INTERVAL_S, stall_s, timeout_s=1.0)
        self.monitor = PeerMonitor(store, rank, world, times, **options)
        self.monitor.track_step(lambda: self.step)
        self._transport = self.monitor.track_exchanges(_NoTransport())

    def exchange(self, phase: str) -> None:
        self._transport.start([], Routes(), phase, 0)

    def die(self) -> None:
        """As SIGKILL does: the beats end and nothing is said."""
        self.monitor._stop.set()
        self.monitor._thread.join()


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ranks(store: dist.Store) -> Iterator[list[Rank]]:
    ranks = [Rank(store, rank) for rank in range(WORLD)]
    yield ranks
    for rank in ranks:
        rank.monitor.close()


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(INTERVAL_S)
    return condition()


def test_healthy_peers_are_not_blamed(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    assert ranks[0].monitor.diagnose() == []
    assert caplog.messages == []


def test_dead_peer_is_named_and_logged(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    ranks[2].die()
    assert eventually(lambda: len(caplog.messages) == 2)  # both others watch it
    for message in caplog.messages:
        assert message.startswith("rank 2 (")
        assert "gave no sign of life for 0." in message
    (finding,) = ranks[0].monitor.diagnose()
    assert finding.startswith("rank 2 (")
    assert finding.endswith("gave no sign of life for 0.2 s")


def test_hung_peer_is_named_with_its_phase(store: dist.Store, caplog: pytest.LogCaptureFixture) -> None:
    """It beats on, but the others have started an exchange that it has not."""
    ranks = [Rank(store, rank, stall_s=0.3) for rank in range(WORLD)]
    for rank in ranks:
        rank.exchange("forward rows")
    for rank in (ranks[0], ranks[2]):
        rank.exchange("forward outputs")
    assert eventually(lambda: len(ranks[0].monitor.diagnose()) == 1)  # all have published where they are
    (finding,) = ranks[0].monitor.diagnose()
    assert finding.startswith("rank 1 (")
    assert finding.endswith(
        "is alive but behind, at step 1, exchange 1 'forward rows', "
        "while this rank is at step 1, exchange 2 'forward outputs'"
    )
    assert ranks[1].monitor.diagnose() == []
    assert eventually(lambda: len(caplog.messages) == 2)
    for message in caplog.messages:
        assert message.startswith("rank 1 (")
        assert "has been at step 1, exchange 1 'forward rows' for 0." in message
    for rank in ranks:
        rank.monitor.close()


def test_slow_peer_that_still_moves_is_not_called_behind(ranks: list[Rank]) -> None:
    ranks[0].step, ranks[1].step = 100, 100
    begin = time.monotonic()
    ranks[2].monitor.track_step(lambda: int((time.monotonic() - begin) / INTERVAL_S))
    assert ranks[0].monitor.diagnose() == []


def test_steps_but_not_exchanges_are_compared_across_groups(store: dist.Store) -> None:
    """Pipeline stages exchange different numbers of times."""
    ranks = [Rank(store, rank, group=(rank,)) for rank in range(WORLD)]
    ranks[0].exchange("forward rows")
    assert ranks[0].monitor.diagnose() == []
    ranks[0].step = ranks[1].step = 2
    assert eventually(lambda: len(ranks[0].monitor.diagnose()) == 1)
    (finding,) = ranks[0].monitor.diagnose()
    assert finding.startswith("rank 2 (")
    assert "is alive but behind, at step 1, while" in finding
    for rank in ranks:
        rank.monitor.close()


def test_peer_that_stopped_and_left_is_not_called_dead(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    ranks[1].exchange("forward rows")
    # Noticed before the cause was said.
    ranks[0].monitor.announce_stop(RuntimeError("connection closed"), by_itself=False)
    ranks[1].monitor.announce_stop(ValueError("bad\nbatch"), by_itself=True)
    ranks[1].monitor.close()
    assert eventually(lambda: sum(m.startswith("rank 1 (") for m in caplog.messages) == 2)  # both others watch it
    stopped = "stopped by itself at step 1, exchange 1 'forward rows': ValueError: bad batch"
    for rank in (0, 2):
        (finding,) = ranks[rank].monitor.diagnose()
        assert finding.startswith("rank 1 (")
        assert finding.endswith(stopped)
    assert not any("no sign of life" in message for message in caplog.messages)


def test_failed_communication_is_no_cause_if_there_is_a_better_one(ranks: list[Rank]) -> None:
    for rank in (0, 1):
        ranks[rank].monitor.announce_stop(RuntimeError("connection closed"), by_itself=False)
    assert ranks[0].monitor.diagnose() == []
    (finding,) = ranks[1].monitor.diagnose()
    assert finding.startswith("rank 0 (")
    assert finding.endswith(
        "stopped after failed communication at step 1: RuntimeError: connection closed (the first to stop)"
    )
    ranks[2].die()
    for rank in (0, 1):
        (finding,) = ranks[rank].monitor.diagnose()
        assert finding.startswith("rank 2 (")
        assert "no sign of life" in finding


def test_closed_peer_is_well(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    ranks[2].monitor.close()
    assert ranks[0].monitor.diagnose() == []
    assert caplog.messages == []


def test_peer_that_never_started_and_many_names(store: dist.Store) -> None:
    rank = Rank(store, 0, world=20, group=(0,))
    (finding,) = rank.monitor.diagnose()
    assert finding == f"{', '.join(f'rank {r}' for r in range(1, 9))} and 11 more never gave a sign of life"
    rank.monitor.close()


def test_lost_store_is_said_so(caplog: pytest.LogCaptureFixture) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False)
    rank = Rank(client, 0)
    del server
    assert eventually(lambda: any("lost the job's key-value store" in m for m in caplog.messages))
    begin = time.monotonic()
    (finding,) = rank.monitor.diagnose()
    assert "key-value store does not answer, so its host, normally rank 0's, is gone" in finding
    rank.monitor.close()
    assert time.monotonic() - begin < STORE_TIMEOUT_S / 2


def test_log_goes_to_the_given_logger(store: dist.Store, caplog: pytest.LogCaptureFixture) -> None:
    first, second = Rank(store, 0, world=2, logger=logging.getLogger("mine")), Rank(store, 1, world=2)
    second.die()
    assert eventually(lambda: [record.name for record in caplog.records] == ["mine"])
    first.monitor.close()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_process_that_only_waits_for_its_parent_has_ended(victim: subprocess.Popen) -> None:
    assert not has_ended(victim.pid)
    victim.kill()
    assert eventually(lambda: has_ended(victim.pid))  # a zombie
    victim.wait()
    assert has_ended(victim.pid)


def pretend_to_be(rank: Rank, process: subprocess.Popen) -> None:
    rank.monitor._own.pid = process.pid
    rank.monitor._own.process = f"host, pid {process.pid}"
    rank.monitor._publish()


def test_dead_process_of_the_host_is_named_at_once_by_the_lowest_rank_left(
    store: dist.Store, victim: subprocess.Popen, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [Rank(store, rank, host_ranks=range(WORLD)) for rank in range(WORLD)]
    pretend_to_be(ranks[0], victim)
    ranks[0].die()
    assert eventually(lambda: all(0 in rank.monitor._host.signs for rank in ranks[1:]))
    assert ranks[1].monitor.name_gone("nothing happened") == []
    victim.kill()
    begin = time.monotonic()
    for rank in ranks[1:]:
        (clause,) = rank.monitor.name_gone("Connection reset by peer", wait_s=5)
        assert clause == f"rank 0 (host, pid {victim.pid}) is gone"
    assert time.monotonic() - begin < 2
    (message,) = [message for message in caplog.messages if "is gone" in message]
    assert message.startswith(f"rank 0 (host, pid {victim.pid}) is gone: its process has ended, at step 1; ")
    for rank in ranks:
        rank.monitor.close()


def test_rank_that_a_signal_ends_says_so_and_is_not_called_gone(
    store: dist.Store, victim: subprocess.Popen, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [Rank(store, rank, host_ranks=range(WORLD)) for rank in range(WORLD)]
    pretend_to_be(ranks[1], victim)
    assert eventually(lambda: all(len(rank.monitor._host.signs) == WORLD - 1 for rank in ranks))
    ranks[1].monitor.announce_signal("SIGTERM")
    victim.kill()
    assert eventually(lambda: has_ended(victim.pid))
    for rank in (0, 2):
        assert ranks[rank].monitor.name_gone("Connection reset by peer") == []
        ranks[rank].monitor.announce_signal("SIGTERM")  # the launcher ends the others
    said = f"rank 1 (host, pid {victim.pid}) received SIGTERM at step 1; this ends the job"
    assert [message for message in caplog.messages if "received" in message] == [said, said]  # by itself, and by rank 0
    for rank in ranks:
        rank.monitor.close()


def test_rank_that_says_so_and_ends_between_two_looks_is_not_called_gone(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [Rank(store, rank, 2, host_ranks=range(2)) for rank in range(2)]
    assert eventually(lambda: all(rank.monitor._host.signs for rank in ranks))
    looks: list[int] = []

    def ends_after_the_first_look(pid: int) -> bool:
        looks.append(pid)
        if len(looks) == 1:
            ranks[1].monitor._publish(error="SIGTERM", by_itself=True, order=2)
            return False
        return True

    monkeypatch.setattr(signs, "has_ended", ends_after_the_first_look)
    ranks[0].monitor.announce_signal("SIGTERM")
    (message,) = [line for line in caplog.messages if "no sign of life" not in line]
    assert message.startswith("rank 0 (")
    assert "received SIGTERM at step 1" in message
    for rank in ranks:
        rank.monitor.close()


def test_ranks_end_when_their_launcher_is_gone_and_the_first_says_so(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launcher, ended = os.getppid(), []
    ranks = [Rank(store, rank, 3, host_ranks=range(3), launcher=launcher if rank else 0) for rank in range(3)]
    assert eventually(lambda: all(len(rank.monitor._host.signs) == 2 for rank in ranks))
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append((pid, number)))
    assert not ended
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert eventually(lambda: len(ended) == 2)
    assert ended == [(os.getpid(), signal.SIGTERM)] * 2
    (line,) = [line for line in caplog.messages if "launcher" in line]
    assert f"pid {launcher}) is gone" in line
    for rank in ranks:
        rank.monitor.announce_signal("SIGTERM")
        rank.monitor.close()
    (line,) = [line for line in caplog.messages if "received SIGTERM" in line]
    assert line.startswith("rank 0 ")  # whose launcher is another one


def test_a_launcher_that_takes_the_store_with_it_is_seen_to_be_gone_afterwards(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []
    rank = Rank(store, 0, 1, launcher=os.getppid())
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(rank.monitor, "_publish", lost)
    assert eventually(lambda: any("lost the job's key-value store" in line for line in caplog.messages))
    assert not ended
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert eventually(lambda: ended == [signal.SIGTERM])
    rank.die()
