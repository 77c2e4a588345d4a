# SPDX-License-Identifier: BSD-3-Clause
"""The rank's side of joined servers: which there are, and requests to them, all of which have deadlines.

A server that is late, gone or wrong is struck off by the rank that sees it, at once: the rank computes what it has
asked for itself, asks it nothing more, and says so in the servers' store. All ranks of a CAD group look which servers
there are for each step that is planned, and use those that all of them are connected to.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.servers import JoinedServer, assign_to_servers
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.errors import first_sentence
from torchtitan_cad.runtime.servers.registry import Registry, ServerCard
from torchtitan_cad.runtime.servers.request import Request
from torchtitan_cad.runtime.servers.wire import (
    RANK,
    Connection,
    ServerMessage,
    WireError,
)

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
"""seconds in which a server must accept an invitation"""
LEAST_WAIT_S = 0.5
WAIT_FACTOR = 2.0
"""An answer may take this many times the predicted seconds, but at least ``LEAST_WAIT_S``."""
ECHO_BYTES = 4 << 20

OwedAnswer = Future[Sequence[Tensor] | None]
"""results on the host that a server owes; None if they did not come, as the server is struck off"""


class _Link:
    """A connection to one server, all of whose work is done by a thread of its own, one thing after the other.

    Attributes:
        joined: the server as plans see it; None before there is a connection.
    """

    def __init__(self, card: ServerCard) -> None:
        self.card = card
        self.joined: JoinedServer | None = None
        self.thread = ThreadPoolExecutor(1, f"cad-server-{card.number}")

    def connect(self, registry: Registry, rank: int, unit: float) -> None:
        """Invite the server. Raises RuntimeError if it does not come, or does not echo.

        ``unit``: see ``ServerPool``.
        """
        card = self.card
        store = registry.invite(card.number, rank)
        self._connection = Connection(store, registry.job, RANK, timeout_s=CONNECT_S)
        payload = torch.zeros(ECHO_BYTES, dtype=torch.uint8)
        begin = time.monotonic()
        self._connection.send(ServerMessage("echo", {}, [payload]), CONNECT_S)
        self._connection.receive(CONNECT_S)
        rate = 2 * ECHO_BYTES / (time.monotonic() - begin)
        speed = unit / card.seconds_per_unit
        self.joined = JoinedServer(card.number, speed, rate)
        logger.info(
            f"CAD uses {card.name}: kernel {card.kernel}, {speed:.2f} of a rank's speed, {1e-9 * rate:.2g} GB/s"
        )

    def round_trip(
        self,
        request: Request,
        rows: Sequence[Tensor],
        copied: torch.cuda.Event | None,
        seconds: float,
    ) -> Sequence[Tensor]:
        """Send a request, once its ``rows`` are on the host, and return the results.

        Raises WireError for an answer that is late or wrong. ``seconds`` are predicted.
        """
        if copied is not None:
            copied.synchronize()
        deadline = time.monotonic() + max(LEAST_WAIT_S, WAIT_FACTOR * seconds)
        self._connection.send(request.message(rows), deadline - time.monotonic())
        answer = self._connection.receive(deadline - time.monotonic())
        if answer.kind == "refusal":
            raise WireError(f"it refuses: {answer.description['reason']}")
        if answer.kind != "results" or not request.accepts(answer.tensors):
            raise WireError(
                "its answer has other shapes or another dtype than asked for"
            )
        if not all(x.sum(dtype=torch.float32).isfinite() for x in answer.tensors):
            raise WireError("its answer has values that are not finite")
        return answer.tensors


class ServerPool:
    """The joined servers as one rank knows them.

    Args:
        registry: of the job.
        rank: global number of this rank.
        unit: seconds of attention of a rank, forward and backward, per unit of the plans' cost model; equal on all
            ranks of a CAD group.
        share: of every server that this rank's CAD group may use.
    """

    def __init__(
        self, registry: Registry, rank: int, unit: float, share: float
    ) -> None:
        self._registry = registry
        self._rank = rank
        self._unit = unit
        self._share = share
        self._links: dict[int, _Link] = {}
        self._known = set[int]()
        """Numbers of all servers that this rank has ever connected to, or tried to."""
        self.listed: list[JoinedServer] = []
        """The servers that plans use."""

    # Requests ---------------------------------------------------------------------------------------------------------

    def ask(self, server: int, request: Request, seconds: float) -> OwedAnswer | None:
        """Ask a server to compute a call; None if it is struck off.

        Args:
            seconds: predicted, of all that the server computes by this plan.
        """
        link = self._links.get(server)
        if link is None:
            return None
        # of GPUs: to pinned memory
        rows = [x.to("cpu", non_blocking=True) for x in request.rows]
        copied = streams.record_event(request.rows[0].device)
        answer = partial(link.round_trip, request, rows, copied, seconds)
        try:
            return self._submit(link, answer)
        except RuntimeError:  # struck off meanwhile
            return None

    def _submit(
        self, link: _Link, work: Callable[[], Any], failure: str = ""
    ) -> Future[Any]:
        """Do work in a server's thread; strike the server off if that fails, and say so after ``failure``."""

        def run() -> Any:
            try:
                return work()
            except Exception as error:  # no server ends training
                self.strike(link.card.number, failure + first_sentence(error))
                return None

        return link.thread.submit(run)

    def strike(self, server: int, reason: str) -> None:
        """Ask a server nothing more, and tell the others."""
        link = self._drop(server)
        if link is None:
            return
        logger.warning(
            f"CAD strikes off {link.card.name}: {reason}; this rank computes its tasks itself"
        )
        with contextlib.suppress(RuntimeError):  # others find out by themselves
            self._registry.strike(server, f"struck off by rank {self._rank}: {reason}")

    # Lists ------------------------------------------------------------------------------------------------------------

    def look(self) -> list[JoinedServer]:
        """Return the servers that this rank is connected to, and begin to connect to new ones.

        There are none if the store in which servers announce themselves does not answer.
        """
        try:
            cards = self._registry.servers(self._known)
            for number in [*self._links]:  # threads drop some
                reason = self._registry.reason_gone(number)
                link = self._drop(number) if reason else None
                if link is not None:
                    logger.info(f"CAD uses {link.card.name} no longer: {reason}")
        except RuntimeError as error:
            if self._links:
                logger.warning(
                    f"CAD uses no servers any longer: their store does not answer: {first_sentence(error)}"
                )
            self.close()
            return []
        for card in cards:
            link = _Link(card)
            self._known.add(card.number)
            self._links[card.number] = link
            connect = partial(link.connect, self._registry, self._rank, self._unit)
            self._submit(link, connect, "it does not accept an invitation: ")
        links = sorted(self._links.items())
        return [link.joined for _, link in links if link.joined is not None]

    def take_lists(self, lists: Sequence[list[JoinedServer]]) -> None:
        """Use the servers from now on that all ranks of the group are connected to; of the first rank's rates."""
        numbers = [{server.number for server in joined} for joined in lists]
        common = set.intersection(*numbers)
        self.listed = [server for server in lists[0] if server.number in common]

    def assign(self, plan: Plan) -> Plan:
        """Return a plan in which the servers of the last list take part."""
        return assign_to_servers(plan, self.listed, self._unit, self._share)

    def _drop(self, number: int) -> _Link | None:
        """Hang up; returns the link that there was."""
        link = self._links.pop(number, None)  # atomic: requests' threads drop, too
        if link is not None:
            # the connection ends with the link, after the last request
            link.thread.shutdown(wait=False)
        return link

    def close(self) -> None:
        """Hang up on all servers."""
        for number in [*self._links]:
            self._drop(number)
