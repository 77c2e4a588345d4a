# SPDX-License-Identifier: BSD-3-Clause
"""Tick schedules: everything runs once, after what it depends on, and in as few ticks as possible.

Programs: every stage's blocks in their order, all ranks in the same calls, one pool per combination.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.refusals import refusal
from torchtitan_cad.planning.pipeline.program import (
    AttentionPool,
    PoolCall,
    make_program,
)
from torchtitan_cad.planning.pipeline.ticks import StageWork, Tick, tick_schedule


@given(
    ranks=st.integers(1, 8), microbatches=st.integers(1, 20), chunks=st.integers(1, 4)
)
def test_everything_once_and_in_order(ranks, microbatches, chunks):
    if chunks > 1:
        microbatches *= ranks
    ticks = tick_schedule(ranks, microbatches, chunks)
    last_stage = ranks * chunks - 1
    done: dict[tuple[bool, int, int], int] = {}
    for number, tick in enumerate(ticks):
        for rank, work in enumerate(tick.work):
            if work is None:
                continue
            stage = work.chunk * ranks + rank
            if tick.forward:
                needed = [(True, stage - 1, work.microbatch)] if stage else []
            else:
                needed = [(True, stage, work.microbatch)]
                needed += (
                    [(False, stage + 1, work.microbatch)] if stage < last_stage else []
                )
            # a KeyError: it has not run at all
            assert all(done[key] < number for key in needed)
            key = (tick.forward, stage, work.microbatch)
            assert key not in done
            done[key] = number
    assert len(done) == 2 * (last_stage + 1) * microbatches
    assert Counter(tick.forward for tick in ticks) == dict.fromkeys(
        (True, False), microbatches * chunks + ranks - 1
    )
    assert all(any(tick.work) for tick in ticks)


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 1), (2, 4), (4, 4), (4, 16), (8, 32)]
)
def test_microbatches_in_flight(ranks, microbatches):
    microbatches_in_flight, most = [0] * ranks, [0] * ranks
    for tick in tick_schedule(ranks, microbatches):
        for rank, work in enumerate(tick.work):
            microbatches_in_flight[rank] += (1 if tick.forward else -1) * (
                work is not None
            )
            most[rank] = max(most[rank], microbatches_in_flight[rank])
    assert most == [
        min(microbatches, 2 * (ranks - 1 - rank) + 1) for rank in range(ranks)
    ]
    assert not any(microbatches_in_flight)


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 1, 1),
        (1, 0, 1),
        (2, 2, 0),
        (4, 6, 2),
    ],
)
def test_mistakes(numbers):
    with refusal():
        tick_schedule(*numbers)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[Tick], list[list[bool]], int]:
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 3)) * ranks
    stage = st.lists(st.booleans(), max_size=3)
    blocks = draw(st.lists(stage, min_size=ranks * chunks, max_size=ranks * chunks))
    return tick_schedule(ranks, microbatches, chunks), blocks, ranks


def expected_calls(forward_tick: bool, blocks: Sequence[bool]) -> list[bool]:
    """The calls of a stage in a tick: True for forward."""
    if forward_tick:
        return [True] * len(blocks)
    return [
        direction
        for recomputed in reversed(blocks)
        for direction in ([True, False] if recomputed else [False])
    ]


@given(pipelines())
def test_every_stage_finds_its_own_calls(pipeline):
    ticks, blocks, ranks = pipeline
    program = make_program(ticks, blocks)
    assert program.ticks == tuple(ticks)
    for tick, calls in zip(ticks, program.calls, strict=True):
        for rank, work in enumerate(tick.work):
            mine = [
                call
                for call in calls
                if program.pools[call.pool].microbatches[rank] is not None
            ]
            assert {program.pools[call.pool].microbatches[rank] for call in mine} <= {
                work and work.microbatch
            }
            stage = blocks[work.chunk * ranks + rank] if work else []
            assert [call.forward for call in mine] == expected_calls(
                tick.forward, stage
            )
        assert all(program.pools[call.pool].forward == tick.forward for call in calls)
        assert all(
            any(m is not None for m in program.pools[call.pool].microbatches)
            for call in calls
        )
    assert {call.pool for calls in program.calls for call in calls} == set(
        range(len(program.pools))
    )


def test_short_stages_serve_and_recomputation_precedes_gradients():
    work = (StageWork(0, 3), StageWork(0, 2), None)
    program = make_program(
        [Tick(True, work), Tick(False, work)], [[True, False], [False], [True, True]]
    )
    first, second = (
        AttentionPool(True, (3, 2, None)),
        AttentionPool(True, (3, None, None)),
    )
    both, mine = (
        AttentionPool(False, (3, 2, None)),
        AttentionPool(False, (3, None, None)),
    )
    assert program.pools == (first, second, both, mine)
    assert program.calls == (
        (PoolCall(True, 0), PoolCall(True, 1)),
        (PoolCall(False, 2), PoolCall(True, 3), PoolCall(False, 3)),
    )
