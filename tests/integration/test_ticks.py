# SPDX-License-Identifier: BSD-3-Clause
"""Schedules in ticks: losses and gradients of the run without a pipeline, and all ranks in the same exchanges."""

import functools
import re
from collections import Counter, defaultdict, deque
from itertools import pairwise, product
from typing import NamedTuple

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
    ATTENTION_KEPT,
    BATCH4,
    BY_ROW,
    CAD,
    COMMON,
    COMPILE,
    CP2,
    FOUR_BLOCKS,
    FULL,
    HALVES,
    LAYER,
    OP,
    SMALL_BUFFERS,
    TP2,
    VALIDATE4,
    VALIDATION,
    Composition,
    assert_trains_alike,
    dp,
    global_batch,
    name_of,
    needs_traced,
    reference,
    schedule,
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

EIGHT_BLOCKS = ("--model.flavor=tiny8_varlen",)
HALVES_BY_ROW = (*HALVES, *BY_ROW)
"""Without ``BY_ROW`` microbatches have one row, which is halved in its middle."""


def rows(count: int) -> tuple[str, ...]:
    return (f"--training.local_batch_size={count}",)


def ticks(pp: int, name: str = "CAD1F1B") -> tuple[str, ...]:
    return (*dp(pipeline_parallel=pp), *schedule(name))


INTERLEAVED, INTERLEAVED4 = (ticks(pp, "CADInterleaved1F1B") for pp in (2, 4))
VALIDATED = (*rows(4), *VALIDATE4)
BLOCKS4 = (*rows(4), *FOUR_BLOCKS)
BLOCKS8 = (*rows(8), *EIGHT_BLOCKS)
SHORT = [
    Composition(
        "halves pp2",
        args=(*ticks(2), *HALVES),
        shared=(*BATCH4, *VALIDATION),
        dp=1,
    ),
]
QUICK = [
    *SHORT,
    Composition("halves pp2 dp2", args=(*ticks(2), *HALVES), shared=VALIDATED),
    Composition("pp2 dp2", args=ticks(2), shared=VALIDATED),
    # Four blocks on four stages are 1, 2, 1 and 0.
    Composition("pp4 ac full", args=(*ticks(4), *FULL), shared=BLOCKS4, dp=1),
    Composition("interleaved", args=INTERLEAVED, shared=BLOCKS4, dp=1),
]
PIPELINES = {
    "pp2": ticks(2),
    "pp4": ticks(4),
    "interleaved": INTERLEAVED,
    "halves": (*ticks(2), *HALVES),
    "halves pp4": (*ticks(4), *HALVES),
    "halves by row": (*ticks(2), *HALVES_BY_ROW),
    "halves interleaved": (*INTERLEAVED, *HALVES),
    "halves interleaved by row": (*INTERLEAVED, *HALVES_BY_ROW),
}
IN_THE_MIDDLE = ("halves", "halves pp4", "halves interleaved")
"""Pipelines that tensor parallelism does not go with."""
COMPOSED = {
    "alone": (),
    "ac full": FULL,
    "ac layer": LAYER,
    "ac op": OP,
    "attention kept": ATTENTION_KEPT,
    "compile": COMPILE,
    "compile ac full": (*COMPILE, *FULL),
    "tp2": TP2,
    "tp2 ac full": (*TP2, *FULL),
    "cp2": CP2,
}
"""What pipelines are composed with, and the reference is not."""
SHARED = {
    "dp2": rows(8),
    "16 rows": rows(16),
    "accumulation": global_batch(8),
    "validation": VALIDATE4,
}
"""What the reference is composed with, too."""
SLOW = [
    Composition(
        "interleaved of four stages dp2",
        (*INTERLEAVED, "--parallelism.pipeline_parallel_layers_per_stage=1"),
        (*EIGHT_BLOCKS, *VALIDATED),
    ),
    Composition("interleaved pp4", INTERLEAVED4, BLOCKS8, dp=1),
    Composition("interleaved pp4 ac full", (*INTERLEAVED4, *FULL), BLOCKS8, dp=1),
    Composition("halves interleaved pp4", (*INTERLEAVED4, *HALVES), BLOCKS8, dp=1),
]
for pipeline, what in product(PIPELINES, COMPOSED | SHARED):
    case = Composition(
        f"{pipeline} {what}",
        args=(*PIPELINES[pipeline], *COMPOSED.get(what, ())),
        shared=(*BLOCKS4, *SHARED.get(what, ())),
        dp=2 if what == "dp2" else 1,
    )
    is_refused = pipeline in IN_THE_MIDDLE and what.startswith("tp2")
    if case.nranks <= 4 and not is_refused:
        SLOW.append(case)
BY_NAME = {case.name: case for case in [*QUICK, *SLOW]}


