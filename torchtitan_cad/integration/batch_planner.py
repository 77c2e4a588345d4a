"""From every rank's document boundaries to plans that the engine can execute.

Every rank of a CAD group gathers the boundaries of all, computes the same plans for itself and compares fingerprints.
The gathers run over a gloo group of their own, so planning never touches the accelerator's communicators.
"""

import time
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_cad.integration.documents import BatchShape, group_layout
from torchtitan_cad.planning import AttentionShape, Plan, PlannerConfig, make_plan
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.errors import PeerError, PlanMismatchError

_OK, _EXHAUSTED, _FAILED = range(3)


@dataclass
class PlannedBatch:
    """The plans of one batch: one key per row (equal within a microbatch), and what was planned."""

    keys: torch.Tensor
    plans: list[Plan] = field(repr=False)
    seconds: float


class Exhausted(Exception):
    """Some rank of the group has no more data; all of them stop together."""


class BatchPlanner:
    """Plans batches for one CAD group. All ranks of the group must plan the same batches in the same order.

    Args:
        group: gloo group of the CAD group, in group order; None for a group of one.
        ranks: global ranks of the group.
        cp: context-parallel degree; the group is data-parallel x cp ranks, cp fastest.
        keys: the arithmetic progression (start, step) from which this planner draws plan keys.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: list[int],
        cp: int,
        config: PlannerConfig,
        shape: AttentionShape,
        engine: CoreAttentionEngine,
        keys: tuple[int, int] = (0, 1),
    ) -> None:
        self._group, self._ranks, self._cp = group, ranks, cp
        self._config, self._shape, self._engine = config, shape, engine
        self._next_key, self._key_step = keys

    def plan(self, starts: np.ndarray, shape: BatchShape) -> PlannedBatch:
        """Plans one batch from this rank's ``document_starts`` and makes the plans known to the engine.

        Raises:
            PeerError: a peer failed or disagrees on the batch's shape.
            PlanMismatchError: a peer computed another plan.
            Exhausted: a peer has no more data.
        """
        begin = time.perf_counter()
        gathered = self._gather_starts(starts, shape)
        plans = [
            make_plan(group_layout(gathered, shape, index, self._cp), self._shape, self._config)
            for index in range(shape.microbatches)
        ]
        self._compare_fingerprints(plans)
        keys = []
        for plan in plans:
            self._engine.add_plan(self._next_key, plan)
            keys.append(self._next_key)
            self._next_key += self._key_step
        per_row = torch.tensor(keys, dtype=torch.int64).repeat_interleave(shape.rows_per_microbatch)
        return PlannedBatch(per_row, plans, time.perf_counter() - begin)

    def announce_exhausted(self) -> NoReturn:
        """Instead of ``plan``: this rank has no more data, or stops. Every rank of the group raises ``Exhausted``."""
        self._gather_header(_EXHAUSTED, np.empty(0, np.int64), None)
        raise AssertionError("a gather with an exhausted rank always raises")

    def announce_failure(self) -> None:
        """Instead of ``plan``: this rank cannot go on. The others raise ``PeerError`` naming it."""
        if self._group is not None:
            self._gather_rows(torch.tensor([_FAILED, 0, 0, 0, 0]))

    def _gather_starts(self, starts: np.ndarray, shape: BatchShape) -> list[np.ndarray]:
        """Every data-parallel rank's ``document_starts``."""
        headers = self._gather_header(_OK, starts, shape)
        if self._group is None:
            return [starts]
        padded = torch.zeros(int(headers[:, 1].max()), dtype=torch.int64)
        padded[: len(starts)] = torch.from_numpy(starts)
        rows = self._gather_rows(padded).numpy()
        every = [rows[i, : headers[i, 1]] for i in range(len(self._ranks))]
        for i, mine in enumerate(every):
            if not np.array_equal(mine, every[i - i % self._cp]):
                raise PeerError(
                    f"ranks {self._ranks[i - i % self._cp]} and {self._ranks[i]} share a sequence but loaded "
                    "different documents; the data loader must depend on the data-parallel rank alone"
                )
        return every[:: self._cp]

    def _gather_header(self, status: int, starts: np.ndarray, shape: BatchShape | None) -> torch.Tensor:
        dims = (shape.rows, shape.seq_len, shape.rows_per_microbatch) if shape else (0, 0, 0)
        header = torch.tensor([status, len(starts), *dims], dtype=torch.int64)
        headers = header[None] if self._group is None else self._gather_rows(header)
        for rank, row in zip(self._ranks, headers, strict=True):
            if row[0] == _FAILED:
                raise PeerError(f"rank {rank} failed while loading or planning a batch; see its log")
        if (headers[:, 0] == _EXHAUSTED).any():
            raise Exhausted
        for rank, row in zip(self._ranks, headers, strict=True):
            if not torch.equal(row[2:], headers[0, 2:]):
                raise PeerError(
                    f"rank {rank} loaded a batch of (rows, tokens, rows per microbatch) = {row[2:].tolist()}, "
                    f"rank {self._ranks[0]} one of {headers[0, 2:].tolist()}"
                )
        return headers

    def _compare_fingerprints(self, plans: list[Plan]) -> None:
        if self._group is None:
            return
        mine = torch.tensor([int(plan.fingerprint()[:15], 16) for plan in plans], dtype=torch.int64)
        every = self._gather_rows(mine)
        differing = [rank for rank, row in zip(self._ranks, every, strict=True) if not torch.equal(row, every[0])]
        if differing:
            raise PlanMismatchError(
                f"ranks {differing} planned a batch differently from rank {self._ranks[0]}: "
                "all ranks must run the same version of torchtitan_cad and numpy with the same [cad] table"
            )

    def _gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        rows = [torch.empty_like(row) for _ in self._ranks]
        try:
            dist.all_gather(rows, row, group=self._group)
        except RuntimeError as error:
            raise PeerError(f"planning gather among ranks {self._ranks} failed: {error}") from error
        return torch.stack(rows)
