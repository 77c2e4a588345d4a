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
from torchtitan_cad.runtime.packing import Message
from torchtitan_cad.runtime.transport.base import Routes

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
        operations = [_operation(dist.irecv, part, group) for part in received]
        operations += [_operation(dist.isend, part, group) for part in sent]
        works = dist.batch_isend_irecv(operations) if operations else []
        if len(works) < len(operations):  # NCCL's one work is that of all parts
            sent = sent[:1]
            received = received[:1]
            works *= len(sent) + len(received)
        peers = [part.peer for part in (*received, *sent)]
        by_peer = list(zip(peers, works, strict=True))
        return Works(by_peer[len(received) :], by_peer[: len(received)])

    return transfer


def _operation(
    verb: Callable[..., object], part: Part, group: dist.ProcessGroup
) -> dist.P2POp:
    return dist.P2POp(verb, part.rows, group=group, tag=part.tag, group_peer=part.peer)


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
        self.ranks = ranks
        self.device = device
        self.ends: list[torch.cuda.Event] = []
        """Of sends whose memory is free again: whoever packs next, on whichever stream, packs behind them."""
        self._rank = rank
        self._near = near
        self._far = [peer for peer in range(len(ranks)) if peer not in near]
        self._transfer = transfer
        self._messages = 0

    def split(self, routes: Routes) -> Routes:
        """Make the near and the far part of ``routes``, once; returns the near one. May run in another thread."""
        if routes.near is None:
            routes.far = self._part(routes, self._far)
            routes.near = self._part(routes, self._near)
        return routes.near

    def _part(self, routes: Routes, peers: Sequence[int]) -> Routes:
        return Routes([route.among(peers, self.device) for route in routes])

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
        while self.ends:
            streams.wait_event(self.device, self.ends.pop())
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
        what = f"core attention exchange '{phase}' of rank {self.ranks[self._rank]}"
        try:
            works = self._transfer(sent, received)
        except RuntimeError as error:
            peers = sorted({self.ranks[part.peer] for part in (*sent, *received)})
            raise PeerError(f"{what} with ranks {peers} failed: {error}") from error
        return FarRows(works, packed, what, self)


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
        between: whose rows they are.
    """

    works: Works
    packed: list[Tensor]
    what: str
    between: FarRanks

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
        end = streams.record_event(self.between.device)
        if end is not None:
            self.between.ends.append(end)
        self.packed.clear()

    def _wait(
        self, works: Sequence[tuple[int, dist.Work]], failure: str, timeout_s: float
    ) -> None:
        for peer, work in works:
            try:
                if self.between.device.type == "cpu":
                    work.wait(timedelta(seconds=timeout_s))
                else:  # a stream waits; with a timeout the host would
                    work.wait()
            except RuntimeError as error:
                rank = self.between.ranks[peer]
                raise PeerError(
                    f"{self.what} failed: rank {rank} {failure}: {error}"
                ) from error
