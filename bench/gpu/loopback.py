# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that one process plays in turns, with the real engine, transport and kernels.

Every step runs first for one rank, then for the others, so that whatever a rank waits for has been launched before.
The ranks' symmetric memory is plain memory of the device. Ranks that have streams of their own run at the same time.
On the CPU Triton's interpreter runs the transport's kernels, and a list stands for the stream on which ranks send; on a
GPU, in the first run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.exchange.messages import buffer_bytes
from torchtitan_cad.runtime.call import AttentionCall, Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels.base import Merged, VarlenArgs, row_delta
from torchtitan_cad.runtime.kernels.select import get_kernel
from torchtitan_cad.runtime.packing import Message
from torchtitan_cad.runtime.transport.base import Peers, Routes
from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory, sending_stream
from torchtitan_cad.runtime.transport.symmetric import SymmetricTransport

KEY = 0
TIMEOUT_S = 20.0
TOY_BUFFERS_GB = 1e-3
"""All receive buffers of a rank on the CPU, where documents are short."""
"""Times a second that an interpreted kernel looks at a word, about."""


class RankStreams(NamedTuple):
    """The streams of one rank; None for both on the CPU.

    Attributes:
        computing: the stream of attention; None for the current one.
        sending: the stream on which its rows leave.
    """

    computing: "torch.cuda.Stream | None" = None
    sending: "torch.cuda.Stream | None" = None

    def on_computing(self) -> AbstractContextManager[object]:
        """A context in which the computing stream is the current one."""
        return (
            nullcontext()
            if self.computing is None
            else torch.cuda.stream(self.computing)
        )


class PlayedMemory(DeviceMemory):
    """Memory of a rank whose sending can be put off, for all ranks, until one of them waits for rows.

    By then all have started the exchange and have said that they are ready. Interpreted kernels cannot wait for what
    follows them. Nor can kernels of a device while its host loads others or allocates, which may wait for the device.
    What was put off runs on the stream of the rank that waits, so that results are wrong where ranks have streams of
    their own.
    """

    def __init__(
        self,
        memories: "Memories",
        own: Tensor,
        addresses: Sequence[int],
        sending: "torch.cuda.Stream | None",
    ) -> None:
        super().__init__(own, addresses, sending)
        self._memories = memories
        self._sending = False

    @contextmanager
    def sending(self) -> Iterator[None]:
        if not self._memories.puts_off:
            with super().sending():
                yield
            return
        self._sending = True
        yield
        self._sending = False

    def send(
        self,
        messages: Sequence[Message],
        routes: Routes,
        begins: Sequence[int],
        word: int,
        number: int,
    ) -> None:
        send = partial(super().send, messages, routes, begins, word, number)
        self._memories.later.append(send) if self._sending else send()

    def wait(
        self, peers: Peers, first_word: int, number: int, timeout_s: float
    ) -> list[int]:
        wait = partial(super().wait, peers, first_word, number, timeout_s)
        if self._sending:
            self._memories.later.append(wait)
            return []
        while self._memories.later:
            self._memories.later.pop(0)()
        return wait()


class Memories:
    """Hands out the memory that every rank allocates in turn.

    Attributes:
        streams: per rank, its streams.
        puts_off: whether sending waits in ``later``.
    """

    def __init__(self, streams: Sequence[RankStreams], device: torch.device) -> None:
        self.streams, self.num_ranks, self.device = streams, len(streams), device
        self.puts_off, self.later = True, list[Callable[[], object]]()
        self._rounds: list[list[Tensor]] = []
        self._calls = [0] * self.num_ranks

    def allocate(self, rank: int, num_bytes: int) -> DeviceMemory:
        """The ``n``-th allocation of a rank is of the same round as the others' ``n``-th."""
        number = self._calls[rank]
        self._calls[rank] += 1
        if number == len(self._rounds):
            buffers = [
                torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(self.num_ranks)
            ]
            self._rounds.append(buffers)
        buffers = self._rounds[number]
        addresses = [buffer.data_ptr() for buffer in buffers]
        return PlayedMemory(self, buffers[rank], addresses, self.streams[rank].sending)


