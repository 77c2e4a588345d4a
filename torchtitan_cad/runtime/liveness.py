# SPDX-License-Identifier: BSD-3-Clause
"""Heartbeats of all ranks, by which a rank whose communication failed names the peer at fault.

Every rank keeps one value in the job's key-value store: a counter that it increments at intervals, its step and
exchange, and the reason if it stops. A peer with a constant counter is gone. If a peer's counter rises but its step or
exchange is behind, the others wait for that peer. Counters need no synchronised clocks. Heartbeats do not use the
training's communication.

One store answers all ranks, so that few values are read of it. While all is well a rank reads those of two neighbours,
and the first rank of every host those of its host as well. After a failure a rank reads at most ``MOST_EXAMINED`` ranks
of its group, and the first rank of every host alone reads all ranks of the job, for the others of its host as well.
"""

import dataclasses
import json
import logging
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from torchtitan_cad.runtime.heartbeat import Heartbeat

_PREFIX = "torchtitan_cad/alive"
_SILENT_INTERVALS = 5
_LEAST_SILENCE_S = 2.0
"""seconds: a store that is silent for less time is not lost, however short the interval"""
_WATCHED_PEERS = 2
MOST_EXAMINED = 64
"""ranks that a rank examines after a failure, those that follow it in its group, unless it is the first of its host"""
_NAMED_RANKS = 8
_ERROR_CHARS = 300
_STORE_TIMEOUT_S = 10.0
_SLOWER = 3
"""times the longest step so far: a step that takes longer, and longer than ``_SLOW_INTERVALS``, is reported"""
_SLOW_INTERVALS = 3
"""intervals of signs of life that a slow step takes at least"""
_STARTING_STEPS = 2
"""steps: the first ones, in which things compile, set no measure for others"""
_GONE_WAIT_S = 0.5
"""seconds: connections close a little before their process has ended."""
_LAUNCHER_WAIT_S = 0.5
"""seconds: within this time the launcher's first rank logs that the launcher is gone."""
_CAUSE = "stopped by itself"
"""Key of the store, with a clause about the first rank to stop by itself."""
_EFFECT = "stopped after failed communication"
"""Key of the store, with a clause about the first rank whose communication failed."""
_FOUND = "found by"
"""Key of the store, with the number of the first rank of a host: what that rank has found, in JSON."""
_logger = logging.getLogger()
_T = TypeVar("_T")


def store_of_attempt(store: dist.Store) -> dist.Store:
    """Return a part of the job's store for this start of its ranks alone; all ranks of the job call it together.

    A launcher that starts ranks again keeps the store (torch 2.11 to 2.15), with what the ranks before have left there.
    How often each node has started its ranks does not tell starts apart: nodes count by themselves.
    """
    attempt = [uuid.uuid4().hex]
    dist.broadcast_object_list(attempt)
    return dist.PrefixStore(attempt[0], store)


_Beats = dict[int, Heartbeat]


