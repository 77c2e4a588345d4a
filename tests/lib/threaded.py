# SPDX-License-Identifier: BSD-3-Clause
"""All ranks of a CAD group as threads of one process: real engines and tables, memory and messages of threads."""

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.lib.cpu_memory import CpuMemory
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.far import FarRanks, Part, Works
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport

T = TypeVar("T")
TIMEOUT_S = 60
MOST_DELAY_S = 0.002
BUFFER_BYTES = 2**22

needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="symmetric memory of CPU ranks needs Linux"
)


class ThreadTransport(SymmetricTransport):
    """The transport between threads, each of which starts exchanges at its own random pace."""

    @cached_property
    def sent(self) -> Counter[str]:
        """Bytes by direction, the first word of a phase."""
        return Counter()

    def start(self, messages, routes, phase, call):
        time.sleep(random.random() * MOST_DELAY_S)
        for parts, route in zip(messages, routes, strict=True):
            num_bytes = sum(route.send_counts) * RowFormat(parts).row_bytes
            self.sent[phase.split()[0]] += num_bytes
        return super().start(messages, routes, phase, call)

    def _free(self, buffers):
        super()._free(buffers)
        begin, end = (
            self._first_byte + buffer * self.buffer_bytes
            for buffer in (buffers.start, buffers.stop)
        )
        self._memory.own[begin:end] = 255  # who reads on, reads garbage


class ThreadRounds:
    """Rounds in which ranks that are threads allocate memory together."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self._rounds: dict[int, list[Tensor]] = {}
        self._changed = threading.Condition()
        self._calls = [0] * num_ranks

    def exchange(self, rank, own: Tensor) -> list[Tensor]:
        """The allocations of all ranks, in which each takes part with its own."""
        with self._changed:
            buffers = self._rounds.setdefault(
                self._calls[rank], [torch.empty(0)] * self.num_ranks
            )
            self._calls[rank] += 1
            buffers[rank] = own
            self._changed.notify_all()
            assert self._changed.wait_for(
                lambda: all(len(buffer) for buffer in buffers), TIMEOUT_S
            )
        assert len({len(buffer) for buffer in buffers}) == 1, (
            "ranks allocate different sizes"
        )
        return buffers


class ThreadAllocations(ThreadRounds):
    """Symmetric memory of ranks that are threads: plain tensors, with the signals of ranks that are processes."""

    def __init__(self, num_ranks, hosts: Sequence[int] | None = None):
        super().__init__(num_ranks)
        self._hosts = (0,) * num_ranks if hosts is None else hosts

    def allocate(self, rank, num_bytes) -> CpuMemory:
        buffers = self.exchange(rank, torch.zeros(num_bytes, dtype=torch.uint8))
        near = {
            peer: buffer
            for peer, buffer in enumerate(buffers)
            if self._hosts[peer] == self._hosts[rank]
        }
        return CpuMemory(near, rank)


class ThreadWork:
    """A send or a receive between threads. It is complete as soon as both have started, whoever waits."""

    def __init__(self):
        self._is_complete = threading.Event()

    def complete(self):
        self._is_complete.set()

    def wait(self, timeout=timedelta(seconds=TIMEOUT_S)):
        assert self._is_complete.wait(timeout.total_seconds())


Started = tuple[Tensor, Any]
"""Rows of a send or a receive, and its work."""


class ThreadMessages:
    """Send and receive between ranks that are threads, as ``transfer_over`` a process group."""

    new_work: Callable[[], Any] = ThreadWork

    def __init__(self):
        self._lock = threading.Lock()
        self._started: dict[tuple[int, int, int, bool], Started] = {}
        """By sender, receiver, tag, and whether it is the receive."""

    def transfer(self, rank, sent: Sequence[Part], received: Sequence[Part]) -> Works:
        """The transfer of one rank."""
        receives = [
            (part.peer, self._start(part.peer, rank, part, receives=True))
            for part in received
        ]
        sends = [
            (part.peer, self._start(rank, part.peer, part, receives=False))
            for part in sent
        ]
        return Works(sends, receives)

    def _start(self, sender, receiver: int, part: Part, *, receives: bool):
        started = part.rows, self.new_work()
        message = (sender, receiver, part.tag)
        with self._lock:
            assert (*message, receives) not in self._started
            other = self._started.pop((*message, not receives), None)
            if other is None:
                self._started[*message, receives] = started
            else:
                send, receive = (other, started) if receives else (started, other)
                self.copy(receiver, send, receive)
                for _, work in (send, receive):
                    work.complete()
        return started[1]

    def copy(self, receiver: int, send: Started, receive: Started):
        """Copy the rows of a send that both have started."""
        receive[0].copy_(send[0])


def transports_over(
    allocations,
    num_ranks,
    buffer_bytes=BUFFER_BYTES,
    far_of: Callable[[int], FarRanks | None] = lambda rank: None,
) -> list[ThreadTransport]:
    """Transports of all ranks, which allocate together; ``far_of`` gives a rank its far peers."""

    def make(rank):
        allocate = partial(allocations.allocate, rank)
        return ThreadTransport(
            range(num_ranks),
            rank,
            allocate,
            lambda: TIMEOUT_S,
            buffer_bytes,
            far=far_of(rank),
        )

    return run_ranks(num_ranks, make)


def far_ranks(messages, hosts: Sequence[int], rank, device) -> FarRanks:
    """The far peers of a rank, given the number of every rank's host."""
    near = [peer for peer, host in enumerate(hosts) if host == hosts[rank]]
    return FarRanks(
        rank, near, range(len(hosts)), partial(messages.transfer, rank), device
    )


def thread_transports(
    num_ranks, buffer_bytes=BUFFER_BYTES, hosts: Sequence[int] | None = None
) -> list[ThreadTransport]:
    """Over shared memory; between ``hosts``, if there are several, by messages."""
    allocations = ThreadAllocations(num_ranks, hosts)
    messages = ThreadMessages()

    def far_of(rank):
        return (
            None
            if hosts is None
            else far_ranks(messages, hosts, rank, torch.device("cpu"))
        )

    return transports_over(allocations, num_ranks, buffer_bytes, far_of)


def run_ranks(num_ranks, body: Callable[[int], T]) -> list[T]:
    """``body(rank)`` on one thread per rank; the first error is raised."""
    barrier = threading.Barrier(num_ranks)

    def start(rank):
        # of this thread: pools that spin for each other stall where cores are few
        torch.set_num_threads(1)
        barrier.wait(TIMEOUT_S)
        return body(rank)

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(start, rank) for rank in range(num_ranks)]
        return [future.result(timeout=TIMEOUT_S) for future in futures]
