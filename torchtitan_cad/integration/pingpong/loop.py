# SPDX-License-Identifier: BSD-3-Clause
"""``nano_batches = 2``: two nano-batches take turns, so that one's exchange hides behind the other's work.

The loop over the blocks, A and B being the nano-batches and segment i the linear work between the attentions of blocks
i - 1 and i (block.py):

    wait for outputs of A, segment i of A, send q, k, v of A      | meanwhile B's outputs travel
    wait for outputs of B, segment i of B, send q, k, v of B      | A's q, k, v
    wait for q, k, v of A, attend, send outputs of A             | B's q, k, v
    wait for q, k, v of B, attend, send outputs of B             | A's outputs

The blocks' own work is behind ``BlockView``.

With ``traced_on`` a segment of both nano-batches is one compiled graph, exchanges included (segment_graph.py). Without
it exchanges lie between the segments and are never compiled.

Autograd runs the same in reverse, because among nodes that are ready it takes the one made last. Where whole blocks are
checkpointed, the unit that is recomputed is both nano-batches of a block, exchanges included, so all ranks repeat them
in the same order; segments do not cross blocks.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from torchtitan_cad.integration.pingpong.block import BlockSegment, BlockView
from torchtitan_cad.integration.pingpong.fsdp_hooks import close_block, open_block
from torchtitan_cad.integration.pingpong.segment_graph import compile_graphs
from torchtitan_cad.planning.model.batch import divides_by_row
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.steps import combine, dispatch, step

NAMES = ("nano_batch_0", "nano_batch_1")
MOST_GRAPHS = 64
"""All segments share their code, which compiles anew by place in the model, layout of rows, and for gradients:
torch's own limit of 8 ends a job that validates rows of another number with stages of one block and of several.
"""


@dataclass
class _NanoBatch:
    """A nano-batch on its way through the blocks.

    ``x``, ``rope``, ``positions`` are what the next block would get; ``earlier`` is the nano-batch whose keys this one
    attends to as well, if rows are halved in the middle. ``token`` and ``rows`` are its core attention in flight: q, k,
    v and what heads share, or what a graph carries to the next (segment_graph.py).
    """

    name: str
    key: int
    engine: str
    x: Tensor
    rope: Tensor
    positions: Tensor | None
    earlier: "_NanoBatch | None" = None
    token: Any = None
    rows: Any = None
    block: Any = None

    def __post_init__(self) -> None:
        self.plan_key = torch.tensor(self.key, device="cpu")

    def open(self, block: nn.Module, second: "_NanoBatch") -> None:
        """Run the pre-hooks of ``block``, which this nano-batch and the ``second`` one enter (see fsdp_hooks.py)."""
        self.x, self.token, self.rope, second.rope = open_block(
            block, self.x, self.token, self.rope, second.rope
        )

    def close(self, block: nn.Module) -> None:
        """Run the hooks of ``block`` on its result: core attention of the next block, or ``x``."""
        if self.token is None:
            self.x = close_block(block, self.x)
        else:
            self.token = close_block(block, self.token)

    def run(self, name: str, segment: Any, attended: Tensor | None) -> Any:
        """Run linear work, which traces show under its name."""
        with record_function(f"cad/{name}.{self.name}"):
            return segment(self.x, attended, self.rope, self.positions)

    def send(
        self,
        block: BlockView,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: Tensor | None = None,
    ) -> None:
        if self.earlier is not None:
            _, first_k, first_v, first_shared = self.earlier.rows
            k = torch.cat((first_k, k))
            v = torch.cat((first_v, v))
            shared = None if shared is None else torch.cat((first_shared, shared))
        self.engine = block.engine or self.engine
        self.token = dispatch(q, k, v, shared, self.plan_key, self.engine)
        self.block = block
        self.rows = (q, k, v, shared)

    def attend(self) -> None:
        self.token = step(self.token, "attend", self.plan_key, self.engine)

    def receive(self) -> Tensor:
        """Return core attention's output [B, S, heads * head_dim]."""
        out, lse, *_ = combine(self.token, *self.rows, self.plan_key, self.engine)
        if self.block.rescale is not None:
            out = self.block.rescale(out, lse)
        self.token = None
        self.rows = None
        return out.view(self.x.shape[0], -1, out.shape[1] * out.shape[2])


