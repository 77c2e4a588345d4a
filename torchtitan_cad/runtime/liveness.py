"""Signs of life of all ranks, by which a rank whose communication failed names the peer at fault.

Every rank keeps one value in the job's key-value store: a counter raised at intervals, how far its training has come,
and, once it stops, why. A peer whose counter stands still is gone; one that beats but is behind is what the others wait
for. Counters rather than times, so clocks need not agree. No communication of the training itself is involved.
"""

import dataclasses
import json
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.runtime.errors import first_sentence
from torchtitan_cad.runtime.signs import Host, Sign
from torchtitan_cad.runtime.transport import Pending, Routes, Transport

_PREFIX = "torchtitan_cad/alive"
_SILENT_INTERVALS = 5
_WATCHED_PEERS = 2
_NAMED_RANKS = 8
_ERROR_CHARS = 300
_POLL_S = 0.02
_STOP_POLL_S = 0.25
_AFTER_FIRST_S = 0.2
_SIGNAL_NAMES = ("SIGTERM", "SIGINT")
_jitter = random.SystemRandom()  # training may have seeded all ranks alike


@dataclasses.dataclass(frozen=True)
class MonitorTimes:
    """Seconds.

    Attributes:
        interval_s: between signs of life; a peer is silent after five.
        stall_s: after which a watched neighbour that is behind is reported.
        timeout_s: bound on every question to the store.
    """

    interval_s: float
    stall_s: float = 60.0
    timeout_s: float = 10.0


