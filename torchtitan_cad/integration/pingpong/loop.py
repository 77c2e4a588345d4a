# SPDX-License-Identifier: BSD-3-Clause
"""``nano_batches = 2``: the halves of a microbatch take turns, so that one's exchange hides behind the other's work.

The loop over the blocks, A and B being the halves and region i the linear work between the attentions of blocks i - 1
and i (block.py):

    wait for outputs of A, region i of A, send q, k, v of A      | meanwhile B's outputs travel
    wait for outputs of B, region i of B, send q, k, v of B      | A's q, k, v
    wait for q, k, v of A, attend, send outputs of A             | B's q, k, v
    wait for q, k, v of B, attend, send outputs of B             | A's outputs

Under tensor parallelism a region is cut where TP communicates, and the halves take turns within it as well
(``_ORDER``). The blocks' own work is behind ``BlockView``.

With ``traced_on`` such a turn of both halves is one compiled graph, exchanges included (turn.py). Without it exchanges
lie between the regions and are never compiled.

Autograd runs the same in reverse, because among nodes that are ready it takes the one made last. Where whole blocks are
checkpointed, the unit that is recomputed is both halves of a block, exchanges included, so all ranks repeat them in the
same order; regions do not cross blocks.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from torchtitan_cad.integration.pingpong.block import BlockView, Region
from torchtitan_cad.integration.pingpong.fsdp_hooks import close_block, open_block
from torchtitan_cad.integration.pingpong.turn import compile_turns, run_turns
from torchtitan_cad.planning.model.batch import divides_by_row
from torchtitan_cad.runtime.steps import combine, combine_with_lse, dispatch, step
from torchtitan_cad.runtime.tp_overlap.sequence_parallel import Boundary

NAMES = ("ping", "pong")
MOST_GRAPHS = 64
"""Regions or turns share their code, which compiles anew by place in the model, layout of rows, and for gradients:
torch's own limit of 8 ends a job that validates rows of another number with stages of one block and of several.
"""


@dataclass
class _Half:
    """One half of a microbatch on its way through the blocks.

    ``x``, ``rope``, ``positions`` are what the next block would get; ``earlier`` is the half whose keys this one
    attends to as well, if rows are halved in the middle.
    """

    name: str
    key: int
    engine: str
    x: Tensor
    rope: Tensor
    positions: Tensor | None
    earlier: "_Half | None"

    def __post_init__(self) -> None:
        self.plan_key = torch.tensor(self.key, device="cpu")
        # The other half's linear work comes between, and after in backward.
        self._undivided = ", undivided" if self.name == NAMES[0] else ""
        self._token: Any = None
        self._block: Any = None
        self._rows: Any = None
        """With the token, core attention in flight, from ``send`` until ``receive``: its block, q, k, v and shared."""
        self._attended: Any = None
        """Core attention's output [B, S, heads * head_dim], from ``receive`` until a region has used it."""

    def open(self, block: nn.Module, second: "_Half") -> None:
        """Run the pre-hooks of ``block``, which this half and the ``second`` one enter (see fsdp_hooks.py)."""
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

    def send(self, block: BlockView, q: Tensor, k: Tensor, v: Tensor, shared: Tensor | None = None) -> None:
        if self.earlier is not None:
            _, first_k, first_v, first_shared = self.earlier._rows
            k, v = torch.cat((first_k, k)), torch.cat((first_v, v))
            shared = None if shared is None else torch.cat((first_shared, shared))
        self.engine = block.engine or self.engine
        self._token = dispatch(q, k, v, self.plan_key, self.engine, shared=shared)
        self._block, self._rows = block, (q, k, v, shared)

    def attend(self, part: str = "") -> None:
        """Attend, or do the "first" part of it or the "rest"."""
        name = f"attend_{part}{self._undivided}" if part else "attend"
        self._token = step(self._token, name, self.plan_key, self.engine)

    def receive(self) -> None:
        *qkv, shared = self._rows
        call = self._token, *qkv, self.plan_key, self.engine
        if self._block.rescale is None:
            out = combine(*call, shared=shared)
        else:
            out = self._block.rescale(*combine_with_lse(*call, shared=shared))
        self._token = self._block = self._rows = None
        self._attended = out.view(self.x.shape[0], -1, out.shape[1] * out.shape[2])

    def exchange(
        self, boundary: Boundary, summands: Tensor | None, norm: tuple[Tensor, float] | None
    ) -> tuple[Boundary, Tensor]:
        """Start the reduction of ``summands``, and with a ``norm`` its application and the gathering."""
        weight, eps = norm or (None, 0.0)
        return boundary, boundary.start(summands, self.x, weight, eps)

    def gather(self, boundary: Boundary, token: Tensor) -> Tensor:
        """Wait for an exchange; return what was gathered."""
        self.x, gathered = boundary.wait(token)
        return gathered

    def take_attended(self) -> Tensor:
        """Give core attention's output away: the half no longer holds it."""
        if self._attended is None:
            self.receive()
        attended, self._attended = self._attended, None
        return attended


