"""The protocol of transports, which move rows between the ranks of a CAD group.

Row counts, and where rows arrive, are known on all ranks from the plan, so no sizes travel. ``start`` returns at once;
``Pending.wait`` makes the received rows usable on the current stream (on CPU, both may block until peers come there).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Kind = Literal["queries", "keys", "results"]
_T = TypeVar("_T")


@dataclass(eq=False)
class Peers:
    """Ranks of the group, and the tables that a transport on a device makes of them, in ``prepare``."""

    ranks: list[int]
    tables: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Route:
    """Rows of one kind that one rank sends and receives, by peer. All ranks have routes of the same plan.

    Attributes:
        kind: what travels: query or key rows to servers, or what servers have computed for them.
        rows: int64 [sum(send_counts)] rows to send, grouped by destination (padded with any); None sends all in order.
        send_counts, recv_counts: rows per rank of the group.
        put_offsets: per rank, where this rank's rows begin among those it receives (they are ordered by sender).
        most_rows: no rank of the group receives more; the same number on all of them.
        buffer: which of its core attention's receive buffers the rows use, counted from 0; the same on all ranks.
        padded_to: rows of the tensors that hold sent or received rows, whatever the counts; None for the counts.
        tables: what a transport on a device makes of it, in ``prepare``.
    """

    kind: Kind
    rows: Tensor | None
    send_counts: list[int]
    recv_counts: list[int]
    put_offsets: list[int]
    most_rows: int
    buffer: int = 0
    padded_to: int | None = None
    tables: list[Tensor] = field(default_factory=list)

    @cached_property
    def num_received(self) -> int:
        """Rows of the tensor of received rows."""
        return sum(self.recv_counts) if self.padded_to is None else self.padded_to


class Routes(tuple[Route, ...]):
    """Routes whose rows travel together, as one exchange, each into a receive buffer of its own."""

    @cached_property
    def receivers(self) -> Peers:
        """Ranks to which this one sends rows."""
        return Peers(_with_rows([route.send_counts for route in self]))

    @cached_property
    def senders(self) -> Peers:
        """Ranks that send this one rows."""
        return Peers(_with_rows([route.recv_counts for route in self]))


def _with_rows(counts: Sequence[Sequence[int]]) -> list[int]:
    return [rank for rank, of_rank in enumerate(zip(*counts, strict=True)) if any(of_rank)]


def all_to_all(rank: int, num_ranks: int, each: int, buffer: int = 0) -> Routes:
    """Return the exchange in which every rank sends ``each`` rows to every other one, as ``rank`` sees it."""
    counts = [each * (peer != rank) for peer in range(num_ranks)]
    offsets = [each * (rank - (peer < rank)) for peer in range(num_ranks)]
    return Routes([Route("queries", None, counts, counts, offsets, sum(counts), buffer)])


class Pending(Protocol):
    """A started exchange. ``wait`` then ``release``, each once."""

    def wait(self) -> list[Tensor]:
        """Wait for every route's received rows, uint8 [num_received, row_bytes], by sender.

        They are valid until ``release``; for good if they fill a storage of their own.

        Raises:
            PeerError: a peer died or did not answer within the group's timeout; names the phase.
        """
        ...

    def release(self) -> None:
        """Say that the received rows are no longer needed, once the work issued so far is done."""
        return None


class Transport(Protocol):
    """Exchanges rows within one CAD group."""

    name: str
    buffer_bytes: int
    """Bytes of a receive buffer: no route brings a rank more."""
    replayable: bool
    """Tell whether CUDA graphs may capture exchanges."""

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        """Prepare for the exchanges of a plan before they are started, maybe in a planning thread.

        Raises:
            ValueError: the routes can never be served; names the key to change.
            PeerError: an exchange has failed on the device since.
        """
        ...

    def begin(self) -> int:
        """Begin a call, one core attention, and return its number, for ``start``.

        Every rank of the group must call it in the same order with respect to ``start``.
        """
        ...

    def start(self, messages: Sequence[Sequence[Tensor]], routes: Routes, phase: str, call: int) -> Pending:
        """Send, of every route, its rows of every part of its message.

        Every rank of the group must call it with the same kinds of parts in the same order. Exchanges of a call may be
        in flight, started and not released, at the same time if their routes have other buffers.

        Args:
            messages: of every route its parts ([N, ...]), packed into one row of bytes as ``RowFormat(parts)`` says.
            phase: names the exchange in errors.
        """
        ...


def gather(value: _T, group: dist.ProcessGroup) -> dict[int, _T]:
    """Return what the ranks of a gloo group, which call it together, have as ``value``, by global rank."""
    values = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return dict(zip(dist.get_process_group_ranks(group), values, strict=True))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to ``device`` without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def rows_to_device(rows: np.ndarray, device: torch.device, dtype: type = np.int64) -> Tensor:
    """Copy host indices, as ``dtype``, to ``device`` without waiting for it."""
    return to_device(torch.from_numpy(np.ascontiguousarray(rows, dtype=dtype)), device)
