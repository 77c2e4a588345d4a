# SPDX-License-Identifier: BSD-3-Clause
"""Messages between a rank and a joined server, over a gloo group of these two.

A message is a head of int64 numbers and a body of bytes. The body holds a description in JSON and tensors, one after
the other. Heads are checked before a body is received, and the body's sum before it is read, so that a peer of another
job or version, or one that is broken, is refused with the reason.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.runtime.errors import first_sentence

VERSION = 1
"""of the format of messages"""
ASK, ANSWER, REFUSAL, ECHO, END = range(5)
"""what a message is: a request, its results, a reason in words, bytes to return, and that the sender has no more"""
_HEAD = 7
"""numbers of a head: version, job, kind, number of the request, bytes of description, bytes of the body, sum"""
MAX_BODY_BYTES = 2**36
_ALIGNMENT = 16
_RANK = 0
_SERVER = 1
_TAG = 0


class WireError(RuntimeError):
    """A message did not come, or is not one of this job and version."""


@dataclass(frozen=True)
class ServerMessage:
    """What one side sends to the other.

    Attributes:
        kind: one of the constants above.
        number: of the request that this belongs to.
        description: values that JSON can hold.
        tensors: on the host.
    """

    kind: int
    number: int
    description: dict[str, Any]
    tensors: Sequence[Tensor] = ()


class Connection:
    """One side of the group of a rank and a server.

    Args:
        store: the part of the servers' store that belongs to this connection alone.
        job: number of the job, which every head carries.
        is_server: True on the server.
        timeout_s: for the other side to come.
        pinned: True if tensors that arrive are copied to a GPU.

    Raises:
        WireError: the other side does not come in time.
    """

    def __init__(
        self,
        store: dist.Store,
        job: int,
        *,
        is_server: bool,
        timeout_s: float,
        pinned: bool = False,
    ) -> None:
        self._job = job
        self._pinned = pinned
        self._peer = _RANK if is_server else _SERVER
        own_number = _SERVER if is_server else _RANK
        timeout = timedelta(seconds=timeout_s)
        try:
            self._group: Any = dist.ProcessGroupGloo(store, own_number, 2, timeout)
        except RuntimeError as error:
            raise WireError(first_sentence(error)) from error

    def send(self, message: ServerMessage, timeout_s: float) -> None:
        """Send a message. Raises WireError if the other side has not taken it in time."""
        text, body = _pack(message, pinned=self._pinned)
        words = [
            VERSION,
            self._job,
            message.kind,
            message.number,
            text,
            len(body),
            _sum_of(body),
        ]
        deadline = time.monotonic() + timeout_s
        self._transfer(self._group.send, torch.tensor(words), deadline)
        self._transfer(self._group.send, body, deadline)

    def receive(self, timeout_s: float) -> ServerMessage:
        """Return the next message. Raises WireError if none comes in time, or it is not one of this job and version."""
        deadline = time.monotonic() + timeout_s
        head = torch.empty(_HEAD, dtype=torch.int64)
        self._transfer(self._group.recv, head, deadline)
        version, job, kind, number, text, num_bytes, total = head.tolist()
        if version != VERSION:
            raise WireError(
                f"a message of version {version}, but this side speaks version {VERSION}"
            )
        if job != self._job:
            raise WireError("a message of another job")
        if not 0 <= text <= num_bytes <= MAX_BODY_BYTES or num_bytes % _ALIGNMENT:
            raise WireError(f"a message of {num_bytes} bytes, {text} of description")
        try:
            body = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        except RuntimeError as error:
            raise WireError(f"no memory for {num_bytes} bytes") from error
        self._transfer(self._group.recv, body, deadline)
        if _sum_of(body) != total:
            raise WireError("a message whose sum is not that of its bytes")
        return _unpack(kind, number, text, body)

    def _transfer(
        self, start: Callable[..., Any], tensor: Tensor, deadline: float
    ) -> None:
        """Send or receive a tensor. Raises WireError if that is not done in time."""
        seconds = max(0.001, deadline - time.monotonic())
        try:
            start([tensor], self._peer, _TAG).wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            is_late = time.monotonic() >= deadline
            reason = "it is late" if is_late else first_sentence(error)
            raise WireError(reason) from error


def _pack(message: ServerMessage, *, pinned: bool) -> tuple[int, Tensor]:
    """Return the bytes of the description, and the body."""
    formats = [
        (str(x.dtype).removeprefix("torch."), list(x.shape)) for x in message.tensors
    ]
    text = json.dumps({**message.description, "tensors": formats}).encode()
    sizes = [len(text), *(x.nbytes for x in message.tensors)]
    body = torch.zeros(sum(map(_aligned, sizes)), dtype=torch.uint8, pin_memory=pinned)
    body[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    begin = _aligned(len(text))
    for tensor in message.tensors:
        end = begin + tensor.nbytes
        body[begin:end] = tensor.contiguous().reshape(-1).view(torch.uint8)
        begin = _aligned(end)
    return len(text), body


def _unpack(kind: int, number: int, text: int, body: Tensor) -> ServerMessage:
    """Return the message of a body; its tensors share the body's memory."""
    try:
        description = json.loads(body[:text].numpy().tobytes())
        tensors = list[Tensor]()
        begin = _aligned(text)
        for name, shape in description.pop("tensors"):
            dtype = getattr(torch, name)
            count = int(torch.Size(shape).numel())
            end = begin + count * dtype.itemsize
            tensors.append(body[begin:end].view(dtype).view(shape))
            begin = _aligned(end)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise WireError(f"a message that cannot be read: {error}") from error
    return ServerMessage(kind, number, description, tensors)


def _sum_of(body: Tensor) -> int:
    """Return the sum of a body's bytes, eight at a time, modulo 2^64; it detects garbage, not intent."""
    return int(body.view(torch.int64).sum()) if len(body) else 0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
