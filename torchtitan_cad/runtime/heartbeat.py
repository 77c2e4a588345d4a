# SPDX-License-Identifier: BSD-3-Clause
"""What a rank says of itself while it is alive; see ``liveness``."""

import dataclasses


@dataclasses.dataclass
class Heartbeat:
    """State of a rank, written by the rank itself to the job's key-value store."""

    rank: int
    host: str
    pid: int
    count: int = 0
    """Heartbeats so far."""
    step: int = 0
    exchange: int = 0
    """Exchanges of its CAD group that the host has started; all ranks of the group start the same exchanges."""
    phase: str = ""
    """Name of the last exchange."""
    moved: int = 0
    """``count`` at the last change of ``position``."""
    has_left: bool = False
    """True once training has ended, with or without an error; the process may end, too."""

    @property
    def name(self) -> str:
        """The rank, its host and its process."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def position(self) -> tuple[int, int]:
        """Progress of training: step and exchange."""
        return self.step, self.exchange

    @property
    def place(self) -> str:
        """The position in words."""
        return f"step {self.step}" + (
            f", exchange {self.exchange} '{self.phase}'" if self.exchange else ""
        )
