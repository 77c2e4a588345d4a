# SPDX-License-Identifier: BSD-3-Clause
"""``cad.shadow``: a job trains without CAD, and the documents of all its steps are recorded."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_cad.integration.gathering import new_host_group
from torchtitan_cad.integration.job import Job
from torchtitan_cad.integration.loading.loader import Batch, Loader
from torchtitan_cad.integration.report.steps_file import (
    DOCUMENTS_NAME,
    DOCUMENTS_VERSION,
    StepsFile,
)
from torchtitan_cad.planning.model.kind import attention_work

Rows = list[list[int]]
"""Tokens of the documents of every row, in order."""


@dataclass(eq=False)
class Shadow(Stateful):
    """Hands out the batches of a loader, whose state it has, and records their documents step by step.

    Args:
        job: that trains.
        dump_folder: of the job, with the record of the job's first rank in it.
        group: of gloo, the CAD group's; None for one rank, which then stands for all.
        rank: this one's position in the CAD group.
    """

    loader: Loader
    job: Job
    dump_folder: str
    group: dist.ProcessGroup | None
    rank: int
    _microbatches: list[Rows] = field(default_factory=list, init=False)
    _row_tokens: int = field(default=0, init=False)
    _imbalances: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._file = StepsFile(
            lambda: Path(self.dump_folder, DOCUMENTS_NAME), "simulate"
        )

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in self.loader:
            lengths = self.job.documents.lengths(inputs)
            rows, self._row_tokens = inputs["input"].shape
            size = max(1, rows // self.job.microbatches)
            self._microbatches += [
                lengths[first : first + size] for first in range(0, rows, size)
            ]
            yield inputs, labels

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict)

    def end_step(self, step: int) -> None:
        """Record the documents of the batches since the last call. All ranks of the group must call it together."""
        microbatches = self._microbatches
        self._microbatches = []
        tile = self.job.cad.planner_config().cost_tile
        own_work = [attention_work(rows, self.job.kinds, tile) for rows in microbatches]
        own = (microbatches, own_work)
        gathered = [own] * self.job.topology.group_size
        if self.group is not None:
            # to the first rank alone, so that no rank waits for another
            there = gathered if self.rank == 0 else None
            dist.gather_object(own, there, group=self.group, group_dst=0)
        if self.rank > 0:
            return
        # context-parallel ranks have the same rows
        rows_of_ranks, work_of_ranks = zip(
            *gathered[:: self.job.topology.cp], strict=True
        )
        work = np.array(work_of_ranks)  # [ranks, microbatches]
        imbalance = (work.max(axis=0) / work.mean(axis=0)).mean()
        self._imbalances.append(float(imbalance))
        if dist.get_rank() == 0:
            line = {
                "version": DOCUMENTS_VERSION,
                "step": step,
                "ranks": dist.get_world_size(),
                "row_tokens": self._row_tokens,
                "microbatches": list(zip(*rows_of_ranks, strict=True)),
            }
            self._file.append(line)

    def drain_imbalances(self) -> list[float]:
        """Return the imbalance of every step since the last call, on the first rank of the group; elsewhere none.

        It is the attention of the busiest rank over the mean rank's, in tiles: the mean over microbatches.
        """
        imbalances = self._imbalances
        self._imbalances = []
        return imbalances


def open_shadow(loader: Loader, job: Job, dump_folder: str) -> Shadow:
    """Wrap a training loader; collective over the ranks of each CAD group."""
    rank = dist.get_rank()
    ranks = job.topology.group_ranks(rank)
    group = new_host_group(ranks, job.planning_timeout_s)
    return Shadow(loader, job, dump_folder, group, job.topology.group_rank(rank))
