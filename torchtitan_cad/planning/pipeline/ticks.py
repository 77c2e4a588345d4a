# SPDX-License-Identifier: BSD-3-Clause
"""Schedules of a pipeline in ticks: in a tick all ranks run forward, or all backward.

Ranks r = 0 .. P - 1 of a pipeline have ``num_chunks`` stages each: stage c P + r is chunk c of rank r. The core
attentions of one tick form a pool, and a rank without work of its own in a tick only serves (arXiv 2510.18121, section
4.1 and figure 8). Rank r runs its k-th forward in forward tick r + k and its k-th backward in backward tick
P - 1 - r + k, in the order of interleaved 1F1B: P microbatches per chunk in turn.

Backward tick u comes right after forward tick ``num_chunks`` P - 1 + u, the first in which its microbatches are ready.
There are M ``num_chunks`` + P - 1 ticks of each kind, as many as in a stock 1F1B step. Stock 1F1B lets some ranks run
backward while others run forward; here these backwards wait for the next backward tick, and the last ones fill the
bubbles. So rank r has up to 2 (P - 1 - r) + 1 microbatches in flight instead of P - r (with one chunk).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class StageWork:
    """Work of one rank of a pipeline in a tick: a microbatch on one of its chunks."""

    chunk: int
    microbatch: int


@dataclass(frozen=True)
class Tick:
    """One tick.

    Attributes:
        forward: True if all ranks run forward, False if all run backward.
        work: per rank of the pipeline; None for ranks that only serve.
    """

    forward: bool
    work: tuple[StageWork | None, ...]


def tick_schedule(
    num_ranks: int, num_microbatches: int, num_chunks: int = 1
) -> list[Tick]:
    """Return the ticks of one step.

    Args:
        num_ranks: ranks of one pipeline (P).
        num_microbatches: microbatches of one step; with several chunks a multiple of P.
        num_chunks: stages per rank.

    Raises:
        ValueError: a number is not positive, or with several chunks ``num_microbatches`` is not a multiple of P.
    """
    for name, value in (
        ("ranks", num_ranks),
        ("microbatches", num_microbatches),
        ("stages per rank", num_chunks),
    ):
        if value < 1:
            raise ValueError(f"a pipeline with {value} {name}: set at least one")
    if num_chunks > 1 and num_microbatches % num_ranks:
        raise ValueError(
            f"{num_microbatches} microbatches do not fit {num_chunks} stages per rank: use a multiple of the "
            f"{num_ranks} pipeline ranks, or one stage per rank"
        )
    return list(_ticks(num_ranks, num_microbatches, num_chunks))


def _ticks(num_ranks: int, num_microbatches: int, num_chunks: int) -> Iterator[Tick]:
    items = num_microbatches * num_chunks
    ahead = num_chunks * num_ranks

    def work(k: int, forward: bool) -> StageWork | None:
        if not 0 <= k < items:
            return None
        group, rest = divmod(k, ahead)
        chunk, microbatch = divmod(rest, num_ranks) if num_chunks > 1 else (0, rest)
        return StageWork(
            chunk if forward else num_chunks - 1 - chunk, group * num_ranks + microbatch
        )

    def tick(number: int, forward: bool) -> Tick:
        first = [rank if forward else num_ranks - 1 - rank for rank in range(num_ranks)]
        return Tick(forward, tuple(work(number - start, forward) for start in first))

    num_ticks = items + num_ranks - 1
    for number in range(min(ahead, num_ticks)):
        yield tick(number, True)
    for number in range(num_ticks):
        yield tick(number, False)
        if ahead + number < num_ticks:
            yield tick(ahead + number, True)