@pytest.mark.parametrize(
    ("pp", "microbatches", "chunks"), [(2, 4, 1), (2, 4, 3), (2, 4, 4), (4, 8, 4)]
)
def test_forward_alone_gathers_no_parameters_in_vain(pp, microbatches, chunks):
    """torch keeps three stages of a rank gathered. It refuses to free what no forward or backward has used."""
    for rank in range(pp):
        work = [_action(tick, rank) for tick in tick_schedule(pp, microbatches, chunks)]
        num_forwards = 0
        state = dict.fromkeys(range(rank, pp * chunks, pp), "sharded")
        for action in forward_only(_add_unshard_reshard(work)):
            stage = action.stage_index
            wanted, after = {
                UNSHARD: (["sharded"], "gathered"),
                FORWARD: (["gathered", "used"], "used"),
                RESHARD: (["used"], "sharded"),
            }[action.computation_type]
            assert state[stage] in wanted
            state[stage] = after
            num_forwards += action.computation_type == FORWARD
        assert num_forwards == microbatches * chunks
        assert {*state.values()} == {"sharded"}


class Message(NamedTuple):
    """What a stage sends to the next one, or in backward to the one before; ``ends`` are the ranks of both."""

    to_next: int
    stage: int
    microbatch: int | None
    ends: frozenset[int]


def marked_rows(
    pp: int, chunks: int, microbatches: int, *, trains: bool
) -> dict[int, list[_Action]]:
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
        rank: with_marks(row, ticks, rank, num_stages=stages)
        for rank, row in lowered.items()
    }


def message(to_next: int, stage: int, microbatch: int | None, pp: int) -> Message:
    ends = frozenset((stage % pp, (stage + to_next) % pp))
    return Message(to_next, stage, microbatch, ends)


def transferred(action: _Action, pp: int) -> Message | None:
    """Return what a rank sends or receives."""
    kind = action.computation_type
    if kind not in (SEND_F, RECV_F, SEND_B, RECV_B):
        return None
    to_next = 1 if kind in (SEND_F, RECV_F) else -1
    sender = action.stage_index - (to_next if kind in (RECV_F, RECV_B) else 0)
    return message(to_next, sender, action.microbatch_index, pp=pp)


def needed(action: _Action, pp: int, stages: int) -> Message | None:
    """Return what forward or backward of a stage works on, unless it is the first."""
    kind = action.computation_type
    if kind not in (FORWARD, FULL_BACKWARD):
        return None
    to_next = 1 if kind == FORWARD else -1
    sender = action.stage_index - to_next
    if not 0 <= sender < stages:
        return None
    return message(to_next, sender, action.microbatch_index, pp=pp)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("by_pair", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
def test_messages_that_queue_hold_up_no_tick(pp, chunks, by_pair, trains):
    """On NCCL, not on gloo, a rank's messages may queue, all of them or those to one rank, behind one yet to be made.

    A message arrives once it is the first in the queues of both ends. A tick ends once all ranks have come to it, with
    what they work on.
    """
    stages = pp * chunks
    microbatches = 2 * pp
    marked = marked_rows(pp, chunks, microbatches, trains=trains)
    rows = {rank: deque(row) for rank, row in marked.items()}
    queues: dict[object, deque[Message]] = defaultdict(deque)
    arrived = set[Message]()

    def take_action(rank: int) -> bool:
        """Go on, unless a tick ends or its work lacks what it needs."""
        row = rows[rank]
        if not row or row[0].computation_type == _Mark.END:
            return False
        wanted = needed(row[0], pp, stages)
        if wanted is not None and wanted not in arrived:
            return False
        posted = transferred(row.popleft(), pp)
        if posted is not None:
            queues[rank, posted.ends if by_pair else None].append(posted)
        return True

    def deliver() -> bool:
        first = Counter(queue[0] for queue in queues.values() if queue)
        at_both_ends = {one for one, count in first.items() if count == 2}
        for queue in queues.values():
            if queue and queue[0] in at_both_ends:
                queue.popleft()
        arrived.update(at_both_ends)
        return bool(at_both_ends)

    def end_tick() -> bool:
        ends = all(
            row and row[0].computation_type == _Mark.END for row in rows.values()
        )
        if ends:
            for row in rows.values():
                row.popleft()
        return ends

    goes_on = True
    while goes_on:
        taken = [take_action(rank) for rank in rows]
        goes_on = any([*taken, deliver(), end_tick()])
    assert not any(rows.values())
    assert not any(queues.values())
    assert len(arrived) == (1 + trains) * microbatches * (stages - 1)


@functools.cache
def check(case: Composition, *more: str, steps: int = 3) -> RunResult:
    shared = (*case.shared, f"--training.steps={steps}")
    result = run(
        [*COMMON, *CAD, *shared, *case.args, *more],
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
        "halves pp4 ac full",
        "halves cp2",
        "halves interleaved dp2",
        "halves by row tp2",
    ],
)
def test_symmetric_memory(name):
    check(BY_NAME[name], "--cad.transport=symm_mem")


@slow
def test_rows_in_many_messages_keep_their_order():
    """Ranks that only serve start the exchanges of two nano-batches in the order of those that attend."""
    check(BY_NAME["halves by row dp2"], *SMALL_BUFFERS)
