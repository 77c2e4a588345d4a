# SPDX-License-Identifier: BSD-3-Clause
"""One-sided transport: senders pack rows straight into the buffers of receivers on their host, in symmetric memory.

All ranks of a group begin the same calls and start the same exchanges in the same order. A rank allocates receive
buffers of one size, once. A *slot* is the set of receive buffers of one call: call c uses slot c mod P, where P is the
number of calls in flight. An exchange uses the buffer of the slot that its first route names, and those after it that
its rows need. The exchanges of a slot are numbered from 1. Two words per slot and peer, with release and acquire order,
make it safe to use a buffer again:

    ready[slot, receiver]    n: the buffers of exchange n are free at the receiver
    arrived[slot, sender]    n: the sender's rows of exchange n have arrived

When a rank starts an exchange, it signals ready to the ranks that have rows for it. A sender waits for its receivers
and a receiver for its senders, so each pair of ranks with rows exchanges two signals, and no rank waits for all.

This holds for ranks that share memory, those of a host. From and to other hosts, rows of the same exchange travel by
send and receive (transport/far.py), into the same buffers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, aligned
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import (
    WORD_BYTES,
    Peers,
    Pending,
    Route,
    Routes,
)
from torchtitan_cad.runtime.transport.far import FarRanks

if TYPE_CHECKING:  # it needs triton
    from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory


class SymmetricTransport:
    """The one-sided transport, described in the module's docstring.

    Args:
        ranks: global ranks of the CAD group, for errors.
        rank: this rank's index in ``ranks``.
        allocate: makes symmetric memory of a number of bytes; called once.
        timeout_s: returns the bound on every wait.
        far: the ranks of the group on other hosts; None if there are none.
        buffer_bytes: size of a receive buffer, a multiple of ``BUFFER_ALIGNMENT``, equal on all ranks.
        calls_in_flight: maximum number of calls that have begun and not yet released their last exchange.
    """

    name = "symm_mem"

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        allocate: "Callable[[int], DeviceMemory]",
        timeout_s: Callable[[], float],
        buffer_bytes: int,
        *,
        far: FarRanks | None = None,
        calls_in_flight: int = 2,
    ) -> None:
        self.description = self.name
        self._ranks = list(ranks)
        self._rank = rank
        self.buffer_bytes = buffer_bytes
        self._far = far
        self.timeout_s = timeout_s
        self._num_slots = calls_in_flight
        self._calls = 0
        num_buffers = calls_in_flight * BUFFERS_PER_CALL
        self._users: list[str | None] = [None] * num_buffers
        self._freed: list[torch.cuda.Event | None] = [None] * num_buffers
        word_bytes = 2 * calls_in_flight * len(ranks) * WORD_BYTES
        self._first_byte = aligned(word_bytes)
        self._memory = allocate(self._first_byte + num_buffers * buffer_bytes)
        self._numbers = [0] * calls_in_flight
        self._latest: deque[tuple[int, int, str]] = deque(maxlen=64)
        """Slot, number in the slot, and name of the latest exchanges."""

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        self._raise_overdue()
        for routes in exchanges:
            self._near(routes)

    def _near(self, routes: Routes) -> Routes:
        """Return the part of routes that goes over shared memory, with its tables."""
        near = routes if self._far is None else self._far.split(routes)
        self._memory.prepare(near)
        return near

    def begin(self) -> int:
        self._raise_overdue()
        call = self._calls
        self._calls += 1
        return call

    def start(
        self,
        messages: Sequence[Sequence[Tensor]],
        routes: Routes,
        phase: str,
        call: int,
    ) -> Pending:
        self._raise_overdue()
        packed = [(tensors, RowFormat.of(tensors)) for tensors in messages]
        row_bytes = [row_format.row_bytes for _, row_format in packed]
        memory = self._memory
        near = self._near(routes)
        slot = call % self._num_slots
        buffers, begins = self._place(slot, routes, row_bytes, phase)
        arrivals = list(map(self._rows, begins, routes, row_bytes))
        number = self._occupy(slot, buffers, phase)
        ready = self._ready(slot)
        arrived = slot * len(self._ranks)
        memory.post(near.senders, ready + self._rank, number)
        far = None
        with memory.sending():
            if self._far is not None:
                far = self._far.start(packed, routes, arrivals, phase)
            self._await(near.receivers, ready, number, phase)
            memory.send(packed, near, begins, arrived + self._rank, number)
            sent = streams.record_event(memory.own.device)

        def receive() -> list[Tensor]:
            self._await(near.senders, arrived, number, phase)
            if far is not None:
                far.wait_received(self.timeout_s())
            return arrivals

        def release() -> None:
            self._free(buffers)
            streams.wait_event(memory.own.device, sent)
            if far is not None:
                far.wait_sent(self.timeout_s())

        return _SymmetricPending(receive, release, (routes, packed))

    def _rows(self, begin: int, route: Route, row_bytes: int) -> Tensor:
        """Return uint8 [num_received, row_bytes] of this rank's memory from byte ``begin``."""
        own = self._memory.own
        shape = route.num_received, row_bytes
        return own.as_strided(shape, (row_bytes, 1), own.storage_offset() + begin)

    def _free(self, buffers: range) -> None:
        """Let later exchanges use the buffers after what the current stream has done."""
        freed = streams.record_event(self._memory.own.device)
        for buffer in buffers:
            self._users[buffer] = None
            self._freed[buffer] = freed

    def _place(
        self, slot: int, routes: Routes, row_bytes: Sequence[int], phase: str
    ) -> tuple[range, list[int]]:
        """Return the buffers that an exchange uses, and the bytes of the memory at which the routes' rows begin."""
        first = slot * BUFFERS_PER_CALL + routes[0].buffer
        buffer_bytes = self.buffer_bytes
        begins = []
        end = self._first_byte + first * buffer_bytes
        for route, num_bytes in zip(routes, row_bytes, strict=True):
            begins.append(aligned(end))
            end = begins[-1] + route.most_rows * num_bytes
        num_bytes = end - begins[0]
        room = (BUFFERS_PER_CALL - routes[0].buffer) * buffer_bytes
        if num_bytes > room:
            raise ValueError(
                f"exchange '{phase}' brings some rank {num_bytes} bytes, but its receive buffers have {room}: "
                "set a larger cad.receive_buffer_gb, or give tensors of the dtype that training.mixed_precision_param "
                "says, for which chunks were made"
            )
        return range(first, first + max(1, -(-num_bytes // buffer_bytes))), begins

    def _occupy(self, slot: int, buffers: Sequence[int], phase: str) -> int:
        """Count one more exchange of a slot, and return its number; the current stream waits for the buffers."""
        for buffer in buffers:
            user = self._users[buffer]
            if user is not None:
                raise RuntimeError(
                    f"exchange '{phase}' would use the buffer of exchange '{user}', which is in flight: finish that "
                    f"first; {self._num_slots} core attentions at most, with {BUFFERS_PER_CALL} buffers each, are in "
                    "flight"
                )
            self._users[buffer] = phase
            streams.wait_event(self._memory.own.device, self._freed[buffer])
        self._numbers[slot] += 1
        number = self._numbers[slot]
        self._latest.append((slot, number, phase))
        return number

    # Words ------------------------------------------------------------------------------------------------------------

    def _ready(self, slot: int) -> int:
        """Return the first ready word of a slot; the arrived words of all slots come before the ready words."""
        return (self._num_slots + slot) * len(self._ranks)

    def _await(self, peers: Peers, first_word: int, number: int, phase: str) -> None:
        """Wait until words of ``peers`` are at least ``number``, up to the group's timeout.

        Raises:
            PeerError: on CPU, naming the late peers. On a device, the next exchange or plan raises it.
        """
        timeout_s = self.timeout_s()
        if late := self._memory.wait(peers, first_word, number, timeout_s):
            raise PeerError(self._describe(late, first_word, phase, timeout_s))

    def _describe(
        self, late: Sequence[int], first_word: int, phase: str, timeout_s: float
    ) -> str:
        names = ", ".join(f"rank {self._ranks[peer]}" for peer in late)
        what = "sent its rows" if first_word < self._ready(0) else "begun to receive"
        return (
            f"core attention exchange '{phase}' of rank {self._ranks[self._rank]} failed: "
            f"{names} has not {what} for {timeout_s:.1f} s"
        )

    def _raise_overdue(self) -> None:
        """Raise PeerError that names the exchange of a wait on the device that took too long."""
        if (overdue := self._memory.overdue()) is None:
            return
        word, value = overdue
        slot, peer = divmod(word, len(self._ranks))
        slot %= self._num_slots
        latest = tuple(self._latest)  # the training thread may start another
        phases = {(at, number): phase for at, number, phase in latest}
        phase = phases.get((slot, value), "long ago")
        raise PeerError(self._describe([peer], word, phase, self.timeout_s()))


@dataclass(eq=False)
class _SymmetricPending(Pending):
    """Rows in the rank's symmetric buffers.

    Owns what the sending stream still reads, the tensors and the routes' tables, until ``release`` has made the current
    stream wait for that. What is freed then can be used again at once, in the order of that stream; ``record_stream``
    would keep memory until the host sees that the device is done, several layers later.
    """

    receive: Callable[[], list[Tensor]]
    free: Callable[[], None]
    sent: object

    def wait(self) -> list[Tensor]:
        return self.receive()

    def release(self) -> None:
        self.free()
        self.sent = None