class _Unit(nn.Module):
    """A whole block for both nano-batches: what activation checkpointing recomputes at once."""

    schedule: "PingPong"

    def __init__(self, block: BlockView, index: int, schedule: "PingPong") -> None:
        super().__init__()
        self.start = BlockSegment(None, block)
        self.end = BlockSegment(block, None)
        self.index = index
        self.__dict__["schedule"] = schedule  # not a submodule

    def forward(
        self,
        xs: tuple[Tensor, Tensor],
        ropes: tuple,
        positions: tuple,
        key: int,
        in_rows: bool,
    ) -> tuple:
        """Compute the next block's inputs of both nano-batches from this one's, ``xs`` [B, S, dim]."""
        nano_batches = self.schedule.nano_batches(xs, ropes, positions, key, in_rows)
        self.schedule.run_segment(self.start, nano_batches, begins=self.index)
        for nano_batch in nano_batches:
            nano_batch.attend()
        self.schedule.run_segment(self.end, nano_batches, ends=self.index)
        return tuple(nano_batch.x for nano_batch in nano_batches)


class PingPong:
    """Runs the blocks of a model for both nano-batches.

    Args:
        blocks: of the model, in order. FSDP2 may shard them later, in place.
        engine: name of the registered engine, which has plans for a microbatch's two nano-batches under its key and the
            next number.
        traced_on: device whose streams are traced where compiling is asked for (segment_graph.py); not with tensor
            parallelism, nor where whole blocks are checkpointed. None: exchanges are not compiled.
    """

    def __init__(
        self,
        blocks: Iterable[BlockView],
        engine: str,
        *,
        traced_on: torch.device | None = None,
    ) -> None:
        self.blocks = list(blocks)
        self.engine = engine
        self.traced_on = traced_on
        self.traceable = all(block.traceable for block in self.blocks)
        self.segments: list[Any] = (
            list(map(BlockSegment, [None, *self.blocks], [*self.blocks, None]))
            if self.blocks
            else []
        )
        self.units: list[nn.Module] = []
        self.graphs: list[Callable[..., Any]] = []

    def checkpoint(
        self,
        wrap: Callable[[list[nn.Module]], list[nn.Module]],
        *,
        whole_blocks: bool,
    ) -> None:
        """Apply activation checkpointing.

        Args:
            wrap: gets modules that the loop runs, and returns modules to run in their place.
            whole_blocks: whether these are whole blocks, recomputed from their inputs, attention included; otherwise
                they are segments.
        """
        if whole_blocks:
            self.segments = []
            self.units = wrap(
                [_Unit(block, i, self) for i, block in enumerate(self.blocks)]
            )
            return
        self.segments = wrap(self.segments)

    def compile(self, backend: str) -> None:
        """Compile every segment, or what can be traced of it, as one graph; with ``traced_on`` those of both as one."""
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
        if self.traced_on is not None:
            assert not self.units, "see torchtitan_v0_2/streams.py"
            self.graphs = compile_graphs(self.segments, self.engine, self.traced_on)
            return

        compiled: Any = functools.partial(
            torch.compile, backend=backend, fullgraph=True
        )
        if not self.traceable:
            for block in self.blocks:
                for name in block.graphs:
                    setattr(block, name, compiled(getattr(block, name)))
            return
        self.segments = [compiled(segment) for segment in self.segments]
        for unit in self.units:
            inner: Any = getattr(unit, "_checkpoint_wrapped_module", unit)
            inner.start = compiled(inner.start)
            inner.end = compiled(inner.end)

    def __call__(
        self, x: Tensor, rope: Tensor, positions: Tensor | None, key: int
    ) -> Tensor:
        """Run the blocks on x [B, S, dim] (S / TP under TP), for an output of its shape; ``rope`` as a block's."""
        if not self.blocks:
            return x
        in_rows = not divides_by_row(x.shape[0])
        dim = 1 if in_rows else 0
        ropes = [rope, rope]
        if in_rows and positions is None:
            middle = x.shape[1] // 2
            ropes = [rope[:middle], rope[middle : 2 * middle]]
        halved = (None, None) if positions is None else positions.chunk(2, dim)
        xs: Sequence[Tensor] = x.chunk(2, dim)
        nano_batches = self.nano_batches(xs, ropes, halved, key, in_rows)
        self.run_blocks(nano_batches, in_rows)
        return torch.cat([nano_batch.x for nano_batch in nano_batches], dim)

    def run_blocks(self, nano_batches: list[_NanoBatch], in_rows: bool) -> None:
        """Run what ``checkpoint`` and ``compile`` have made of the blocks, with the blocks' hooks around."""
        first, second = nano_batches
        if self.graphs:
            streams.forget_objects_of_graphs(first.x.device)
        ends: list[Any] = [None, *self.blocks]
        begins: list[Any] = [*self.blocks, None]
        parts: Sequence[Any] = self.graphs or self.segments
        if self.units:
            ends = begins = self.blocks
            parts = self.units
        for i, (part, before, after) in enumerate(
            zip(parts, ends, begins, strict=True)
        ):
            if after is not None:
                first.open(after.block, second)
            if self.units:
                _run_unit(part, nano_batches, in_rows)
            elif self.graphs:
                _run_graph(part, nano_batches, i, in_rows, begins=after is not None)
            else:
                self.run_segment(
                    part,
                    nano_batches,
                    ends=None if before is None else i - 1,
                    begins=None if after is None else i,
                )
            if before is not None:
                second.close(before.block)
            if parts is self.segments and after is not None:
                for nano_batch in nano_batches:
                    nano_batch.attend()

    def run_segment(
        self,
        segment: Any,
        nano_batches: list[_NanoBatch],
        *,
        ends: int | None = None,
        begins: int | None = None,
    ) -> None:
        """Advance both nano-batches by the segment in which a block ``ends`` and one ``begins``, given by number."""
        names = []
        if ends is not None:
            names.append(f"post {ends}")
        if begins is not None:
            names.append(f"pre {begins}")
        for nano_batch in nano_batches:
            attended = None if ends is None else nano_batch.receive()
            nano_batch.x, *qkv = nano_batch.run(" ".join(names), segment, attended)
            if begins is not None:
                nano_batch.send(self.blocks[begins], *qkv)

    def nano_batches(
        self, xs: Any, ropes: Any, positions: Any, key: int, in_rows: bool
    ) -> list[_NanoBatch]:
        """Make the microbatch's nano-batches; ``in_rows``: the second one's queries attend to the first one's keys."""
        first, second = (
            _NanoBatch(name, key + i, self.engine, x, rope=rope, positions=position)
            for i, (name, x, rope, position) in enumerate(
                zip(NAMES, xs, ropes, positions, strict=True)
            )
        )
        if in_rows:
            second.earlier = first
        return [first, second]


def _run_unit(unit: nn.Module, nano_batches: list[_NanoBatch], in_rows: bool) -> None:
    first, second = nano_batches
    first.x, second.x = unit(
        (first.x, second.x),
        (first.rope, second.rope),
        (first.positions, second.positions),
        first.key,
        in_rows,
    )


def _run_graph(
    graph: Callable[..., Any],
    nano_batches: list[_NanoBatch],
    index: int,
    in_rows: bool,
    *,
    begins: bool,
) -> None:
    """Run the graph of a segment on both nano-batches; arguments as in ``SegmentGraph``."""
    pending = [
        (part.token, *part.rows) for part in nano_batches if part.token is not None
    ]
    with record_function(f"cad/segments {index}"):
        xs, pending = graph(
            [part.x for part in nano_batches],
            pending,
            [part.rope if begins else None for part in nano_batches],
            [part.positions for part in nano_batches],
            [part.plan_key for part in nano_batches],
            in_rows,
        )
    for part, x in zip(nano_batches, xs, strict=True):
        part.x = x
        part.token = None
    if begins:
        for part, (token, *rows) in zip(nano_batches, pending, strict=True):
            part.token = token
            part.rows = rows
