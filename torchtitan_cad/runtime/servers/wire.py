# SPDX-License-Identifier: BSD-3-Clause
"""Messages between a rank and a joined server, over a gloo group of these two.

A message is a head of three int64 numbers (job, bytes and sum of the text), a text in JSON, and the bytes of tensors,
whose sum the text has: a peer of another job, or one that is broken, is refused with the reason.
"""

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.runtime.errors import first_sentence

RANK = 0
SERVER = 1


class WireError(RuntimeError):
    """A message did not come, or is not one of this job."""


@dataclass(frozen=True)
class ServerMessage:
    """What one side sends to the other.

    Attributes:
        kind: a request, its results, a reason in words not to compute them, or bytes to return.
        description: values that JSON can hold.
        tensors: on the host.
    """

    kind: Literal["request", "results", "refusal", "echo"]
    description: dict[str, Any]
    tensors: Sequence[Tensor] = ()


class Connection:
    """One side of the group of a rank and a server.

    Args:
        store: the part of the servers' store that belongs to this connection alone.
        job: number of the job, which every head carries.
        member: of the group, ``RANK`` or ``SERVER``.
        timeout_s: for the other side to come.

    Raises:
        RuntimeError: the other side does not come in time.
    """

    def __init__(
        self,
        store: dist.Store,
        job: int,
        member: int,
        timeout_s: float,
    ) -> None:
        self._job = job
        self._peer = 1 - member
        self._group: Any = dist.ProcessGroupGloo(
            store, member, 2, timedelta(seconds=timeout_s)
        )

    def send(self, message: ServerMessage, timeout_s: float) -> None:
        """Send a message. Raises WireError if the other side has not taken it in time."""
        deadline = time.monotonic() + timeout_s
        formats = [
            (str(x.dtype).removeprefix("torch."), x.shape) for x in message.tensors
        ]
        bodies = [_bytes_of(x) for x in message.tensors]
        values = [message.kind, message.description, formats, _sum_of(bodies)]
        text = torch.frombuffer(
            bytearray(json.dumps(values).encode()), dtype=torch.uint8
        )
        head = torch.tensor([self._job, len(text), _sum_of([text])])
        for part in (head, text, *bodies):
            self._transfer(self._group.send, part, deadline)

    def receive(self, timeout_s: float) -> ServerMessage:
        """Return the next message. Raises WireError if none comes in time, or it is not one of this job."""
        deadline = time.monotonic() + timeout_s
        head = torch.empty(3, dtype=torch.int64)
        self._transfer(self._group.recv, head, deadline)
        job, length, text_sum = head.tolist()
        if job != self._job:
            raise WireError("a message of another job")
        text = torch.empty(length, dtype=torch.uint8)
        self._transfer(self._group.recv, text, deadline)
        _check_sum([text], text_sum)
        kind, description, formats, body_sum = json.loads(text.numpy().tobytes())
        is_copied = torch.cuda.is_initialized()  # to a GPU
        tensors = [
            torch.empty(shape, dtype=getattr(torch, name), pin_memory=is_copied)
            for name, shape in formats
        ]
        bodies = [_bytes_of(x) for x in tensors]
        for body in bodies:
            self._transfer(self._group.recv, body, deadline)
        _check_sum(bodies, body_sum)
        return ServerMessage(kind, description, tensors)

    def _transfer(
        self, start: Callable[..., Any], tensor: Tensor, deadline: float
    ) -> None:
        """Send or receive a tensor. Raises WireError if that is not done in time."""
        seconds = max(0.001, deadline - time.monotonic())
        try:
            start([tensor], self._peer, 0).wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise WireError("it is late") from error
            raise WireError(first_sentence(error)) from error


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, in its memory if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _sum_of(parts: Sequence[Tensor]) -> int:
    """Return the CRC of all bytes; it detects garbage, not intent."""
    total = 0
    for part in parts:
        total = zlib.crc32(part.numpy().data, total)
    return total


def _check_sum(parts: Sequence[Tensor], expected: int) -> None:
    if _sum_of(parts) != expected:
        raise WireError("a message whose sum is not that of its bytes")
