# SPDX-License-Identifier: BSD-3-Clause
"""The rank's side of joined servers: which there are, and requests to them, none of which is waited for without bound.

A server that is late, gone or wrong is struck off by the rank that sees it, at once: the rank computes what it has
asked for itself, asks it nothing more, and says so in the job's store. Other ranks learn of it from the next list.
The first rank of every CAD group makes that group's lists, one for each step that is planned.
"""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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


class OwedAnswer:
    """An answer that a server owes."""

    def __init__(
        self,
        pool: "ServerPool",
        server: int,
        request: Request,
        deadline: float,
        answer: "Future[Sequence[Tensor]]",
    ) -> None:
        self._pool = pool
        self._server = server
        self._request = request
        self._deadline = deadline
        self._answer = answer

    def wait(self) -> Sequence[Tensor] | None:
        """Return the results, on the device of the rows; None if they did not come, as the server is struck off."""
        try:
            seconds = max(0.0, self._deadline - time.monotonic())
            results = self._answer.result(seconds)
        except TimeoutError:
            self._pool.strike(self._server, "it is late")
            return None
        except Exception as error:  # no answer ends training
            self._pool.strike(self._server, first_sentence(error))
            return None
        device = self._request.rows[0].device
        return [x.to(device, non_blocking=True) for x in results]


class _Link:
    """A connection to one server, and the thread that sends requests and receives answers, one after the other."""

    def __init__(self, connection: Connection, card: ServerCard) -> None:
        self.card = card
        self._connection = connection
        self._jobs = queue.SimpleQueue[Callable[[], None] | None]()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._expected_s = 0.0
        """Predicted seconds of all requests under way."""
        name = f"cad-server-{card.number}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, request: Request, seconds: float
    ) -> tuple[float, "Future[Sequence[Tensor]]"]:
        """Send a request when those before it are answered; returns its deadline and its answer."""
        expected_s = self._expect(seconds)
        deadline = time.monotonic() + max(LEAST_WAIT_S, WAIT_FACTOR * expected_s)
        rows, copied = _to_host(request.rows)
        answer: Future[Sequence[Tensor]] = Future()

        def exchange() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                answer.set_result(self._round_trip(request, rows, deadline))
            except Exception as error:  # the rank that waits decides
                answer.set_exception(error)
            finally:
                self._expect(-seconds)

        self._jobs.put(exchange)
        return deadline, answer

    def _expect(self, seconds: float) -> float:
        """Add to the predicted seconds of requests under way, and return them; two threads do."""
        with self._lock:
            self._expected_s += seconds
            return self._expected_s

    def _round_trip(
        self, request: Request, rows: Sequence[Tensor], deadline: float
    ) -> Sequence[Tensor]:
        number = next(self._numbers)
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

    def measure(self) -> float:
        """Return the bytes per second there and back, before any request. Raises WireError without an answer."""
        payload = torch.zeros(ECHO_BYTES, dtype=torch.uint8)
        begin = time.monotonic()
        self._connection.send(ServerMessage(ECHO, 0, {}, [payload]), CONNECT_S)
        self._connection.receive(CONNECT_S)
        return 2 * ECHO_BYTES / (time.monotonic() - begin)

    def close(self) -> None:
        """Tell the server that no more requests come, after those under way."""
        self._jobs.put(None)

    def join(self) -> None:
        """Wait until the server has been told."""
        self._thread.join(_GOODBYE_S)

    def _run(self) -> None:
        for job in iter(self._jobs.get, None):
            job()
            del job  # it holds rows
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
        self._cards: dict[int, ServerCard] = {}
        self._version = 0
        self.listed: list[JoinedServer] = []
        """The servers of the last list."""

    # Requests ---------------------------------------------------------------------------------------------------------

    def ask(self, server: int, request: Request, seconds: float) -> OwedAnswer | None:
        """Ask a server to compute a call; None if it is not connected.

        Args:
            seconds: predicted, of all that the server computes by this plan.
        """
        link = self._links.get(server)
        if link is None:
            return None
        deadline, answer = link.submit(request, seconds)
        return OwedAnswer(self, server, request, deadline, answer)

    def strike(self, server: int, reason: str) -> None:
        """Ask a server nothing more, and tell the others."""
        with self._lock:
            link = self._links.pop(server, None)
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

    def make_list(self) -> int:
        """Publish which servers the next plans may use, if that has changed; returns the number of the list.

        Only the first rank of a group makes lists, before a step is planned; all ranks ``take_list`` with the result.
        """
        if self._rank != self._group:
            return 0
        remaining = [
            server for server in self.listed if not self._is_gone(server.number)
        ]
        for card in self._registry.servers(self._job, self._cards):
            self._cards[card.number] = card
            if self._is_gone(card.number) or not self._connect(card):
                continue
            rate = self._measure(card)
            if rate is None:
                continue
            speed = self._rates.seconds_per_tile / card.seconds_per_tile
            remaining.append(JoinedServer(card.number, speed, rate))
            logger.info(
                f"CAD uses {card.name}: kernel {card.kernel}, {speed:.2f} of a rank's speed, "
                f"{1e-9 * rate:.2g} GB/s"
            )
        if remaining != self.listed:
            self._version += 1
            self.listed = remaining
            self._registry.put_list(self._job, self._group, self._version, remaining)
        return self._version

    def take_list(self, version: int) -> None:
        """Use the servers of a list from now on, and connect to those that are new, as far as they answer."""
        if version != self._version:
            self.listed = self._registry.get_list(self._job, self._group, version)
            self._version = version
        listed = {server.number for server in self.listed}
        for number in listed - self._cards.keys():
            card = self._registry.card(self._job, number)
            self._cards[number] = card
            self._connect(card)
        for number in self._links.keys() - listed:
            with self._lock:
                link = self._links.pop(number, None)
            if link is not None:
                link.close()

    def assign(self, plan: Plan) -> Plan:
        """Return a plan in which the servers of the last list take part."""
        rates = self._rates
        return assign_to_servers(plan, self.listed, rates.seconds_per_unit, rates.share)

    def _is_gone(self, number: int) -> bool:
        reason = self._registry.reason_gone(self._job, number)
        if reason is not None and number in self._cards:
            logger.info(f"CAD uses {self._cards[number].name} no longer: {reason}")
        return reason is not None

    def _connect(self, card: ServerCard) -> bool:
        try:
            connection = Connection(
                self._registry.invite(self._job, card.number, self._rank),
                self._job,
                is_server=False,
                timeout_s=CONNECT_S,
                pinned=self._pinned,
            )
        except WireError as error:
            self._refuse(card, f"it does not accept an invitation: {error}")
            return False
        self._links[card.number] = _Link(connection, card)
        return True

    def _measure(self, card: ServerCard) -> float | None:
        try:
            return self._links[card.number].measure()
        except WireError as error:
            self.strike(card.number, f"it does not echo: {error}")
            return None

    def _refuse(self, card: ServerCard, reason: str) -> None:
        logger.warning(f"CAD does not use {card.name}: {reason}")
        self._registry.strike(self._job, card.number, reason)

    def close(self) -> None:
        """Tell all servers that this rank has no more requests."""
        links = [*self._links.values()]
        self._links.clear()
        for link in links:
            link.close()
        for link in links:
            link.join()


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
