# SPDX-License-Identifier: BSD-3-Clause
"""Core attention of a pipeline in ticks: every rank runs the same calls in a tick, with or without tokens of its own.

A rank's blocks make some of the tick's calls. In the other calls the rank only serves, without own rows and without a
model. The plan of a call depends on the tick, not on the microbatch: a microbatch's backward shares its tick with other
microbatches than its forward did, and recomputation in backward is balanced over the microbatches of that tick.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.call import AttentionCall, Saved, Step
from torchtitan_cad.runtime.directions import FORWARD, Direction
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.ops import results_like


@dataclass(frozen=True)
class TickCall:
    """One core attention of a tick.

    Attributes:
        forward: True for a forward call.
        keys: keys of its plans in the engine, one per nano-batch, equal on all ranks of the group.
        attends: True if tokens of this rank attend; otherwise the rank only serves.
    """

    forward: bool
    keys: tuple[int, ...]
    attends: bool


class _Due(NamedTuple):
    """A step of a nano-batch, counted from 0, that starts exchanges."""

    step: Step
    call: TickCall
    nano: int


def _steps(calls: Sequence[TickCall]) -> Iterator[_Due]:
    """Yield the steps in the order in which all ranks of the group take them.

    The first nano-batch comes first; in backward it comes last, as autograd reverses the loop over blocks.
    """
    for call in calls:
        nanos = range(len(call.keys))
        for step in get_args(Step):
            for nano in nanos if call.forward else reversed(nanos):
                yield _Due(step, call, nano)


class TickEngine(CoreAttentionEngine):
    """An engine whose calls run in the same order on all ranks, each by the plan of the tick's next call.

    Between ``begin_tick`` and ``end_tick`` the calls of a tick run in order. Calls with tokens of this rank wait for
    its blocks, which call by the microbatch's key. The other calls run before the next call of a block, or in
    ``end_tick``. Served calls are finished as late as possible, as blocks do: before the next call of the same
    nano-batch, or in ``end_tick``.

    Args:
        shape: heads of this rank, and their sizes.
        dtype: dtype of queries, keys and values, equal on all ranks of the group, as are the formats of messages.
        options: options of ``CoreAttentionEngine``.
    """

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, **options: Any
    ) -> None:
        super().__init__(**options)
        new = torch.empty(0, dtype=dtype, device=self.device)
        q = new.new_empty(0, shape.num_heads, shape.head_dim)
        k = new.new_empty(0, shape.num_kv_heads, shape.key_dim)
        v = new.new_empty(0, shape.num_kv_heads, shape.out_dim)
        shared = new.new_empty(0, 1, shape.shared_dim) if shape.shared_dim else None
        out, lse, kept_q, kept_kv = results_like([q, k, v])
        self._saved = Saved(q, k, v, out, lse, kept_q, kept_kv, shared)
        self._steps: Iterator[_Due] | None = None
        self._microbatch: int | None = None
        """Key of this rank's blocks for the first nano-batch of the tick."""
        self._served: dict[int, AttentionCall] = {}
        """Served calls by nano-batch until they are finished, the oldest first."""
        self._serving = False

    # Ticks ------------------------------------------------------------------------------------------------------------

    def begin_tick(
        self, calls: Sequence[TickCall], microbatch: int | None = None
    ) -> None:
        """Start a tick.

        Args:
            calls: all core attentions of the tick, in the order in which all ranks run them.
            microbatch: key of this rank's blocks for the first nano-batch; the next numbers are those of the other
                nano-batches. None if the rank only serves.
        """
        if self._steps is not None:
            raise RuntimeError("a tick begins, but the one before it has not ended")
        self._steps = _steps(calls)
        self._microbatch = microbatch

    def end_tick(self) -> None:
        """Serve in the remaining calls; raises RuntimeError if one of them needs a block of this rank."""
        due = self._serve_until_own()
        self._steps = None
        if due is not None:
            raise RuntimeError(
                f"a tick ends, but a block of this rank has not made its step {due}"
            )
        while self._served:
            self._finish_oldest()

    def enter(
        self, step: Step, direction: Direction, key: int, rows: Tensor | None = None
    ) -> int:
        """Serve until the next step belongs to this rank's block, and return the key of its plan.

        Raises:
            RuntimeError: a block calls out of order, or its rows are not of ``dtype``.
        """
        if self._serving:
            return super().enter(step, direction, key)
        expected = self._saved.q.dtype
        if rows is not None and rows.dtype != expected:
            raise RuntimeError(
                f"core attention gets {rows.dtype}, but the ranks that serve it expect {expected}, the dtype of "
                "training.mixed_precision_param: cast queries, keys and values to that"
            )
        due = self._serve_until_own() if self._steps is not None else None
        is_forward = direction is FORWARD
        if due is not None and (due.step, due.call.forward) == (step, is_forward):
            plan_key = due.call.keys[due.nano]
            is_own = key - due.nano == self._microbatch
            if is_own if step == "start" else key == plan_key:
                return super().enter(step, direction, plan_key)
        raise RuntimeError(
            f"a block makes the step {step}_{direction.name} of {key}, but the next step in this tick is {due}"
        )

    def _serve_until_own(self) -> _Due | None:
        assert self._steps is not None, "a tick has begun"
        for due in self._steps:
            if due.step == "start":
                while due.nano in self._served:
                    self._finish_oldest()
            if due.call.attends:
                return due
            self._serving = True
            self._serve(due)
            self._serving = False
        return None

    def _serve(self, due: _Due) -> None:
        key = due.call.keys[due.nano]
        if due.step == "attend":
            self._served[due.nano].attend()
        elif due.call.forward:
            q, k, v, *_, shared = self._saved
            self._served[due.nano] = self.begin_forward(q, k, v, key, shared).send()
        else:
            self._served[due.nano] = self.begin_backward(
                self._saved.out, self._saved, key
            ).send()

    def _finish_oldest(self) -> None:
        self._served.pop(next(iter(self._served))).finish()
