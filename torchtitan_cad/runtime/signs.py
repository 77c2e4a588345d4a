"""What a rank says of itself, and what the ranks of one host see of each other's processes."""

import contextlib
import dataclasses
import os
import select
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path


@dataclasses.dataclass
class Sign:
    """Sign of life that a rank writes about itself."""

    rank: int
    process: str
    """Host and process id."""
    pid: int = 0
    launcher: int = 0
    """Process id of the launcher that started it; 0 if none did."""
    beat: int = 0
    step: int = 0
    exchange: int = 0
    """Exchanges of its CAD group that the host has started. All ranks of the group start the same ones."""
    phase: str = ""
    """Name of the last exchange."""
    error: str = ""
    """Why it stopped, if an error ended its training."""
    by_itself: bool = False
    """That error was its own; otherwise a peer may have caused it."""
    order: int = 0
    """1 for the first rank of the job to stop with an error, and so on; 0 while it has not."""
    closed: bool = False
    """Has left without an error."""

    @property
    def name(self) -> str:
        """The rank, its host and its process."""
        return f"rank {self.rank} ({self.process})"

    @property
    def place(self) -> str:
        """How far its training has come."""
        return f"step {self.step}" + (f", exchange {self.exchange} '{self.phase}'" if self.exchange else "")

    @property
    def stopped(self) -> str:
        """Sentence that says where it stopped, and why."""
        how = "stopped by itself" if self.by_itself else "stopped after failed communication"
        return f"{self.name} {how} at {self.place}: {self.error}"


class Host:
    """The ranks of one host, as one of them sees their processes."""

    def __init__(self, own: Sign, ranks: Sequence[int]) -> None:
        self._own = own
        self.ranks = [rank for rank in ranks if rank != own.rank]
        self.signs: dict[int, Sign] = {}
        """The last signs known; process ids do not change."""
        self._poll = select.poll()
        self._files: dict[int, int] = {}
        self._watch(own.launcher)

    def watch(self) -> None:
        """Let ``wait_for_end`` know of all processes whose signs are known, where the system is Linux."""
        for sign in list(self.signs.values()):
            self._watch(sign.pid)

    def _watch(self, pid: int) -> None:
        if pid and pid not in self._files and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._files[pid] = os.pidfd_open(pid)
                self._poll.register(self._files[pid], select.POLLIN)

    def wait_for_end(self, timeout_s: float, stop: threading.Event) -> bool:
        """Wait up to ``timeout_s`` until one of the processes watched ends; True if one did. Each is reported once."""
        if not self._files:
            stop.wait(timeout_s)
            return False
        ended = self._poll.poll(1000 * timeout_s)
        for file, _ in ended:
            self._poll.unregister(file)
        return bool(ended)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def ended(self) -> list[int]:
        """Return the ranks whose processes have ended, for whatever reason."""
        return [sign.rank for sign in list(self.signs.values()) if has_ended(sign.pid)]

    def wordless(self, ranks: Iterable[int]) -> list[Sign]:
        """Return the signs of those of ``ranks`` that have not said that they end."""
        return [sign for rank in ranks if not (sign := self.signs[rank]).order and not sign.closed]

    def is_spokesman(self) -> bool:
        """Tell whether this is the lowest rank of this host that is alive."""
        gone = {sign.rank for sign in self.wordless(self.ended())}
        return all(rank in gone for rank in self.ranks if rank < self._own.rank)

    def is_first_of_launcher(self) -> bool:
        """Tell whether this is the lowest of the ranks that its launcher has started here."""
        siblings = [rank for rank, sign in list(self.signs.items()) if sign.launcher == self._own.launcher]
        return self._own.rank <= min(siblings, default=self._own.rank)


def has_ended(pid: int) -> bool:
    """Tell whether a process of this host has ended, zombies included."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        pass
    try:  # no such process, or no /proc on this system
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
