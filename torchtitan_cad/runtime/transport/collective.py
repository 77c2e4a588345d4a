# SPDX-License-Identifier: BSD-3-Clause
"""The transport over the process group's all-to-all (gloo on CPU, NCCL on CUDA)."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.planning.exchange import messages as planned
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Pending, Route, Routes


class _Received(Pending):
    """Rows received in new tensors, complete after ``works``; ``sent`` is kept alive until then."""

    def __init__(
        self,
        received: list[Tensor],
        works: Sequence[dist.Work],
        sent: list[Tensor],
        describe: Callable[[], str],
    ) -> None:
        self._received = received
        self._works = works
        self._sent = sent
        self._describe = describe

    def wait(self) -> list[Tensor]:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self._describe()} failed: {error}") from error
        return self._received


class CollectiveTransport:
    """``all_to_all_single`` with uneven splits."""

    name = description = "collective"

    def __init__(
        self, group: dist.ProcessGroup, buffer_bytes: int | None = None
    ) -> None:
        self.buffer_bytes = (
            planned.buffer_bytes() if buffer_bytes is None else buffer_bytes
        )
        self._group = group

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        pass

    def begin(self) -> int:
        return 0

    def start(
        self,
        messages: Sequence[Sequence[Tensor]],
        routes: Routes,
        phase: str,
        call: int,
    ) -> Pending:
        def describe() -> str:
            ranks = dist.get_process_group_ranks(self._group)
            peers = [
                ranks[peer]
                for peer in sorted({*routes.receivers.ranks, *routes.senders.ranks})
            ]
            return f"core attention exchange '{phase}' of rank {dist.get_rank()} with ranks {peers}"

        works = []
        received = []
        sent = []
        for tensors, route in zip(messages, routes, strict=True):
            sent.append(RowFormat.of(tensors).pack(tensors, route.rows))
            received.append(sent[-1].new_empty(route.num_received, sent[-1].shape[1]))
            try:
                works += self._exchange(received[-1], sent[-1], route)
            except RuntimeError as error:
                raise PeerError(f"{describe()} failed: {error}") from error
        return _Received(received, works, sent, describe)

    def _exchange(
        self, received: Tensor, sent: Tensor, route: Route
    ) -> list[dist.Work]:
        return [
            dist.all_to_all_single(
                received,
                sent,
                output_split_sizes=route.recv_counts,
                input_split_sizes=route.send_counts,
                group=self._group,
                async_op=True,
            )
        ]