class PeerMonitor:
    """Publishes this rank's sign of life, watches two neighbours, and after a failure finds the peer at fault.

    Its thread logs one line as soon as a watched neighbour is silent, has stopped, or holds the others up. With NCCL
    that may be all there is, since the watchdog ends a process without a Python exception. Ranks of the same host see
    each other's processes, so a dead one is known at once; the lowest rank left there logs it.

    Progress is the host's: work that hangs on the device shows only once the host waits for it.

    Args:
        store: the job's store; cloned, so that waits in other threads do not block it.
        group: global ranks of this rank's CAD group, whose exchanges are comparable.
        host_ranks: global ranks on this host.
        launcher: process id of the launcher that started this process, its parent. Without it the process gets SIGTERM,
            as nothing would end it otherwise when a peer fails; 0 if there is none.
        times: how often to speak and look, and how long to wait.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        times: MonitorTimes,
        *,
        group: Sequence[int] = (),
        host_ranks: Sequence[int] = (),
        launcher: int = 0,
        logger: logging.Logger | None = None,
    ) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=times.timeout_s))
        self._rank, self._world, self._group = rank, range(world_size), frozenset(group)
        self._times = times
        self._logger = logger or logging.getLogger()
        self._step: Callable[[], int] = lambda: 0
        self._own = Sign(rank, f"{socket.gethostname()}, pid {os.getpid()}", os.getpid(), launcher)
        self.ended_by_signal = False
        """A signal is about to end this process: whatever fails from now on is no news."""
        self._without_launcher = False
        self._host = Host(self._own, host_ranks)
        self._named: set[int] = set()
        self._naming = threading.Lock()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        ring = list(group) if len(group) > 1 else list(self._world)
        at = ring.index(rank)
        self._watched = (ring[at + 1 :] + ring[:at])[:_WATCHED_PEERS]
        self._publish()
        self._thread = threading.Thread(target=self._run, name="cad-liveness", daemon=True)
        self._thread.start()

    # What this rank does ----------------------------------------------------------------------------------------------

    def track_step(self, step: Callable[[], int]) -> None:
        """Publish ``step()`` with every sign of life from now on."""
        self._step = step

    def track_exchanges(self, transport: Transport) -> Transport:
        """Wrap ``transport`` so that every exchange started on it is published as progress."""
        return _TrackedTransport(transport, self._own)

    def announce_stop(self, error: BaseException, *, by_itself: bool) -> None:
        """Tell the peers that this rank stops because of ``error``; ``by_itself`` if no peer can have caused it."""
        text = f"{type(error).__name__}: {first_sentence(error)}"[:_ERROR_CHARS]

        self._bounded(lambda: self._publish(error=text, by_itself=by_itself, order=self._next_order()))

    def announce_signal(self, name: str) -> None:
        """Say that this rank ends because of a signal, and which rank is the cause, if one is."""
        self.ended_by_signal = True
        if self._without_launcher:  # which has been said
            return
        errors = self._bounded(lambda: self._publish(error=name, by_itself=True, order=self._next_order()))
        first = not errors and self._own.order == 1
        if not self.name_gone(f"rank {self._rank} received {name}") and (first or self._host.is_spokesman()):
            earlier = [s for s in list(self._host.signs.values()) if 0 < s.order < self._own.order and s.by_itself]
            cause = min(earlier, key=lambda s: s.order, default=self._own)
            said = f"received {cause.error}" if cause.error in _SIGNAL_NAMES else f"stopped: {cause.error};"
            self._logger.error(f"{cause.name} {said} at {cause.place}; this ends the job")

    def close(self) -> None:
        """Leave without an error, unless one was announced."""
        self._stop.set()
        self._thread.join(timeout=2 * self._times.interval_s)
        if not self._thread.is_alive():
            self._host.close()
        if not self._own.order:
            self._bounded(lambda: self._publish(closed=True))

    # What its peers do ------------------------------------------------------------------------------------------------

    def name_gone(self, noticed: str, wait_s: float = 0.0) -> list[str]:
        """Return the ranks of this host whose processes have ended without a word, one clause each.

        The lowest rank that is left here logs each of them once, with how it was ``noticed``.

        Args:
            wait_s: how long to wait for one, as connections close a little before their process is gone.
        """
        deadline = time.monotonic() + wait_s
        while not (gone := self._look_for_gone()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with self._naming:
            for sign in gone:
                if sign.rank not in self._named and self._host.is_spokesman():
                    self._logger.error(f"{sign.name} is gone: its process has ended, at {sign.place}; {noticed}")
                self._named.add(sign.rank)
        return [f"{sign.name} is gone" for sign in gone]

    def _look_for_gone(self) -> list[Sign]:
        if not (ended := self._host.ended()):
            return []
        # Their last words, and what ranks have said that the thread has not read yet.
        self._bounded(lambda: self._host.signs.update(self._read(self._host.ranks)))
        # Not of those that end from now on: their last words have not been read.
        return self._host.wordless(ended)

    def diagnose(self) -> list[str]:
        """Say why this rank's communication may have failed, one clause per finding; empty if every peer is well.

        Takes five intervals and a little. Findings: peers that are gone, the peer furthest behind, the first that
        stopped by itself; if there is none of these, the first to stop at all.
        """
        time.sleep(_jitter.random() * self._times.interval_s)  # many ranks ask at once
        silence_s = _SILENT_INTERVALS * self._times.interval_s
        findings: list[str] = []

        def look() -> None:
            before = self._read(self._world)
            time.sleep(silence_s)
            findings.extend(self._findings(before, self._read(self._world), silence_s))

        if error := self._bounded(look, silence_s):
            return [f"the job's key-value store does not answer, so its host, normally rank 0's, is gone ({error})"]
        return findings

    def _findings(self, before: dict[int, Sign], after: dict[int, Sign], silence_s: float) -> list[str]:
        own, findings = self._own, []
        peers = [sign for rank, sign in after.items() if rank != self._rank and not sign.closed]
        alive = [sign for sign in peers if not sign.order and sign.beat != before.get(sign.rank, own).beat]
        gone = [sign for sign in peers if not sign.order and sign.rank in before and sign not in alive]
        if missing := [rank for rank in self._world if rank not in after]:
            findings.append(f"{_listed([f'rank {rank}' for rank in missing])} never gave a sign of life")
        if gone:
            findings.append(f"{_listed([s.name for s in gone])} gave no sign of life for {silence_s:.1f} s")
        if behind := [s for s in alive if self._is_behind(s) and _position(s) == _position(before.get(s.rank, own))]:
            # Exchanges of other groups are not comparable, so its own group's ranks come first.
            candidates = [s for s in behind if s.rank in self._group] or behind
            last = min(map(_position, candidates))
            names = _listed([s.name for s in candidates if _position(s) == last])
            place = next(s.place for s in candidates if _position(s) == last)
            findings.append(f"{names} is alive but behind, at {place}, while this rank is at {own.place}")
        stopped = sorted((s for s in peers if s.order), key=lambda s: s.order)
        if causes := [s for s in stopped if s.by_itself]:
            findings.append(causes[0].stopped)
        elif stopped and not findings and not 0 < own.order < stopped[0].order:
            findings.append(f"{stopped[0].stopped} (the first to stop)")
        return findings

    def _is_behind(self, sign: Sign) -> bool:
        own = self._own
        if sign.rank in self._group:
            return _position(sign) < _position(own)
        return sign.step < own.step

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        watches: dict[int, _Watch] = {}
        while not self._stopped_within_interval():
            try:
                self._publish(beat=self._own.beat + 1)
                if len(self._host.signs) < len(self._host.ranks):
                    self._host.signs.update(self._read(self._host.ranks))
                self._host.watch()
                for rank, sign in self._read(self._watched).items():
                    watch = watches.setdefault(rank, _Watch(sign, self._times))
                    if line := watch.news(sign, self._own.place, is_behind=self._is_behind(sign)):
                        self._logger.error(line)
            except RuntimeError as error:
                lost = f"rank {self._rank} lost the job's key-value store: {error}"
                # The launcher may have held it: a process that dies closes its connections first, its children see that
                # it is gone last.
                while not self._stop.wait(_STOP_POLL_S) and not self._ends_without_launcher():
                    if lost:
                        self._logger.error(lost)
                        lost = ""
                return

    def _stopped_within_interval(self) -> bool:
        """Wait for the next sign of life to be due, and say at once if a process of this host ends meanwhile."""
        deadline = time.monotonic() + self._times.interval_s
        while (left := deadline - time.monotonic()) > 0 and not self._stop.is_set():
            if self._host.wait_for_end(min(left, _STOP_POLL_S), self._stop):
                self.name_gone(f"noticed by rank {self._rank}")
            if self._ends_without_launcher():
                return True
        return self._stop.is_set()

    def _ends_without_launcher(self) -> bool:
        """End this process as the launcher would have done, if that is gone; the launcher's first rank says so."""
        own = self._own
        if self._without_launcher or not own.launcher or os.getppid() == own.launcher:
            return self._without_launcher
        self._without_launcher = True
        if self._host.is_first_of_launcher():
            self._logger.error(
                f"the launcher ({socket.gethostname()}, pid {own.launcher}) is gone: its process has ended, at "
                f"{own.place}; this ends its ranks"
            )
        else:
            time.sleep(_AFTER_FIRST_S)
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    # The store --------------------------------------------------------------------------------------------------------

    def _next_order(self) -> int:
        return self._store.add(f"{_PREFIX}/stopped", 1)

    def _publish(self, **changes: object) -> None:
        with self._lock:
            self._own.step = self._step()
            for field, value in changes.items():
                setattr(self._own, field, value)
            self._store.set(f"{_PREFIX}/{self._rank}", json.dumps(dataclasses.asdict(self._own)))

    def _read(self, ranks: Iterable[int]) -> dict[int, Sign]:
        """Return the signs of those ranks that have given one."""
        keys = [f"{_PREFIX}/{rank}" for rank in ranks]
        if not keys:
            return {}
        if not self._store.check(keys):  # multi_get would wait for what may never come
            keys = [key for key in keys if self._store.check([key])]
        signs = [Sign(**json.loads(value)) for value in (self._store.multi_get(keys) if keys else [])]
        return {sign.rank: sign for sign in signs}

    def _bounded(self, ask: Callable[[], None], extra_s: float = 0.0) -> str:
        """Run ``ask`` and say what went wrong, if anything.

        In a thread, because the store's own timeout does not help if its host vanishes without closing connections.
        """
        if self._without_launcher:  # which holds the store, on one host at least; torch would print stacks
            return "the launcher is gone"
        errors = [f"no answer within {self._times.timeout_s} s"]

        def run() -> None:
            try:
                ask()
                errors.clear()
            except RuntimeError as error:
                errors[:] = [str(error)]

        thread = threading.Thread(target=run, name="cad-liveness-question", daemon=True)
        thread.start()
        thread.join(self._times.timeout_s + extra_s)
        return errors[0] if errors else ""


