# SPDX-License-Identifier: BSD-3-Clause
"""Core attentions that all ranks of a pipeline run together, tick by tick.

The stages that work in a tick run their blocks in step: the first block of every stage, then the second, and so on;
backward begins with the last block. A rank without work, or whose stage has no blocks left, only serves. Each of these
*calls* has a *pool*, at most one microbatch per rank of the pipeline, and each pool gets one plan. In a backward tick,
recomputed blocks (activation checkpointing) add forward calls right before their gradients, with the pool of that tick.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan_cad.planning.pipeline.ticks import Tick

Pool = tuple[int | None, ...]
"""Per rank of the pipeline, the microbatch whose tokens attend under a plan; None for ranks that only serve."""


@dataclass(frozen=True)
class PoolCall:
    """One core attention that all ranks run together; ``pool`` is an index into ``TickProgram.pools``."""

    forward: bool
    pool: int


@dataclass(frozen=True)
class TickProgram:
    """All core attentions of one step.

    Attributes:
        ticks: the schedule.
        calls: the calls of every tick, in order.
        pools: the pools to plan, in the order of their first calls.
    """

    ticks: tuple[Tick, ...]
    calls: tuple[tuple[PoolCall, ...], ...]
    pools: tuple[Pool, ...]


def make_program(
    ticks: Sequence[Tick], blocks: Sequence[Sequence[bool]]
) -> TickProgram:
    """Return the program of a schedule.

    Args:
        ticks: the schedule of one pipeline of P ranks; chunk c of rank r is stage c P + r.
        blocks: per stage and block, True if backward recomputes the block's attention.
    """
    pools: list[Pool] = []
    calls = []
    for tick in ticks:
        known: dict[Pool, int] = {}
        in_tick = []
        for forward, live in _live_ranks(tick, blocks):
            microbatches = tuple(
                w.microbatch if w and alive else None
                for w, alive in zip(tick.work, live, strict=True)
            )
            if microbatches not in known:
                known[microbatches] = len(pools)
                pools.append(microbatches)
            in_tick.append(PoolCall(forward, known[microbatches]))
        calls.append(tuple(in_tick))
    return TickProgram(tuple(ticks), tuple(calls), tuple(pools))


def _live_ranks(
    tick: Tick, blocks: Sequence[Sequence[bool]]
) -> Iterator[tuple[bool, list[bool]]]:
    """Yield, for every call of the tick, True if it is forward, and per rank True if a block of the rank makes it."""
    num_ranks = len(tick.work)
    stages = [
        blocks[w.chunk * num_ranks + rank] if w else ()
        for rank, w in enumerate(tick.work)
    ]
    for index in range(max(map(len, stages))):
        live = [index < len(stage) for stage in stages]
        if tick.forward:
            yield True, live
            continue
        recomputed = [
            alive and stage[-1 - index]
            for alive, stage in zip(live, stages, strict=True)
        ]
        if any(recomputed):
            yield True, recomputed
        yield False, live