_ORDER: dict[tuple[bool, bool], tuple[int | str, ...]] = {
    (True, True): (0, "rest", 0, 1, 0, 1, 0, 1, "first", 1),
    (True, False): (0, "rest", 0, 1, 0, 1, 0, 1, 1),
    (False, True): (0, 1, 0, 1, "first"),
}
"""The order in which the halves run a cut region, by whether a block ends in it and whether one begins: 0 and 1 for a
half's next part, "first" for the first part of the first half's attention, "rest" for the rest of the second half's."""


class _Unit(nn.Module):
    """A whole block for both halves: what activation checkpointing recomputes at once."""

    schedule: "PingPong"

    def __init__(self, block: BlockView, index: int, schedule: "PingPong") -> None:
        super().__init__()
        self.start, self.end = Region(None, block), Region(block, None)
        self.index = index
        self.__dict__["schedule"] = schedule  # not a submodule

    def forward(self, xs: tuple[Tensor, Tensor], ropes: tuple, positions: tuple, key: int, in_rows: bool) -> tuple:
        """Compute the next block's inputs of both halves from this one's, ``xs`` [B, S, dim]."""
        schedule, halves = self.schedule, self.schedule.halves(xs, ropes, positions, key, in_rows)
        schedule.run_region(self.start, halves, self.index, before=False, after=True)
        schedule.attend(halves)
        schedule.run_region(self.end, halves, self.index + 1, before=True, after=False)
        return tuple(half.x for half in halves)


