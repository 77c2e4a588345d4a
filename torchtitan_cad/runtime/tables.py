# SPDX-License-Identifier: BSD-3-Clause
"""A rank's exchange as tensors: kernel calls, and tables of its queries and keys (``row_tables``).

For the numbering of rows see NOTE [Row spaces] of planning/exchange/tables.py.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.planning import CallTable, RankExchange
from torchtitan_cad.planning.exchange.calls import (
    MAX_CALLS,
    Calls,
    bounded,
    lie_in_order,
    squares,
)
from torchtitan_cad.planning.exchange.messages import Chunks
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.row_tables import Chunk, RowTables
from torchtitan_cad.runtime.transport.base import Routes, rows_to_device

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One kernel call: its rows of the row spaces, and its varlen arguments.

    ``q_rows`` and ``kv_rows`` are int64 indices of rows to gather, a slice of local rows to read in place, or None for
    all rows of the row space in order.
    """

    args: VarlenArgs
    q_rows: Tensor | slice | None
    kv_rows: Tensor | slice | None

    @property
    def weighted_rows(self) -> int:
        """Weighted rows, see ``calls.MOST_ROWS``."""
        return int(2 * self.args.cu_q_host[-1] + self.args.cu_k_host[-1])


class StandInCall(NamedTuple):
    """A call that a joined server computes for this rank.

    Attributes:
        server: its number.
        seconds: predicted, of all that the server computes by this plan in a layer.
    """

    server: int
    seconds: float
    call: KernelCall


@dataclass(frozen=True)
class PlanTables:
    """Everything that one rank needs to execute one plan.

    Two attributes are equal on all ranks. If ``moves`` is False, no rank sends rows, and all exchanges are skipped. If
    ``keeps`` is True, servers keep received Q, K and V for backward.
    """

    queries: RowTables
    keys: RowTables
    moves: bool
    calls: list[KernelCall]
    stand_ins: list[StandInCall]
    keeps: bool

    @classmethod
    def from_exchange(
        cls,
        exchange: RankExchange,
        moves: bool,
        device: torch.device,
        scale: float,
        *,
        chunks: Chunks,
        squares_only: bool = False,
        keeps: bool = False,
    ) -> "PlanTables":
        """Build the tensors on ``device``.

        Args:
            scale: multiplies the scores before the softmax.
            chunks: of every kind of rows.
            squares_only: divide causal tasks for a kernel that takes squares only (``AttentionKernel``).
        """
        by_servers = _calls_of_servers(exchange, squares_only=squares_only)
        own = bounded(
            _with_tasks(exchange.causal, exchange.full, squares_only=squares_only),
            exchange.keys.num_local,
            split_keys=exchange.split_keys,
            max_calls=MAX_CALLS - len(by_servers),
        )
        computed = [table for table, _ in own]
        computed += [table for _, _, table, _ in by_servers]
        build_rows = partial(
            RowTables.build,
            num_own=len(own),
            chunks=chunks,
            device=device,
            moves=moves,
        )
        queries = build_rows(
            exchange.queries, "queries", [table.q_rows for table in computed]
        )
        keys = build_rows(exchange.keys, "keys", [table.kv_rows for table in computed])

        def kernel_call(table: CallTable, causal: bool) -> KernelCall:
            args = VarlenArgs.from_numpy(
                table.cu_q,
                table.cu_k,
                causal=causal,
                scale=scale,
                device=device,
                q_start=table.q_start,
                window=exchange.window if causal else None,
            )
            return KernelCall(
                args,
                _rows_of_call(table.q_rows, queries, device),
                _rows_of_call(table.kv_rows, keys, device),
            )

        calls = [kernel_call(table, causal) for table, causal in own]
        stand_ins = [
            StandInCall(server, seconds, kernel_call(table, causal))
            for server, seconds, table, causal in by_servers
        ]
        return cls(queries, keys, moves, calls, stand_ins, keeps)

    @cached_property
    def out(self) -> dict[str, list[Routes]]:
        """The exchanges that take rows to servers, by direction; in backward without keys if servers keep them."""
        together = _together(self.queries.out, self.keys.out)
        out = [Routes(routes) for routes in together]
        of_queries = [Routes([route]) for route in self.queries.out]
        return {"forward": out, "backward": of_queries if self.keeps else out}

    @cached_property
    def home(self) -> dict[str, list[tuple[Routes, tuple[Chunk, ...]]]]:
        """The exchanges of results and their chunks, by direction."""
        kinds = {
            "forward": [self.queries.home],
            "backward": [self.queries.home, self.keys.home],
        }
        return {
            direction: [
                (Routes(chunk.route for chunk in chunks), chunks)
                for chunks in _together(*of_kinds)
            ]
            for direction, of_kinds in kinds.items()
        }

    @property
    def exchanges(self) -> list[Routes]:
        """All exchanges of the plan, in both directions."""
        out = chain(*self.out.values()) if self.keeps else self.out["forward"]
        return [*out, *(routes for routes, _ in chain(*self.home.values()))]

    @property
    def is_plain(self) -> bool:
        """True if there is only one kernel call, over all local rows in order: no gather, no merge, no exchange."""
        return (
            not self.moves
            and not self.stand_ins
            and len(self.calls) == 1
            and self.calls[0].q_rows is None
            and self.calls[0].kv_rows is None
        )


def _calls_of_servers(
    exchange: RankExchange, *, squares_only: bool
) -> list[tuple[int, float, CallTable, bool]]:
    """Return the kernel calls that joined servers make: a server, its seconds, a table, and whether it is causal."""
    by_servers = []
    for server, seconds, causal, full in exchange.stand_ins:
        calls = _with_tasks(causal, full, squares_only=squares_only)
        by_servers += [(server, seconds, *call) for call in calls]
    return by_servers


def _with_tasks(causal: CallTable, full: CallTable, *, squares_only: bool) -> Calls:
    """Return the calls that have tasks, each with its causal flag, for a kernel that may take squares only."""
    both = [(causal, True), (full, False)]
    calls = [(table, is_causal) for table, is_causal in both if table.num_tasks]
    return squares(calls) if squares_only else calls


def _together(*kinds: list[T]) -> list[tuple[T, ...]]:
    """Divide chunks into exchanges: one for all kinds if each takes one chunk, otherwise one for each chunk."""
    if all(len(chunks) == 1 for chunks in kinds):
        return [tuple(chunk for (chunk,) in kinds)]
    return [(chunk,) for chunk in chain(*kinds)]


def _rows_of_call(
    rows: np.ndarray, tables: RowTables, device: torch.device
) -> Tensor | slice | None:
    if lie_in_order(rows):
        if rows.size == tables.num_local + tables.num_remote:
            return None
        if rows[-1] < tables.num_local:
            return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows_to_device(rows, device)
