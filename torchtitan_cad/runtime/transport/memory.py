# SPDX-License-Identifier: BSD-3-Clause
"""Symmetric memory of one CAD group: the interface for the one-sided transport, and its implementation on CPU.

Every rank has one allocation of equal size, which all ranks of the group map. Its first bytes are int64 words for
signals; each word has one writer. Implementations differ in how they write to a peer's memory and how they wait.
"""

import os
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from io import FileIO
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.runtime.packing import Message
from torchtitan_cad.runtime.transport.base import Peers, Routes, gather

WORD_BYTES = 8
_FILE = "torchtitan_cad"
_YIELDS = 64
"""polls of words before a CPU rank pauses between polls; between the first polls it only yields"""
_PAUSE_S = 5e-5
_FENCE = threading.Lock()


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


class SymmetricMemory(Protocol):
    """One symmetric allocation of the ranks of a host. The default methods are for hosts without streams.

    Attributes:
        own: this rank's memory, uint8 [num_bytes].
    """

    own: Tensor

    def prepare(self, routes: Routes) -> None:
        """Make the device tables of an exchange for ``send``, ``post`` and ``wait``; may run in another thread."""

    def sending(self) -> AbstractContextManager[object]:
        """Return a context on the sending stream, which first waits for the current stream."""
        return nullcontext()

    def send(
        self,
        messages: Sequence[Message],
        routes: Routes,
        begins: Sequence[int],
        word: int,
        number: int,
    ) -> None:
        """Write each route's packed rows to each receiver's memory, from byte ``begin`` + put offset, and then post.

        ``word`` and ``number`` are arguments of ``post``.
        """
        ...

    def post(self, peers: Peers, word: int, number: int) -> None:
        """Set one word in each peer's memory to ``number``, with release order, after all earlier writes."""
        ...

    def wait(
        self, peers: Peers, first_word: int, number: int, timeout_s: float
    ) -> list[int]:
        """Wait until the words ``first_word`` + peer of this rank's memory are at least ``number``.

        Returns the peers whose words did not arrive in time; a device returns at once, see ``overdue``.
        """
        ...

    def overdue(self) -> tuple[int, int] | None:
        """Return word and value of the first wait on the device that took too long, without waiting for the device."""
        return None


class CpuMemory(SymmetricMemory):
    """Memory shared by the processes of one Linux host, for tests. The host copies and waits.

    Args:
        buffers: every near rank's memory, uint8 [num_bytes], by its index in the CAD group.
        rank: this rank's index.
    """

    def __init__(self, buffers: Mapping[int, Tensor], rank: int) -> None:
        self.buffers = buffers
        self.own = buffers[rank]
        self._words = {
            peer: buffer[: len(buffer) // WORD_BYTES * WORD_BYTES]
            .view(torch.int64)
            .numpy()
            for peer, buffer in buffers.items()
        }
        self._rank = rank

    @staticmethod
    def reserve(num_bytes: int) -> FileIO:
        """Make an anonymous file, which the system frees when the last process that maps it has ended."""
        file = FileIO(os.memfd_create(f"{_FILE}-{uuid.uuid4().hex}"), "r+")
        file.truncate(num_bytes)
        return file

    @classmethod
    def share(cls, file: FileIO, near: NearRanks) -> "CpuMemory":
        """Map the files of all near ranks. Collective; no rank may close its file before all have returned.

        Raises:
            RuntimeError: the file of a peer is out of this process's sight.
        """
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        num_bytes = os.fstat(file.fileno()).st_size
        named_paths = gather((os.readlink(path), path), near.group)
        for peer, (peers_name, peers_path) in named_paths.items():
            # In a container of its own, a peer of the same number may be another process: this one, say.
            if not os.path.exists(peers_path) or os.readlink(peers_path) != peers_name:
                raise RuntimeError(
                    f"the memory of rank {peer} is not at {peers_path}: start all ranks in one container, in which "
                    "processes see each other"
                )
        paths = [peers_path for _, peers_path in named_paths.values()]
        mapped = [
            torch.from_file(peers_path, True, num_bytes, dtype=torch.uint8)
            for peers_path in paths
        ]
        return cls(dict(zip(near.ranks, mapped, strict=True)), near.rank)

    def send(
        self,
        messages: Sequence[Message],
        routes: Routes,
        begins: Sequence[int],
        word: int,
        number: int,
    ) -> None:
        for (tensors, row_format), route, begin in zip(
            messages, routes, begins, strict=True
        ):
            row_bytes = row_format.row_bytes
            first = 0
            for peer, count in enumerate(route.send_counts):
                if not count:
                    continue
                last = first + count
                at = begin + route.put_offsets[peer] * row_bytes
                arrival = self.buffers[peer][at : at + count * row_bytes].view(
                    count, row_bytes
                )
                if route.rows is None:
                    row_format.pack(
                        [tensor[first:last] for tensor in tensors], out=arrival
                    )
                else:
                    row_format.pack(tensors, route.rows[first:last], out=arrival)
                first = last
        self.post(routes.receivers, word, number)

    def post(self, peers: Peers, word: int, number: int) -> None:
        _fence()
        for peer in peers.ranks:
            self._words[peer][word] = number

    def wait(
        self, peers: Peers, first_word: int, number: int, timeout_s: float
    ) -> list[int]:
        words = self._words[self._rank]
        late = peers.ranks
        looks = 0
        deadline = time.monotonic() + timeout_s
        while late := [peer for peer in late if words[first_word + peer] < number]:
            if time.monotonic() > deadline:
                break
            time.sleep(0 if looks < _YIELDS else _PAUSE_S)
            looks += 1
        _fence()
        return late


def _fence() -> None:
    """Order all memory accesses before this call before all later ones. (x86 processors do not need it.)"""
    for _ in range(2):
        with _FENCE:
            pass
