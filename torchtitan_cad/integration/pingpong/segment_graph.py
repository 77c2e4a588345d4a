# SPDX-License-Identifier: BSD-3-Clause
"""A segment of both nano-batches as one compiled graph, between two points where FSDP2's hooks run.

    wait for outputs of A, segment of A, send q, k, v of A; the same of B; wait for q, k, v of A, attend, send outputs;
    the same of B

Exchanges run on side streams with events between, all inside the graph; the next graph waits for those that are in
flight at its end, by the same events. On CPU there are no streams, and the host takes the steps in this order.

Backward of a graph is one autograd node, so a block's gradients are reduced once those of both nano-batches are known.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_cad.runtime import streams, traced

FIRST_TORCH = "2.14.1"
"""Before, compiled graphs lose the order of streams and events."""

COMPILE_OPTIONS: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "allow_buffer_reuse": False,
}
"""Inductor (torch 2.14, 2.15) would else move a wait next to its start and write over what is still being sent."""

Carried = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""A nano-batch's core attention between two graphs: token, keepalive, q, k, v. Gradients flow through the token."""


class SideStreams:
    """Per nano-batch a side stream and the events of its exchanges, there and back: each ready to start, and done.

    One side stream for both would let the attention of one nano-batch wait for the other's exchange in backward.
    """

    def __init__(self, device: torch.device) -> None:
        streams.repair_graphs()
        module: Any = streams.module_of(device)
        self.current = module.current_stream
        self.sides = [module.Stream(device, priority=-1) for _ in range(2)]
        self.there, self.back = (
            [(module.Event(), module.Event()) for _ in range(2)] for _ in range(2)
        )
        self.end = module.Event()


class SegmentGraph(nn.Module):
    """See the module's docstring.

    Args:
        segment: a ``BlockSegment``, or what activation checkpointing has wrapped around it.
        ends, begins: whether a block ends in it, and whether one begins.
        engine: name of the registered engine.
        side_streams: None on CPU.
    """

    def __init__(
        self,
        segment: nn.Module,
        ends: bool,
        begins: bool,
        engine: str,
        side_streams: SideStreams | None,
    ) -> None:
        super().__init__()
        self.segment = segment
        self.ends = ends
        self.begins = begins
        self.engine = engine
        self.side_streams = side_streams

    def forward(
        self,
        xs: Sequence[Tensor],
        pending: Sequence[Carried],
        ropes: Sequence[Tensor | None],
        positions: Sequence[Tensor | None],
        keys: Sequence[Tensor],
        in_rows: bool,
    ) -> tuple[list[Tensor], list[Carried]]:
        """Run the graph; return the input of the next block, or the model's output, and what is in flight.

        Args:
            xs: of both nano-batches the input [B, S, dim] of the block that ends, or of the first one.
            pending: what the graph before has left in flight.
            ropes, positions: as in ``BlockSegment``.
            keys: of the plans, int64 host tensors.
            in_rows: the second nano-batch attends to the first one's keys.
        """
        new_xs: list[Tensor] = []
        sent: list[Carried] = []
        for i in (0, 1):
            attended = None
            if self.ends:
                earlier = None
                if self.side_streams is None and i == 1:
                    earlier = sent[0][0] if sent else new_xs[0].detach()
                out = self._receive(i, pending[i], earlier, keys[i])
                attended = out.view(xs[i].shape[0], -1, out.shape[1] * out.shape[2])
            x, q, k, v = self.segment(xs[i], attended, ropes[i], positions[i])
            new_xs.append(x)
            if self.begins:
                if in_rows and i == 1:
                    _, _, _, first_k, first_v = sent[0]
                    k = torch.cat((first_k, k))
                    v = torch.cat((first_v, v))
                sent.append(self._send(i, q, k, v, keys[i]))
        pending_after = [self._attend(i, call, keys[i]) for i, call in enumerate(sent)]
        if self.side_streams is not None:
            # Otherwise the graph cannot be divided into forward and backward (torch 2.14 and 2.15).
            self.side_streams.end.record(self.side_streams.current())
        return new_xs, pending_after

    def _receive(
        self, i: int, call: Carried, earlier: Tensor | None, key: Tensor
    ) -> Tensor:
        """Return core attention's output [T, Hq, Dv] of nano-batch ``i``; ``earlier`` as ``traced.after``."""
        token, keepalive, q, k, v = call
        keepalive = traced.step(keepalive, "keepalive", key, self.engine)
        if earlier is not None:
            token = traced.after(token, earlier)
        token = self._wait("back", i, "receive", token, key)
        out, *_ = traced.combine(token, keepalive, q, k, v, None, key, self.engine)
        return out

    def _send(self, i: int, q: Tensor, k: Tensor, v: Tensor, key: Tensor) -> Carried:
        """Send rows of nano-batch ``i`` to their servers."""
        token, keepalive = traced.prepare(q, k, v, None, key, self.engine)
        token = self._exchange("there", i, "dispatch", token, key)
        return token, keepalive, q, k, v

    def _attend(self, i: int, call: Carried, key: Tensor) -> Carried:
        """Attend to the rows that have arrived, and send the outputs of nano-batch ``i`` home."""
        token, keepalive, q, k, v = call
        token = self._wait("there", i, "arrive", token, key)
        token, keepalive = traced.attend(token, keepalive, key, self.engine)
        token = self._exchange("back", i, "give_back", token, key)
        return token, keepalive, q.detach(), k.detach(), v.detach()

    def _wait(
        self, way: str, nano_batch: int, step: str, token: Tensor, key: Tensor
    ) -> Tensor:
        """Make the current stream wait for an exchange; ``step`` starts one in backward, on the side stream."""
        if self.side_streams is None:
            return traced.step(token, step, key, self.engine)
        with self.side_streams.sides[nano_batch]:
            token = traced.step(token, step, key, self.engine)
        self.side_streams.current().wait_event(
            getattr(self.side_streams, way)[nano_batch][1]
        )
        return token

    def _exchange(
        self, way: str, nano_batch: int, step: str, token: Tensor, key: Tensor
    ) -> Tensor:
        """Run an exchange on the side stream, after what the current one has done so far."""
        if self.side_streams is None:
            return traced.step(token, step, key, self.engine)
        ready, done = getattr(self.side_streams, way)[nano_batch]
        side = self.side_streams.sides[nano_batch]
        ready.record(self.side_streams.current())
        side.wait_event(ready)
        with side:
            token = traced.step(token, step, key, self.engine)
            done.record(side)
        return token


def compile_graphs(
    segments: Sequence[nn.Module], engine: str, device: torch.device
) -> list[Callable[..., Any]]:
    """Return the graphs of ``segments``, each compiled by Inductor; those of one kind are one graph."""
    side_streams = None
    options = COMPILE_OPTIONS
    if device.type != "cpu":
        from torchtitan_cad.integration.pingpong.recomputation import (
            RecomputeFromBefore,
        )

        side_streams = SideStreams(device)
        options = options | {"joint_custom_pre_pass": RecomputeFromBefore()}
    last = len(segments) - 1
    graphs: list[Callable[..., Any]] = []
    for i, segment in enumerate(segments):
        graph = SegmentGraph(
            segment,
            ends=i > 0,
            begins=i < last,
            engine=engine,
            side_streams=side_streams,
        )
        graphs.append(torch.compile(graph, fullgraph=True, options=options))
    return graphs
