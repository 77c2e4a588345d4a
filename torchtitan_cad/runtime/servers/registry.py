# SPDX-License-Identifier: BSD-3-Clause
"""The part of a key-value store in which attention servers announce themselves, and ranks strike them off.

Keys, below a prefix:
    job                 what the job is, in JSON: its number, version, dtype, heads, and the digest of its token
    servers             how many servers have announced themselves
    server/N            announcement of server N, in JSON
    gone/N              why server N takes no more work: it left, or a rank struck it off
    list/G/V            servers that plans of the group whose first rank is G use, by the number V of the list
    invitations/N       how many ranks have invited server N to a connection
    invitation/N/I      name of the I-th connection
"""

import hashlib
import hmac
import json
import math
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch.distributed as dist

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.planning.servers import JoinedServer

PREFIX = "torchtitan_cad/servers"


@dataclass(frozen=True)
class JobCard:
    """What a server must know of a job.

    Attributes:
        job: number of this start of the job, which every message carries.
        version: of torchtitan_cad.
        dtype: name of the dtype of queries, keys and values.
        shape: heads of the first kind of attention.
        ranks: of the job.
        digest: of the token that a server must know.
    """

    job: int
    version: str
    dtype: str
    shape: dict[str, Any]
    ranks: int
    digest: str

    @property
    def attention_shape(self) -> AttentionShape:
        """Heads of the first kind of attention."""
        return AttentionShape(**self.shape)


@dataclass(frozen=True)
class ServerCard:
    """What a server says of itself.

    Attributes:
        number: of its registration; a server that joins again gets another.
        place: its host and process, in words.
        kernel: that it computes with.
        seconds_per_tile: of attention, forward and backward, per tile of 128 x 128, with the job's heads.
    """

    number: int
    place: str
    kernel: str
    seconds_per_tile: float

    @property
    def name(self) -> str:
        """The server in log lines."""
        return f"server {self.number} ({self.place})"


def digest_of(token: str, job: int) -> str:
    """Return what the store may show of a token."""
    return hashlib.sha256(f"{job}/{token}".encode()).hexdigest()


class Registry:
    """The servers of a job, as its store has them. Methods raise what the store raises (RuntimeError).

    Args:
        store: that rank 0 hosts for servers, as a client sees it without any prefix.
        token: which announcements are signed with.
    """

    def __init__(self, store: dist.Store, token: str) -> None:
        self._whole_store: Any = store
        self._store = dist.PrefixStore(PREFIX, store)
        self._token = token

    def clone(self) -> "Registry":
        """Return a registry with a connection of its own to the store, on which nobody else's calls wait."""
        return Registry(self._whole_store.clone(), self._token)

    # A job ------------------------------------------------------------------------------------------------------------

    def open_job(self, card: JobCard) -> None:
        """Publish the job, after any before it in the same store."""
        self._store.set("job", json.dumps(asdict(card)))

    def job(self) -> JobCard | None:
        """Return the job; None before it has been published."""
        if not self._store.check(["job"]):
            return None
        values = json.loads(self._store.get("job"))
        # A job of another version may say more or less.
        return JobCard(
            **{field.name: values.get(field.name) for field in fields(JobCard)}
        )

    # Servers ----------------------------------------------------------------------------------------------------------

    def announce(self, job: int, place: str, kernel: str, seconds: float) -> ServerCard:
        """Announce a server and return its card."""
        number = self._store.add(f"{job}/servers", 1) - 1
        card = ServerCard(number, place, kernel, seconds)
        text = json.dumps(asdict(card))
        self._store.set(f"{job}/server/{number}", f"{self._sign(text)} {text}")
        return card

    def servers(self, job: int, known: Container[int]) -> list[ServerCard]:
        """Return the servers that have announced themselves, but for the ``known``, in order.

        A server that has a number but no card yet is left out. One whose announcement cannot be used is struck off.
        """
        cards = list[ServerCard]()
        for number in range(self._store.add(f"{job}/servers", 0)):
            if number in known or not self._store.check([f"{job}/server/{number}"]):
                continue
            try:
                card = self.card(job, number)
            except (ValueError, TypeError, RecursionError) as error:
                self.strike(job, number, f"its announcement {error}")
                card = ServerCard(number, "of an unknown place", "", 1.0)
            cards.append(card)
        return cards

    def card(self, job: int, number: int) -> ServerCard:
        """Return the card of a server that has announced itself. Raises ValueError if it is not signed or is wrong."""
        announcement = self._store.get(f"{job}/server/{number}").decode()
        signature, _, text = announcement.partition(" ")
        if not hmac.compare_digest(signature, self._sign(text)):
            raise ValueError("is not signed with the token")
        card = ServerCard(**json.loads(text))
        if card.number != number or not 0 < card.seconds_per_tile < math.inf:
            raise ValueError("has another number, or no speed")
        return card

    def strike(self, job: int, number: int, reason: str) -> None:
        """Note why a server takes no more work."""
        self._store.set(f"{job}/gone/{number}", reason)

    def reason_gone(self, job: int, number: int) -> str | None:
        """Return why a server takes no more work; None while it does."""
        key = f"{job}/gone/{number}"
        if not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    # Lists ------------------------------------------------------------------------------------------------------------

    def put_list(
        self, job: int, group: int, version: int, servers: Sequence[JoinedServer]
    ) -> None:
        """Publish the servers that the plans of a CAD group use; ``group`` is its first rank."""
        text = json.dumps([asdict(server) for server in servers])
        self._store.set(f"{job}/list/{group}/{version}", text)

    def get_list(self, job: int, group: int, version: int) -> list[JoinedServer]:
        """Return the servers of ``put_list``."""
        text = self._store.get(f"{job}/list/{group}/{version}")
        return [JoinedServer(**values) for values in json.loads(text)]

    # Connections ------------------------------------------------------------------------------------------------------

    def invite(self, job: int, number: int, rank: int) -> dist.Store:
        """Invite a server to a connection with a rank; returns the connection's part of the store."""
        index = self._store.add(f"{job}/invitations/{number}", 1) - 1
        name = f"{job}/connection/{number}/{rank}"
        self._store.set(f"{job}/invitation/{number}/{index}", name)
        return dist.PrefixStore(name, self._store)

    def invitations(self, job: int, number: int, known: int) -> list[dist.Store]:
        """Return the connections to which a server has been invited after the first ``known``."""
        connections = list[dist.Store]()
        for index in range(known, self._store.add(f"{job}/invitations/{number}", 0)):
            key = f"{job}/invitation/{number}/{index}"
            if not self._store.check([key]):
                break
            name = self._store.get(key).decode()
            connections.append(dist.PrefixStore(name, self._store))
        return connections

    def _sign(self, text: str) -> str:
        return hmac.new(self._token.encode(), text.encode(), "sha256").hexdigest()
