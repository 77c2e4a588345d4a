# SPDX-License-Identifier: BSD-3-Clause
"""``cad.shadow``: what reordering rows, and CAD, would make of every step of a job that trains without either.

Batches go to training as they were loaded. A thread gathers where their documents begin, and the first rank of the CAD
group plans every step as CAD would; training waits for that only to log it.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_cad.integration.job import Job
from torchtitan_cad.integration.loading.batch_planner import PlannedBatch
from torchtitan_cad.integration.loading.documents import BOUNDARY_KEYS
from torchtitan_cad.integration.loading.loader import Batch, Loader
from torchtitan_cad.integration.report.statistics import StepStatistics
from torchtitan_cad.planning.model.batch import BatchShape
from torchtitan_cad.planning.outlook import Outlook, speedups
from torchtitan_cad.runtime.transport.base import gather

logger = logging.getLogger(__name__)

WAIT_S = 60.0
"""seconds: maximum for which a log line waits for the plan of its step"""
CLOSE_S = 5.0
"""seconds: maximum for which the end of the job waits for the thread, which may wait for a peer that is gone"""
NICENESS = 10
"""of the thread, so that it runs while training waits for other ranks"""


@dataclass(eq=False)
class Shadow(Stateful):
    """Hands out the batches of a loader, whose state it has, and predicts steps of one CAD group from them.

    Args:
        job: that trains.
        group: of gloo; None for a group of one rank.
        rank: this one's position in the CAD group.
    """

    loader: Loader
    job: Job
    outlook: Outlook
    group: dist.ProcessGroup | None
    rank: int
    _steps: queue.Queue[list[dict[str, Tensor]]] = field(default_factory=queue.Queue, init=False)
    _statistics: StepStatistics = field(default_factory=StepStatistics, init=False)
    _failed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name="cad-shadow", daemon=True).start()

    def __iter__(self) -> Iterator[Batch]:
        step: list[dict[str, Tensor]] = []
        for inputs, labels in self.loader:
            step.append({name: inputs[name] for name in BOUNDARY_KEYS if name in inputs})
            if len(step) == self.job.accumulation:
                if not self._failed:
                    self._steps.put(step)
                step = []
            yield inputs, labels

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)

    def figures(self, step_seconds: float) -> dict[str, Any]:
        """Return the figures of the steps since the last call, which took ``step_seconds`` each; on the first rank."""
        if self.rank == 0 and not self.close(WAIT_S):
            self._fail(f"the plan of a step has taken more than {WAIT_S:.0f} s")
        figures = self._statistics.drain()
        return figures | speedups(figures, step_seconds)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Wait until this rank has done its part for the steps so far; False if it has not in that time."""
        with (done := self._steps.all_tasks_done):
            return done.wait_for(lambda: self._failed or not self._steps.unfinished_tasks, timeout_s)

    def _fail(self, reason: str) -> None:
        logger.warning(f"cad.shadow logs nothing from here on, and training goes on: {reason}")
        with (done := self._steps.all_tasks_done):
            self._failed = True
            done.notify_all()

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # on Linux, where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._failed:
            try:
                self._predict(self._steps.get())
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")
            self._steps.task_done()

    def _predict(self, step: list[dict[str, Tensor]]) -> None:
        """Gather where a step's documents begin and, on the first rank, add its figures."""
        inputs, cp = {name: torch.cat([batch[name] for batch in step]) for name in step[0]}, self.job.topology.cp
        mine = self.job.documents.starts(inputs)
        every = [mine] * self.job.topology.group_size if self.group is None else [*gather(mine, self.group).values()]
        if self.rank == 0:
            begin, starts, (rows, seq_len) = time.perf_counter(), every[::cp], inputs["input"].shape
            shape = BatchShape(rows, seq_len, rows // (len(step) * self.job.microbatches))
            plans = self.outlook.plan(starts, shape, place=self.job.cad.placement != "loader")
            seconds, (first, *others) = (
                (time.perf_counter() - begin) / len(step),
                [list(chain(*kind)) for kind in plans],
            )
            layers = tuple(kind.layers for kind in self.outlook.kinds)
            planned = PlannedBatch(
                torch.empty(0), first, seconds, [], self.outlook.nano_batches, others=others, layers=layers
            )
            self._statistics.add(planned, **self.outlook.without(starts, shape, plans))
