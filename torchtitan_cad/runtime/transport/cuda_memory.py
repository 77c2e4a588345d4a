# SPDX-License-Identifier: BSD-3-Clause
"""Symmetric memory on CUDA devices that reach each other's memory, those of one host.

Every rank has one allocation of equal size, which all ranks of the host map. Its first bytes are int64 words for
signals; each word has one writer. Triton kernels pack rows into the peers' memory, set words and wait for words. Rows
are sent on a stream of their own, and the stream that uses received rows waits for them. The host never waits: a kernel
that waits too long writes a record to host memory, and later kernels of this rank do nothing.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from torchtitan_cad.runtime.packing import Message
from torchtitan_cad.runtime.transport.base import (
    NearRanks,
    Peers,
    Routes,
    gather,
    to_device,
)
from torchtitan_cad.runtime.triton import put, signals

_RENDEZVOUS_TIMEOUT_S = 60.0
_RENDEZVOUS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TMPDIR": "/tmp"}
"""environment variables while ranks map each other's memory; torch has no other switches.

No kernel here uses NVLink's multicast, it fails on some devices (H20, workstations), and its driver calls wait for
peers without a bound. Torch opens sockets in TMPDIR, which must be short and the same on all ranks of the host.
"""


class DeviceMemory:
    """Memory of one host's devices, to which peers write directly.

    For tests without a GPU, it also runs on CPU tensors with Triton's interpreter, without streams.

    Args:
        own: this rank's memory, uint8 [num_bytes], zeros.
        addresses: address of every rank's memory for this rank's device, 0 for ranks on other hosts.
        stream: stream for sending; None on CPU.
        owner: object to keep alive as long as the memory.
    """

    def __init__(
        self,
        own: Tensor,
        addresses: Sequence[int],
        stream: "torch.cuda.Stream | None",
        owner: object = None,
    ) -> None:
        self.own = own
        self._stream = stream
        self._owner = owner
        self._words = own.view(torch.int64)
        self._addresses = torch.tensor(addresses, dtype=torch.int64).to(own.device)
        self._failed = torch.zeros(1, dtype=torch.int64, device=own.device)
        self._record = torch.zeros(1, dtype=torch.int64, pin_memory=own.is_cuda)

    @staticmethod
    def reserve(num_bytes: int, device: torch.device) -> Tensor:
        """Allocate memory of zeros that peers can map, uint8 [num_bytes]."""
        # symm_mem.empty takes memory from a pool, which may give words to others while peers still signal to them.
        own = symm_mem._SymmetricMemory.empty_strided_p2p(
            (num_bytes,), (1,), torch.uint8, device
        )
        own.zero_()
        # peers write, and other streams use it, too
        torch.cuda.current_stream(device).synchronize()
        return own

    @classmethod
    def share(cls, own: Tensor, near: NearRanks) -> "DeviceMemory":
        """Map the memory that all near ranks have reserved. Collective.

        Raises:
            RuntimeError: they cannot reach each other's memory, or a rank did not come in time.
        """
        addresses = [0] * near.num_ranks
        handle = None
        addresses[near.rank] = own.data_ptr()
        if len(near.ranks) > 1:
            _check_sockets(near)
            with bounded_waits(near.group), _environment(_RENDEZVOUS):
                handle = symm_mem.rendezvous(own, near.group)
            for rank, address in zip(near.ranks, handle.buffer_ptrs, strict=True):
                addresses[rank] = address
            if addresses[near.rank] != own.data_ptr():
                raise RuntimeError(
                    "torch's symmetric memory does not begin at its tensor's address"
                )
        return cls(own, addresses, sending_stream(own.device), (own, handle))

    def prepare(self, routes: Routes) -> None:
        """Make the device tables of an exchange for ``send``, ``post`` and ``wait``; may run in another thread."""
        routes.tables = routes.tables or self._tables(routes)
        for peers in (routes.receivers, routes.senders):
            peers.tables = peers.tables or self._peer_tables(peers.ranks)

    def _peer_tables(self, ranks: list[int]) -> list[Tensor]:
        """Copy ranks to the device, as int32."""
        return [to_device(torch.tensor(ranks, dtype=torch.int32), self.own.device)]

    def _tables(self, routes: Routes) -> Any:
        tables = [
            put.split_into_blocks(route.send_counts, route.put_offsets)
            for route in routes
        ]
        return put.Blocks.of(tables, [route.rows for route in routes], self.own.device)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Return a context on the sending stream, which first waits for the current stream."""
        if self._stream is None:
            yield
            return
        module = torch.get_device_module(self.own.device)
        self._stream.wait_stream(module.current_stream(self.own.device))
        with module.stream(self._stream):
            yield

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
        put.put_rows(messages, routes.tables, begins, self._addresses, self._failed)
        self.post(routes.receivers, word, number)

    def post(self, peers: Peers, word: int, number: int) -> None:
        """Set one word in each peer's memory to ``number``, with release order, after all earlier writes."""
        signals.post(peers.tables[0], self._addresses, word, number, self._failed)

    def wait(
        self, peers: Peers, first_word: int, number: int, timeout_s: float
    ) -> list[int]:
        """Wait until the words ``first_word`` + peer of this rank's memory are at least ``number``.

        Returns the peers whose words did not arrive in time: none here, where the host does not wait, see ``overdue``.
        """
        signals.wait(
            peers.tables[0],
            self._words,
            first_word,
            number,
            timeout_s,
            self._failed,
            self._record,
        )
        return []

    def overdue(self) -> tuple[int, int] | None:
        """Return word and value of the first wait on the device that took too long, without waiting for the device."""
        record = int(self._record) - 1
        if record < 0:
            return None
        return record % (1 << signals.PEER_BITS), record >> signals.PEER_BITS


@functools.cache
def sending_stream(device: torch.device) -> "torch.cuda.Stream":
    """Return the stream on which this process sends, with a high priority, as peers wait for it."""
    return torch.cuda.Stream(device, priority=-1)


def _check_sockets(near: NearRanks) -> None:
    """Raise RuntimeError unless this host's ranks have one /tmp, for sockets; torch would wait without a bound."""
    folder = None
    with suppress(OSError):
        status = os.stat("/tmp")
        folder = (status.st_dev, status.st_ino)
    folders = gather(folder, near.group)
    if len(set(folders.values())) > 1:
        raise RuntimeError(
            "torch's symmetric memory opens sockets in /tmp, which is another folder on other ranks of the host; "
            "let its containers share /tmp"
        )


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the context."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


@contextmanager
def bounded_waits(group: dist.ProcessGroup) -> Iterator[None]:
    """Bound the waits for values of the group's key-value store, through which ranks show each other their memory."""
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    before = store.timeout
    store.set_timeout(timedelta(seconds=_RENDEZVOUS_TIMEOUT_S))
    try:
        yield
    finally:
        store.set_timeout(before)
