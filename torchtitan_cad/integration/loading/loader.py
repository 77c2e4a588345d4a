# SPDX-License-Identifier: BSD-3-Clause
"""A data loader that plans ahead: the next step is drawn and planned in a thread while the current one trains."""

import copy
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from torch._C import _error_if_any_worker_fails
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_cad.integration.host_tensor import HostTensor
from torchtitan_cad.integration.loading.batch_planner import (
    BatchPlanner,
    Exhausted,
    PlannedBatch,
)
from torchtitan_cad.integration.loading.documents import DOCUMENT_IDS, DocumentRule
from torchtitan_cad.integration.loading.redistribution import Batch
from torchtitan_cad.planning.model.batch import BatchShape

logger = logging.getLogger(__name__)

T = TypeVar("T")

PLAN_KEYS = "cad_plan"
"""Batch key that carries the plan of every row, [B] int64, from the loader to the model."""

JOIN_S = 30.0
"""Seconds that closing waits for the planning thread, which in turn waits for the peers' planning threads."""

_POLL_S = 0.1

Step = list[tuple[Batch, PlannedBatch]]


class Loader(Protocol):
    """Yields batches and can be resumed from its state, as torchtitan's data loaders do.

    It does not derive from torch's ``Stateful``: asking whether an object is one can then fail in Python 3.11, and
    checkpoints ask that of everything they save.
    """

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a thread that ends with the process."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="cad-planning", daemon=True).start()
    return future


def _result(future: Future[T]) -> T:
    """Wait for what a thread returns or raises.

    Raises RuntimeError if a worker that loads data was killed, for whose half a message the thread may wait for ever.
    """
    while not wait([future], _POLL_S).done:
        # torch does so only where the main thread has started the workers
        _error_if_any_worker_fails()
    return future.result()


@dataclass(eq=False)
class PlanningLoader(Stateful):
    """Wraps a data loader; batches gain the key ``cad_plan``, and ``cad_positions`` where tokens are redistributed.

    ``state_dict`` describes the last step that was handed out, not the one drawn ahead, so a checkpoint resumes with
    the batch that would have come next. A step for which the data does not suffice hands out no batch.

    Args:
        inner: the loader to draw from.
        planner: gives the planner when an iteration begins, by when the model has been built. Plans are made in the
            planning thread only, and dropped once their batch has been trained on.
        documents: how they are told apart.
        microbatches: parts of a batch that go through the model one after the other.
        accumulation: batches of an optimizer step, which are drawn and planned together, ahead of training.
        snapshot: record the loader's state with every step (needed when checkpoints are saved).
        on_batch: called in the training thread with every batch's plans when the batch is handed out.
    """

    inner: Loader
    planner: Callable[[], BatchPlanner]
    _: KW_ONLY
    documents: DocumentRule
    microbatches: int
    accumulation: int
    snapshot: bool
    on_batch: Callable[[PlannedBatch], None]
    _state: dict[str, Any] | None = field(default=None, init=False)
    _ahead: Future[Any] | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Batch]:
        self._stop_planning()
        planner = self.planner()
        with planner.announced_failure("loading a batch"):
            iterator = iter(self.inner)
            self._state = self._snapshot()
        draw = partial(self._draw_step, planner, iterator)
        self._ahead = _in_thread(draw)
        # A step draws all its batches before its first forward, so its plans are in use until the next one has drawn.
        trained: list[PlannedBatch] = []
        while True:
            try:
                step, state = _result(self._ahead)
            except Exhausted:
                return
            self._ahead = _in_thread(draw)
            plans = [planned for _, planned in step]
            while step:
                batch, planned = step.pop(0)  # so that training alone holds it
                if not step:
                    self._state = state
                self.on_batch(planned)
                yield batch
            for planned in trained:
                planner.drop(planned)
            trained = plans

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict() if self._state is None else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stop_planning()
        self._state = state_dict
        self.inner.load_state_dict(state_dict)

    def _stop_planning(self) -> None:
        """Wait for the planning thread. Raises RuntimeError if it does not end: two would draw from one loader."""
        self.close()
        if self._ahead is not None:
            raise RuntimeError(
                f"the CAD planning thread still waits for its peers after {JOIN_S:.0f} s; start the job anew"
            )

    def close(self, timeout_s: float = JOIN_S) -> None:
        """Wait for the planning thread, which plans a step with those of its peers, so that none waits in vain.

        After an error in training a second will do for that: the peers then wait for this rank in a collective of the
        model, and will not come to plan.
        """
        if self._ahead is None:
            return
        if wait([self._ahead], timeout_s).done:
            self._ahead = None
        else:
            logger.warning(
                "the CAD planning thread still waits for its peers, and is left behind"
            )

    def _draw_step(
        self, planner: BatchPlanner, iterator: Iterator[Batch]
    ) -> tuple[Step, dict[str, Any] | None]:
        """Draw and plan a step; return it with the inner loader's state behind it.

        Raises ``Exhausted`` if some rank of the group has not enough batches for it.
        """
        with planner.announced_failure("loading a batch"):
            drawn = list(itertools.islice(iterator, self.accumulation))
            by_shape = itertools.groupby(drawn, lambda batch: batch[0]["input"].shape)
            parts = [list(batches) for _, batches in by_shape]
            state = self._snapshot()
        if len(drawn) < self.accumulation:
            planner.announce_exhausted()
        step = Step()
        for batches in parts:
            step += self._plan(planner, batches)
        return step, state

    def _snapshot(self) -> dict[str, Any] | None:
        """Copy the inner loader's state, which may share lists with a loader that goes on drawing."""
        return copy.deepcopy(self.inner.state_dict()) if self.snapshot else None

    def _plan(self, planner: BatchPlanner, batches: list[Batch]) -> Step:
        """Plan batches of one shape together, and redistribute their tokens."""
        placement = planner.placement
        starts = list[np.ndarray]()
        can_redistribute = placement is not None
        with planner.announced_failure("planning a batch"):
            rows, seq_len = batches[0][0]["input"].shape
            shape = BatchShape(rows, seq_len, rows // self.microbatches)
            for number, (inputs, labels) in enumerate(batches):
                begun = self.documents.starts(inputs)
                inputs.pop(DOCUMENT_IDS, None)
                starts.append(number * rows * seq_len + begun)
                if placement is not None and can_redistribute:
                    can_redistribute = placement.can_redistribute(inputs, labels)
        planned, redistribution = planner.plan(
            np.concatenate(starts),
            shape,
            len(batches),
            can_redistribute=can_redistribute,
        )
        if placement is not None and redistribution is not None:
            with planner.announced_failure("planning a batch"):
                batches = placement.exchange(redistribution, batches)
        keyed = [
            ({**inputs, PLAN_KEYS: HostTensor.wrap(planned_batch.keys)}, labels)
            for (inputs, labels), planned_batch in zip(batches, planned, strict=True)
        ]
        return list(zip(keyed, planned, strict=True))
