# SPDX-License-Identifier: BSD-3-Clause
"""The transport over the process group's all-to-all (gloo on CPU, NCCL on CUDA)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.planning.exchange import messages as planned
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.transport.base import Pending, Routes


@dataclass
class _Received(Pending):
    """Rows received in new tensors, complete after ``works``; ``sent`` is kept alive until then."""

    received: list[Tensor]
    works: list[dist.Work]
    sent: list[Tensor]
    failure: Callable[[], str]

    def wait(self) -> list[Tensor]:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"{self.failure()}: {error}") from error
        return self.received


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
        def failure() -> str:
            ranks = dist.get_process_group_ranks(self._group)
            indices = {*routes.receivers.ranks, *routes.senders.ranks}
            peers = sorted(ranks[index] for index in indices)
            return f"core attention exchange '{phase}' of rank {dist.get_rank()} with ranks {peers} failed"

        works = list[dist.Work]()
        received = []
        sent = []
        for tensors, route in zip(messages, routes, strict=True):
            rows = RowFormat.of(tensors).pack(tensors, route.rows)
            arriving = rows.new_empty(route.num_received, rows.shape[1])
            sent.append(rows)
            received.append(arriving)
            try:
                work = dist.all_to_all_single(
                    arriving,
                    rows,
                    output_split_sizes=route.recv_counts,
                    input_split_sizes=route.send_counts,
                    group=self._group,
                    async_op=True,
                )
            except RuntimeError as error:
                raise PeerError(f"{failure()}: {error}") from error
            works.append(work)
        return _Received(received, works, sent, failure)