class Layer:
    """Core attention of a layer, forward and backward, on all ranks.

    Args:
        plan: the plan under ``KEY``.
        streams: per rank, its streams; by default all ranks share the current stream and one stream for sending.
        kernel: attention kernel, by the name that ``cad.kernel`` takes.
        room: bytes of a receive buffer; by default those of training, and few on the CPU.
        puts_off: True if sending is put off in every run, so that no kernel waits for one that is launched later.

    Attributes:
        rows: per rank q, k, v and dO.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        streams: Sequence[RankStreams] | None = None,
        *,
        kernel: str = "auto",
        room: int | None = None,
        puts_off: bool = False,
    ) -> None:
        shape = plan.shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        num_ranks = plan.layout.num_ranks
        if streams is None:
            shared = RankStreams(
                None, sending_stream(device) if device.type == "cuda" else None
            )
            streams = [shared] * num_ranks
        self._layout = plan.layout
        self._streams = streams
        self._device = device
        self._puts_off = puts_off
        self._keys: list[int] = []
        self._memories = Memories(streams, device)
        self.engines = []
        self.rows = []
        if room is None:
            room = (
                buffer_bytes()
                if device.type == "cuda"
                else buffer_bytes(TOY_BUFFERS_GB)
            )
        for rank, tokens in enumerate(plan.layout.tokens_per_rank.tolist()):
            allocate = partial(self._memories.allocate, rank)
            transport = SymmetricTransport(
                range(num_ranks), rank, allocate, lambda: TIMEOUT_S, room
            )
            attention = get_kernel(kernel, device, shape)
            engine = CoreAttentionEngine(
                attention,
                transport,
                rank=rank,
                device=device,
                scale=shape.head_dim**-0.5,
            )
            self.engines.append(engine)
            heads = (
                shape.num_heads,
                shape.num_kv_heads,
                shape.num_kv_heads,
                shape.num_heads,
            )
            self.rows.append(
                [
                    torch.randn(tokens, n, shape.head_dim, device=device, dtype=dtype)
                    for n in heads
                ]
            )
        self.add_plan(KEY, plan)

    def add_plan(self, key: int, plan: Plan) -> None:
        """Make ``plan``, of the same layout, known to all ranks. On a GPU, run all plans while sending is put off."""
        self._keys.append(key)
        for engine in self.engines:
            engine.add_plan(key, plan)
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # rows, memory and tables are there for all streams
            self._memories.puts_off = True
            for known in self._keys:
                self(known)  # loads every kernel and allocates
            torch.cuda.synchronize()
            self._memories.puts_off = self._puts_off

    def __call__(self, key: int = KEY) -> list[tuple[Tensor, ...]]:
        """out, lse, dq, dk and dv of every rank, by the plan under ``key``."""
        calls = []
        for engine, streams, (q, k, v, _) in zip(
            self.engines, self._streams, self.rows, strict=True
        ):
            with streams.on_computing():
                calls.append(engine.begin_forward(q, k, v, key).send())
        forward = self._finish(calls)
        calls = []
        for engine, streams, (q, k, v, dout), results in zip(
            self.engines, self._streams, self.rows, forward, strict=True
        ):
            with streams.on_computing():
                calls.append(
                    engine.begin_backward(dout, Saved(q, k, v, *results), key).send()
                )
        backward = self._finish(calls)
        return [
            (*results[:2], *gradients)
            for results, gradients in zip(forward, backward, strict=True)
        ]

    def _finish(self, calls: Sequence[AttentionCall]) -> list[tuple[Tensor, ...]]:
        # First what every rank serves is computed: results return into buffers that their homes have to free before.
        results = []
        for step in (
            AttentionCall.compute,
            AttentionCall.send_home,
            AttentionCall.finish,
        ):
            results = []
            for streams, call in zip(self._streams, calls, strict=True):
                with streams.on_computing():
                    results.append(step(call))
        return results

    def undivided(self) -> list[Tensor]:
        """out, lse, dq, dk and dv by one kernel call over whole documents, of both ranks one after the other."""
        q, k, v, dout = (torch.cat(column) for column in zip(*self.rows, strict=True))
        engine = self.engines[0]
        offsets = [0, *self._layout.doc_lengths.cumsum().tolist()]
        call = VarlenArgs.from_numpy(
            offsets, offsets, causal=True, scale=engine.scale, device=engine.device
        )
        out, lse = engine.kernel.forward(q, k, v, call)
        return [
            out,
            lse,
            *engine.kernel.backward(
                dout, q, k, v, Merged(lse, row_delta(dout, out)), call
            ),
        ]

    def raise_if_late(self) -> None:
        """Raises PeerError if an exchange has failed on the device."""
        for engine in self.engines:
            engine.transport.prepare([])
