"""Transport over the process group's own all-to-all: gloo on CPU, NCCL on CUDA."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Pending, Route


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

    def release(self) -> None:
        pass

    def take(self) -> Tensor:
        return self.wait()


class CollectiveTransport:
    """``all_to_all_single`` with uneven splits."""

    name = "collective"
    replayable = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def prepare(self, routes: Sequence[Route]) -> None:
        if any(route.padded_to is not None for route in routes):
            raise ValueError("cad.transport = 'collective' cannot exchange padded tables: build 'symm_mem'")

    def begin(self, *num_bytes: int) -> int:
        return 0

    def start(self, parts: Sequence[Tensor], route: Route, phase: str, call: int) -> Pending:
        message = RowFormat(parts).pack(parts, route.rows)
        received = message.new_empty(route.num_received, message.shape[1])

        def describe() -> str:
            peers = sorted({*route.receivers.ranks, *route.senders.ranks})
            ranks = [self._ranks[peer] for peer in peers]
            return f"core attention exchange '{phase}' of rank {dist.get_rank()} with ranks {ranks}"

        try:
            work = dist.all_to_all_single(
                received, message, route.recv_counts, route.send_counts, group=self._group, async_op=True
            )
        except RuntimeError as error:
            raise PeerError(f"{describe()} failed: {error}") from error
        return _CollectivePending(work, received, message, describe)
