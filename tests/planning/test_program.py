"""Programs: every stage's blocks in their order, all ranks in the same calls, one pool per combination."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from torchtitan_cad.planning.pipeline.program import AttentionPool, PoolCall, make_program
from torchtitan_cad.planning.pipeline.ticks import StageWork, Tick, tick_schedule


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
    return [direction for recomputed in reversed(blocks) for direction in ([True, False] if recomputed else [False])]


@given(pipelines())
def test_every_stage_finds_its_own_calls(pipeline: tuple[list[Tick], list[list[bool]], int]) -> None:
    ticks, blocks, ranks = pipeline
    program = make_program(ticks, blocks)
    assert program.ticks == tuple(ticks)
    for tick, calls in zip(ticks, program.calls, strict=True):
        for rank, work in enumerate(tick.work):
            mine = [call for call in calls if program.pools[call.pool].microbatches[rank] is not None]
            assert {program.pools[call.pool].microbatches[rank] for call in mine} <= {work and work.microbatch}
            stage = blocks[work.chunk * ranks + rank] if work else []
            assert [call.forward for call in mine] == expected_calls(tick.forward, stage)
        assert all(program.pools[call.pool].forward == tick.forward for call in calls)
        assert all(any(m is not None for m in program.pools[call.pool].microbatches) for call in calls)
    assert {call.pool for calls in program.calls for call in calls} == set(range(len(program.pools)))


def test_short_stages_serve_and_recomputation_precedes_gradients() -> None:
    work = (StageWork(0, 3), StageWork(0, 2), None)
    program = make_program([Tick(True, work), Tick(False, work)], [[True, False], [False], [True, True]])
    first, second = AttentionPool(True, (3, 2, None)), AttentionPool(True, (3, None, None))
    both, mine = AttentionPool(False, (3, 2, None)), AttentionPool(False, (3, None, None))
    assert program.pools == (first, second, both, mine)
    assert program.calls == (
        (PoolCall(True, 0), PoolCall(True, 1)),
        (PoolCall(False, 2), PoolCall(True, 3), PoolCall(False, 3)),
    )
