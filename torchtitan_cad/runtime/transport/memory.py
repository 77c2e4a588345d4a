"""Symmetric memory of one CAD group: what the one-sided transport needs of a device, and its implementation on CPU.

One allocation of equal size on every rank, mapped by all ranks of the group. Its first bytes are int64 words that
signal; a word has one writer. Devices differ in how rows and words get into a peer's memory, and how one waits.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from torchtitan_cad.runtime import symm_cpu
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Peers, Routes

WORD_BYTES = 8


@dataclass(frozen=True, eq=False)
class Epoch:
    """Value of a word: ``count``, plus what ``counter`` (int64 [1]) holds when a device comes to use it."""

    count: int
    counter: Tensor | None = None


@dataclass(frozen=True)
class Overdue:
    """A wait that took too long, found later by a device: the rank waited for, and the word and value."""

    peer: int
    word: int
    value: int


Message = tuple[Sequence[Tensor], RowFormat]
"""Parts that travel together, and how they lie in a row."""


class SymmetricMemory(Protocol):
    """One symmetric allocation. Constructing one is collective."""

    def prepare(self, routes: Routes) -> None:
        """Make what ``send``, ``post`` and ``wait`` need of an exchange on the device. May run in another thread."""
        ...

    def sending(self) -> AbstractContextManager[object]:
        """Make the stream of an exchange's ``wait`` and ``send`` current, after the current one's work."""
        ...

    def send(self, messages: Sequence[Message], routes: Routes, begins: Sequence[int], word: int, epoch: Epoch) -> None:
        """Pack each route's rows, write them into each receiver's memory from byte ``begin`` + put offset, and post.

        ``word`` and ``epoch`` are those of ``post``, for each receiver once its rows are there.
        """
        ...

    def mark(self) -> "torch.cuda.Event | None":
        """Mark all work issued so far on the current stream; None: it is done."""
        ...

    def join(self, mark: "torch.cuda.Event | None") -> None:
        """Let what the current stream does next come after the work before the mark."""
        ...

    def post(self, peers: Peers, word: int, epoch: Epoch) -> None:
        """Set one word in each peer's memory; who sees it sees all that was written before."""
        ...

    def wait(self, peers: Peers, first_word: int, epoch: Epoch, timeout_s: float) -> list[int]:
        """Wait until the words ``first_word`` + peer of this rank's memory are at least ``epoch``.

        Returns the peers whose words are not in time; a device returns at once, see ``overdue``.
        """
        ...

    def overdue(self) -> Overdue | None:
        """Return the first wait on the device that has taken too long. Does not wait for the device."""
        ...

    def view(self, begin: int, num_bytes: int) -> Tensor:
        """Return the bytes of this rank's memory, uint8 [num_bytes]."""
        ...


class CpuMemory:
    """Memory shared by the processes of one host; the host copies and waits.

    Args:
        buffers: every rank's memory, uint8 [num_bytes].
        rank: this rank's index.
        owner: kept as long as the buffers are in use.
    """

    def __init__(self, buffers: Sequence[Tensor], rank: int, owner: object = None) -> None:
        self._buffers, self._own, self._owner = buffers, buffers[rank], owner
        self._addresses = [buffer.data_ptr() for buffer in buffers]
        self._first = self._addresses[rank]
        self._ops = torch.ops.torchtitan_cad_symm_cpu

    @classmethod
    def allocate(cls, num_bytes: int, group: dist.ProcessGroup) -> "CpuMemory":
        symm_cpu.load()
        own = symm_mem.empty(num_bytes, dtype=torch.uint8, device=torch.device("cpu"))
        handle = symm_mem.rendezvous(own, group)
        buffers = [handle.get_buffer(peer, (num_bytes,), torch.uint8) for peer in range(group.size())]
        return cls(buffers, group.rank(), (own, handle))

    def prepare(self, routes: Routes) -> None:
        pass

    def sending(self) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, messages: Sequence[Message], routes: Routes, begins: Sequence[int], word: int, epoch: Epoch) -> None:
        for (parts, row_format), route, begin in zip(messages, routes, begins, strict=True):
            row_bytes, first = row_format.row_bytes, 0
            for peer, count in enumerate(route.send_counts):
                if not count:
                    continue
                last, at = first + count, begin + route.put_offsets[peer] * row_bytes
                arrival = self._buffers[peer][at : at + count * row_bytes].view(count, row_bytes)
                if route.rows is None:
                    row_format.pack([part[first:last] for part in parts], out=arrival)
                else:
                    row_format.pack(parts, route.rows[first:last], out=arrival)
                first = last
        self.post(routes.receivers, word, epoch)

    def mark(self) -> None:
        return None

    def join(self, mark: "torch.cuda.Event | None") -> None:
        pass

    def post(self, peers: Peers, word: int, epoch: Epoch) -> None:
        self._ops.post([self._addresses[peer] + word * WORD_BYTES for peer in peers.ranks], epoch.count)

    def wait(self, peers: Peers, first_word: int, epoch: Epoch, timeout_s: float) -> list[int]:
        addresses = [self._first + (first_word + peer) * WORD_BYTES for peer in peers.ranks]
        missing = self._ops.wait(addresses, epoch.count, max(1, int(timeout_s * 1000)))
        return [peers.ranks[index] for index in missing]

    def overdue(self) -> Overdue | None:
        return None

    def view(self, begin: int, num_bytes: int) -> Tensor:
        return self._own[begin : begin + num_bytes]
