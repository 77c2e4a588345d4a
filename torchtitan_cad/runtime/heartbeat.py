"""What a rank says of itself at intervals, and whether a process of this host has ended."""

import dataclasses
import sys
from pathlib import Path


@dataclasses.dataclass
class Heartbeat:
    """State of a rank, as the rank itself writes it to the job's key-value store."""

    rank: int
    process: str
    """Host and process id."""
    pid: int = 0
    count: int = 0
    """Heartbeats so far."""
    step: int = 0
    exchange: int = 0
    """Exchanges of its CAD group that the host has started. All ranks of the group start the same ones."""
    phase: str = ""
    """Name of the last exchange."""
    error: str = ""
    """Why training stopped: an error, or the name of a signal."""
    by_itself: bool = False
    """That error was its own; otherwise a peer may have caused it."""
    order: int = 0
    """Number, from 1, of this rank among those that stopped with the same ``by_itself``; 0 without an error."""
    has_left: bool = False
    """Training has ended, with an error or without; the process may end, too."""

    @property
    def name(self) -> str:
        """The rank, its host and its process."""
        return f"rank {self.rank} ({self.process})"

    @property
    def position(self) -> tuple[int, int]:
        """How far training has come: step and exchange."""
        return self.step, self.exchange

    @property
    def place(self) -> str:
        """The position in words."""
        return f"step {self.step}" + (f", exchange {self.exchange} '{self.phase}'" if self.exchange else "")

    @property
    def stop(self) -> str:
        """Clause that says where the rank stopped, and why."""
        how = "stopped by itself" if self.by_itself else "stopped after failed communication"
        return f"{self.name} {how} at {self.place}: {self.error}"


def has_ended(pid: int) -> bool:
    """Return whether a process of this host has ended, zombies included; False for all where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return sys.platform == "linux"
