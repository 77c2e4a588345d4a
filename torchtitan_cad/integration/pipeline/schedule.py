# SPDX-License-Identifier: BSD-3-Clause
"""A schedule in ticks on the runtime of torch.distributed.pipelining (torch 2.11 to 2.15).

The runtime lowers a table of forward and backward actions to a list per rank that also gathers parameters, sends and
receives. Here marks are put around every forward and backward of that list, and where a rank only serves: they begin
and end the ticks. What ranks send each other follows the tick that has made it, on both sides.

Torch has a rank receive as soon as it can, in an order that takes ranks to wait for nothing else. NCCL may run all that
a rank sends and receives one after the other (torch 2.11, and 2.15 with an eager communicator), so that a message which
waits for its sender's next tick holds up those by which other ranks come to that tick.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage
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
    _PipelineContext,
    _PipelineScheduleRuntime,
)

from torchtitan_cad.integration.loading.batch_planner import KEY_STEP
from torchtitan_cad.planning.pipeline.program import TickProgram
from torchtitan_cad.planning.pipeline.ticks import Tick
from torchtitan_cad.runtime.tick_engine import TickCall, TickEngine

_BACKWARD = (
    "FULL_BACKWARD",
    "SEND_B",
    "WAIT_SEND_B",
    "RECV_B",
    "REDUCE_GRAD",
    "WAIT_REDUCE_GRAD",
)
"""Names of the types of actions that validation leaves out; both WAIT types are new in torch 2.15."""
_TRANSFERS = (SEND_F, RECV_F, SEND_B, RECV_B)


class _Mark(StrEnum):
    """Types of actions that the runtime does not know; the number of the tick stands in for the microbatch."""

    BEGIN = "BEGIN_TICK"
    END = "END_TICK"


class TickSchedule(_PipelineScheduleRuntime):
    """Runs training and validation steps in ticks.

    Args:
        stages: of this rank, in the order of its chunks, with static shapes: inferring them would run a stage off-tick.
        training, validation: the programs of both kinds of steps.
        engine: runs the stages' core attention.
        nano_batches: parts of every microbatch, each with plans of its own.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor],
        training: TickProgram,
        validation: TickProgram,
        engine: TickEngine,
        nano_batches: int,
    ) -> None:
        super().__init__(
            stages, n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=False
        )
        self._engine = engine
        self._nano_batches = nano_batches
        self._programs = {True: training, False: validation}
        self._prepare_schedule_with_comms(
            {
                rank: [_action(tick, rank) for tick in training.ticks]
                for rank in range(self.pp_group_size)
            }
        )
        lowered = self.pipeline_order_with_comms
        num_stages = stages[0].num_stages
        self._orders = {
            True: {
                rank: with_marks(row, training.ticks, rank, num_stages=num_stages)
                for rank, row in lowered.items()
            },
            False: {
                rank: with_marks(
                    forward_only(row), validation.ticks, rank, num_stages=num_stages
                )
                for rank, row in lowered.items()
            },
        }
        self._comp_type_to_function_map[_Mark.BEGIN] = self._begin_tick  # type: ignore[index]
        self._comp_type_to_function_map[_Mark.END] = self._end_tick  # type: ignore[index]

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> Any:
        self.pipeline_order_with_comms = self._orders[self._has_backward]
        return super()._step_microbatches(*args, **kwargs)

    def _begin_tick(self, action: _Action, context: _PipelineContext) -> None:
        program = self._programs[self._has_backward]
        number = action.microbatch_index
        assert number is not None
        keys = [
            int(kwargs["attention_masks"].cu_seq_q.reshape(-1)[0])
            for kwargs in context.kwarg_mbs or ()
        ]
        calls = []
        for call in program.calls[number]:
            attends = program.pools[call.pool][self.rank] is not None
            calls.append(
                TickCall(
                    call.forward,
                    pool_keys(keys[0], call.pool, self._nano_batches),
                    attends,
                )
            )
        work = program.ticks[number].work[self.rank]
        self._engine.begin_tick(calls, None if work is None else keys[work.microbatch])

    def _end_tick(self, action: _Action, context: _PipelineContext) -> None:
        self._engine.end_tick()


