# SPDX-License-Identifier: BSD-3-Clause
"""Tick schedules: everything runs once, after what it depends on, and in as few ticks as possible.

Programs: every stage's blocks in their order, all ranks in the same calls, one pool per combination.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.refusals import refusal
from torchtitan_cad.planning.pipeline.program import make_program
from torchtitan_cad.planning.pipeline.ticks import tick_schedule


@given(
    ranks=st.integers(1, 8), microbatches=st.integers(1, 20), chunks=st.integers(1, 4)
)
def test_everything_once_and_in_order(ranks, microbatches, chunks):
    if chunks > 1:
        microbatches *= ranks
    ticks = tick_schedule(ranks, microbatches, chunks)
    stages = ranks * chunks
    done = {}
    for number, tick in enumerate(ticks):
        for rank, work in enumerate(tick.work):
            if work is None:
                continue
            stage = work.chunk * ranks + rank
            needed = []
            if tick.forward and stage > 0:
                needed.append((True, stage - 1, work.microbatch))
            if not tick.forward:
                needed.append((True, stage, work.microbatch))
            if not tick.forward and stage < stages - 1:
                needed.append((False, stage + 1, work.microbatch))
            # a KeyError: it has not run at all
            assert all(done[key] < number for key in needed)
            key = (tick.forward, stage, work.microbatch)
            assert key not in done
            done[key] = number
    assert len(done) == 2 * stages * microbatches
    ticks_of_way = microbatches * chunks + ranks - 1
    ways = Counter(tick.forward for tick in ticks)
    assert ways == {True: ticks_of_way, False: ticks_of_way}
    assert all(any(tick.work) for tick in ticks)


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 1), (2, 4), (4, 4), (4, 16), (8, 32)]
)
def test_microbatches_in_flight(ranks, microbatches):
    ticks = tick_schedule(ranks, microbatches)
    for rank in range(ranks):
        changes = [1 if tick.forward else -1 for tick in ticks if tick.work[rank]]
        in_flight = np.cumsum(changes)
        assert in_flight.max() == min(microbatches, 2 * (ranks - 1 - rank) + 1)
        assert in_flight[-1] == 0


def test_mistakes():
    for numbers in ((0, 1, 1), (1, 0, 1), (2, 2, 0), (4, 6, 2)):
        with refusal():
            tick_schedule(*numbers)


@st.composite
def pipelines(draw):
    ranks = draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 3)) * ranks
    stage = st.lists(st.booleans(), max_size=3)
    blocks = draw(st.lists(stage, min_size=ranks * chunks, max_size=ranks * chunks))
    return tick_schedule(ranks, microbatches, chunks), blocks, ranks


def expected_calls(forward_tick, blocks):
    """The calls of a stage in a tick: True for forward."""
    if forward_tick:
        return [True] * len(blocks)
    calls = []
    for is_recomputed in reversed(blocks):
        calls += [True, False] if is_recomputed else [False]
    return calls


@given(pipelines())
def test_every_stage_finds_its_own_calls(pipeline):
    ticks, blocks, ranks = pipeline
    program = make_program(ticks, blocks)
    assert program.ticks == tuple(ticks)
    used = set()
    for tick, calls in zip(ticks, program.calls, strict=True):
        pools = [program.pools[call.pool] for call in calls]
        used |= {call.pool for call in calls}
        for rank, work in enumerate(tick.work):
            found = [
                (call.forward, pool[rank])
                for call, pool in zip(calls, pools, strict=True)
                if pool[rank] is not None
            ]
            wanted = []
            if work:
                stage = blocks[work.chunk * ranks + rank]
                for forward in expected_calls(tick.forward, stage):
                    wanted.append((forward, work.microbatch))
            assert found == wanted
        if tick.forward:
            stages = [
                work.chunk * ranks + rank for rank, work in enumerate(tick.work) if work
            ]
            assert len(calls) == max(len(blocks[stage]) for stage in stages)
        for pool in pools:
            assert set(pool) != {None}
    assert used == set(range(len(program.pools)))
