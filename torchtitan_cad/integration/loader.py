"""A data loader that plans ahead: the next batch is drawn and planned in a thread while the current one trains."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.tools.logging import logger

from torchtitan_cad.integration.batch_planner import BatchPlanner, Exhausted, PlannedBatch
from torchtitan_cad.integration.documents import DOCUMENT_IDS, BatchShape, document_starts
from torchtitan_cad.integration.host_tensor import HostTensor
from torchtitan_cad.runtime.engine import CoreAttentionEngine

PLAN_KEYS = "cad_plan"
"""Batch key that carries the plan of every row, [B] int64, from the loader to the model."""

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class PlanningLoader(BaseDataLoader):
    """Wraps a torchtitan data loader; batches gain the key ``cad_plan``.

    ``state_dict`` describes the last batch that was handed out, not the ones drawn ahead, so a checkpoint resumes with
    the batch that would have come next.

    Args:
        inner: the loader to draw from.
        planner: called from the planning thread only.
        engine: whose plans are dropped once their batch has been trained on.
        eos_id: document separator; None makes every row one document.
        rows_per_microbatch: rows that go through the model together; None for all.
        ahead: batches drawn ahead; an optimizer step's worth keeps planning off the critical path.
        snapshot: record the loader's state with every batch (needed when checkpoints are saved).
        on_batch: called in the training thread with every batch's plans when the batch is handed out.
    """

    def __init__(
        self,
        inner: BaseDataLoader,
        planner: BatchPlanner,
        engine: CoreAttentionEngine,
        *,
        eos_id: int | None,
        rows_per_microbatch: int | None,
        ahead: int,
        snapshot: bool,
        on_batch: Callable[[PlannedBatch], None],
    ) -> None:
        self._inner, self._planner, self._engine = inner, planner, engine
        self._eos_id, self._rows_per_microbatch = eos_id, rows_per_microbatch
        self._ahead, self._snapshot, self._on_batch = ahead, snapshot, on_batch
        self._consumed_state: dict[str, Any] | None = None
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._stop.clear()
        self._queue = queue.Queue(maxsize=self._ahead)
        self._thread = threading.Thread(target=self._produce, name="cad-planning", daemon=True)
        self._thread.start()
        # A step draws all its batches before its first forward, so plans of a step are in use until the next one draws.
        in_use: deque[PlannedBatch] = deque()
        while True:
            kind, item = self._queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise item
            batch, planned, self._consumed_state = item
            in_use.append(planned)
            while len(in_use) > 2 * self._ahead:
                self._drop(in_use.popleft())
            self._on_batch(planned)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict() if self._consumed_state is None else self._consumed_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.close()
        self._consumed_state = None
        self._inner.load_state_dict(state_dict)

    def close(self) -> None:
        """Stops the planning thread, once it has joined its peers' current gather, so that none waits in vain."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
            if self._thread.is_alive():
                logger.warning("CAD planning thread is still waiting for its peers")
            self._thread = None

    def _drop(self, planned: PlannedBatch) -> None:
        for key in set(planned.keys.tolist()):
            self._engine.drop_plan(key)

    def _produce(self) -> None:
        iterator = iter(self._inner)
        try:
            while True:
                drawn = self._draw(iterator)
                if drawn is None:
                    self._planner.announce_exhausted()
                inputs, labels, starts, shape = drawn
                planned = self._planner.plan(starts, shape)
                state = self._inner.state_dict() if self._snapshot else None
                batch = ({**inputs, PLAN_KEYS: HostTensor.wrap(planned.keys)}, labels)
                if not self._put("batch", (batch, planned, state)):
                    self._planner.announce_exhausted()
        except Exhausted:
            self._put("end", None)
        except Exception as error:
            self._put("error", error)

    def _draw(self, iterator: Iterator[Batch]) -> tuple[dict, torch.Tensor, np.ndarray, BatchShape] | None:
        """The next batch and its document starts; None when there is none left."""
        try:
            inputs, labels = next(iterator)
            document_ids = inputs.pop(DOCUMENT_IDS, None)
            tokens = inputs["input"]
            starts = document_starts(tokens, self._eos_id, document_ids)
        except StopIteration:
            return None
        except Exception:
            self._planner.announce_failure()
            raise
        rows = tokens.shape[0]
        return inputs, labels, starts, BatchShape(rows, tokens.shape[1], self._rows_per_microbatch or rows)

    def _put(self, kind: str, item: Any) -> bool:
        """Hands an item to the training thread; False if the loader was closed meanwhile."""
        while not self._stop.is_set():
            try:
                self._queue.put((kind, item), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
