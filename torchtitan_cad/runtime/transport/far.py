# SPDX-License-Identifier: BSD-3-Clause
"""Rows to and from ranks of other hosts: by send and receive of the group's own backend, NCCL or gloo.

A rank packs the rows of an exchange for all ranks of other hosts, sends every rank its part, and receives straight
into the buffers in which rows of near ranks arrive. A receive is started when its buffer is free, and a send is
complete only when its receive has started: these messages need no words that say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.transport.base import Routes
from torchtitan_cad.runtime.transport.memory import Message

_TAGS = 1 << 20
"""Messages of a route after which tags repeat."""


class Part(NamedTuple):
    """Rows, uint8 [rows, row_bytes] and contiguous, to or from the rank ``peer`` of the CAD group.

    ``tag`` tells them from others that are on their way between the same two ranks.
    """

    peer: int
    rows: Tensor
    tag: int


class Works(NamedTuple):
    """Works that complete the sent parts, and those that complete the received ones, each with a peer for errors."""

    sends: list[tuple[int, dist.Work]]
    receives: list[tuple[int, dist.Work]]


Transfer = Callable[[Sequence[Part], Sequence[Part]], Works]
"""Starts to send and to receive parts."""


def transfer_over(group: dist.ProcessGroup) -> Transfer:
    """Return the transfer over a process group, as one batch. Every rank of the group must use it in the same order."""

    def transfer(sent: Sequence[Part], received: Sequence[Part]) -> Works:
        operations = []
        for verb, parts in ((dist.irecv, received), (dist.isend, sent)):
            operations += [
                dist.P2POp(
                    verb, part.rows, group=group, tag=part.tag, group_peer=part.peer
                )
                for part in parts
            ]
        works = dist.batch_isend_irecv(operations) if operations else []
        if len(works) < len(operations):  # NCCL's one work is that of all parts
            sent = sent[:1]
            received = received[:1]
            works = works * (len(sent) + len(received))
        of_received = works[: len(received)]
        of_sent = works[len(received) :]
        return Works(_by_peer(sent, of_sent), _by_peer(received, of_received))

    return transfer


def _by_peer(
    parts: Sequence[Part], works: Sequence[dist.Work]
) -> list[tuple[int, dist.Work]]:
    return list(zip([part.peer for part in parts], works, strict=True))


class FarRanks:
    """The ranks of a CAD group on other hosts than this rank's.

    Args:
        rank: this rank's index in the CAD group.
        near: indices of the ranks of its host.
        ranks: global ranks of the CAD group, for errors.
        transfer: of ``transfer_over``.
        device: device of the rows.
    """

    def __init__(
        self,
        rank: int,
        near: Sequence[int],
        ranks: Sequence[int],
        transfer: Transfer,
        device: torch.device,
    ) -> None:
        self._own = rank
        self._near = list(near)
        self._names = list(ranks)
        self._transfer = transfer
        self._device = device
        self._far = [rank for rank in range(len(ranks)) if rank not in set(near)]
        self._messages = 0
        self._ends: list[torch.cuda.Event] = []
        """Of sends whose memory is free again: whoever packs next, on whichever stream, packs behind them."""

    def split(self, routes: Routes) -> Routes:
        """Make the near and the far part of ``routes``, once; returns the near one. May run in another thread."""
        if routes.near is None:
            routes.far = Routes(
                [route.among(self._far, self._device) for route in routes]
            )
            routes.near = Routes(
                [route.among(self._near, self._device) for route in routes]
            )
        return routes.near

    def start(
        self,
        messages: Sequence[Message],
        routes: Routes,
        arrivals: Sequence[Tensor],
        phase: str,
    ) -> "FarRows":
        """Send and receive the far part of an exchange; the current stream must have made the buffer free.

        Args:
            arrivals: per route, where the rows of all senders arrive in this rank's memory, uint8 [rows, row_bytes].
        """
        assert routes.far is not None, "the exchange was not prepared"
        while self._ends:
            streams.wait_event(self._device, self._ends.pop())
        sent = list[Part]()
        received = list[Part]()
        packed = list[Tensor]()
        for (tensors, row_format), route, far, arrival in zip(
            messages, routes, routes.far, arrivals, strict=True
        ):
            self._messages = tag = (self._messages + 1) % _TAGS
            if any(far.send_counts):
                packed.append(row_format.pack(tensors, far.rows))
                sent += _parts(packed[-1], far.send_counts, tag)
            arriving = _parts(arrival, route.recv_counts, tag)
            received += [part for part in arriving if far.recv_counts[part.peer]]
        own = f"core attention exchange '{phase}' of rank {self._names[self._own]}"
        try:
            works = self._transfer(sent, received)
        except RuntimeError as error:
            peers = sorted({part.peer for part in (*sent, *received)})
            names = ", ".join(f"rank {self._names[peer]}" for peer in peers)
            raise PeerError(f"{own} with {names} failed: {error}") from error
        return FarRows(works, packed, own, self._names, self._device, self._ends)


def _parts(rows: Tensor, counts: Sequence[int], tag: int) -> list[Part]:
    """Cut rows into those of every peer that has some, given counts by peer."""
    ends = accumulate(counts, initial=0)
    return [
        Part(peer, rows[begin:end], tag)
        for peer, (begin, end) in enumerate(pairwise(ends))
        if begin < end
    ]


@dataclass
class FarRows:
    """Rows on their way between hosts.

    Attributes:
        works: what completes them.
        packed: what is being sent.
        what: name of the exchange.
        names: global ranks of the group.
        device: device of the rows.
        ends: gets an event behind which what was packed may be overwritten.
    """

    works: Works
    packed: list[Tensor]
    what: str
    names: Sequence[int]
    device: torch.device
    ends: list[torch.cuda.Event]

    def wait_received(self, timeout_s: float) -> None:
        """Wait, on the current stream, for the rows of far senders.

        Raises:
            PeerError: on CPU, naming a peer whose rows did not arrive. With NCCL, its watchdog ends the process.
        """
        self._wait(self.works.receives, "has not sent its rows", timeout_s)

    def wait_sent(self, timeout_s: float) -> None:
        """Wait, on the current stream, until what was packed may be overwritten. Raises as ``wait_received``.

        What was packed returns to the memory of the sending stream, from which exchanges of other streams pack, too.
        """
        self._wait(self.works.sends, "has not received its rows", timeout_s)
        if (end := streams.record_event(self.device)) is not None:
            self.ends.append(end)
        self.packed.clear()

    def _wait(
        self, works: Sequence[tuple[int, dist.Work]], failure: str, timeout_s: float
    ) -> None:
        for peer, work in works:
            try:
                if self.device.type == "cpu":
                    work.wait(timedelta(seconds=timeout_s))
                else:  # a stream waits; with a timeout the host would
                    work.wait()
            except RuntimeError as error:
                raise PeerError(
                    f"{self.what} failed: rank {self.names[peer]} {failure}: {error}"
                ) from error
