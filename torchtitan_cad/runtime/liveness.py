# SPDX-License-Identifier: BSD-3-Clause
"""Heartbeats of all ranks, by which a rank whose communication failed names the peer at fault.

Every rank keeps one value in the job's key-value store: a counter that it increments at intervals, its step and
exchange, and whether it has left. A peer with a constant counter is gone. If a peer's counter rises but its step or
exchange is behind, the others wait for that peer. Counters need no synchronised clocks. Heartbeats do not use the
training's communication.

One store answers all ranks, so that few values are read of it. While all is well a rank reads those of two neighbours.
After a failure the first rank of every group whose communication failed reads those of all ranks, and tells the others
of its group what it has found.
"""

import dataclasses
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from torchtitan_cad.runtime.heartbeat import Heartbeat

_SILENT_INTERVALS = 5
_WATCHED_PEERS = 2
_ERROR_CHARS = 300
_STORE_TIMEOUT_S = 10.0
_GONE_WAIT_S = 0.5
"""seconds: connections close a little before their process has ended."""
_LAUNCHER_WAIT_S = 0.5
"""seconds: within this time the launcher's first rank logs that the launcher is gone."""
_CAUSE = "cause"
"""Key of the store, with a clause about the first rank to stop by itself or to end without a message."""
_EFFECT = "first to stop"
"""Key of the store, with a clause about the first rank to stop after failed communication."""
_logger = logging.getLogger()
_T = TypeVar("_T")
_Beats = dict[int, Heartbeat]


def store_of_attempt(store: dist.Store) -> dist.Store:
    """Return a part of the job's store for this start of its ranks alone; all ranks of the job call it together.

    A launcher that starts ranks again keeps the store (torch 2.11 to 2.15), with what the ranks before have left there.
    How often each node has started its ranks does not tell starts apart: nodes count by themselves.
    """
    attempt = [uuid.uuid4().hex]
    dist.broadcast_object_list(attempt)
    return dist.PrefixStore(f"torchtitan_cad/alive/{attempt[0]}", store)


