# SPDX-License-Identifier: BSD-3-Clause
"""Symmetric memory on CUDA devices that reach each other's memory (one node).

Triton kernels pack rows into the peers' memory, set words and wait for words. Rows are sent on a stream of their own,
and the stream that uses received rows waits for them. The host never waits: a kernel that waits too long writes a
record to host memory, and later kernels of this rank do nothing.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from torchtitan_cad.runtime.transport.base import Peers, Route, Routes, to_device
from torchtitan_cad.runtime.transport.memory import WORD_BYTES, Epoch, Message, SymmetricMemory
from torchtitan_cad.runtime.triton import put, signals

_CALIBRATION_POLLS = 20_000


class DeviceMemory(SymmetricMemory):
    """Memory of one node's devices, to which peers write directly.

    For tests without a GPU, it also runs on CPU tensors with Triton's interpreter, without streams.

    Args:
        own: this rank's memory, uint8 [num_bytes].
        addresses: address of every rank's memory for this rank's device, 0 for ranks on other nodes.
        stream: stream for sending; None on CPU.
        polls_per_second: rate at which a waiting kernel polls a word.
        owner: object to keep alive as long as the memory.
    """

    def __init__(
        self,
        own: Tensor,
        addresses: Sequence[int],
        stream: "torch.cuda.Stream | None",
        polls_per_second: float,
        owner: object = None,
    ) -> None:
        self.own, self._stream, self._owner, self._polls_per_second = own, stream, owner, polls_per_second
        self._words = own[: own.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)
        self._far = {peer for peer, address in enumerate(addresses) if not address}
        self._addresses = torch.tensor(addresses, dtype=torch.int64).to(own.device)
        self._failed = torch.zeros(1, dtype=torch.int64, device=own.device)
        self._record = torch.zeros(1, dtype=torch.int64, pin_memory=own.is_cuda)

    @classmethod
    def allocate(cls, num_bytes: int, group: dist.ProcessGroup, device: torch.device, **_: Any) -> "DeviceMemory":
        # symm_mem.empty takes memory from a pool, which may give words to others while peers still signal to them.
        own = symm_mem._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        own.zero_()
        handle = symm_mem.rendezvous(own, group)
        addresses = handle.buffer_ptrs
        if addresses[group.rank()] != own.data_ptr():
            raise RuntimeError("torch's symmetric memory does not begin at its tensor's address")
        handle.barrier()  # no peer may write before all words are zero
        memory = cls(own, addresses, sending_stream(device), polls_per_second(device), (own, handle))
        torch.cuda.current_stream(device).synchronize()  # other streams use it, too
        return memory

    def prepare(self, routes: Routes) -> None:
        for route in routes:
            route.tables += [] if route.tables else self._tables(route)
        padded_to = 0 if routes[0].padded_to is None else len(self._addresses)
        for peers in (routes.receivers, routes.senders):
            peers.tables += [] if peers.tables else self._peer_tables(peers.ranks, padded_to)

    def _peer_tables(self, ranks: list[int], padded_to: int) -> list[Tensor]:
        """Copy ranks to the device, int32 padded with -1: all ranks, those on this node, and those on other nodes."""
        near = [rank for rank in ranks if rank not in self._far]
        groups = (ranks, near, [rank for rank in ranks if rank in self._far]) if self._far else (ranks,)
        padded = (torch.tensor(group + [-1] * (padded_to - len(group)), dtype=torch.int32) for group in groups)
        tables = [to_device(group, self.own.device) for group in padded]
        return tables if self._far else [*tables, *tables, tables[0][:0]]

    def _tables(self, route: Route) -> list[Tensor]:
        blocks = put.split_into_blocks(route.send_counts, route.put_offsets, padded_to=route.padded_to)
        return [to_device(blocks, self.own.device)]

    @contextmanager
    def sending(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        module = torch.get_device_module(self.own.device)
        self._stream.wait_stream(module.current_stream(self.own.device))
        with module.stream(self._stream):
            yield

    def send(self, messages: Sequence[Message], routes: Routes, begins: Sequence[int], word: int, epoch: Epoch) -> None:
        for message, route, begin in zip(messages, routes, begins, strict=True):
            self._put(message, route, begin, route.tables[0], self._addresses)
        self.post(routes.receivers, word, epoch)

    def _put(self, message: Message, route: Route, begin: int, blocks: Tensor, addresses: Tensor) -> None:
        tensors, row_format = message
        offsets = [offset for offset, *_ in row_format.fields]
        tensors = [tensor.contiguous() for tensor in tensors]
        put.put_rows(tensors, offsets, route.rows, blocks, addresses, begin, row_format.row_bytes, self._failed)

    def post(self, peers: Peers, word: int, epoch: Epoch) -> None:
        signals.post(peers.tables[1], self._addresses, word, *epoch, self._failed)

    def wait(self, peers: Peers, first_word: int, epoch: Epoch, timeout_s: float) -> list[int]:
        polls = int(timeout_s * self._polls_per_second) + 1
        signals.wait(peers.tables[0], self._words, first_word, *epoch, polls, self._failed, self._record)
        return []

    def overdue(self) -> tuple[int, int] | None:
        record = int(self._record) - 1
        return None if record < 0 else (record % (1 << signals.PEER_BITS), record >> signals.PEER_BITS)


@functools.cache
def sending_stream(device: torch.device) -> "torch.cuda.Stream":
    """Return the stream on which this process sends, with a high priority, as peers wait for it."""
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def polls_per_second(device: torch.device) -> float:
    """Return the rate at which a kernel polls a word in its device's memory."""
    word, counter, failed = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(3))
    record = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    nobody = torch.zeros(1, dtype=torch.int32, device=device)
    signals.wait(nobody, word, 0, 0, counter, 0, failed, record)  # compiles
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    signals.wait(nobody, word, 0, 1, counter, _CALIBRATION_POLLS, failed, record)
    events[1].record()
    events[1].synchronize()
    return 1000 * _CALIBRATION_POLLS / events[0].elapsed_time(events[1])
