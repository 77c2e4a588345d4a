# SPDX-License-Identifier: BSD-3-Clause
"""Ranks of a CAD group as threads, each on a ledger device of its own: the runtime as on CUDA, but for kernels."""

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from tests.lib.cpu_memory import arrivals
from tests.lib.threaded import (
    TIMEOUT_S,
    ThreadMessages,
    ThreadRounds,
    ThreadWork,
    far_ranks,
    transports_over,
)
from torchtitan_cad.runtime.kernels.base import Merged, compute_dtype
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport


class OneKernel(CpuKernel):
    """The CPU kernel as one kernel on the current stream."""

    def forward(self, q, k, v, call):
        results = (
            torch.empty_like(q),
            q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype)),
        )
        return self._launch(super().forward, [q, k, v], call, results)

    def backward(self, dout, q, k, v, merged, call):
        results = tuple(
            torch.empty_like(x, dtype=compute_dtype(x.dtype)) for x in (q, k, v)
        )
        name = "delta" if merged.out is None else "out"

        def run(*arguments):
            *rows, lse, rest, call = arguments
            merged = Merged(lse, **{name: rest})
            return CpuKernel.backward(self, *rows, merged, call)

        return self._launch(
            run, [dout, q, k, v, merged.lse, getattr(merged, name)], call, results
        )

    @staticmethod
    def _launch(run, inputs, call, results):
        ledger = torch.ops.ledger
        ledger.use([*inputs, call.cu_q, call.cu_k], list(results), "attention kernel")
        for result, computed in zip(
            results, run(*map(ledger.on_host, inputs), call), strict=True
        ):
            ledger.on_host(result).copy_(computed)
        return results


class LedgerMemory(DeviceMemory):
    """Streams and marks are those of CUDA devices; copies and events stand for the kernels that write and signal."""

    def __init__(self, buffers, rank, stream, words):
        super().__init__(
            buffers[rank], [buffer.data_ptr() for buffer in buffers], stream
        )
        self._buffers = buffers
        self._rank = rank
        self._words_of_all = words

    def prepare(self, routes):
        pass

    def send(self, messages, routes, begins, word, number):
        ledger = torch.ops.ledger
        for parts, row_format, rows, arrival in arrivals(
            messages, routes, begins, self._buffers
        ):
            chosen = [rows] if isinstance(rows, Tensor) else []
            ledger.use([*parts, *chosen], [arrival], "put kernel")
            index = ledger.on_host(rows) if chosen else rows
            sent = row_format.pack([ledger.on_host(part)[index] for part in parts])
            ledger.on_host(arrival).copy_(sent)
        self.post(routes.receivers, word, number)

    def post(self, peers, word, number):
        event = torch.accelerator.current_stream(self.own.device).record_event()
        for peer in peers.ranks:
            self._word(peer, word, number).set_result(event)

    def _word(self, *place):
        """The event after which an owner's word has a value."""
        return self._words_of_all.setdefault(place, Future())

    def wait(self, peers, first_word, number, timeout_s):
        words = [
            self._word(self._rank, first_word + peer, number) for peer in peers.ranks
        ]
        self.follow([word.result(TIMEOUT_S) for word in words])
        return []

    def follow(self, events):
        """Makes the current stream wait for other ranks' words."""
        for event in events:
            torch.accelerator.current_stream(self.own.device).wait_event(event)

    def overdue(self):
        return None


class LedgerAllocations(ThreadRounds):
    """Symmetric memory of such ranks."""

    def __init__(self, num_ranks):
        super().__init__(num_ranks)
        self._streams = [torch.Stream(f"ledger:{rank}") for rank in range(num_ranks)]
        self._words = {}

    def allocate(self, rank, num_bytes):
        buffers = self.exchange(
            rank, torch.empty(num_bytes, dtype=torch.uint8, device=f"ledger:{rank}")
        )
        words = self._words.setdefault(buffers[0].data_ptr(), {})
        return LedgerMemory(buffers, rank, self._streams[rank], words)


class LedgerWork(ThreadWork):
    """A send or a receive behind the current stream, for which the host waits until both ranks have started it."""

    def __init__(self):
        super().__init__()
        self.before = torch.accelerator.current_stream().record_event()
        self.end = None

    def wait(self):
        """Make the current stream wait for its end, as a work of NCCL does."""
        super().wait()
        torch.accelerator.current_stream().wait_event(self.end)


class LedgerMessages(ThreadMessages):
    """Messages between such ranks, as NCCL sends them: on a stream of every rank, behind its current stream."""

    new_work = LedgerWork

    def __init__(self, num_ranks):
        super().__init__()
        self._streams = [torch.Stream(f"ledger:{rank}") for rank in range(num_ranks)]

    def copy(self, receiver, send, receive):
        """Copy the rows on the receiver's stream, behind what came before on either rank."""
        ledger = torch.ops.ledger
        works = [work for _, work in (send, receive)]
        with self._streams[receiver] as stream:
            for work in works:
                stream.wait_event(work.before)
            ledger.use([send[0]], [receive[0]], "message")
            ledger.on_host(receive[0]).copy_(ledger.on_host(send[0]))
            end = stream.record_event()
        for work in works:
            work.end = end


def ledger_transports(
    num_ranks: int, hosts: Sequence[int] | None = None
) -> list[SymmetricTransport]:
    """Over memory of devices; between ``hosts``, if there are several, by messages."""
    messages = LedgerMessages(num_ranks)

    def far_of(rank):
        return (
            None
            if hosts is None
            else far_ranks(messages, hosts, rank, torch.device("ledger", rank))
        )

    return transports_over(LedgerAllocations(num_ranks), num_ranks, far_of=far_of)