class PeerMonitor:
    """Publishes this rank's heartbeat, watches peers, and after a failure finds the peer at fault.

    A thread watches two neighbours in the group. It logs when one of them is silent or behind, or when a process of the
    host has ended. With NCCL this may be the only message, since the watchdog ends a process without a Python
    exception. If several ranks notice the same, only the first logs it.

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
        self._store = store.clone()  # type: ignore[attr-defined]
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
        self._others = set(range(world_size)) - {rank}
        self._group = frozenset(group)
        self._host = set(host_ranks) - {rank}
        ring = list(group) if len(group) > 1 else list(range(world_size))
        place = ring.index(rank)
        following = ring[place + 1 :] + ring[:place]
        self.watched = set(following[:_WATCHED_PEERS])
        self.known: _Beats = {}
        """Last heartbeats of the watched ranks, and one of every other rank of this host, for its process."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._is_lost = False
        """True if the store has not answered."""
        self.publish()
        self._thread = _start_thread("liveness", self._watch)

    # What this rank says of itself ------------------------------------------------------------------------------------

    def publish(self) -> None:
        with self._lock:
            own = self.own
            before = own.position
            own.step, own.exchange, own.phase = self.progress()
            if own.position != before:
                own.moved = own.count
            self._store.set(str(own.rank), json.dumps(dataclasses.asdict(own)))

    def announce_signal(self, name: str) -> None:
        """Announce that a signal ends this rank, and log the cause unless another rank of the job has."""
        self.ended_by_signal = True
        own = self.own
        if not self._launcher_is_gone():
            gone = self.name_gone(f"rank {own.rank} received {name}")
            ending = f"received {name} at {own.place}; this ends the job"
            self._leave(ending, is_cause=not gone)
        elif own.rank > min(self._host, default=own.rank):
            time.sleep(_LAUNCHER_WAIT_S)
        else:
            _logger.error(
                f"the launcher ({own.host}, pid {self.launcher}) is gone: its process has ended, at {own.place}; "
                "this ends its ranks"
            )

    def _launcher_is_gone(self) -> bool:
        """Tell whether the launcher has ended; it may have held the store."""
        return self.launcher != 0 and os.getppid() != self.launcher

    def _leave(self, ending: str, *, is_cause: bool) -> None:
        """Publish that this rank stops, once; log it if it is the first ``is_cause`` of the job."""
        if self.own.has_left:
            return
        clause = f"{self.own.name} {ending}"
        if is_cause and self._is_first(_CAUSE, clause):
            _logger.error(clause)
        self.own.has_left = True
        self._ask(self.publish)

    def close(self) -> None:
        """Stop watching, and publish that this rank has left unless it has announced an error."""
        self._closing.set()
        self._thread.join(0.0 if self._is_lost else _STORE_TIMEOUT_S)
        self._leave("", is_cause=False)

    # The cause of a failure -------------------------------------------------------------------------------------------

    def find_cause(self, error: str, *, by_itself: bool) -> list[str]:
        """Announce that this rank stops because of ``error``; return one clause for each finding about its peers.

        Findings are silent peers, the peer furthest behind, and the first peer that stopped by itself or ended; without
        any of these, the first peer that stopped at all. Takes five intervals on the first rank of the group whose
        communication failed, and up to ten on others, which wait for what that rank has found.

        Args:
            by_itself: True if no peer can have caused the error; peers are then not examined.
        """
        own = self.own
        own.step, own.exchange, own.phase = self.progress()
        error = error[:_ERROR_CHARS]
        if by_itself:
            self._leave(f"stopped by itself at {own.place}: {error}", is_cause=True)
            return []
        time.sleep(_GONE_WAIT_S)
        gone = self.name_gone(error)
        self._leave("", is_cause=False)
        if gone or self.ended_by_signal:
            return gone
        failed = f"communication of rank {own.rank} failed at step {own.step}"
        _logger.error(f"{failed}, looking for the cause among its peers: {error}")
        stopped = f"{own.name} stopped after failed communication at {own.place}: {error} (the first to stop)"
        findings = self._ask(lambda: self._diagnose(stopped), 2 * self._silence_s)
        if findings is not None:
            return findings
        lost = "the job's key-value store does not answer: its host, normally rank 0's, or the link to it is gone"
        beats = sorted(self.known.values(), key=lambda beat: beat.host == own.host)
        seen = [f"; {beat.name} was last seen at {beat.place}" for beat in beats]
        return [lost + "".join(seen[:_WATCHED_PEERS])]

    def name_gone(self, noticed: str) -> list[str]:
        """Return one clause for each rank of this host whose process ended without a message, and log it.

        ``noticed`` tells how it was noticed, for the log.
        """
        known = self.known
        ended = [
            rank for rank in self._host & known.keys() if has_ended(known[rank].pid)
        ]
        if not ended:
            return []
        # their last heartbeats may hold the reason
        beats = self._ask(lambda: self._read(ended)) or known
        gone = [beats[rank] for rank in ended if not beats[rank].has_left]
        for beat in gone:
            clause = f"{beat.name} is gone"
            if self._is_first(clause):
                self._is_first(_CAUSE, clause)
                _logger.error(
                    f"{clause}: its process has ended, at {beat.place}; {noticed}"
                )
        return [f"{beat.name} is gone" for beat in gone]

    def _diagnose(self, stopped: str) -> list[str]:
        """Return findings about peers; others of the group are told of them, or that this rank has ``stopped``."""
        key = f"found in group {min(self._group, default=self.own.rank)}"
        if self._store.add(f"count of {key}", 1) == 1:
            findings = self._with_cause(self.examine())
            if not findings and not self._is_first(_EFFECT, stopped):
                findings = [self._value_of(_EFFECT)]
            self._store.set(key, json.dumps(findings or [stopped]))
            return findings
        findings = self._wait_for_findings(key)
        of_others = [text for text in findings if not text.startswith(self.own.name)]
        return self._with_cause(of_others)

    def _with_cause(self, findings: list[str]) -> list[str]:
        """Return findings, and the first rank that stopped by itself or ended if they do not name it."""
        cause = self._value_of(_CAUSE)
        return findings if cause in ("", *findings) else [*findings, cause]

    def examine(self) -> list[str]:
        """Return findings about all ranks of the job."""
        before = self._read(self._others)
        time.sleep(self._silence_s)
        return self._compare(before, self._read(self._others), _SILENT_INTERVALS)

    def _wait_for_findings(self, key: str) -> list[str]:
        for _ in range(2 * _SILENT_INTERVALS):
            if found := self._value_of(key):
                return json.loads(found)
            time.sleep(self._silence_s / _SILENT_INTERVALS)
        return []

    def _compare(self, before: _Beats, after: _Beats, still: int) -> list[str]:
        """Return findings: peers silent between two looks, and the peer behind without progress for ``still`` beats.

        Ranks of the own group come first. Only steps are compared with ranks of other groups, whose exchanges differ.
        """
        own = self.own
        silent = []
        behind = []
        for rank, beat in after.items():
            is_near = rank in self._group
            is_behind = (
                beat.position < own.position if is_near else beat.step < own.step
            )
            if beat.has_left:
                continue
            if rank in before and beat.count == before[rank].count:
                silent.append(beat)
            elif is_behind and beat.count - beat.moved >= still:
                behind.append((not is_near, beat.position, rank))
        findings = []
        if silent:
            more = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
            findings.append(
                f"{silent[0].name}{more} gave no sign of life for {self._silence_s:.1f} s, "
                f"last seen at {silent[0].place}; the job's key-value store answers"
            )
        if behind:
            _, _, rank = min(behind)
            last = after[rank]
            findings.append(
                f"{last.name} is alive but behind, at {last.place}, while {own.name} is at {own.place}"
            )
        return findings

    # The thread -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        looks: deque[_Beats] = deque(maxlen=_SILENT_INTERVALS + 1)
        while not self._closing.wait(self._interval_s) and not self._launcher_is_gone():
            try:
                self._look(looks)
            except RuntimeError:
                self._is_lost = True
                return

    def _look(self, looks: deque[_Beats]) -> None:
        """Publish a heartbeat, read those of the watched ranks, and log which are silent or behind."""
        self.own.count += 1
        self.publish()
        unknown = self._host - self.known.keys()
        self.known = self.known | self._read(self.watched | unknown)
        self._is_lost = False
        self.name_gone(f"noticed by rank {self.own.rank}")
        watched = self.watched & self.known.keys()
        looks.append({rank: self.known[rank] for rank in watched})
        if len(looks) < _SILENT_INTERVALS + 1:
            return
        for finding in self._compare(looks[0], looks[-1], self._stall_intervals):
            if self._is_first(finding):
                _logger.error(finding)

    # The store --------------------------------------------------------------------------------------------------------

    def _value_of(self, key: str) -> str:
        """Return the store's value of a key; empty if it has none."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _is_first(self, event: str, clause: str = "") -> bool:
        """Return whether this is the job's first call for an event, whose ``clause`` the store then keeps.

        True, too, if the store does not answer.
        """

        def ask() -> bool:
            is_first = self._store.add(f"count of {event}", 1) == 1
            if is_first:
                self._store.set(event, clause)
            return is_first

        return self._ask(ask) is not False

    def _read(self, ranks: Iterable[int]) -> _Beats:
        """Return the heartbeats of ``ranks``; empty until all of them have published one."""
        keys = [str(rank) for rank in ranks]
        if not self._store.check(keys):  # multi_get would wait
            return {}
        beats = [
            Heartbeat(**json.loads(value)) for value in self._store.multi_get(keys)
        ]
        return {beat.rank: beat for beat in beats}

    def _ask(self, question: Callable[[], _T], extra_s: float = 0.0) -> _T | None:
        """Return the answer to a question to the store; None if it fails or takes longer than the timeout.

        The question runs in a thread, as the store's own timeout fails if its host vanishes with open connections. A
        store that is known not to answer is not asked.
        """
        answers: list[_T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        if not self._is_lost:
            _start_thread("question", ask).join(_STORE_TIMEOUT_S + extra_s)
            self._is_lost = not answers
        return answers[0] if answers else None


def _start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=f"cad-{name}", daemon=True)
    thread.start()
    return thread


def has_ended(pid: int) -> bool:
    """Tell whether a process of this host has ended, zombies included; always False without /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return sys.platform == "linux"
    return status.rpartition(")")[2].split()[0] in "ZX"
