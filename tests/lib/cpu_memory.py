# SPDX-License-Identifier: BSD-3-Clause
"""Symmetric memory of CPU ranks, in place of that of devices: the host copies and waits."""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from io import FileIO

import torch
from torch import Tensor

from torchtitan_cad.runtime.packing import Message, RowFormat
from torchtitan_cad.runtime.transport import build
from torchtitan_cad.runtime.transport.base import NearRanks, gather

YIELDS = 64
"""polls of words before a rank pauses between polls; between the first polls it only yields"""
PAUSE_S = 5e-5
FENCE = threading.Lock()


def install():
    """Let ``cad.transport = "symm_mem"`` in this process be for CPU ranks of one Linux machine."""
    build._check = lambda name, device: None
    build._memory_class = lambda: CpuMemory


class CpuMemory:
    """Memory with the methods of ``DeviceMemory``, which processes or threads share.

    Args:
        buffers: every near rank's memory, uint8 [num_bytes], by its index in the CAD group.
        rank: this rank's index.
        owner: object to keep alive as long as the memory.
    """

    def __init__(self, buffers: Mapping[int, Tensor], rank, owner=None):
        self.buffers = buffers
        self.own = buffers[rank]
        self._owner = owner
        self._rank = rank
        self._words = {
            peer: buffer.view(torch.int64).numpy() for peer, buffer in buffers.items()
        }

    @staticmethod
    def reserve(num_bytes, device) -> FileIO:
        """An anonymous file, which the system frees when the last process that maps it has ended."""
        file = FileIO(os.memfd_create("torchtitan_cad"), "r+")
        file.truncate(num_bytes)
        return file

    @classmethod
    def share(cls, file: FileIO, near: NearRanks) -> "CpuMemory":
        """Map the files of all near ranks, which must keep theirs open until all have returned."""
        num_bytes = os.fstat(file.fileno()).st_size
        paths = gather(f"/proc/{os.getpid()}/fd/{file.fileno()}", near.group)
        mapped = [
            torch.from_file(path, True, num_bytes, dtype=torch.uint8)
            for path in paths.values()
        ]
        return cls(dict(zip(near.ranks, mapped, strict=True)), near.rank, file)

    def prepare(self, routes):
        pass

    def sending(self):
        return nullcontext()

    def send(self, messages, routes, begins, word, number):
        for tensors, row_format, rows, arrival in arrivals(
            messages, routes, begins, self.buffers
        ):
            arrival.copy_(row_format.pack([tensor[rows] for tensor in tensors]))
        self.post(routes.receivers, word, number)

    def post(self, peers, word, number):
        order_accesses()
        for peer in peers.ranks:
            self._words[peer][word] = number

    def wait(self, peers, first_word, number, timeout_s):
        words = self._words[self._rank]
        late = peers.ranks
        looks = 0
        deadline = time.monotonic() + timeout_s
        while late := [peer for peer in late if words[first_word + peer] < number]:
            if time.monotonic() > deadline:
                break
            time.sleep(0 if looks < YIELDS else PAUSE_S)
            looks += 1
        order_accesses()
        return late

    def overdue(self):
        return None


def arrivals(
    messages: Sequence[Message],
    routes,
    begins: Sequence[int],
    buffers: Mapping[int, Tensor] | Sequence[Tensor],
) -> Iterator[tuple[Sequence[Tensor], RowFormat, Tensor | slice, Tensor]]:
    """For every peer that is sent rows: the message, its row format, which rows, and where in ``buffers`` they go."""
    for (tensors, row_format), route, begin in zip(
        messages, routes, begins, strict=True
    ):
        row_bytes = row_format.row_bytes
        last = 0
        for peer, count in enumerate(route.send_counts):
            first = last
            last += count
            if count:
                at = begin + route.put_offsets[peer] * row_bytes
                arrival = buffers[peer][at : at + count * row_bytes]
                sent = slice(first, last)
                rows = sent if route.rows is None else route.rows[sent]
                yield tensors, row_format, rows, arrival.view(count, row_bytes)


def order_accesses():
    """Order all memory accesses before this call before all later ones. (x86 processors do not need it.)"""
    for _ in range(2):
        with FENCE:
            pass
