"""Heartbeats of all ranks, by which a rank whose communication failed names the peer at fault.

Every rank keeps one value in the job's key-value store: a counter raised at intervals, how far its training has come,
and, once it stops, why. A peer whose counter stands still is gone; one whose counter rises but that is behind is what
the others wait for. Counters rather than times, so clocks need not agree. The training's own communication is not used.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

_PREFIX = "torchtitan_cad/alive"
_SILENT_INTERVALS = 5
_WATCHED_PEERS = 2
_NAMED_RANKS = 8
_ERROR_CHARS = 300
_STORE_TIMEOUT_S = 10.0
_GONE_WAIT_S = 0.5
"""Seconds: connections close a little before their process is gone."""
_LAUNCHER_WAIT_S = 0.5
"""Seconds: within these, the launcher's first rank has logged that the launcher is gone."""
_CAUSE, _EFFECT = "stopped by itself", "stopped after failed communication"
"""Keys of the store: the first rank to stop by itself, and the first whose communication failed, each in a clause."""
_logger = logging.getLogger()
_T = TypeVar("_T")


@dataclasses.dataclass
class Heartbeat:
    """State of a rank, as the rank itself writes it to the job's key-value store."""

    rank: int
    host: str
    pid: int
    count: int = 0
    """Heartbeats so far."""
    step: int = 0
    exchange: int = 0
    """Exchanges of its CAD group that the host has started. All ranks of the group start the same ones."""
    phase: str = ""
    """Name of the last exchange."""
    moved: int = 0
    """``count`` when it last came further."""
    has_left: bool = False
    """Training has ended, with an error or without; the process may end, too."""

    @property
    def name(self) -> str:
        """The rank, its host and its process."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def position(self) -> tuple[int, int]:
        """How far training has come: step and exchange."""
        return self.step, self.exchange

    @property
    def place(self) -> str:
        """The position in words."""
        return f"step {self.step}" + (f", exchange {self.exchange} '{self.phase}'" if self.exchange else "")


_Beats = dict[int, Heartbeat]


class PeerMonitor:
    """Publishes this rank's heartbeat, watches peers, and after a failure finds the peer at fault.

    Its thread watches the ranks of this host and two neighbours in the group: it logs when one is silent, holds the
    others up, or has ended. With NCCL that may be all there is, since the watchdog ends a process without a Python
    exception. What several ranks notice, only the first logs.

    Progress is the host's: work that hangs on the device shows only once the host waits for it.

    Args:
        store: the job's store; cloned, so that waits in other threads do not block it.
        group: global ranks of this rank's CAD group, whose exchanges are comparable.
        host_ranks: global ranks that the launcher has started on this host.
        launcher: process id of the launcher, this process's parent; 0 if there is none.
        interval_s: seconds between heartbeats; a peer is silent after five.
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
        self._interval_s, self._silence_s = interval_s, _SILENT_INTERVALS * interval_s
        self._stall_intervals = max(_SILENT_INTERVALS, round(stall_s / interval_s))
        self._own = Heartbeat(rank, socket.gethostname(), os.getpid())
        self.launcher = launcher
        self.progress: Callable[[], tuple[int, int, str]] = lambda: (0, 0, "")
        """Called with every heartbeat for ``step``, ``exchange`` and ``phase``."""
        self.ended_by_signal = False
        """A signal is about to end this process: whatever fails from now on is no news."""
        self._group, self._others = frozenset(group), [other for other in range(world_size) if other != rank]
        self._host = [other for other in host_ranks if other != rank]
        ring = list(group) if len(group) > 1 else list(range(world_size))
        at = ring.index(rank)
        self._watched = {*self._host, *(ring[at + 1 :] + ring[:at])[:_WATCHED_PEERS]}
        self._known: _Beats = {}
        """Last heartbeats of the watched ranks."""
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="cad-liveness", daemon=True)
        self._thread.start()

    def find_cause(self, error: str, *, by_itself: bool) -> list[str]:
        """Announce that this rank stops because of ``error``; return one clause for each finding about its peers.

        Args:
            by_itself: no peer can have caused the error, so none is looked for.
        """
        if by_itself:
            self._announce(_CAUSE, f": {error[:_ERROR_CHARS]}")
            return []
        time.sleep(_GONE_WAIT_S)
        gone = self.name_gone(error)
        self._announce(_EFFECT, f": {error[:_ERROR_CHARS]}", by_itself=False)
        if gone or self.ended_by_signal:
            return gone
        failed = f"communication of rank {self._own.rank} failed at step {self._own.step}"
        _logger.error(f"{failed}, looking for the cause among its peers: {error}")
        return self.diagnose()

    def announce_signal(self, name: str) -> None:
        """Announce that a signal ends this rank, and log why, unless another rank of the job has."""
        self.ended_by_signal = True
        own = self._own
        if not self._launcher_is_gone():
            gone = self.name_gone(f"rank {own.rank} received {name}")
            self._announce(f"received {name}", "; this ends the job", by_itself=not gone)
        elif own.rank > min(self._host, default=own.rank):
            time.sleep(_LAUNCHER_WAIT_S)
        else:
            launcher = f"the launcher ({own.host}, pid {self.launcher})"
            _logger.error(f"{launcher} is gone: its process has ended, at {own.place}; this ends its ranks")

    def _launcher_is_gone(self) -> bool:
        """Return whether the launcher has ended; it may have held the store."""
        return self.launcher != 0 and os.getppid() != self.launcher

    def _announce(self, how: str, why: str, *, by_itself: bool = True) -> None:
        """Publish that this rank stops, once; log it if it is the first of the job to stop by itself."""
        own = self._own
        if own.has_left:
            return
        own.step, own.exchange, own.phase = self.progress()
        clause, key = f"{own.name} {how} at {own.place}{why}", _CAUSE if by_itself else _EFFECT
        if is_first := self._is_first(key):
            self._ask(lambda: self._store.set(f"{_PREFIX}/{key}", clause))
        own.has_left = True
        self._ask(self._publish)
        if by_itself and is_first:
            _logger.error(clause)

    def close(self) -> None:
        """Leave, without an error unless one was announced."""
        self._closing.set()
        self._thread.join(_STORE_TIMEOUT_S)
        if not self._own.has_left:
            self._own.has_left = True
            self._ask(self._publish)

    def name_gone(self, noticed: str) -> list[str]:
        """Return one clause for each rank of this host whose process has ended unannounced; log how it was noticed."""
        ended = {rank: self._known[rank] for rank in self._host if self._known and has_ended(self._known[rank].pid)}
        if ended:  # They may have said why. Not read of ranks that end from now on.
            ended = self._ask(lambda: self._read(ended)) or ended
        gone = [beat for beat in ended.values() if not beat.has_left]
        for beat in gone:
            if self._is_first(f"{beat.rank} is gone"):
                _logger.error(f"{beat.name} is gone: its process has ended, at {beat.place}; {noticed}")
        return [f"{beat.name} is gone" for beat in gone]

    def diagnose(self) -> list[str]:
        """Say why this rank's communication may have failed, one clause per finding; empty if every peer is well.

        Takes five intervals. Findings: peers that are silent, the one furthest behind, the first that stopped by
        itself; if there is none of these, the first to stop at all.
        """

        def look() -> list[str]:
            before = self._read(self._others)
            time.sleep(self._silence_s)
            after = self._read(self._others)
            findings = self._compare(before, after, _SILENT_INTERVALS)
            cause, effect = (
                self._store.get(key).decode() if self._store.check([key]) else ""
                for key in (f"{_PREFIX}/{_CAUSE}", f"{_PREFIX}/{_EFFECT}")
            )
            if cause:
                findings.append(cause)
            elif effect and not findings and not effect.startswith(self._own.name):
                findings.append(f"{effect} (the first to stop)")
            return findings

        findings = self._ask(look, self._silence_s)
        lost = "the job's key-value store does not answer, so its host, normally rank 0's, is gone"
        return [lost] if findings is None else findings

    def _compare(self, before: _Beats, after: _Beats, still: int) -> list[str]:
        """Say which peers were silent between two looks, and which one is behind and has not moved for ``still`` beats.

        Exchanges of other groups are not comparable, so only steps are, and its own group's ranks come first.
        """
        own, findings = self._own, []
        if silent := [after[r] for r, b in before.items() if after[r].count == b.count and not after[r].has_left]:
            names = ", ".join(b.name for b in silent[:_NAMED_RANKS]) + ", ..." * (len(silent) > _NAMED_RANKS)
            findings = [f"{names} gave no sign of life for {self._silence_s:.1f} s, last seen at {silent[0].place}"]
        behind = [
            (beat.rank not in self._group, beat.position, beat)
            for beat in after.values()
            if not beat.has_left and beat not in silent and beat.count - beat.moved >= still
            if (beat.position < own.position if beat.rank in self._group else beat.step < own.step)
        ]
        for *_, beat in sorted(behind, key=lambda each: each[:2])[:1]:
            findings.append(f"{beat.name} is alive but behind, at {beat.place}, while this rank is at {own.place}")
        return findings

    def _run(self) -> None:
        looks: deque[_Beats] = deque(maxlen=_SILENT_INTERVALS + 1)
        while not self._closing.wait(self._interval_s) and not self._launcher_is_gone():
            try:
                self._own.count += 1
                self._publish()
                self._known = now = self._read(self._watched)
                self.name_gone(f"noticed by rank {self._own.rank}")
                looks.extend([now] if now else [])
                findings = self._compare(looks[0], now, self._stall_intervals) if len(looks) == looks.maxlen else []
                for finding in findings:
                    if self._is_first(finding):
                        _logger.error(finding)
            except RuntimeError as error:
                # If the launcher held it and is gone, this process is about to end.
                if not self._closing.wait(2 * _LAUNCHER_WAIT_S) and not self.ended_by_signal:
                    _logger.error(f"rank {self._own.rank} lost the job's key-value store: {error}")
                return

    def _is_first(self, event: str) -> bool:
        """Return whether this is the job's first call for an event, or the store does not answer."""
        return self._ask(lambda: self._store.add(f"{_PREFIX}/count/{event}", 1)) in (None, 1)

    def _publish(self) -> None:
        with self._lock:
            own, before = self._own, self._own.position
            own.step, own.exchange, own.phase = self.progress()
            own.moved = own.moved if own.position == before else own.count
            self._store.set(f"{_PREFIX}/{own.rank}", json.dumps(dataclasses.asdict(own)))

    def _read(self, ranks: Iterable[int]) -> _Beats:
        """Return the heartbeats of ``ranks``; nothing until all of them have published one."""
        keys = [f"{_PREFIX}/{rank}" for rank in ranks]
        if not keys or not self._store.check(keys):  # multi_get would wait
            return {}
        return {beat.rank: beat for beat in (Heartbeat(**json.loads(value)) for value in self._store.multi_get(keys))}

    def _ask(self, question: Callable[[], _T], extra_s: float = 0.0) -> _T | None:
        """Return the answer to a question to the store; None if it fails or takes longer than the timeout.

        In a thread, because the store's own timeout does not help if its host vanishes without closing connections.
        """
        answers: list[_T] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=ask, name="cad-liveness-question", daemon=True)
        thread.start()
        thread.join(_STORE_TIMEOUT_S + extra_s)
        return answers[0] if answers else None


def has_ended(pid: int) -> bool:
    """Return whether a process of this host has ended, zombies included; False for all where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return sys.platform == "linux"
