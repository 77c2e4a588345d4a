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
from torchtitan_cad.integration.pingpong.segment_graph import compile_graphs, run_graphs
from torchtitan_cad.planning.model.batch import divides_by_row
from torchtitan_cad.runtime.steps import combine, combine_with_lse, dispatch, step

NAMES = ("nano_batch_0", "nano_batch_1")
MOST_GRAPHS = 64
"""All segments share their code, which compiles anew by place in the model, layout of rows, and for gradients:
torch's own limit of 8 ends a job that validates rows of another number with stages of one block and of several.
"""


@dataclass
class _NanoBatch:
    """A nano-batch on its way through the blocks.

    ``x``, ``rope``, ``positions`` are what the next block would get; ``earlier`` is the nano-batch whose keys this one
    attends to as well, if rows are halved in the middle.
    """

    name: str
    key: int
    engine: str
    x: Tensor
    rope: Tensor
    positions: Tensor | None
    earlier: "_NanoBatch | None"

    def __post_init__(self) -> None:
        self.plan_key = torch.tensor(self.key, device="cpu")
        self._token: Any = None
        self._block: Any = None
        self._rows: Any = None
        """With the token, core attention in flight, from ``send`` until ``receive``: its block, q, k, v and shared."""
        self._attended: Any = None
        """Core attention's output [B, S, heads * head_dim], from ``receive`` until a segment has used it."""

    def open(self, block: nn.Module, second: "_NanoBatch") -> None:
        """Run the pre-hooks of ``block``, which this nano-batch and the ``second`` one enter (see fsdp_hooks.py)."""
        self.x, self._attended, self.rope, second.rope = open_block(
            block, self.x, self._attended, self.rope, second.rope
        )

    def close(self, block: nn.Module) -> None:
        """Run the hooks of ``block`` on its result: what core attention of the next block begins with, or ``x``."""
        if self._token is None:
            self.x = close_block(block, self.x)
        else:
            self._token = close_block(block, self._token)

    def run(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        """Call ``work(*args)`` under its name in traces."""
        with record_function(f"cad/{name}.{self.name}"):
            return work(*args)

    def send(
        self,
        block: BlockView,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: Tensor | None = None,
    ) -> None:
        if self.earlier is not None:
            _, first_k, first_v, first_shared = self.earlier._rows
            k = torch.cat((first_k, k))
            v = torch.cat((first_v, v))
            shared = None if shared is None else torch.cat((first_shared, shared))
        self.engine = block.engine or self.engine
        self._token = dispatch(q, k, v, self.plan_key, self.engine, shared=shared)
        self._block = block
        self._rows = (q, k, v, shared)

    def attend(self) -> None:
        self._token = step(self._token, "attend", self.plan_key, self.engine)

    def receive(self) -> None:
        *qkv, shared = self._rows
        rescale = self._block.rescale
        end: Callable[..., Any] = combine if rescale is None else combine_with_lse
        result = end(self._token, *qkv, self.plan_key, self.engine, shared=shared)
        out = result if rescale is None else rescale(*result)
        self._token = self._block = self._rows = None
        self._attended = out.view(self.x.shape[0], -1, out.shape[1] * out.shape[2])

    def take_attended(self) -> Tensor:
        """Give core attention's output away: the nano-batch no longer holds it."""
        if self._attended is None:
            self.receive()
        attended = self._attended
        self._attended = None
        return attended


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
        schedule = self.schedule
        nano_batches = self.schedule.nano_batches(xs, ropes, positions, key, in_rows)
        schedule.run_segment(
            self.start, nano_batches, self.index, before=False, after=True
        )
        schedule.attend(nano_batches)
        schedule.run_segment(
            self.end, nano_batches, self.index + 1, before=True, after=False
        )
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
        if self.graphs:
            keys = [torch.tensor(key + i, device="cpu") for i in range(2)]
            outputs = run_graphs(
                self.graphs, self.blocks, xs, ropes, halved, keys, in_rows
            )
        elif self.units:
            outputs = self._run_units(xs, ropes, halved, key, in_rows)
        else:
            outputs = self._run_segments(
                self.nano_batches(xs, ropes, halved, key, in_rows)
            )
        return torch.cat(outputs, dim)

    def _run_segments(self, nano_batches: list[_NanoBatch]) -> list[Tensor]:
        first, second = nano_batches
        ends = zip(
            self.segments, [None, *self.blocks], [*self.blocks, None], strict=True
        )
        for i, (segment, before, after) in enumerate(ends):
            if before is not None:
                first.receive()
            if after is not None:
                first.open(after.block, second)
            self.run_segment(
                segment,
                nano_batches,
                i,
                before=before is not None,
                after=after is not None,
            )
            if before is not None:
                second.close(before.block)
            if after is not None:
                self.attend(nano_batches)
        return [first.x, second.x]

    def _run_units(
        self,
        xs: Sequence[Tensor],
        ropes: Sequence[Tensor],
        positions: Sequence[Tensor | None],
        key: int,
        in_rows: bool,
    ) -> list[Tensor]:
        first, second = xs
        for block, unit in zip(self.blocks, self.units, strict=True):
            first, *ropes = open_block(block.block, first, *ropes)
            first, second = unit(
                (first, second), tuple(ropes), tuple(positions), key, in_rows
            )
            second = close_block(block.block, second)
        return [first, second]

    def run_segment(
        self,
        segment: Any,
        nano_batches: list[_NanoBatch],
        index: int,
        *,
        before: bool,
        after: bool,
    ) -> None:
        """Advance both nano-batches by the segment before the attention of block ``index``; ``attend`` follows.

        ``before`` and ``after`` tell whether a block ends there, and whether one begins.
        """
        name = " ".join([f"post {index - 1}"] * before + [f"pre {index}"] * after)
        for nano_batch in nano_batches:
            attended = nano_batch.take_attended() if before else None
            nano_batch.x, *qkv = nano_batch.run(
                name,
                segment,
                nano_batch.x,
                attended,
                nano_batch.rope,
                nano_batch.positions,
            )
            if after:
                nano_batch.send(self.blocks[index], *qkv)

    def attend(self, nano_batches: list[_NanoBatch]) -> None:
        """Run core attention between two segments."""
        for nano_batch in nano_batches:
            nano_batch.attend()

    def nano_batches(
        self, xs: Any, ropes: Any, positions: Any, key: int, in_rows: bool
    ) -> list[_NanoBatch]:
        """Make the microbatch's nano-batches; ``in_rows``: the second one's queries attend to the first one's keys."""
        nano_batches: list[_NanoBatch] = []
        for i, (name, x, rope, position) in enumerate(
            zip(NAMES, xs, ropes, positions, strict=True)
        ):
            nano_batches.append(
                _NanoBatch(
                    name,
                    key + i,
                    self.engine,
                    x,
                    rope,
                    position,
                    nano_batches[0] if in_rows and i else None,
                )
            )
        return nano_batches
