# SPDX-License-Identifier: BSD-3-Clause
"""A data loader that plans ahead: the next step is drawn and planned in a thread while the current one trains."""

import contextlib
import copy
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

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
from torchtitan_cad.integration.run_state import run_state
from torchtitan_cad.planning.model.batch import BatchShape

logger = logging.getLogger(__name__)

PLAN_KEYS = "cad_plan"
"""Batch key that carries the plan of every row, [B] int64, from the loader to the model."""

TRAINED = "cad_trained_batches"
"""Key of a loader's state in the middle of an optimizer step: how many of the step's batches were handed out. The other
keys are then the inner loader's as the step began, from which all of it is drawn and planned again."""

JOIN_S = 30.0
"""Seconds that closing waits for the planning thread, which in turn waits for the peers' planning threads."""

_POLL_S = 0.1

WATCHED = 20
"""Batches over which the time that training waits for them is summed."""

LONG_WAIT = 0.05
"""Share of the time that training may wait for its batches without a word."""


class Loader(Protocol):
    """Yields batches and can be resumed from its state, as torchtitan's data loaders do.

    It does not derive from torch's ``Stateful``: asking whether an object is one can then fail in Python 3.11, and
    checkpoints ask that of everything they save.
    """

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _Producer:
    """The planning thread of one iteration, with a queue and a stop signal that no other iteration shares.

    Args:
        produce: runs in the thread; hands items out through its argument, which returns False once they are unwanted.
            Ends by ``Exhausted`` or by the error that ``get`` will raise.
        ahead: items that may wait in the queue.
    """

    def __init__(
        self, produce: Callable[[Callable[[Any], bool]], None], ahead: int
    ) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(produce,), name="cad-planning", daemon=True
        )
        self._thread.start()

    def get(self) -> Any:
        """Wait for the next item, or raise what ended the thread.

        Raises RuntimeError if it ended without saying why, as it does when it was closed; or if a worker that loads
        data was killed, for whose half a message the thread may wait for ever.
        """
        while True:
            # asked first: what a thread delivers last must not be missed
            alive = self._thread.is_alive()
            try:
                item = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                if alive:
                    _error_if_any_worker_fails()  # torch does so only where the main thread has started the workers
                    continue
                raise RuntimeError(
                    "the CAD planning thread ended without a batch or an error: its loader was closed while in use"
                ) from None
            if isinstance(item, BaseException):
                raise item
            return item

    def close(self, timeout_s: float) -> bool:
        """Tell the thread to stop and wait for it; False if it is still running."""
        self._stop.set()
        with contextlib.suppress(queue.Empty):
            # make room for what the thread waits to hand out
            while True:
                self._queue.get_nowait()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self, produce: Callable[[Callable[[Any], bool]], None]) -> None:
        try:
            produce(self._put)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Any) -> bool:
        if not self._stop.is_set():
            self._queue.put(item)
        return not self._stop.is_set()