def pool_keys(first: int, pool: int, nano_batches: int) -> tuple[int, ...]:
    """Return the keys of a pool's plans, one per nano-batch, in a batch whose first plan has key ``first``."""
    key = first + pool * KEY_STEP * nano_batches
    return tuple(range(key, key + nano_batches))


def _action(tick: Tick, rank: int) -> _Action | None:
    work = tick.work[rank]
    if work is None:
        return None
    kind = FORWARD if tick.forward else FULL_BACKWARD
    return _Action(work.chunk * len(tick.work) + rank, kind, work.microbatch)


def forward_only(lowered: Sequence[_Action]) -> list[_Action]:
    """Return a rank's lowered actions without backward, and without parameters that are gathered for backward alone."""
    kept: list[_Action | None] = []
    unused: dict[int, int] = {}
    """by stage, where in ``kept`` its parameters are gathered, as long as no forward has used them"""
    for action in lowered:
        kind = action.computation_type
        stage = action.stage_index
        if kind.name in _BACKWARD:
            continue
        if kind == RESHARD and stage in unused:
            kept[unused.pop(stage)] = None
            continue
        if kind == UNSHARD:
            unused[stage] = len(kept)
        elif kind == FORWARD:
            unused.pop(stage, None)
        kept.append(action)
    return [action for action in kept if action is not None]


def transfers_after(tick: Tick, rank: int, num_stages: int) -> list[_Action]:
    """Return what a rank sends and receives of what a tick has made.

    All ranks have their messages in one order, so that none waits for ever where a rank has one at a time; senders of
    even number come first, so that no more than a few wait for each other.
    """
    num_ranks = len(tick.work)
    to_next, send, receive = (
        (1, SEND_F, RECV_F) if tick.forward else (-1, SEND_B, RECV_B)
    )
    transfers = []
    for sender in (*range(0, num_ranks, 2), *range(1, num_ranks, 2)):
        work = tick.work[sender]
        if work is None:
            continue
        stage = work.chunk * num_ranks + sender
        next_stage = stage + to_next
        receiver = next_stage % num_ranks
        if receiver == sender or not 0 <= next_stage < num_stages:
            continue
        if rank == sender:
            transfers.append(_Action(stage, send, work.microbatch))
        elif rank == receiver:
            transfers.append(_Action(next_stage, receive, work.microbatch))
    return transfers


def with_marks(
    lowered: Sequence[_Action], ticks: Sequence[Tick], rank: int, num_stages: int
) -> list[_Action]:
    """Put the beginning and the end of every tick among a rank's lowered actions, and what it sends and receives."""
    marked: list[_Action] = []
    number = 0

    def pass_tick(*work: _Action) -> None:
        nonlocal number
        begin, end = (_Action(rank, kind, number) for kind in (_Mark.BEGIN, _Mark.END))  # type: ignore[arg-type]
        transfers = transfers_after(ticks[number], rank, num_stages)
        marked.extend([begin, *work, end, *transfers])
        number += 1

    for action in lowered:
        if action.computation_type in _TRANSFERS:
            continue
        if action.computation_type not in (FORWARD, FULL_BACKWARD):
            marked.append(action)
            continue
        while _action(ticks[number], rank) is None:
            pass_tick()
        assert _action(ticks[number], rank) == action, (
            f"{action} is not the work of tick {number}"
        )
        pass_tick(action)
    while number < len(ticks):
        assert ticks[number].work[rank] is None, f"{ticks[number]} was lost"
        pass_tick()
    of_torch = [action for action in marked if action.computation_type not in [*_Mark]]
    assert Counter(of_torch) == Counter(lowered), "torch sends or receives otherwise"
    return marked
