"""``nano_batches = 2``: the halves of a microbatch take turns, so that one's exchange hides behind the other's work.

The loop over the blocks, A and B being the halves and region i the linear work between the attentions of blocks i - 1
and i (regions.py):

    wait for outputs of A, region i of A, send q, k, v of A      | meanwhile B's outputs travel
    wait for outputs of B, region i of B, send q, k, v of B      | A's q, k, v
    wait for q, k, v of A, attend, send outputs of A             | B's q, k, v
    wait for q, k, v of B, attend, send outputs of B             | A's outputs

Autograd runs the same in reverse, because among nodes that are ready it takes the one made last. Exchanges lie outside
of the regions and are never compiled. Where torchtitan checkpoints whole blocks, the unit that is recomputed is both
halves of a block, exchanges included, so all ranks repeat them in the same order; regions do not cross blocks then.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from torchtitan_cad.integration.block_hooks import close_block, open_block
from torchtitan_cad.integration.documents import halves_by_row
from torchtitan_cad.integration.regions import Region
from torchtitan_cad.runtime.engine import get_engine
from torchtitan_cad.runtime.steps import attend, dispatch, finish

NAMES = ("ping", "pong")


@dataclass
class _Flight:
    """Core attention of a half, from ``dispatch`` to ``finish``."""

    qkv: tuple[Tensor, Tensor, Tensor]
    token: Tensor


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
    earlier: "_Half | None" = None
    _flight: _Flight | None = None

    def __post_init__(self) -> None:
        self._plan_key = torch.tensor(self.key, device="cpu")

    @property
    def flight(self) -> _Flight:
        assert self._flight is not None, "nothing was sent"
        return self._flight

    def send(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.earlier is not None:
            _, first_k, first_v = self.earlier.flight.qkv
            k, v = torch.cat((first_k, k)), torch.cat((first_v, v))
        self._flight = _Flight((q, k, v), dispatch(q, k, v, self._plan_key, self.engine))

    def attend(self) -> None:
        self.flight.token = attend(self.flight.token, self._plan_key, self.engine)

    def receive(self) -> Tensor:
        """Core attention's output [B, S, heads * head_dim]."""
        flight, self._flight = self.flight, None
        out = finish(flight.token, *flight.qkv, self._plan_key, self.engine)
        return out.view(self.x.shape[0], -1, out.shape[1] * out.shape[2])


class _Unit(nn.Module):
    """A whole block for both halves: what activation checkpointing recomputes at once."""

    schedule: "PingPong"

    def __init__(self, block: nn.Module, index: int, schedule: "PingPong") -> None:
        super().__init__()
        self.start, self.end = Region(None, block), Region(block, None)
        self.index = index
        self.__dict__["schedule"] = schedule  # not a submodule

    def forward(self, xs: tuple[Tensor, Tensor], ropes: tuple, positions: tuple, key: int, in_rows: bool) -> tuple:
        """``xs`` of the two halves [B, S, dim], by the next block's."""
        schedule, halves = self.schedule, self.schedule.halves(xs, ropes, positions, key, in_rows)
        for half in halves:
            schedule.run_region(self.start, half, None, f"pre {self.index}")
        for half in halves:
            half.attend()
        for half in halves:
            schedule.run_region(self.end, half, half.receive(), f"post {self.index}")
        return tuple(half.x for half in halves)


