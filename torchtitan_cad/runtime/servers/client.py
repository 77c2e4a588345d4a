# SPDX-License-Identifier: BSD-3-Clause
"""The rank's side of joined servers: which there are, and requests to them, all of which have deadlines.

A server that is late, gone or wrong is struck off by the rank that sees it, at once: the rank computes what it has
asked for itself, asks it nothing more, and says so in the servers' store. Other ranks learn of it from the next list.
The first rank of every CAD group looks which servers there are for each step that is planned, and tells the others.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.servers import JoinedServer, assign_to_servers
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.errors import first_sentence
from torchtitan_cad.runtime.servers.registry import Registry, ServerCard
from torchtitan_cad.runtime.servers.request import Request
from torchtitan_cad.runtime.servers.wire import (
    ANSWER,
    ECHO,
    END,
    REFUSAL,
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
_GOODBYE_S = 1.0

OwedAnswer = Future[Sequence[Tensor] | None]
"""results on the host that a server owes; None if they did not come, as the server is struck off"""
ListedServer = tuple[ServerCard, JoinedServer]
"""a server that plans use, as it announced itself and as planning sees it"""


def take_answer(request: Request, answer: OwedAnswer | None) -> Sequence[Tensor] | None:
    """Wait for an answer; return the results on the device of the request's rows, None if there are none."""
    results = None if answer is None else answer.result()
    if results is None:
        return None
    device = request.rows[0].device
    return [x.to(device, non_blocking=True) for x in results]


class _Link:
    """A connection to one server, all of whose work is done by a thread of its own, one thing after the other.

    Attributes:
        rate: bytes per second there and back, infinite where another rank measures; None before there is a connection.
    """

    def __init__(self, card: ServerCard) -> None:
        self.card = card
        self.rate: float | None = None
        self._num_sent = 0
        self.thread = ThreadPoolExecutor(1, f"cad-server-{card.number}")

    def connect(
        self, registry: Registry, job: int, rank: int, *, pinned: bool, measures: bool
    ) -> None:
        """Invite the server. Raises WireError if it does not come, or does not echo where the rank ``measures``."""
        self._connection = Connection(
            registry.invite(job, self.card.number, rank),
            job,
            is_server=False,
            timeout_s=CONNECT_S,
            pinned=pinned,
        )
        if not measures:
            self.rate = math.inf
            return
        payload = torch.zeros(ECHO_BYTES, dtype=torch.uint8)
        begin = time.monotonic()
        self._connection.send(ServerMessage(ECHO, 0, {}, [payload]), CONNECT_S)
        self._connection.receive(CONNECT_S)
        self.rate = 2 * ECHO_BYTES / (time.monotonic() - begin)

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
        self._num_sent += 1
        number = self._num_sent
        self._connection.send(
            request.message(number, rows), deadline - time.monotonic()
        )
        answer = self._connection.receive(deadline - time.monotonic())
        if answer.kind == REFUSAL:
            raise WireError(f"it refuses: {answer.description.get('reason')}")
        if (answer.kind, answer.number) != (ANSWER, number):
            raise WireError("it answers another request")
        if not request.accepts(answer.tensors):
            raise WireError(
                "its answer has other shapes or another dtype than asked for"
            )
        if not all(x.sum(dtype=torch.float32).isfinite() for x in answer.tensors):
            raise WireError("its answer has values that are not finite")
        return answer.tensors

    def close(self) -> "Future[None]":
        """Tell the server that no more requests come, after those under way."""
        told = self.thread.submit(self._say_goodbye)
        self.thread.shutdown(wait=False)
        return told

    def _say_goodbye(self) -> None:
        if self.rate is not None:
            with contextlib.suppress(WireError):  # it may be gone already
                self._connection.send(ServerMessage(END, 0, {}), _GOODBYE_S)


@dataclass(frozen=True)
class RankRates:
    """What a rank's attention takes, forward and backward, and its group's part of the servers.

    Attributes:
        seconds_per_tile: as in ``ServerCard``.
        seconds_per_unit: of the plans' cost model.
        share: of every server that this rank's CAD group may use.
    """

    seconds_per_tile: float
    seconds_per_unit: float
    share: float