class PingPong:
    """Runs the blocks of a model for both halves of a microbatch.

    Args:
        blocks: of the model, in order. FSDP2 may shard them later, in place.
        engine: name of the registered engine, which has plans for a microbatch's two halves under its key and the next
            number.
        new_boundary: makes what hides TP's collectives as well, if the blocks can be split.
        traced_on: device whose streams are traced where compiling is asked for (turn.py); not with tensor parallelism,
            nor where whole blocks are checkpointed. None: exchanges are not compiled.
    """

    def __init__(
        self,
        blocks: Iterable[BlockView],
        engine: str,
        new_boundary: Callable[[], Boundary] | None = None,
        *,
        traced_on: torch.device | None = None,
    ) -> None:
        self.blocks, self.engine, self.new_boundary = list(blocks), engine, new_boundary
        self.traced_on = traced_on
        self.splits = new_boundary is not None and all(block.can_split for block in self.blocks)
        """Whether regions run by parts, between which TP communicates."""
        self.traceable = all(block.traceable for block in self.blocks)
        self.regions: list[Any] = list(map(Region, [None, *self.blocks], [*self.blocks, None])) if self.blocks else []
        self.units: list[nn.Module] = []
        self.turns: list[Callable[..., Any]] = []

    def checkpoint(
        self,
        wrap: Callable[[list[nn.Module]], list[nn.Module]],
        kept: Literal["blocks", "regions", "operators"],
    ) -> None:
        """Apply activation checkpointing.

        Args:
            wrap: gets modules that the loop runs, and returns modules to run in their place.
            kept: what these are. "blocks": whole blocks, recomputed from their inputs. "regions". "operators": regions
                in which the outputs of chosen operators are kept, core attention's among them.
        """
        if kept == "blocks":
            self.regions, self.units = [], wrap([_Unit(block, i, self) for i, block in enumerate(self.blocks)])
            return
        if kept == "operators":
            # What a part gathers from other TP ranks would be kept as its input, where a whole region gathers it again.
            self.splits = False
        self.regions = wrap(self.regions)

    def compile(self, backend: str) -> None:
        """Compile every region, or its parts, as one graph each; with ``traced_on`` every turn, by Inductor."""
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_GRAPHS)
        if self.traced_on is not None:
            assert not self.units, "see torchtitan_v0_2/checks.py"
            self.turns = compile_turns(self.regions, self.engine, self.traced_on)
            return

        compiled: Any = functools.partial(torch.compile, backend=backend, fullgraph=True)
        if self.splits or not self.traceable:
            for block in self.blocks:
                parts = ("attention_out", "expand", "contract", "project_normed") if self.splits else block.graphs
                for name in parts:
                    setattr(block, name, compiled(getattr(block, name)))
            return
        self.regions = [compiled(region) for region in self.regions]
        for unit in self.units:
            inner: Any = getattr(unit, "_checkpoint_wrapped_module", unit)
            inner.start, inner.end = compiled(inner.start), compiled(inner.end)

    def __call__(self, x: Tensor, rope: Tensor, positions: Tensor | None, key: int) -> Tensor:
        """Run the blocks on x [B, S, dim] (S / TP under TP), for an output of its shape; ``rope`` as a block's."""
        if not self.blocks:
            return x
        in_rows = not divides_by_row(x.shape[0])
        dim = 1 if in_rows else 0
        ropes = (rope, rope)
        if in_rows and positions is None:
            middle = x.shape[1] // 2
            ropes = (rope[:middle], rope[middle : 2 * middle])
        halved = (None, None) if positions is None else positions.chunk(2, dim)
        xs: Sequence[Tensor] = x.chunk(2, dim)
        if self.turns:
            keys = [torch.tensor(key + i, device="cpu") for i in range(2)]
            outputs = run_turns(self.turns, self.blocks, xs, ropes, halved, keys, in_rows)
        elif self.units:
            outputs = self._run_units(xs, ropes, halved, key, in_rows)
        else:
            outputs = self._run_regions(self.halves(xs, ropes, halved, key, in_rows))
        return torch.cat(outputs, dim)

    def _run_regions(self, halves: list[_Half]) -> list[Tensor]:
        first, second = halves
        ends = zip(self.regions, [None, *self.blocks], [*self.blocks, None], strict=True)
        for i, (region, before, after) in enumerate(ends):
            if before is not None:
                first.receive()
            if after is not None:
                first.open(after.block, second)
            self.run_region(region, halves, i, before=before is not None, after=after is not None)
            if before is not None:
                second.close(before.block)
            if after is not None:
                self.attend(halves)
        return [first.x, second.x]

    def _run_units(
        self, xs: Sequence[Tensor], ropes: Sequence[Tensor], positions: Sequence[Tensor | None], key: int, in_rows: bool
    ) -> list[Tensor]:
        first, second = xs
        for block, unit in zip(self.blocks, self.units, strict=True):
            first, *ropes = open_block(block.block, first, *ropes)
            first, second = unit((first, second), tuple(ropes), tuple(positions), key, in_rows)
            second = close_block(block.block, second)
        return [first, second]

    def run_region(self, region: Any, halves: list[_Half], index: int, *, before: bool, after: bool) -> None:
        """Advance both halves by the region before the attention of block ``index``; see ``attend`` for what follows.

        ``before`` and ``after`` tell whether a block ends there, and whether one begins.
        """
        if self.splits:
            parts = [self._parts(region, half, index) for half in halves]
            for turn in _ORDER[before, after]:
                if isinstance(turn, int):
                    next(parts[turn], None)
                else:
                    halves[turn == "rest"].attend(turn)
            return
        name = " ".join([f"post {index - 1}"] * before + [f"pre {index}"] * after)
        for half in halves:
            attended = half.take_attended() if before else None
            half.x, *qkv = half.run(name, region, half.x, attended, half.rope, half.positions)
            if after:
                half.send(self.blocks[index], *qkv)

    def _parts(self, region: Region, half: _Half, index: int) -> Iterator[None]:
        """Run a cut region in parts: out of attention; into the MLP; out of it; q, k, v.

        The first and the third start what TP communicates, and the parts after them wait for it.
        """
        assert self.new_boundary is not None
        before, after, end = region.before, region.after, f"post {index - 1}"
        summands = None
        if before is not None:
            out = half.run(f"{end} out", before.attention_out, half.take_attended())
            boundary, token = half.exchange(self.new_boundary(), out, before.mlp_norm())
            del out
            yield
            hidden = half.run(f"{end} expand", before.expand, half.gather(boundary, token))
            yield
            summands = half.run(f"{end} contract", before.contract, hidden)
            del hidden
        boundary, token = half.exchange(self.new_boundary(), summands, after and after.attention_norm())
        del summands
        yield
        gathered = half.gather(boundary, token)
        if after is not None:
            half.send(after, *half.run(f"pre {index}", after.project_normed, gathered, half.rope, half.positions))

    def attend(self, halves: list[_Half]) -> None:
        """Run core attention between two regions, less what belongs to their parts."""
        first, second = halves
        if self.splits:
            first.attend("rest")
            second.attend("first")
        else:
            first.attend()
            second.attend()

    def halves(self, xs: Any, ropes: Any, positions: Any, key: int, in_rows: bool) -> list[_Half]:
        """Make the microbatch's halves; ``in_rows``: the second one's queries attend to the first one's keys."""
        halves: list[_Half] = []
        for i, (name, x, rope, position) in enumerate(zip(NAMES, xs, ropes, positions, strict=True)):
            halves.append(_Half(name, key + i, self.engine, x, rope, position, halves[0] if in_rows and i else None))
        return halves
