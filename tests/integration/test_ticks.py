# SPDX-License-Identifier: BSD-3-Clause
"""Schedules in ticks: losses and gradients of the run without a pipeline, and all ranks in the same exchanges."""

import functools
import re
from collections import Counter, defaultdict, deque
from itertools import pairwise, product

import pytest
from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
)

from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    Composition,
    assert_trains_alike,
    name_of,
    needs_traced,
    options,
    reference,
)
from tests.lib.jobs.harness import RunResult, run
from tests.lib.sets import params, slow
from tests.lib.threaded import needs_linux
from torchtitan_cad.integration.pipeline.schedule import (
    _action,
    _Mark,
    forward_only,
    with_marks,
)
from torchtitan_cad.planning.pipeline.ticks import tick_schedule

BLOCKS4 = "rows4 four_blocks"
BLOCKS8 = "rows8 eight_blocks"
VALIDATED = "rows4 validate4"
SHORT = [
    Composition(
        "halves pp2",
        "stages2 cad1f1b halves",
        shared="rows4 --validation.local_batch_size=4 validation",
        dp=1,
    ),
]
QUICK = [
    *SHORT,
    Composition("halves pp2 dp2", "stages2 cad1f1b halves", shared=VALIDATED),
    Composition("pp2 dp2", "stages2 cad1f1b", shared=VALIDATED),
    # Four blocks on four stages are 1, 2, 1 and 0.
    Composition("pp4 ac full", "stages4 cad1f1b ac_full", shared=BLOCKS4, dp=1),
    Composition("interleaved", "stages2 cad_interleaved", shared=BLOCKS4, dp=1),
    # torch keeps three stages of a rank gathered, and refuses to free what validation has gathered in vain.
    Composition(
        "interleaved of four stages dp2",
        "stages2 cad_interleaved --parallelism.pipeline_parallel_layers_per_stage=1",
        shared=f"eight_blocks {VALIDATED}",
    ),
]
PIPELINES = {
    "pp2": "stages2 cad1f1b",
    "pp4": "stages4 cad1f1b",
    "interleaved": "stages2 cad_interleaved",
    "halves": "stages2 cad1f1b halves",
    "halves pp4": "stages4 cad1f1b halves",
    "halves by row": "stages2 cad1f1b halves by_row",
    "halves interleaved": "stages2 cad_interleaved halves",
    "halves interleaved by row": "stages2 cad_interleaved halves by_row",
}
"""Without ``by_row`` microbatches have one row, which is halved in its middle."""
IN_THE_MIDDLE = ("halves", "halves pp4", "halves interleaved")
"""Pipelines that tensor parallelism does not go with."""
COMPOSED = (
    "",
    "ac_full",
    "ac_layer",
    "ac_op",
    "attention_kept",
    "compile",
    "compile ac_full",
    "tp2",
    "tp2 ac_full",
    "cp2",
)
"""What pipelines are composed with, and the reference is not."""
SHARED = ("rows8", "rows16", "batch8", "validate4")
"""What the reference is composed with, too."""
SLOW = [
    Composition("interleaved pp4", "stages4 cad_interleaved", BLOCKS8, dp=1),
    Composition(
        "interleaved pp4 ac full", "stages4 cad_interleaved ac_full", BLOCKS8, dp=1
    ),
    Composition(
        "halves interleaved pp4", "stages4 cad_interleaved halves", BLOCKS8, dp=1
    ),
]
for pipeline, what in product(PIPELINES, (*COMPOSED, *SHARED)):
    is_shared = what in SHARED
    case = Composition(
        f"{pipeline} {what}",
        PIPELINES[pipeline] if is_shared else f"{PIPELINES[pipeline]} {what}",
        shared=f"{BLOCKS4} {what}" if is_shared else BLOCKS4,
        dp=2 if what == "rows8" else 1,
    )
    is_refused = pipeline in IN_THE_MIDDLE and what.startswith("tp2")
    if case.nranks <= 4 and not is_refused:
        SLOW.append(case)
BY_NAME = {case.name: case for case in [*QUICK, *SLOW]}


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_forward_alone_gathers_no_parameters_in_vain(chunks):
    """torch keeps three stages of a rank gathered. It refuses to free what no forward or backward has used."""
    letters = {UNSHARD: "gather ", FORWARD: "use ", RESHARD: "free "}
    for rank in range(2):
        work = [_action(tick, rank) for tick in tick_schedule(2, 4, chunks)]
        done = defaultdict(str)
        for action in forward_only(_add_unshard_reshard(work)):
            done[action.stage_index] += letters[action.computation_type]
        assert "".join(done.values()).count("use") == 4 * chunks
        for of_stage in done.values():
            assert re.fullmatch("(gather (use )+free )+", of_stage)


MEETINGS = (SEND_F, RECV_F, SEND_B, RECV_B, _Mark.END)
"""What a rank does with others: with the other end of a message, or with all at the end of a tick."""


def marked_rows(
    pp: int, chunks: int, microbatches: int, *, trains: bool
) -> dict[int, deque[_Action]]:
    """Every rank's actions of a step, without those for parameters."""
    ticks = tick_schedule(pp, microbatches, chunks)
    stages = pp * chunks
    work = {}
    for rank in range(pp):
        actions = [_action(tick, rank) for tick in ticks]
        # as torch does before it adds messages
        work[rank] = [action for action in actions if action is not None]
    lowered = _add_send_recv(work, lambda stage: stage % pp, stages)
    if not trains:
        ticks = [tick for tick in ticks if tick.forward]
        lowered = {rank: forward_only(row) for rank, row in lowered.items()}
    return {
        rank: deque(with_marks(row, ticks, rank, num_stages=stages))
        for rank, row in lowered.items()
    }