class _Watch:
    """A watched peer: its last sign of life, and since when that is the same."""

    def __init__(self, sign: Sign, times: MonitorTimes) -> None:
        self._sign, self._times = sign, times
        self._beat_at = self._moved_at = time.monotonic()
        self._stall_reported = self._over = False

    def news(self, sign: Sign, here: str, *, is_behind: bool) -> str:
        """Return the line to log about the peer's latest sign; empty if there is no news.

        Args:
            here: the place at which this rank is.
            is_behind: whether the peer has not yet come there.
        """
        now = time.monotonic()
        if sign.beat != self._sign.beat:
            self._beat_at = now
        if _position(sign) != _position(self._sign):
            self._moved_at, self._stall_reported = now, False
        self._sign = sign
        if self._over or sign.closed:
            return ""
        if sign.order:
            self._over = True
            return "" if sign.error in _SIGNAL_NAMES else sign.stopped  # it has said so
        if (silent_s := now - self._beat_at) > _SILENT_INTERVALS * self._times.interval_s:
            self._over = True
            return f"{sign.name} gave no sign of life for {silent_s:.1f} s; it was at {sign.place}"
        stalled_s = now - self._moved_at
        if stalled_s > self._times.stall_s and is_behind and not self._stall_reported:
            self._stall_reported = True
            return f"{sign.name} has been at {sign.place} for {stalled_s:.1f} s; this rank is at {here}"
        return ""


class _TrackedTransport:
    """Counts exchanges into a rank's sign of life."""

    def __init__(self, transport: Transport, sign: Sign) -> None:
        self._transport, self._sign = transport, sign
        self.name, self.replayable, self.buffer_bytes = transport.name, transport.replayable, transport.buffer_bytes
        self.prepare, self.begin = transport.prepare, transport.begin

    def start(self, messages: Sequence[Sequence[Tensor]], routes: Routes, phase: str, call: int) -> Pending:
        self._sign.phase = phase
        self._sign.exchange += 1
        return self._transport.start(messages, routes, phase, call)


def _position(sign: Sign) -> tuple[int, int]:
    return sign.step, sign.exchange


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_RANKS])
    return shown + (f" and {len(names) - _NAMED_RANKS} more" if len(names) > _NAMED_RANKS else "")
