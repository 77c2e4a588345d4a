"""Transport over the process group's own all-to-all: gloo on CPU, NCCL on CUDA."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.planning.exchange import messages as planned
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Pending, Routes


class _CollectivePending:
    def __init__(
        self, works: Sequence[dist.Work], received: list[Tensor], sent: list[Tensor], describe: Callable[[], str]
    ) -> None:
        self._works, self._received, self._describe = works, received, describe
        self._sent = sent  # kept alive until the exchange is over

    def wait(self) -> list[Tensor]:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self._describe()} failed: {error}") from error
        return self._received

    def release(self) -> None:
        pass

    def take(self) -> list[Tensor]:
        return self.wait()


class CollectiveTransport:
    """``all_to_all_single`` with uneven splits."""

    name = "collective"
    replayable = False

    def __init__(self, group: dist.ProcessGroup, buffer_bytes: int | None = None) -> None:
        self.buffer_bytes = planned.buffer_bytes() if buffer_bytes is None else buffer_bytes
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        if any(route.padded_to is not None for routes in exchanges for route in routes):
            raise ValueError("cad.transport = 'collective' cannot exchange padded tables: build 'symm_mem'")

    def begin(self) -> int:
        return 0

    def start(self, messages: Sequence[Sequence[Tensor]], routes: Routes, phase: str, call: int) -> Pending:
        def describe() -> str:
            ranks = [self._ranks[peer] for peer in sorted({*routes.receivers.ranks, *routes.senders.ranks})]
            return f"core attention exchange '{phase}' of rank {dist.get_rank()} with ranks {ranks}"

        works, received, sent = [], [], []
        for parts, route in zip(messages, routes, strict=True):
            sent.append(RowFormat(parts).pack(parts, route.rows))
            received.append(sent[-1].new_empty(route.num_received, sent[-1].shape[1]))
            counts = route.recv_counts, route.send_counts
            try:
                works.append(dist.all_to_all_single(received[-1], sent[-1], *counts, group=self._group, async_op=True))
            except RuntimeError as error:
                raise PeerError(f"{describe()} failed: {error}") from error
        return _CollectivePending(works, received, sent, describe)