def meeting(action: _Action, pp: int) -> tuple[int, int, int | None, frozenset[int]]:
    """Return direction, sender and microbatch of what is worked on, sent or received, and the ranks that meet."""
    kind = action.computation_type
    if kind == _Mark.END:
        return 0, 0, action.microbatch_index, frozenset(range(pp))
    to_next = 1 if kind in (FORWARD, SEND_F, RECV_F) else -1
    stage = action.stage_index
    sender = stage if kind in (SEND_F, SEND_B) else stage - to_next
    ends = frozenset((sender % pp, (sender + to_next) % pp))
    return to_next, sender, action.microbatch_index, ends


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
def test_messages_that_queue_hold_up_no_tick(pp, chunks, trains):
    """On NCCL, not on gloo, all that a rank sends and receives may queue behind a message yet to be made.

    Here even a rank itself waits until both ends have come to a message, and all ranks to the end of a tick.
    """
    stages = pp * chunks
    microbatches = 2 * pp
    rows = marked_rows(pp, chunks, microbatches, trains=trains)
    over = set()
    while any(rows.values()):
        for row in rows.values():
            while row and row[0].computation_type not in MEETINGS:
                action = row.popleft()
                needed = meeting(action, pp)
                if action.computation_type in (FORWARD, FULL_BACKWARD):
                    assert needed in over or not 0 <= needed[1] < stages
        come = Counter(meeting(row[0], pp) for row in rows.values() if row)
        held = {one for one, count in come.items() if count == len(one[-1])}
        assert held, "ranks wait for each other"
        over |= held
        for row in rows.values():
            if row and meeting(row[0], pp) in held:
                row.popleft()
    messages = [one for one in over if one[0]]
    assert len(messages) == (1 + trains) * microbatches * (stages - 1)


@functools.cache
def check(case: Composition, *more: str, steps: int = 3) -> RunResult:
    shared = (*options(case.shared), f"--training.steps={steps}")
    result = run(
        [*COMMON, *CAD, *case.job, shared[-1], *more],
        case.nranks,
        grads_at=2,
        trace_at=3,
        timeout_s=600,
    )
    assert_trains_alike(result, reference(case.reference_nranks, shared))
    validates = "--validation.enable" in shared
    assert bool(result.validation_losses) == validates
    first, *others = [exchanges(trace["events"]) for trace in result.traces]
    assert len(others) == case.nranks - 1
    assert first
    for events in others:
        assert events == first, "ranks differ in the order of their exchanges"
    return result


def exchanges(events: list[list]) -> list[tuple[str, int]]:
    """The engine's steps that start exchanges, with the keys of their plans."""
    starting = re.compile("(start|attend)_(forward|backward)")
    return [(step, key) for step, key in events if starting.fullmatch(step)]


@pytest.mark.parametrize("case", params(QUICK, SHORT), ids=name_of)
def test_trains_like_without_a_pipeline(case):
    check(case)


def test_nano_batches_take_turns_on_every_rank():
    """An exchange is under way while the other nano-batch comes to its next step, also where a rank only serves."""
    for trace in check(SHORT[0]).traces:
        order = exchanges(trace["events"])
        for call in zip(*[iter(order)] * 4, strict=True):
            steps, keys = zip(*call, strict=True)
            direction = steps[0].removeprefix("start_")
            start = f"start_{direction}"
            attend = f"attend_{direction}"
            assert steps == (start, start, attend, attend)
            assert keys[:2] == keys[2:]
            assert keys[1] - keys[0] == (1 if direction == "forward" else -1)
        of_attention = ("start", "attend", "finish")
        events = [x for x in trace["events"] if x[0].startswith(of_attention)]
        for (step, key), (following, next_key) in pairwise(events):
            assert step.startswith("finish") or key != next_key, (
                f"{step} is followed by {following} of the same nano-batch"
            )


@slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", SLOW, ids=name_of)
def test_more_compositions_train_like_without_a_pipeline(case):
    check(case, steps=20 if "halves" in case.name else 3)


@needs_traced
@slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pipeline", ["halves", "halves interleaved", "halves by row"])
def test_traced_streams_train_alike(pipeline):
    """They do as one nano-batch, the segments of two and a run without a pipeline."""
    case = BY_NAME[f"{pipeline} compile"]
    traced = check(case, "--cad.streams=traced", steps=20)
    for log in traced.logs:
        assert "Streams of nano-batches: traced" in log
    for option in ("--cad.streams=opaque", "--cad.nano_batches=1"):
        assert_trains_alike(traced, check(case, option, steps=20))


@slow
@needs_linux
@pytest.mark.parametrize(
    "name",
    [
        *map(name_of, QUICK),
        "halves pp4 ac_full",
        "halves cp2",
        "halves interleaved rows8",
        "halves by row tp2",
    ],
)
def test_symmetric_memory(name):
    check(BY_NAME[name], "--cad.transport=symm_mem")


@slow
def test_rows_in_many_messages_keep_their_order():
    """Ranks that only serve start the exchanges of two nano-batches in the order of those that attend."""
    check(BY_NAME["halves by row rows8"], *options("small_buffers"))
