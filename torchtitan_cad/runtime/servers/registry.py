# SPDX-License-Identifier: BSD-3-Clause
"""The part of a key-value store in which attention servers announce themselves, and ranks strike them off.

Keys, below a prefix:
    job                 what the job is, in JSON: its number, version, dtype, heads, and the digest of its token
    servers             announcements of servers, one a line, by whose order they have numbers: a signature, and JSON
    gone                why servers take no more work, one a line: a number, and that it left or a rank struck it off
    invitations/N       ranks that have invited server N to a connection, one a line
"""

import hashlib
import hmac
import json
import math
import secrets
from collections.abc import Container
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch.distributed as dist

from torchtitan_cad.planning import AttentionShape

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
        self._store: Any = dist.PrefixStore(PREFIX, store)
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

    def announce(
        self,
        job: int,
        place: str,
        kernel: str,
        seconds: float,
    ) -> ServerCard:
        """Announce a server and return its card."""
        values = {"place": place, "kernel": kernel, "seconds_per_tile": seconds}
        # No other line is equal, so that the server finds its own.
        text = json.dumps({**values, "nonce": secrets.token_hex(8)})
        line = f"{self._sign(text)} {text}"
        self._append(f"{job}/servers", line)
        number = self._lines(f"{job}/servers").index(line)
        return ServerCard(number, place, kernel, seconds)

    def servers(self, job: int, known: Container[int]) -> list[ServerCard]:
        """Return the servers that have announced themselves, but for the ``known``, in order.

        One whose announcement cannot be used is struck off.
        """
        cards = list[ServerCard]()
        for number, line in enumerate(self._lines(f"{job}/servers")):
            if number in known:
                continue
            try:
                card = self._card(number, line)
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                self.strike(job, number, f"its announcement {error}")
                card = ServerCard(number, "of an unknown place", "", 1.0)
            cards.append(card)
        return cards

    def _card(self, number: int, line: str) -> ServerCard:
        """Return the card of an announcement. Raises ValueError if it is not signed or has no speed."""
        signature, _, text = line.partition(" ")
        if not hmac.compare_digest(signature.encode(), self._sign(text).encode()):
            raise ValueError("is not signed with the token")
        values = json.loads(text)
        seconds = values["seconds_per_tile"]
        if not 0 < seconds < math.inf:
            raise ValueError("has no speed")
        return ServerCard(number, values["place"], values["kernel"], seconds)

    def strike(self, job: int, number: int, reason: str) -> None:
        """Note why a server takes no more work."""
        self._append(f"{job}/gone", f"{number} {reason}")

    def reason_gone(self, job: int, number: int) -> str | None:
        """Return why a server takes no more work; None while it does."""
        for line in self._lines(f"{job}/gone"):
            gone, _, reason = line.partition(" ")
            if gone == str(number):
                return reason
        return None

    # Connections ------------------------------------------------------------------------------------------------------

    def invite(self, job: int, number: int, rank: int) -> dist.Store:
        """Invite a server to a connection with a rank, once; returns the connection's part of the store."""
        self._append(f"{job}/invitations/{number}", str(rank))
        return self._connection(job, number, str(rank))

    def invitations(self, job: int, number: int, known: int) -> list[dist.Store]:
        """Return the connections to which a server has been invited after the first ``known``."""
        ranks = self._lines(f"{job}/invitations/{number}")
        return [self._connection(job, number, rank) for rank in ranks[known:]]

    def _connection(self, job: int, number: int, rank: str) -> dist.Store:
        return dist.PrefixStore(f"{job}/connection/{number}/{rank}", self._store)

    # Lines ------------------------------------------------------------------------------------------------------------

    def _append(self, key: str, line: str) -> None:
        # whatever stands before it, a line begins anew
        self._store.append(key, "\n" + " ".join(line.splitlines()) + "\n")

    def _lines(self, key: str) -> list[str]:
        """Return the lines that have been appended to a key."""
        if not self._store.check([key]):
            return []
        lines = self._store.get(key).decode(errors="replace").split("\n")
        return [line for line in lines if line]

    def _sign(self, text: str) -> str:
        return hmac.new(self._token.encode(), text.encode(), "sha256").hexdigest()
