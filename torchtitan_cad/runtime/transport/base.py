# SPDX-License-Identifier: BSD-3-Clause
"""The protocol of transports, which move rows between the ranks of a CAD group.

All ranks know row counts and positions from the plan, so no sizes travel. ``start`` returns at once. ``Pending.wait``
makes the received rows usable on the current stream. On CPU, both may block until peers make the same call.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.planning.intervals import concat_ranges

Kind = Literal["queries", "keys", "results"]
WORD_BYTES = 8
"""bytes of a word of symmetric memory, which holds a signal"""
_T = TypeVar("_T")


@dataclass(eq=False)
class Peers:
    """Ranks of the group, and the device tables that a transport makes of them in ``prepare``."""

    ranks: list[int]
    tables: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Route:
    """Rows of one kind that one rank sends and receives, by peer. All ranks have routes of the same plan.

    Attributes:
        kind: query or key rows to servers, or results for them.
        rows: int64 [sum(send_counts)] rows to send, grouped by destination; None sends all in order.
        send_counts, recv_counts: rows per rank of the group.
        put_offsets: per peer, where this rank's rows begin among all that the peer receives, ordered by sender.
        most_rows: most rows that any rank of the group receives; equal on all ranks.
        buffer: index, from 0, of the receive buffer of the call in which an exchange begins, whose first route this is;
            equal on all ranks.
    """

    kind: Kind
    rows: Tensor | None
    send_counts: list[int]
    recv_counts: list[int]
    put_offsets: list[int]
    most_rows: int
    buffer: int = 0

    @cached_property
    def num_received(self) -> int:
        """Rows of the tensor of received rows."""
        return sum(self.recv_counts)

    def among(self, peers: Collection[int], device: torch.device) -> "Route":
        """Return the part of this route that goes between this rank and ``peers``; its rows arrive where they did.

        Args:
            device: device of the tensors whose rows are sent.
        """
        counts = np.array(self.send_counts)
        is_peer = np.isin(np.arange(len(counts)), list(peers))
        rows = self.rows
        if counts[~is_peer].any():
            first = np.cumsum(counts) - counts
            index = rows_to_device(
                concat_ranges(first[is_peer], counts[is_peer]), device
            )
            rows = index if self.rows is None else self.rows[index]
        send_counts, recv_counts = (
            np.where(is_peer, x, 0).tolist() for x in (counts, self.recv_counts)
        )
        return replace(
            self, rows=rows, send_counts=send_counts, recv_counts=recv_counts
        )


class Routes(tuple[Route, ...]):
    """Routes whose rows travel together, as one exchange, and arrive one route behind the other.

    Attributes:
        tables: device tables that a transport makes of them in ``prepare``, for one launch.
        near, far: parts of them that go between this rank and ranks of its host, and between it and those of other
            hosts, which a transport that treats them differently makes in ``prepare``.
    """

    tables: Any = None
    near: "Routes | None" = None
    far: "Routes | None" = None

    @cached_property
    def receivers(self) -> Peers:
        """Ranks to which this one sends rows."""
        return Peers(_with_rows([route.send_counts for route in self]))

    @cached_property
    def senders(self) -> Peers:
        """Ranks that send this one rows."""
        return Peers(_with_rows([route.recv_counts for route in self]))


def _with_rows(counts: Sequence[Sequence[int]]) -> list[int]:
    return [
        rank for rank, of_rank in enumerate(zip(*counts, strict=True)) if any(of_rank)
    ]


def all_to_all(rank: int, sends: np.ndarray, per_peer: int, buffer: int = 0) -> Routes:
    """Return ``rank``'s routes of the exchange in which a rank sends ``per_peer`` rows to all that it ``sends`` to.

    ``sends`` is bool [ranks, ranks], sender first.
    """
    rows = per_peer * sends.astype(np.int64)
    route = Route(
        kind="queries",
        rows=None,
        send_counts=rows[rank].tolist(),
        recv_counts=rows[:, rank].tolist(),
        put_offsets=rows[:rank].sum(axis=0).tolist(),
        most_rows=int(rows.sum(axis=0).max()),
        buffer=buffer,
    )
    return Routes([route])


@dataclass(frozen=True)
class NearRanks:
    """The ranks of a CAD group that share memory, those of one host.

    Attributes:
        group: their process group, of gloo.
        ranks: their indices in the CAD group, in the order of the process group.
        num_ranks: ranks of the CAD group.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    num_ranks: int

    @property
    def rank(self) -> int:
        """This rank's index in the CAD group."""
        return self.ranks[self.group.rank()]


class Pending(Protocol):
    """A started exchange: call ``wait``, then ``release``, each once."""

    def wait(self) -> list[Tensor]:
        """Wait for every route's received rows, uint8 [num_received, row_bytes], by sender.

        They are valid until ``release``, or as long as the tensor if they fill a storage of their own.

        Raises:
            PeerError: a peer died or did not answer within the group's timeout; names the phase.
        """
        ...

    def release(self) -> None:
        """Allow the receive buffers to be used again after the work issued so far."""
        return None


class Transport(Protocol):
    """Moves rows between the ranks of one CAD group; all of them start the same exchanges in the same order."""

    name: str
    description: str
    """How rows travel, for the log."""
    buffer_bytes: int
    """Bytes of a receive buffer; the exchanges of a call use ``BUFFERS_PER_CALL`` of them."""

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        """Prepare the exchanges of a plan before their start; may run in a planning thread.

        Raises:
            ValueError: the transport does not support the routes; names the key to change.
            PeerError: an exchange has failed on the device.
        """
        ...

    def begin(self) -> int:
        """Begin a call, one core attention, and return its number, for ``start``.

        Every rank of the group must call it in the same order with respect to ``start``.
        """
        ...

    def start(
        self,
        messages: Sequence[Sequence[Tensor]],
        routes: Routes,
        phase: str,
        call: int,
    ) -> Pending:
        """Start the exchange of the rows of every route.

        Every rank of the group must call it with the same formats of messages in the same order. Exchanges of a call
        may be in flight (started and not released) at the same time if their routes use different buffers.

        Args:
            messages: per route, the tensors [N, ...] of its message, packed into rows by ``RowFormat(tensors)``.
            phase: name of the exchange in errors.
        """
        ...


def gather(value: _T, group: dist.ProcessGroup | None) -> dict[int, _T]:
    """Return the ``value`` of every rank of a group (None: all), by global rank; they must call it together."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return dict(zip(dist.get_process_group_ranks(group), values, strict=True))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device`` without waiting for it."""
    return (
        tensor
        if device.type == "cpu"
        else tensor.pin_memory().to(device, non_blocking=True)
    )


def rows_to_device(
    rows: np.ndarray, device: torch.device, dtype: type = np.int64
) -> Tensor:
    """Copy host indices, as ``dtype``, to ``device`` without waiting for it."""
    return to_device(torch.from_numpy(np.ascontiguousarray(rows, dtype=dtype)), device)
