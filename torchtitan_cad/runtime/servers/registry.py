# SPDX-License-Identifier: BSD-3-Clause
"""The part of a key-value store in which attention servers announce themselves, and ranks strike them off.

Keys, below a prefix:
    job                 number of this start of the job, and its version
    JOB/TOKEN/...       of this start; who does not know the token does not find them:
        card            what servers must know of the job, in JSON
        servers         count of servers that have announced themselves
        server/N        announcement of server N, in JSON
        gone/N          why server N takes no more work
        invitations/N   ranks that have invited server N to a connection
"""

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torchtitan_cad.planning import AttentionShape

PREFIX = "torchtitan_cad/servers"
_JOB = f"{PREFIX}/job"
_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class JobCard:
    """What a server must know of a job to compute for it.

    Attributes:
        dtype: name of the dtype of queries, keys and values.
        shape: heads of the first kind of attention.
        cost_tile: tokens of a tile's edge in the plans' cost model.
    """

    dtype: str
    shape: AttentionShape
    cost_tile: int


@dataclass(frozen=True)
class ServerCard:
    """What a server says of itself.

    Attributes:
        number: of its registration; a server that joins again gets another.
        place: its host and process, in words.
        kernel: that it computes with.
        seconds_per_unit: of attention, forward and backward, per unit of the job's cost model.
    """

    number: int
    place: str
    kernel: str
    seconds_per_unit: float

    @property
    def name(self) -> str:
        """The server in log lines."""
        return f"server {self.number} ({self.place})"


def open_store(host: str, port: int, *, hosts: bool) -> dist.TCPStore:
    """Host the store in which servers and ranks meet, or become its client. Raises RuntimeError if that fails."""
    return dist.TCPStore(
        host, port, is_master=hosts, wait_for_workers=False, timeout=_TIMEOUT
    )


def find_job(store: Any) -> tuple[int, str]:
    """Return number and version of the job of a store. Raises RuntimeError before it has been published."""
    if not store.check([_JOB]):
        raise RuntimeError("the store has no job yet")
    number, version = store.get(_JOB).decode().split()
    return int(number), version


class Registry:
    """The servers of a job, as its store has them. Methods raise what the store raises (RuntimeError).

    Args:
        store: a client of the store that rank 0 hosts for servers.
        job: number of this start of the job, which every message carries.
        token: of the job.
    """

    def __init__(self, store: dist.TCPStore, job: int, token: str) -> None:
        self.job = job
        self._client: Any = store
        self._prefix = f"{PREFIX}/{job}/{token}"
        self._store: Any = dist.PrefixStore(self._prefix, store)

    def publish(self, card: JobCard, version: str) -> None:
        """Open the job to servers of a version, in place of any job before it in the same store."""
        self._store.set("card", json.dumps(asdict(card)))
        self._client.set(_JOB, f"{self.job} {version}")

    def card(self) -> JobCard | None:
        """Return what the job says to servers; None if it has another token."""
        text = self._text("card")
        if not text:
            return None
        values = json.loads(text)
        return JobCard(**values | {"shape": AttentionShape(**values["shape"])})

    def announce(self, place: str, kernel: str, seconds: float) -> ServerCard:
        """Announce a server and return its card."""
        number = self._store.add("servers", 1) - 1
        card = ServerCard(number, place, kernel, seconds)
        self._store.set(f"server/{number}", json.dumps(asdict(card)))
        return card

    def servers(self, known: set[int]) -> list[ServerCard]:
        """Return the servers that have announced themselves, but for the ``known``, in order."""
        cards = []
        for number in range(self._store.add("servers", 0)):
            text = "" if number in known else self._text(f"server/{number}")
            if not text:
                continue
            try:
                cards.append(ServerCard(**json.loads(text)))
            except (TypeError, ValueError):
                self.strike(number, "its announcement cannot be used")
        return cards

    def strike(self, number: int, reason: str) -> None:
        """Note why a server takes no more work."""
        self._store.set(f"gone/{number}", reason)

    def reason_gone(self, number: int) -> str:
        """Return why a server takes no more work; an empty text while it does."""
        return self._text(f"gone/{number}")

    def invite(self, number: int, rank: int) -> dist.Store:
        """Invite a server to a connection with a rank, once; returns the connection's part of the store.

        It has a connection to the store of its own, on which nobody else's calls wait.
        """
        self._store.append(f"invitations/{number}", f"{rank} ")
        return self._connection(self._client.clone(), number, rank)

    def invitations(self, number: int, known: int) -> list[dist.Store]:
        """Return the connections to which a server has been invited after the first ``known``."""
        ranks = self._text(f"invitations/{number}").split()
        return [
            self._connection(self._client, number, int(rank)) for rank in ranks[known:]
        ]

    def _connection(self, client: dist.Store, number: int, rank: int) -> dist.Store:
        return dist.PrefixStore(f"{self._prefix}/connection/{number}/{rank}", client)

    def _text(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""