class ServerPool:
    """The joined servers as one rank knows them.

    Args:
        registry: of the job.
        job: number of the job.
        rank: global number of this rank.
        group: global number of the first rank of this rank's CAD group.
        rates: of the ranks' attention, equal on all ranks of the group.
        pinned: whether rows are on a GPU.
    """

    def __init__(
        self,
        registry: Registry,
        job: int,
        rank: int,
        group: int,
        rates: RankRates,
        *,
        pinned: bool,
    ) -> None:
        self._registry = registry
        self._job = job
        self._rank = rank
        self._group = group
        self._rates = rates
        self._pinned = pinned
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._known = set[int]()
        """Numbers of all servers that this rank has ever connected to, or tried to."""
        self.listed: list[JoinedServer] = []
        """The servers of the last list."""

    # Requests ---------------------------------------------------------------------------------------------------------

    def ask(self, server: int, request: Request, seconds: float) -> OwedAnswer | None:
        """Ask a server to compute a call; None if it is not connected.

        Args:
            seconds: predicted, of all that the server computes by this plan.
        """
        link = self._links.get(server)
        if link is None or link.rate is None:
            return None
        rows, copied = _to_host(request.rows)

        def results() -> Sequence[Tensor] | None:
            try:
                return link.round_trip(request, rows, copied, seconds)
            except Exception as error:  # no answer ends training
                self.strike(server, first_sentence(error))
                return None

        try:
            return link.thread.submit(results)
        except RuntimeError:  # struck off meanwhile
            return None

    def strike(self, server: int, reason: str) -> None:
        """Ask a server nothing more, and tell the others."""
        link = self._take_link(server)
        if link is None:
            return
        link.close()
        logger.warning(
            f"CAD strikes off {link.card.name}: {reason}; this rank computes its tasks itself"
        )
        with contextlib.suppress(RuntimeError):  # others find out by themselves
            self._registry.strike(
                self._job, server, f"struck off by rank {self._rank}: {reason}"
            )

    # Lists ------------------------------------------------------------------------------------------------------------

    def look(self) -> list[ListedServer]:
        """Return the servers that the next plans may use, and begin to connect to new ones.

        Only the first rank of a group looks, before a step is planned; all its ranks ``take_list``. Others return [].
        """
        if self._rank != self._group:
            return []
        for card in self._registry.servers(self._job, self._known):
            self._connect(card)
        before = {server.number: server for server in self.listed}
        listed = []
        for number, link in sorted(self._links.items()):
            reason = self._registry.reason_gone(self._job, number)
            if reason is not None:
                logger.info(f"CAD uses {link.card.name} no longer: {reason}")
                self._close(number)
            elif link.rate is not None:
                joined = before.get(number) or self._joined(link.card, link.rate)
                listed.append((link.card, joined))
        return listed

    def take_list(self, listed: Sequence[ListedServer]) -> None:
        """Use the servers of a list from now on, and begin to connect to those that are new."""
        self.listed = [joined for _, joined in listed]
        numbers = {card.number for card, _ in listed}
        for card, _ in listed:
            if card.number not in self._known:
                self._connect(card)
        if self._rank != self._group:
            for number in self._links.keys() - numbers:
                self._close(number)

    def assign(self, plan: Plan) -> Plan:
        """Return a plan in which the servers of the last list take part."""
        rates = self._rates
        return assign_to_servers(plan, self.listed, rates.seconds_per_unit, rates.share)

    def _joined(self, card: ServerCard, rate: float) -> JoinedServer:
        speed = self._rates.seconds_per_tile / card.seconds_per_tile
        logger.info(
            f"CAD uses {card.name}: kernel {card.kernel}, {speed:.2f} of a rank's speed, {1e-9 * rate:.2g} GB/s"
        )
        return JoinedServer(card.number, speed, rate)

    def _connect(self, card: ServerCard) -> None:
        """Begin to connect to a server, which may not come: nobody waits for it."""
        link = _Link(card)
        self._known.add(card.number)
        self._links[card.number] = link

        def connect() -> None:
            try:
                link.connect(
                    self._registry.clone(),
                    self._job,
                    self._rank,
                    pinned=self._pinned,
                    measures=self._rank == self._group,
                )
            except Exception as error:  # no server ends training
                reason = f"it does not accept an invitation: {first_sentence(error)}"
                self.strike(card.number, reason)

        link.thread.submit(connect)

    def _close(self, number: int) -> None:
        link = self._take_link(number)
        if link is not None:
            link.close()

    def _take_link(self, number: int) -> _Link | None:
        with self._lock:
            return self._links.pop(number, None)

    def close(self) -> None:
        """Tell all servers that this rank has no more requests."""
        links = [self._take_link(number) for number in [*self._links]]
        wait([link.close() for link in links if link is not None], _GOODBYE_S)


def _to_host(
    rows: Sequence[Tensor],
) -> tuple[Sequence[Tensor], torch.cuda.Event | None]:
    """Return rows on the host, and the event after which they are there; rows on the host are returned as they are."""
    if rows[0].device.type == "cpu":
        return rows, None
    copies = [
        torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
        for x in rows
    ]
    return copies, streams.record_event(rows[0].device)
