# SPDX-License-Identifier: BSD-3-Clause
"""Two ranks that one process plays in turns, with the real engine, transport and kernels.

Every step runs first for one rank, then for the other, so that whatever a rank waits for has been launched before.
The ranks' symmetric memory is plain memory of the device. On the CPU Triton's interpreter runs the transport's kernels,
and a list stands for the stream on which ranks send; on a GPU, in the first run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.planning import TASK_DTYPE, AttentionShape, Plan, PlannerConfig, TokenLayout
from torchtitan_cad.planning.exchange.messages import buffer_bytes
from torchtitan_cad.runtime.call import AttentionState, Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.kernels import VarlenArgs, get_kernel
from torchtitan_cad.runtime.kernels.base import Merged, row_delta
from torchtitan_cad.runtime.transport import SymmetricTransport
from torchtitan_cad.runtime.transport.base import Peers, Routes
from torchtitan_cad.runtime.transport.cuda_memory import DeviceMemory, polls_per_second, sending_stream
from torchtitan_cad.runtime.transport.memory import Epoch, Message

KEY = 0
TIMEOUT_S = 20.0
INTERPRETED_POLLS = 3000.0
"""Times a second that an interpreted kernel looks at a word, about."""


def two_rank_plan(tokens: int, shape: AttentionShape) -> Plan:
    """One document of ``tokens`` on rank 0, eight on rank 1. Rank 1 serves half of the long one's queries, some of them
    against a part of their keys; rank 0 serves one of the short ones. ``tokens`` is a multiple of 8.
    """
    half, most, short = tokens // 2, tokens // 4 * 3, tokens // 8
    layout = TokenLayout.from_segments([[(0, 0, tokens)], [(doc, 0, short) for doc in range(1, 9)]])
    tasks = [(0, 0, half, 0, half, 0), (0, half, most, 0, most, 1)]
    tasks += [(0, most, tokens, 0, half, 1), (0, most, tokens, half, tokens, 0)]
    tasks += [(doc, 0, short, 0, short, 0 if doc == 1 else 1) for doc in range(1, 9)]
    return Plan.from_tasks(layout, shape, PlannerConfig(), np.array(tasks, dtype=TASK_DTYPE))


class PlayedMemory(DeviceMemory):
    """Memory of a rank whose sending can be put off, for all ranks, until one of them waits for rows.

    By then all have started the exchange and have said that they are ready. Interpreted kernels cannot wait for what
    follows them. Nor can kernels of a device while its host loads others or allocates, which may wait for the device.
    """

    def __init__(self, memories: "Memories", own: Tensor, addresses: Sequence[int]) -> None:
        on_gpu = own.is_cuda
        stream = sending_stream(own.device) if on_gpu else None
        super().__init__(own, addresses, stream, polls_per_second(own.device) if on_gpu else INTERPRETED_POLLS)
        self._memories, self._sending = memories, False

    @contextmanager
    def sending(self) -> Iterator[None]:
        if not self._memories.puts_off:
            with super().sending():
                yield
            return
        self._sending = True
        yield
        self._sending = False

    def send(self, messages: Sequence[Message], routes: Routes, begins: Sequence[int], word: int, epoch: Epoch) -> None:
        send = partial(super().send, messages, routes, begins, word, epoch)
        self._memories.later.append(send) if self._sending else send()

    def wait(self, peers: Peers, first_word: int, epoch: Epoch, timeout_s: float) -> list[int]:
        wait = partial(super().wait, peers, first_word, epoch, timeout_s)
        if self._sending:
            self._memories.later.append(wait)
            return []
        while self._memories.later:
            self._memories.later.pop(0)()
        return wait()


class Memories:
    """Hands out the memory that every rank allocates in turn.

    Attributes:
        puts_off: whether sending waits in ``later``.
    """

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self.num_ranks, self.device = num_ranks, device
        self.puts_off, self.later = True, list[Callable[[], object]]()
        self._rounds: list[list[Tensor]] = []
        self._calls = [0] * num_ranks

    def allocate(self, rank: int, num_bytes: int) -> DeviceMemory:
        """The ``n``-th allocation of a rank is of the same round as the others' ``n``-th."""
        number = self._calls[rank]
        self._calls[rank] += 1
        if number == len(self._rounds):
            buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.num_ranks)]
            self._rounds.append(buffers)
        buffers = self._rounds[number]
        return PlayedMemory(self, buffers[rank], [buffer.data_ptr() for buffer in buffers])


class Layer:
    """Core attention of a layer, forward and backward, on both ranks.

    Attributes:
        rows: per rank q, k, v and dO.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        shape, dtype = plan.shape, torch.bfloat16 if device.type == "cuda" else torch.float32
        self._layout = plan.layout
        memories = Memories(plan.layout.num_ranks, device)
        self.engines, self.rows = [], []
        for rank, tokens in enumerate(plan.layout.tokens_per_rank.tolist()):
            transport = SymmetricTransport(
                range(plan.layout.num_ranks), rank, partial(memories.allocate, rank), lambda: TIMEOUT_S, buffer_bytes()
            )
            kernel = get_kernel("auto", device, shape)
            engine = CoreAttentionEngine(kernel, transport, rank=rank, device=device, scale=shape.head_dim**-0.5)
            engine.add_plan(KEY, plan)
            self.engines.append(engine)
            heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads
            self.rows.append([torch.randn(tokens, n, shape.head_dim, device=device, dtype=dtype) for n in heads])
        if device.type == "cuda":
            self()  # loads every kernel and allocates
            memories.puts_off = False

    def __call__(self) -> list[tuple[Tensor, ...]]:
        """out, lse, dq, dk and dv of either rank."""
        ranks = list(zip(self.engines, self.rows, strict=True))
        forward = self._finish([engine.send(engine.begin_forward(q, k, v, KEY)) for engine, (q, k, v, _) in ranks])
        backward = self._finish(
            [
                engine.send(engine.begin_backward(dout, Saved(q, k, v, *results), KEY))
                for (engine, (q, k, v, dout)), results in zip(ranks, forward, strict=True)
            ]
        )
        return [(*results[:2], *gradients) for results, gradients in zip(forward, backward, strict=True)]

    def _finish(self, calls: Sequence[AttentionState]) -> list[tuple[Tensor, ...]]:
        # First what every rank serves is computed: results return into buffers that their homes have to free before.
        ranks = list(zip(self.engines, calls, strict=True))
        for engine, call in ranks:
            engine.attend_first(call)
        for engine, call in ranks:
            engine.attend(call)
        return [engine.finish(call) for engine, call in ranks]

    def undivided(self) -> list[Tensor]:
        """out, lse, dq, dk and dv by one kernel call over whole documents, of both ranks one after the other."""
        q, k, v, dout = (torch.cat(column) for column in zip(*self.rows, strict=True))
        engine, offsets = self.engines[0], [0, *self._layout.doc_lengths.cumsum().tolist()]
        call = VarlenArgs.from_numpy(offsets, offsets, causal=True, scale=engine.scale, device=engine.device)
        out, lse = engine.kernel.forward(q, k, v, call)
        return [out, lse, *engine.kernel.backward(dout, q, k, v, Merged(lse, row_delta(dout, out)), call)]

    def raise_if_late(self) -> None:
        """Raises PeerError if an exchange has failed on the device."""
        for engine in self.engines:
            engine.transport.prepare([])