class _Pace:
    """Says once if training waits for its plans. The first ``WATCHED`` batches, when things compile, do not count."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._batches = 0
        self._warned = False
        self._begin = self._waited = self._planned = 0.0

    def add(self, waited: float, planned: float) -> None:
        """Add a batch: the seconds that training has waited for it, and those that planning has taken."""
        self._batches += 1
        self._waited += waited
        self._planned += planned
        if self._batches % WATCHED:
            return
        end = time.perf_counter()
        elapsed = end - self._begin
        counts = self._batches > WATCHED
        if (
            counts
            and not self._warned
            and 2 * self._planned > self._waited > LONG_WAIT * elapsed
        ):
            self._warned = True
            logger.warning(
                f"training waits for plans {100 * self._waited / elapsed:.0f} % of the time: planning a batch takes "
                f"{1e3 * self._planned / WATCHED:.0f} ms, training on it {1e3 * elapsed / WATCHED:.0f} ms; "
                f"{self._remedy}"
            )
        self._begin = end
        self._waited = 0.0
        self._planned = 0.0


@dataclass(eq=False)
class PlanningLoader(Stateful):
    """Wraps a data loader; batches gain the key ``cad_plan``, and ``cad_positions`` where tokens are redistributed.

    ``state_dict`` describes the last batch that was handed out, not the ones drawn ahead, so a checkpoint resumes with
    the batch that would have come next. A step for which the data does not suffice hands out no batch.

    Args:
        inner: the loader to draw from.
        planner: gives the planner when an iteration begins, by when the model has been built. Plans are made in the
            planning thread only, and dropped once their batch has been trained on.
        documents: how they are told apart.
        rows_per_microbatch: rows that go through the model together; None for all.
        accumulation: batches of an optimizer step, which are drawn and planned together, ahead of training.
        snapshot: record the loader's state with every batch (needed when checkpoints are saved).
        on_batch: called in the training thread with every batch's plans when the batch is handed out.
    """

    inner: Loader
    planner: Callable[[], BatchPlanner]
    _: KW_ONLY
    documents: DocumentRule
    rows_per_microbatch: int | None
    accumulation: int
    snapshot: bool
    on_batch: Callable[[PlannedBatch], None]
    _consumed_state: dict[str, Any] | None = field(default=None, init=False)
    _to_skip: int = field(default=0, init=False)
    _producer: _Producer | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Batch]:
        self._end_iteration()
        planner = self.planner()
        producer = self._producer = _Producer(
            lambda put: self._produce(planner, put), self.accumulation
        )
        # A step draws all its batches before its first forward, so plans of a step are in use until the next one draws.
        in_use: deque[PlannedBatch] = deque()
        cheaper = (
            "" if planner.placement is None else "set cad.placement = 'loader', or "
        )
        pace = _Pace(f"{cheaper}give every rank more CPU cores")
        while True:
            begin = time.perf_counter()
            try:
                batch, planned, state = producer.get()
            except Exhausted:
                return
            if self._to_skip:
                self._to_skip -= 1
                planner.drop(planned)
                continue
            self._consumed_state = state
            pace.add(time.perf_counter() - begin, planned.seconds)
            in_use.append(planned)
            while len(in_use) > 2 * self.accumulation:
                planner.drop(in_use.popleft())
            self.on_batch(planned)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return (
            self.inner.state_dict()
            if self._consumed_state is None
            else self._consumed_state
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._end_iteration()
        self._consumed_state = state_dict
        self._to_skip = state_dict.get(TRAINED, 0)
        self.inner.load_state_dict(
            {key: value for key, value in state_dict.items() if key != TRAINED}
        )

    def close(self, timeout_s: float = JOIN_S) -> None:
        """Stop the planning thread, once it has joined its peers' current gather, so that none waits in vain.

        After an error in training a second will do for that: the peers then wait for this rank in a collective of the
        model, and will not come to plan.
        """
        if self._producer is None:
            return
        if self._producer.close(timeout_s):
            self._producer = None
        else:
            logger.warning(
                "the CAD planning thread still waits for its peers, and is left behind"
            )

    def _end_iteration(self) -> None:
        """Make sure that no other thread draws from the inner loader or plans."""
        self.close()
        if self._producer is not None:
            raise RuntimeError(
                "the CAD planning thread of the previous iteration has not ended: it waits for its peers or for the "
                "inner data loader, so the loader cannot be used again"
            )

    def _produce(self, planner: BatchPlanner, put: Callable[[Any], bool]) -> None:
        """Draw and plan steps until some rank of the group has no more or stops, which raises ``Exhausted``."""
        with announced_failure(planner, "loading a batch"):
            iterator = iter(self.inner)
            end = self._snapshot()
        while True:
            begin = end
            step = list[tuple[Batch, PlannedBatch]]()
            with announced_failure(planner, "loading a batch"):
                drawn = list(itertools.islice(iterator, self.accumulation))
                by_shape = itertools.groupby(
                    drawn, lambda batch: batch[0]["input"].shape
                )
                parts = [list(batches) for _, batches in by_shape]
            if len(drawn) < self.accumulation:
                planner.announce_exhausted()
            for batches in parts:
                step += self._plan(planner, batches)
            with announced_failure(planner, "loading a batch"):
                end = self._snapshot()
            for number, pair in enumerate(step, start=1):
                state = (
                    begin and {**begin, TRAINED: number} if number < len(step) else end
                )
                if not put((*pair, state)):
                    planner.announce_exhausted()

    def _snapshot(self) -> dict[str, Any] | None:
        """Copy the inner loader's state, which may share lists with a loader that goes on drawing."""
        return copy.deepcopy(self.inner.state_dict()) if self.snapshot else None

    def _plan(
        self, planner: BatchPlanner, batches: list[Batch]
    ) -> list[tuple[Batch, PlannedBatch]]:
        """Plan batches of one shape together, and redistribute their tokens."""
        placement = planner.placement
        starts = list[np.ndarray]()
        can_redistribute = True
        with announced_failure(planner, "planning a batch"):
            rows, seq_len = batches[0][0]["input"].shape
            planner.check_rows(self.rows_per_microbatch or rows)
            for number, (inputs, labels) in enumerate(batches):
                begun = self.documents.starts(inputs)
                inputs.pop(DOCUMENT_IDS, None)
                can_redistribute = (
                    can_redistribute
                    and placement is not None
                    and placement.can_redistribute(inputs, labels)
                )
                starts.append(number * rows * seq_len + begun)
        shape = BatchShape(rows, seq_len, self.rows_per_microbatch or rows)
        to_redistribute = batches if can_redistribute else None
        planned, parcel = planner.plan(
            np.concatenate(starts), shape, len(batches), to_redistribute=to_redistribute
        )
        if placement is not None and parcel is not None:
            came = placement.exchange(parcel)
            with announced_failure(planner, "planning a batch"):
                batches = parcel.unpack(came)
        keyed = [
            ({**inputs, PLAN_KEYS: HostTensor.wrap(planned_batch.keys)}, labels)
            for (inputs, labels), planned_batch in zip(batches, planned, strict=True)
        ]
        return list(zip(keyed, planned, strict=True))


@contextlib.contextmanager
def announced_failure(planner: BatchPlanner, doing: str) -> Iterator[None]:
    """Tell the peers of an error raised while ``doing`` something, on this rank alone between two plans."""
    try:
        yield
    except BaseException as error:
        run_state().own_error = error
        planner.announce_failure(doing)
        raise