class PeerMonitor:
    """Publishes this rank's heartbeat, watches peers, and after a failure finds the peer at fault.

    One thread watches two neighbours in the group and, on the first rank of a host, the ranks of the host. It logs when
    one of them is silent or behind and, on every rank, when a process of the host has ended. With NCCL this may be the
    only message, since the watchdog ends a process without a Python exception. If several ranks notice the same, only
    the first logs it. Another thread asks nobody: on the first rank of every host it logs when the store does not
    answer, so that both sides of a link that is cut have a message, and when a step takes far longer than any before,
    as on a link that has become slow.

    Progress is measured on the host: work that hangs on the device shows when the host waits for it.

    Args:
        store: the job's store; it is cloned, so that waits in other threads do not block.
        group: global ranks of this rank's CAD group, whose exchanges are comparable.
        host_ranks: global ranks that the launcher has started on this host.
        launcher: process id of the launcher, this process's parent; 0 if there is none.
        interval_s: seconds between heartbeats; a peer is silent after five intervals.
        stall_s: seconds after which a watched neighbour that is behind is reported.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        group: Sequence[int] = (),
        host_ranks: Sequence[int] = (),
        launcher: int = 0,
        interval_s: float = 1.0,
        stall_s: float = 60.0,
    ) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._interval_s = interval_s
        self._silence_s = _SILENT_INTERVALS * interval_s
        self._stall_intervals = max(_SILENT_INTERVALS, round(stall_s / interval_s))
        self.own = Heartbeat(rank, socket.gethostname(), os.getpid())
        self.launcher = launcher
        self.progress: Callable[[], tuple[int, int, str]] = lambda: (0, 0, "")
        """Returns ``step``, ``exchange`` and ``phase``; called at every heartbeat."""
        self.ended_by_signal = False
        """True if a signal is about to end this process; later failures are not reported."""
        self._group = frozenset(group)
        self._host = [other for other in host_ranks if other != rank]
        self._is_first_of_host = rank < min(self._host, default=world_size)
        self._choose_peers(group, world_size)
        self.known: _Beats = {}
        """Last heartbeats of the watched ranks, and one of every other rank of this host, for its process."""
        self._lock = threading.Lock()
        self._is_outside = False
        self._closing = threading.Event()
        self._lost = threading.Event()
        self.publish()
        self._answered = time.monotonic()
        """When the store answered last."""
        self._threads = [
            self._thread("liveness", self._run),
            self._thread("waits", self._watch_own),
        ]
        for thread in self._threads:
            thread.start()

    def _choose_peers(self, group: Sequence[int], world_size: int) -> None:
        """Choose the ranks to watch, and those to examine after a failure."""
        rank = self.own.rank
        ring = list(group) if len(group) > 1 else list(range(world_size))
        place = ring.index(rank)
        following = ring[place + 1 :] + ring[:place]
        self.watched = set(following[:_WATCHED_PEERS])
        self._examined = following[:MOST_EXAMINED]
        if self._is_first_of_host:
            next_host = (max(self._host, default=rank) + 1) % world_size
            self.watched |= {*self._host, 0, next_host} - {rank}
            self._examined = [other for other in range(world_size) if other != rank]

    @staticmethod
    def _thread(name: str, run: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=run, name=f"cad-{name}", daemon=True)

    def find_cause(self, error: str, *, by_itself: bool) -> list[str]:
        """Announce that this rank stops because of ``error``; return one clause for each finding about its peers.

        Args:
            by_itself: True if no peer can have caused the error; peers are then not examined.
        """
        if by_itself:
            self._announce(_CAUSE, f": {error[:_ERROR_CHARS]}")
            return []
        time.sleep(_GONE_WAIT_S)
        gone = self.name_gone(error)
        self._announce(_EFFECT, f": {error[:_ERROR_CHARS]}", by_itself=False)
        if gone or self.ended_by_signal:
            return gone
        failed = f"communication of rank {self.own.rank} failed at step {self.own.step}"
        _logger.error(f"{failed}, looking for the cause among its peers: {error}")
        return self.diagnose()

    def announce_signal(self, name: str) -> None:
        """Announce that a signal ends this rank, and log the cause unless another rank of the job has."""
        self.ended_by_signal = True
        own = self.own
        if not self._launcher_is_gone():
            gone = self.name_gone(f"rank {own.rank} received {name}")
            self._announce(
                f"received {name}", "; this ends the job", by_itself=not gone
            )
        elif own.rank > min(self._host, default=own.rank):
            time.sleep(_LAUNCHER_WAIT_S)
        else:
            launcher = f"the launcher ({own.host}, pid {self.launcher})"
            _logger.error(
                f"{launcher} is gone: its process has ended, at {own.place}; this ends its ranks"
            )

    def _launcher_is_gone(self) -> bool:
        """Tell whether the launcher has ended; it may have held the store."""
        return self.launcher != 0 and os.getppid() != self.launcher

    def _announce(self, how: str, why: str, *, by_itself: bool = True) -> None:
        """Publish that this rank stops, once; log it if it is the first of the job to stop by itself."""
        own = self.own
        if own.has_left:
            return
        own.step, own.exchange, own.phase = self.progress()
        clause = f"{own.name} {how} at {own.place}{why}"
        key = _CAUSE if by_itself else _EFFECT
        if is_first := self._is_first(key):
            self._ask(lambda: self._store.set(f"{_PREFIX}/{key}", clause))
        own.has_left = True
        self._ask(self.publish)
        if by_itself and is_first:
            _logger.error(clause)

    def close(self) -> None:
        """Stop watching, and publish that this rank has left unless it has announced an error."""
        self._closing.set()
        for thread in self._threads:
            thread.join(0.0 if self._lost.is_set() else _STORE_TIMEOUT_S)
        if not self.own.has_left:
            self.own.has_left = True
            self._ask(self.publish)

    def name_gone(self, noticed: str) -> list[str]:
        """Return one clause for each rank of this host whose process ended without a message, and log it.

        ``noticed`` tells how it was noticed, for the log.
        """
        known = self.known
        ended = {
            rank: known[rank]
            for rank in self._host
            if rank in known and has_ended(known[rank].pid)
        }
        if ended:  # their last heartbeats may hold the reason
            ended = self._ask(lambda: self._read(ended)) or ended
        gone = [beat for beat in ended.values() if not beat.has_left]
        for beat in gone:
            if self._is_first(f"{beat.rank} is gone"):
                _logger.error(
                    f"{beat.name} is gone: its process has ended, at {beat.place}; {noticed}"
                )
        return [f"{beat.name} is gone" for beat in gone]

    def diagnose(self) -> list[str]:
        """Return possible causes of failed communication, one clause per finding; empty if every peer is well.

        Takes five intervals, and up to ten where this rank waits for what the first rank of its host has found.
        Findings are silent peers, the peer furthest behind, and the first peer that stopped by itself; without any of
        these, the first peer that stopped at all.
        """

        def look() -> list[str]:
            before = self._read(self._examined)
            time.sleep(self._silence_s)
            findings = self._compare(
                before, self._read(self._examined), _SILENT_INTERVALS
            )
            if self._is_first_of_host and self._host:
                self._store.set(
                    f"{_PREFIX}/{_FOUND} {self.own.rank}", json.dumps(findings)
                )
            cause = self._value_of(_CAUSE)
            effect = self._value_of(_EFFECT)
            if not findings and not cause and not self._is_first_of_host:
                findings = self._found_by_first_of_host()
            if cause:
                findings.append(cause)
            elif effect and not findings and not effect.startswith(self.own.name):
                findings.append(f"{effect} (the first to stop)")
            return findings

        findings = self._ask(look, 2 * self._silence_s)
        lost = "the job's key-value store does not answer: its host, normally rank 0's, or the link to it is gone"
        return [f"{lost}{self._last_seen()}"] if findings is None else findings

    def _value_of(self, key: str) -> str:
        """Return the store's value of a key of this job; empty if it has none."""
        key = f"{_PREFIX}/{key}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _found_by_first_of_host(self) -> list[str]:
        """Return what the first rank of this host has found among all ranks; empty if it does not tell in time."""
        first = min(self._host)
        for _ in range(_SILENT_INTERVALS):
            if told := self._value_of(f"{_FOUND} {first}"):
                return [
                    f"{finding} (found by rank {first})" for finding in json.loads(told)
                ]
            time.sleep(self._silence_s / _SILENT_INTERVALS)
        return []

    def _compare(self, before: _Beats, after: _Beats, still: int) -> list[str]:
        """Return findings: peers silent between two looks, and the peer behind without progress for ``still`` beats.

        Ranks of the own group come first. Only steps are compared with ranks of other groups, whose exchanges differ.
        """
        own = self.own
        findings = []
        if silent := [
            after[r]
            for r, b in before.items()
            if after[r].count == b.count and not after[r].has_left
        ]:
            names = ", ".join(b.name for b in silent[:_NAMED_RANKS]) + ", ..." * (
                len(silent) > _NAMED_RANKS
            )
            findings = [
                f"{names} gave no sign of life for {self._silence_s:.1f} s, last seen at {silent[0].place}"
            ]
            findings[0] += "; the job's key-value store answers"
        behind = [
            (beat.rank not in self._group, beat.position, beat)
            for beat in after.values()
            if not beat.has_left
            and beat not in silent
            and beat.count - beat.moved >= still
            if (
                beat.position < own.position
                if beat.rank in self._group
                else beat.step < own.step
            )
        ]
        for *_, beat in sorted(behind, key=lambda entry: entry[:2])[:1]:
            findings.append(
                f"{beat.name} is alive but behind, at {beat.place}, while this rank is at {own.place}"
            )
        return findings

    def _run(self) -> None:
        looks: deque[_Beats] = deque(maxlen=_SILENT_INTERVALS + 1)
        while not self._closing.wait(self._interval_s) and not self._launcher_is_gone():
            try:
                self.own.count += 1
                self.publish()
                known = self.known
                beats = self._read(
                    self.watched.union(rank for rank in self._host if rank not in known)
                )
                self.known = known | beats
                look = {rank: beats[rank] for rank in self.watched if rank in beats}
                self._answered = time.monotonic()
                self.name_gone(f"noticed by rank {self.own.rank}")
                looks.extend([look] if look else [])
                findings = (
                    self._compare(looks[0], look, self._stall_intervals)
                    if len(looks) == looks.maxlen
                    else []
                )
                for finding in findings:
                    if self._is_first(finding):
                        _logger.error(finding)
            except RuntimeError as error:
                # If the launcher held the store and is gone, this process is about to end.
                if (
                    not self._closing.wait(2 * _LAUNCHER_WAIT_S)
                    and not self.ended_by_signal
                ):
                    self._lose_store(error)
                return

    def _watch_own(self) -> None:
        """Watch how long the store has not answered, and how long this rank's step takes."""
        begin = time.monotonic()
        step = self.progress()[0]
        before_first = step
        longest = 0.0
        is_reported = False
        while not self._closing.wait(self._interval_s):
            moment = time.monotonic()
            if moment - self._answered > max(self._silence_s, _LEAST_SILENCE_S):
                self._lose_store(f"for {moment - self._answered:.1f} s")
            elif self._lost.is_set():
                self._lost.clear()
                _logger.warning(
                    f"{self.own.name} reaches the job's key-value store again"
                )
            if (at := self.progress()[0]) != step:
                if step == 0:
                    before_first = at - 1
                if step - before_first > _STARTING_STEPS:
                    longest = max(longest, moment - begin)
                begin = moment
                step = at
                is_reported = False
            elif self._is_outside:
                begin = moment
            elif longest and moment - begin > max(
                _SLOW_INTERVALS * self._interval_s, _SLOWER * longest
            ):
                if (
                    not is_reported
                    and self._is_first_of_host
                    and not self._lost.is_set()
                ):
                    _logger.warning(
                        f"{self.own.name} has been at {self.own.place} for {moment - begin:.0f} s, where steps took at "
                        f"most {longest:.1f} s: it waits for a link or a peer{self._last_seen()}; the job's key-value "
                        "store answers"
                    )
                is_reported = True

    @contextmanager
    def outside_of_steps(self) -> Iterator[None]:
        """Leave what runs inside out of the time of its step, such as validation."""
        self._is_outside = True
        try:
            yield
        finally:
            self._is_outside = False

    def _lose_store(self, why: str | RuntimeError) -> None:
        """Note that the store does not answer, for good after an error, and log it once a host."""
        if isinstance(why, RuntimeError):
            why = str(why).splitlines()[0]
            self._answered = -math.inf
        if not self._lost.is_set() and self._is_first_of_host:
            self.own.step, self.own.exchange, self.own.phase = self.progress()
            _logger.error(
                f"{self.own.name}, at {self.own.place}, has no answer from the job's key-value store, {why}"
                f"{self._last_seen()}"
            )
        self._lost.set()

    def _last_seen(self) -> str:
        """Return a clause about the watched ranks of other hosts, or else of this one; empty if none is known."""
        known = list(self.known.values())
        others = [beat for beat in known if beat.host != self.own.host] or known
        return "".join(
            f"; {beat.name} was last seen at {beat.place}"
            for beat in others[:_WATCHED_PEERS]
        )

    def _is_first(self, event: str) -> bool:
        """Return whether this is the job's first call for an event, or the store does not answer."""
        return self._ask(lambda: self._store.add(f"{_PREFIX}/count/{event}", 1)) in (
            None,
            1,
        )

    def publish(self) -> None:
        with self._lock:
            own = self.own
            before = self.own.position
            own.step, own.exchange, own.phase = self.progress()
            own.moved = own.moved if own.position == before else own.count
            self._store.set(
                f"{_PREFIX}/{own.rank}", json.dumps(dataclasses.asdict(own))
            )

    def _read(self, ranks: Iterable[int]) -> _Beats:
        """Return the heartbeats of ``ranks``; empty until all of them have published one."""
        keys = {rank: f"{_PREFIX}/{rank}" for rank in ranks}
        unknown = [key for rank, key in keys.items() if rank not in self.known]
        # multi_get would wait
        if not keys or (unknown and not self._store.check(unknown)):
            return {}
        values = self._store.multi_get([*keys.values()])
        return {
            beat.rank: beat
            for beat in (Heartbeat(**json.loads(value)) for value in values)
        }

    def _ask(self, question: Callable[[], _T], extra_s: float = 0.0) -> _T | None:
        """Return the answer to a question to the store; None if it fails or takes longer than the timeout.

        The question runs in a thread, as the store's own timeout fails if its host vanishes with open connections. A
        store that is known not to answer is not asked.
        """
        if self._lost.is_set():
            return None
        answers: list[_T] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                if not self._launcher_is_gone():
                    self._lose_store(error)

        thread = self._thread("liveness-question", ask)
        thread.start()
        thread.join(_STORE_TIMEOUT_S + extra_s)
        return answers[0] if answers else None


def has_ended(pid: int) -> bool:
    """Tell whether a process of this host has ended, zombies included; always False without /proc."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        )
    except OSError:
        return sys.platform == "linux"
