"""Moving rows between the ranks of a CAD group.

A transport exchanges rows of bytes with every rank of the group at once. Row counts are known on both sides from the
plan, so no sizes travel. ``start`` returns at once; ``Pending.wait`` makes the received rows usable on the current
stream (or, on CPU, blocks until they are there).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.runtime.errors import PeerError


class Pending(Protocol):
    """A started exchange."""

    def wait(self) -> Tensor:
        """The received rows, uint8 [sum(recv_counts), row_bytes], grouped by sending rank.

        Raises:
            PeerError: a peer died or did not answer within the group's timeout; names the phase.
        """
        ...


class Transport(Protocol):
    """Exchanges rows within one CAD group."""

    name: str

    def start(self, message: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], phase: str) -> Pending:
        """Sends ``message`` (uint8 [sum(send_counts), row_bytes], grouped by destination rank).

        Every rank of the group must call it in the same order. ``phase`` names the exchange in errors.
        """
        ...


class _CollectivePending:
    def __init__(self, work: dist.Work, received: Tensor, sent: Tensor, describe: Callable[[], str]) -> None:
        self._work, self._received, self._describe = work, received, describe
        self._sent = sent  # kept alive until the exchange is over

    def wait(self) -> Tensor:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self._describe()} failed: {error}") from error
        return self._received


class CollectiveTransport:
    """``all_to_all_single`` with uneven splits: gloo on CPU, NCCL on CUDA."""

    name = "collective"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def start(self, message: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], phase: str) -> Pending:
        received = message.new_empty(sum(recv_counts), message.shape[1])

        def describe() -> str:
            peers = [r for r, s, t in zip(self._ranks, send_counts, recv_counts, strict=True) if s or t]
            return f"core attention exchange '{phase}' of rank {dist.get_rank()} with ranks {peers}"

        try:
            work = dist.all_to_all_single(
                received, message, list(recv_counts), list(send_counts), group=self._group, async_op=True
            )
        except RuntimeError as error:
            raise PeerError(f"{describe()} failed: {error}") from error
        return _CollectivePending(work, received, message, describe)


def build_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport called ``name`` (``auto`` or ``collective``) over ``group``.

    Raises:
        ValueError: unknown or unavailable transport; names the key ``cad.transport``.
    """
    match name:
        case "auto" | "collective":
            return CollectiveTransport(group)
        case _:
            raise ValueError(
                f"cad.transport = {name!r} is not available on {device.type}; "
                "set cad.transport to 'auto' or 'collective'"
            )
