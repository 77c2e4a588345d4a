"""Core attentions that all ranks of a pipeline run together, tick by tick.

The blocks of all stages that work in a tick attend in step: first the first block of every stage, then the second, and
so on, backward from the last block. A stage with fewer blocks than others serves in what remains, as does a rank
without work. What takes part in one of these *calls*, one microbatch per rank of the pipeline or none, is a *pool*: it
gets one plan. A backward tick also has forward calls where blocks are recomputed (activation checkpointing), right
before their gradients, and these are planned for the pool of the backward tick.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan_cad.planning.pipeline.ticks import Tick


@dataclass(frozen=True)
class AttentionPool:
    """Tokens that share a plan.

    Attributes:
        forward: whether it is executed in a forward tick.
        microbatches: per rank of the pipeline, the microbatch whose tokens take part; None for ranks that only serve.
    """

    forward: bool
    microbatches: tuple[int | None, ...]


@dataclass(frozen=True)
class PoolSlot:
    """One core attention, which all ranks run together; ``pool`` is an index into ``TickProgram.pools``."""

    forward: bool
    pool: int


@dataclass(frozen=True)
class TickProgram:
    """All core attentions of one step.

    Attributes:
        ticks: of the schedule.
        calls: those of every tick, in order.
        pools: what to plan, in the order in which it is executed first.
    """

    ticks: tuple[Tick, ...]
    calls: tuple[tuple[PoolSlot, ...], ...]
    pools: tuple[AttentionPool, ...]


def make_program(ticks: Sequence[Tick], blocks: Sequence[Sequence[bool]]) -> TickProgram:
    """Return the program of a schedule.

    Args:
        ticks: of all ranks of one pipeline of P ranks; chunk c of rank r is stage c P + r.
        blocks: of every stage, for each of its blocks whether backward recomputes its attention.
    """
    pools: list[AttentionPool] = []
    calls = []
    for tick in ticks:
        known: dict[tuple[int | None, ...], int] = {}
        in_tick = []
        for forward, live in _live_ranks(tick, blocks):
            microbatches = tuple(
                w.microbatch if w and alive else None for w, alive in zip(tick.work, live, strict=True)
            )
            if microbatches not in known:
                known[microbatches] = len(pools)
                pools.append(AttentionPool(tick.forward, microbatches))
            in_tick.append(PoolSlot(forward, known[microbatches]))
        calls.append(tuple(in_tick))
    return TickProgram(tuple(ticks), tuple(calls), tuple(pools))


def _live_ranks(tick: Tick, blocks: Sequence[Sequence[bool]]) -> Iterator[tuple[bool, list[bool]]]:
    """Direction of every call of the tick, and which ranks have a block that makes it."""
    num_ranks = len(tick.work)
    mine = [blocks[w.chunk * num_ranks + rank] if w else () for rank, w in enumerate(tick.work)]
    for index in range(max(map(len, mine))):
        live = [index < len(stage) for stage in mine]
        if tick.forward:
            yield True, live
            continue
        recomputed = [alive and stage[-1 - index] for alive, stage in zip(live, mine, strict=True)]
        if any(recomputed):
            yield True, recomputed
        yield False, live