class PingPong:
    """Runs the blocks of a model for both halves of a microbatch.

    Args:
        blocks: torchtitan's ``TransformerBlock`` modules, before activation checkpointing, compile and FSDP2; blocks
            from which ``fully_shard`` makes FSDP modules in place are the same objects.
        engine: name of the registered engine, which has plans for a microbatch's two halves under its key and the next
            number.
    """

    def __init__(self, blocks: Iterable[nn.Module], engine: str) -> None:
        self.blocks, self.engine = list(blocks), engine
        self.regions: list[nn.Module] = []
        self.units: list[nn.Module] = []
        if self.blocks:
            self.regions = [Region(a, b) for a, b in zip([None, *self.blocks], [*self.blocks, None], strict=True)]

    def apply_ac(self, apply: Callable[..., None], config: Any, **options: Any) -> None:
        """Applies torchtitan's activation checkpointing ``apply(model, config, ...)`` to regions or whole blocks."""
        whole_blocks = config.mode == "full" or (config.mode == "selective" and config.selective_ac_option != "op")
        if whole_blocks:
            self.regions, self.units = [], [_Unit(block, i, self) for i, block in enumerate(self.blocks)]
        stand_in = nn.Module()
        stand_in.layers = nn.ModuleDict({str(i): module for i, module in enumerate(self.units or self.regions)})
        apply(stand_in, config, **options)
        if whole_blocks:
            self.units = list(stand_in.layers.values())
        else:
            self.regions = list(stand_in.layers.values())

    def apply_compile(self, config: Any) -> None:
        """Compiles every region, as torchtitan does every block."""

        def compiled(region: nn.Module) -> Any:
            return torch.compile(region, backend=config.backend, fullgraph=True)

        self.regions = [compiled(region) for region in self.regions]
        for unit in self.units:
            inner: Any = getattr(unit, "_checkpoint_wrapped_module", unit)
            inner.start, inner.end = compiled(inner.start), compiled(inner.end)

    def __call__(self, x: Tensor, rope: Tensor, positions: Tensor | None, key: int) -> Tensor:
        """The blocks' output [B, S, dim] for input x [B, S, dim] (S / TP under TP); arguments else as a block's."""
        if not self.blocks:
            return x
        in_rows = not halves_by_row(x.shape[0])
        dim = 1 if in_rows else 0
        ropes = (rope, rope)
        if in_rows and positions is None:
            middle = x.shape[1] // 2
            ropes = (rope[:middle], rope[middle : 2 * middle])
        halved = (None, None) if positions is None else positions.chunk(2, dim)
        halves = self.halves(x.chunk(2, dim), ropes, halved, key, in_rows)
        if self.units:
            self._run_units(halves, key, in_rows)
        else:
            self._run_regions(halves)
        return torch.cat([half.x for half in halves], dim)

    def _run_regions(self, halves: list[_Half]) -> None:
        first, second = halves
        ends = zip(self.regions, [None, *self.blocks], [*self.blocks, None], strict=True)
        for i, (region, before, after) in enumerate(ends):
            names = [f"post {i - 1}"] * (before is not None) + [f"pre {i}"] * (after is not None)
            for half in halves:
                attended = half.receive() if before is not None else None
                if half is first and after is not None:
                    half.x, attended, first.rope, second.rope = open_block(
                        after, half.x, attended, first.rope, second.rope
                    )
                self.run_region(region, half, attended, " ".join(names))
            if before is not None and after is not None:
                second.flight.token = close_block(before, second.flight.token)
            elif before is not None:
                second.x = close_block(before, second.x)
            if after is not None:
                for half in halves:
                    half.attend()

    def _run_units(self, halves: list[_Half], key: int, in_rows: bool) -> None:
        first, second = halves
        for block, unit in zip(self.blocks, self.units, strict=True):
            first.x, first.rope, second.rope = open_block(block, first.x, first.rope, second.rope)
            ropes, positions = (first.rope, second.rope), (first.positions, second.positions)
            first.x, second.x = unit((first.x, second.x), ropes, positions, key, in_rows)
            second.x = close_block(block, second.x)

    def run_region(self, region: nn.Module, half: _Half, attended: Tensor | None, name: str) -> None:
        """Advances ``half`` by ``region``; sends its queries, keys and values off if a block begins there."""
        engine = get_engine(self.engine)
        engine.note(f"{name} forward", half.key)
        with record_function(f"cad/{name}.{half.name}"):
            half.x, q, k, v = region(half.x, attended, half.rope, half.positions)
        result = half.x if q is None else q
        if engine.trace is not None and result.requires_grad:
            key = half.key
            result.register_hook(lambda _: engine.note(f"{name} backward", key))
        if q is not None:
            half.send(q, k, v)

    def halves(self, xs: Any, ropes: Any, positions: Any, key: int, in_rows: bool) -> list[_Half]:
        """The microbatch's halves; ``in_rows``: the second one's queries attend to the first one's keys."""
        halves = [
            _Half(name, key + i, self.engine, x, rope, position)
            for i, (name, x, rope, position) in enumerate(zip(NAMES, xs, ropes, positions, strict=True))
        ]
        if in_rows:
            halves[1].earlier = halves[0]
        return halves
