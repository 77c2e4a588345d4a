# SPDX-License-Identifier: BSD-3-Clause
"""Run the kernel calls of one rank for a plan, after its rows have arrived."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.tables import KernelCall

if TYPE_CHECKING:
    from torchtitan_cad.runtime.triton.gather import GatheredRows


class RowSpace:
    """Tensors of one row space (NOTE [Row spaces] of planning/exchange/tables.py): local rows [N, ...] and remote rows.

    Remote rows [M, ...] may be views of messages.
    """

    def __init__(
        self, local: Sequence[Tensor], received: Sequence[Tensor] = ()
    ) -> None:
        self.local = local
        self.received = received or [x[:0] for x in local]
        self._num_remote = len(self.received[0])

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


@dataclass(eq=False)
class TaskRunner:
    """The kernel calls of a plan.

    A call's rows are gathered just before it runs, so at most one call's copies are in memory. The largest call runs
    first, when memory holds the fewest results.

    Attributes:
        spaces: of queries and of keys.
        compute: runs the kernel on the rows of a call; returns results of queries first, then results of keys.
        gathered: called once no more rows will be read from them.
    """

    calls: Sequence[KernelCall]
    spaces: Sequence[RowSpace]
    compute: Callable[[Sequence[Tensor], VarlenArgs], tuple[Tensor, ...]]
    gathered: Callable[[], None]

    def run(self) -> list[tuple[Tensor, ...]]:
        """Run the calls, once; returns their results in the plan's order."""
        left = sorted(self.calls, key=lambda call: call.weighted_rows)
        results: dict[KernelCall, tuple[Tensor, ...]] = {}
        if not left:
            self._forget_rows()
        while left:
            call = left.pop()
            # No name holds the rows of a call while those of the next are gathered.
            results[call] = self.compute(
                self._gather(call, is_last=not left), call.args
            )
        return [results[call] for call in self.calls]

    def _gather(self, call: KernelCall, *, is_last: bool) -> list[Tensor]:
        queries, keys = self.spaces
        rows = queries.take(call.q_rows) + keys.take(call.kv_rows)
        if is_last:
            self._forget_rows()
        return rows

    def _forget_rows(self) -> None:
        self.spaces = ()
        self.gathered()
