# SPDX-License-Identifier: BSD-3-Clause
"""Symmetric memory of CUDA devices on several nodes: NVSHMEM between nodes, direct writes inside. Needs triton, too.

NVSHMEM sends from its own memory only, so rows for other nodes are first packed into a staging area, one message per
peer. Sends are complete, and the area is free again, when the kernel that issues them ends. The area has the size of
the receive buffers of one call; a rank with more rows to send sends them in several batches.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime.packing import Message
from torchtitan_cad.runtime.transport.base import (
    WORD_BYTES,
    Peers,
    Route,
    Routes,
    rows_to_device,
)
from torchtitan_cad.runtime.transport.cuda_memory import (
    DeviceMemory,
    bounded_waits,
    sending_stream,
)
from torchtitan_cad.runtime.triton import put, signals
from torchtitan_cad.runtime.triton.nvshmem_library import reserve_heap

_SPARE_BYTES = 512
"""bytes: an int64, padded to the alignment of the rows behind it."""


class Batch(NamedTuple):
    """Rows of a route for other nodes: blocks to pack into the staging area, and messages to send from there.

    ``messages`` is int32 [n, 4]: peer, first row in the staging area, first row at the peer, number of rows.
    """

    route: int
    blocks: put.Blocks
    messages: Tensor


class Tables(NamedTuple):
    """Blocks for peers of this node, in one launch, and batches for those of other nodes."""

    near: put.Blocks
    batches: list[Batch]


class NodesMemory(DeviceMemory):
    """Memory of devices on several nodes. NVSHMEM allocates the same size on all ranks of the job at once.

    Args:
        own: this rank's memory. The last ``staging_bytes`` are the staging area; the ``_SPARE_BYTES`` before it receive
            the signals of threads without a peer.
        addresses: addresses of the peers' memory for this device, 0 for peers on other nodes.
        ranks: global ranks of the group.
    """

    def __init__(
        self,
        own: Tensor,
        addresses: Sequence[int],
        staging_bytes: int,
        ranks: Sequence[int],
        **kwargs,
    ) -> None:
        super().__init__(own, addresses, **kwargs)
        from torchtitan_cad.runtime.triton import nvshmem

        self._nvshmem = nvshmem
        self._is_far = np.array([not address for address in addresses])
        self._ranks = torch.tensor(ranks, dtype=torch.int32, device=own.device)
        self._staging = own.data_ptr() + own.numel() - staging_bytes
        self._spare = self._staging - _SPARE_BYTES
        self._staging_addresses = torch.full(
            (len(ranks),), self._staging, dtype=torch.int64, device=own.device
        )

    @staticmethod
    def reserve_for(num_bytes: int, buffer_bytes: int, device: torch.device) -> Tensor:
        """Allocate ``num_bytes`` and a staging area for buffers of ``buffer_bytes``; collective over the default group.

        Raises:
            RuntimeError: NVSHMEM has no such memory. Where it cannot start, it ends the process.
        """
        total = num_bytes + _SPARE_BYTES + BUFFERS_PER_CALL * buffer_bytes
        reserve_heap(total)
        symm_mem.set_backend("NVSHMEM")
        own = symm_mem._SymmetricMemory.empty_strided_p2p(
            (total,), (1,), torch.uint8, device
        )
        if not own.data_ptr():
            raise RuntimeError(
                f"NVSHMEM has no {total} bytes: set a smaller cad.receive_buffer_gb"
            )
        own.zero_()
        torch.cuda.synchronize(device)
        return own

    @classmethod
    def share_with(
        cls, own: Tensor, group: dist.ProcessGroup, buffer_bytes: int
    ) -> "NodesMemory":
        """Map the memory that all ranks of the group have reserved. Collective.

        Raises:
            RuntimeError: a rank did not come in time, or a kernel cannot be compiled.
        """
        with bounded_waits(group):
            handle = symm_mem.rendezvous(own, group)
        from torchtitan_cad.runtime.triton import nvshmem

        nvshmem.warm_up(own.device)  # no peer may wait for a compiler
        ranks = dist.get_process_group_ranks(group)
        staging_bytes = BUFFERS_PER_CALL * buffer_bytes
        stream = sending_stream(own.device)
        return cls(
            own,
            handle.buffer_ptrs,
            staging_bytes,
            ranks,
            stream=stream,
            owner=(own, handle),
        )

    def _peer_tables(self, ranks: list[int]) -> list[Tensor]:
        """Return the tables of all ranks, of those on this node, and of those on other nodes."""
        near = [rank for rank in ranks if not self._is_far[rank]]
        far = [rank for rank in ranks if self._is_far[rank]]
        tables = list[Tensor]()
        for group in (ranks, near, far):
            tables += super()._peer_tables(group)
        return tables

    def _tables(self, routes: Routes) -> Tables:
        """Return the writes to peers of this node and, in batches, those to other nodes by way of the staging area."""
        batches = list[Batch]()
        for number, route in enumerate(routes):
            batches += self._batches(number, route)
        near = [
            put.split_into_blocks(
                route.send_counts * ~self._is_far,
                route.put_offsets,
                _first(np.array(route.send_counts)),
            )
            for route in routes
        ]
        return Tables(
            put.Blocks.of(near, [route.rows for route in routes], self.own.device),
            batches,
        )

    def _batches(self, number: int, route: Route) -> Iterator[Batch]:
        """Yield batches of at most the rows that any rank receives, so that they fit into the staging area."""
        device = self.own.device
        peers = np.arange(len(self._ranks))
        sent = np.array(route.send_counts)
        offsets = np.array(route.put_offsets)
        to_far = sent * self._is_far
        first = _first(sent)
        first_far = _first(to_far)
        most = max(1, route.most_rows)
        for begin in range(0, int(to_far.sum()), most):
            head, tail = (
                np.clip(x, begin, begin + most) for x in (first_far, first_far + to_far)
            )
            counts = tail - head
            staged = head - begin
            skipped = head - first_far
            messages = np.stack((peers, staged, offsets + skipped, counts), axis=1)[
                counts > 0
            ]
            blocks = put.Blocks.of(
                [put.split_into_blocks(counts, staged, first + skipped)],
                [route.rows],
                device,
            )
            yield Batch(number, blocks, rows_to_device(messages, device, np.int32))

    def send(
        self,
        messages: Sequence[Message],
        routes: Routes,
        begins: Sequence[int],
        word: int,
        number: int,
    ) -> None:
        # Peers on this node come first: messages to other nodes take longer, and the kernel waits for their arrival.
        put.put_rows(
            messages, routes.tables.near, begins, self._addresses, self._failed
        )
        self._post_near(routes.receivers, word, number)
        for route, blocks, to_far in routes.tables.batches:
            target = self.own.data_ptr() + begins[route]
            row_bytes = messages[route][1].row_bytes
            put.put_rows(
                [messages[route]], blocks, [0], self._staging_addresses, self._failed
            )
            self._nvshmem.put_messages(
                to_far, self._ranks, self._staging, target, row_bytes, self._failed
            )
        self._post_far(routes.receivers, word, number)

    def post(self, peers: Peers, word: int, number: int) -> None:
        self._post_near(peers, word, number)
        self._post_far(peers, word, number)

    def _post_near(self, peers: Peers, word: int, number: int) -> None:
        signals.post(peers.tables[1], self._addresses, word, number, self._failed)

    def _post_far(self, peers: Peers, word: int, number: int) -> None:
        address = self.own.data_ptr() + word * WORD_BYTES
        self._nvshmem.post(
            peers.tables[2], self._ranks, address, self._spare, number, self._failed
        )

    def wait(
        self, peers: Peers, first_word: int, number: int, timeout_s: float
    ) -> list[int]:
        super().wait(peers, first_word, number, timeout_s)
        address = self.own.data_ptr() + first_word * WORD_BYTES
        self._nvshmem.confirm(peers.tables[2], address, number, self._failed)
        return []


def _first(counts: np.ndarray) -> np.ndarray:
    """Return where the rows of each peer begin among all."""
    return np.cumsum(counts) - counts
