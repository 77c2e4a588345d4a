# SPDX-License-Identifier: BSD-3-Clause
"""Run the kernel calls of one rank for a plan, after its rows have arrived."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.tables import KernelCall, PlanTables

if TYPE_CHECKING:
    from torchtitan_cad.runtime.triton.gather import GatheredRows


class RowSpace:
    """Tensors of one row space (NOTE [Row spaces] of planning/exchange/tables.py): local rows [N, ...] and remote rows.

    Remote rows [M, ...] may be views of messages.
    """

    def __init__(self, local: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self.local = local
        self.received = received
        self._num_remote = received[0].shape[0]

    def take(self, rows: Tensor | slice | None) -> list[Tensor]:
        """Return the rows of a ``KernelCall``, of every tensor: views if local and in order, otherwise copies."""
        if isinstance(rows, slice):
            return [x[rows] for x in self.local]
        if rows is None and not self._num_remote:
            return list(self.local)
        if triton.runs_on(self.local[0].device):
            return self._gathered.gather(rows)
        if rows is None:
            return self._joined
        return [x.index_select(0, rows) for x in self._joined]

    @cached_property
    def _gathered(self) -> "GatheredRows":
        from torchtitan_cad.runtime.triton.gather import GatheredRows

        return GatheredRows(self.local, self.received)

    @cached_property
    def _joined(self) -> list[Tensor]:
        if not self._num_remote:
            return list(self.local)
        pairs = zip(self.local, self.received, strict=True)
        return list(map(torch.cat, pairs))


Compute = Callable[[Sequence[Tensor], VarlenArgs], tuple[Tensor, ...]]
"""Computes a kernel's results for the rows of a call: results of queries first, then results of keys."""


class TaskRunner:
    """The kernel calls of a plan.

    A call's rows are gathered just before it runs, so at most one call's copies are in memory. The largest call runs
    first, when memory holds the fewest results.

    Args:
        compute: runs the kernel.
        gathered: called once no more rows will be read from ``queries`` and ``keys``.
    """

    def __init__(
        self,
        plan: PlanTables,
        queries: RowSpace,
        keys: RowSpace,
        compute: Compute,
        gathered: Callable[[], None],
    ) -> None:
        self._compute = compute
        self._gathered = gathered
        self._spaces: tuple[RowSpace, ...] = (queries, keys)
        self._calls = plan.calls
        self._results: dict[KernelCall, tuple[Tensor, ...]] = {}
        self._forget_rows(when=not self._calls)

    def run(self) -> list[tuple[Tensor, ...]]:
        """Run the calls, once; returns their results in the plan's order, and forgets them."""
        largest_first = sorted(self._calls, key=lambda call: -call.weighted_rows)
        for call in largest_first:
            # No name holds the rows of a call while those of the next are gathered.
            self._results[call] = self._compute(self._gather(call), call.args)
        results = self._results
        self._results = {}
        return [results[call] for call in self._calls]

    def _gather(self, call: KernelCall) -> list[Tensor]:
        queries, keys = self._spaces
        rows_of_queries = queries.take(call.q_rows)
        rows_of_keys = keys.take(call.kv_rows)
        self._forget_rows(when=len(self._results) == len(self._calls) - 1)
        return rows_of_queries + rows_of_keys

    def _forget_rows(self, *, when: bool) -> None:
        if when:
            self._spaces = ()
            self._gathered()
