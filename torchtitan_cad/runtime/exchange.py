# SPDX-License-Identifier: BSD-3-Clause
"""Exchanges in flight, as typed tensors: a single exchange, or all exchanges that bring the rows that a rank serves."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.traces import named
from torchtitan_cad.runtime.transport.base import Kind, Routes, Transport


@dataclasses.dataclass
class ExchangeClock:
    """Host seconds spent on exchanges since ``reset``: packing and starting them, and waiting for rows.

    On CPU ranks the host blocks in the wait until the rows have arrived, so ``waiting`` is the exposed time of the
    exchange and of the peers' delay. On CUDA a stream waits, and both numbers are the host's cost of launching; a
    profiler trace shows the device's time.
    """

    starting: float = 0.0
    waiting: float = 0.0
    exchanges: int = 0
    """Exchanges started since training began; equal on all ranks of the group at the same point."""
    phase: str = ""
    """Name of the last exchange."""

    @contextmanager
    def measure(self, what: Literal["starting", "waiting"]) -> Iterator[None]:
        """Add the time spent in the context to ``starting`` or ``waiting``."""
        begin = time.perf_counter()
        yield
        setattr(self, what, getattr(self, what) + (time.perf_counter() - begin))

    def reset(self) -> tuple[float, float]:
        """Return ``starting`` and ``waiting`` and set them to 0."""
        seconds = self.starting, self.waiting
        self.starting = self.waiting = 0.0
        return seconds


class Exchange:
    """An exchange, which begins with its object, and yields typed tensors instead of bytes; arguments as of ``start``.

    Attributes:
        formats: row formats of its messages.
    """

    def __init__(
        self,
        transport: Transport,
        clock: ExchangeClock,
        messages: Sequence[list[Tensor]],
        *,
        routes: Routes,
        phase: str,
        call: int,
    ) -> None:
        self.formats = [RowFormat.of(tensors) for tensors in messages]
        self._clock = clock
        self._phase = phase
        self._messages: list[Tensor] = []
        clock.exchanges += 1
        clock.phase = phase
        with named(f"cad/exchange {phase}"), clock.measure("starting"):
            self._pending = transport.start(messages, routes, phase, call)

    def receive(self) -> list[Tensor]:
        """Wait, on the current stream, for the messages, uint8 [rows, row_bytes]; a later ``wait`` returns at once."""
        if not self._messages:
            with named(f"cad/wait {self._phase}"), self._clock.measure("waiting"):
                self._messages = self._pending.wait()
        return self._messages

    def wait(self) -> list[list[Tensor]]:
        """Wait for the received rows of every tensor of every message, valid until ``release``."""
        return [
            row_format.unpack(message)
            for row_format, message in zip(self.formats, self.receive(), strict=True)
        ]

    def release(self) -> None:
        """Free the receive buffers."""
        self._pending.release()


class Incoming:
    """The exchanges that bring the rows that a rank serves.

    Rows of a single exchange are used in the receive buffers. Rows of several chunks are copied into one message per
    kind, and the next chunk starts when an earlier one has been copied.

    Args:
        start: starts an exchange.
        exchanges: all exchanges, in order.
        num_rows: rows that arrive, by kind.
    """

    def __init__(
        self,
        start: Callable[[Routes], Exchange],
        exchanges: Sequence[Routes],
        num_rows: dict[Kind, int],
    ) -> None:
        self._start = start
        self._num_rows = num_rows
        self._left = deque(exchanges)
        self._is_single = len(exchanges) == 1
        self._travelling: deque[tuple[Routes, Exchange]] = deque()
        self._formats: dict[Kind, RowFormat] = {}
        self._messages: list[Tensor] = []
        self._send()

    def _send(self) -> None:
        while self._left and len(self._travelling) < BUFFERS_PER_CALL:
            routes = self._left.popleft()
            exchange = self._start(routes)
            self._travelling.append((routes, exchange))
            self._formats |= zip(
                (route.kind for route in routes), exchange.formats, strict=True
            )

    def receive(self) -> list[Tensor]:
        """Wait on the current stream for the message of each kind, uint8 [rows, row_bytes], valid until ``release``."""
        if not self._messages:
            self._messages = (
                self._travelling[0][1].receive() if self._is_single else self._collect()
            )
        return self._messages

    def wait(self) -> dict[Kind, list[Tensor]]:
        """Wait for the rows of every tensor of each kind's message, valid until ``release``."""
        messages = self.receive()
        for message in messages:
            # allocated on the stream that waited for the chunks
            if message.is_cuda and not self._is_single:
                message.record_stream(torch.cuda.current_stream(message.device))
        pairs = zip(self._formats.items(), messages, strict=True)
        return {
            kind: row_format.unpack(message) for (kind, row_format), message in pairs
        }

    def _collect(self) -> list[Tensor]:
        messages: dict[Kind, Tensor] = {}
        filled = dict.fromkeys(self._num_rows, 0)
        while self._travelling:
            (route,), exchange = self._travelling.popleft()
            (rows,) = exchange.receive()
            if route.kind not in messages:
                messages[route.kind] = rows.new_empty(
                    self._num_rows[route.kind], rows.shape[1]
                )
            begin = filled[route.kind]
            filled[route.kind] += len(rows)
            messages[route.kind][begin : filled[route.kind]] = rows
            exchange.release()
            self._send()
        return list(messages.values())

    def release(self) -> None:
        """Free the receive buffers, once."""
        while self._travelling:
            self._travelling.popleft()[1].release()
