"""A rank's part in a plan as tensors: kernel calls, and tables of its queries and keys (``row_tables``)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape, CallTable, RankExchange
from torchtitan_cad.planning.exchange.calls import bounded, halves, lie_in_order, squares
from torchtitan_cad.planning.exchange.messages import Trips
from torchtitan_cad.planning.exchange.tables import RowExchange
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.row_tables import Kind, RowTables, Trip
from torchtitan_cad.runtime.table_sizes import TableSizes, padded
from torchtitan_cad.runtime.transport.base import Routes, rows_to_device

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One kernel call: which rows it gathers from the row spaces, and its varlen arguments.

    ``q_rows``, ``kv_rows``: int64 indices of the rows to gather; a slice of local rows, read in place; or None for all
    rows of the row space in order.
    """

    args: VarlenArgs
    q_rows: Tensor | slice | None
    kv_rows: Tensor | slice | None

    @property
    def weighted_rows(self) -> int:
        """See ``calls.MOST_ROWS``."""
        return int(2 * self.args.cu_q_host[-1] + self.args.cu_k_host[-1])


class Return:
    """One exchange of results, of one kind or of both."""

    def __init__(self, trips: Sequence[Trip]) -> None:
        self.trips = trips
        self.routes = Routes(trip.route for trip in trips)


@dataclass(frozen=True)
class PlanTables:
    """Everything one rank needs to execute one plan.

    ``moves`` is the same on all ranks: when False nobody sends anything and every exchange is skipped.
    """

    queries: RowTables
    keys: RowTables
    moves: bool
    rounds: list[list[KernelCall]]

    @classmethod
    def from_exchange(
        cls,
        exchange: RankExchange,
        moves: bool,
        device: torch.device,
        scale: float,
        *,
        trips: Trips | None = None,
        two_rounds: bool = False,
        sizes: TableSizes | None = None,
        squares_only: bool = False,
    ) -> "PlanTables":
        """Build the tensors on ``device``.

        Args:
            scale: multiplies the scores before the softmax.
            trips: in which rows of every kind travel; by default, and with ``sizes``, one of each.
            two_rounds: makes two rounds of about equal work, unless nothing moves.
            sizes: pads all tables; one round of a causal and an unmasked call, even if they have no tasks.
            squares_only: divides causal tasks for a kernel that needs it (``AttentionKernel``).

        Raises:
            ValueError: the plan is larger than ``sizes``; or ``sizes`` and ``squares_only``.
        """
        if sizes is not None:
            if squares_only:
                raise ValueError("tables of fixed sizes are not divided into squares: set cad.kernel = 'varlen'")
            sizes.check(exchange)
        if trips is None or sizes is not None:
            trips = exchange.most.in_one_trip()
        both = (exchange.causal, True), (exchange.full, False)
        used = [(t, causal) for t, causal in both if t.num_tasks or sizes is not None]
        rounds = halves(used) if two_rounds and moves else [used]
        if squares_only:
            rounds = [squares(tables) for tables in rounds]
        if sizes is None:
            rounds = bounded(rounds, exchange.keys.num_local, split_keys=exchange.split_keys)
        computed = [table for tables in rounds for table, _ in tables]
        kinds: list[tuple[Kind, RowExchange, str]]
        kinds = [("queries", exchange.queries, "q_rows"), ("keys", exchange.keys, "kv_rows")]
        queries, keys = (
            RowTables.build(
                rows,
                kind,
                [padded(getattr(table, column), sizes, f"call_{kind}", -1) for table in computed],
                trips,
                device,
                moves=moves,
                padded_to=None if sizes is None else getattr(sizes, kind),
            )
            for kind, rows, column in kinds
        )
        build = partial(_build_call, queries, keys, device=device, scale=scale, sizes=sizes)
        return cls(queries, keys, moves, [[build(*table) for table in tables] for tables in rounds])

    def copy_(self, other: "PlanTables") -> None:
        """Make the tensors of this plan those of another one, on the current stream.

        Only what is on the device: lists on the host, which CPU kernels and transports read, stay as they are.

        Raises:
            ValueError: shapes differ.
        """
        ours, others = list(self._tensors()), list(other._tensors())
        if [x.shape for x in ours] != [x.shape for x in others]:
            raise ValueError("tables can be copied between plans of the same sizes and numbers of tokens only")
        for mine, theirs in zip(ours, others, strict=True):
            mine.copy_(theirs, non_blocking=True)

    def _tensors(self) -> Iterator[Tensor]:
        exchanges = self.exchanges if self.moves else []
        for route in dict.fromkeys(route for routes in exchanges for route in routes):
            yield from (x for x in (route.rows, route.tables) if isinstance(x, Tensor))
        for routes in exchanges:
            yield from (peers.tensor for peers in (routes.receivers, routes.senders) if peers.tensor is not None)
        for call in self.calls:
            yield from (call.args.cu_q, call.args.cu_k)
            yield from (rows for rows in (call.q_rows, call.kv_rows) if isinstance(rows, Tensor))
        for combination in (*self.queries.combinations(), *self.keys.combinations()):
            yield from combination.index

    @cached_property
    def out(self) -> list[Routes]:
        """The exchanges that take queries and keys to their servers."""
        return [Routes(routes) for routes in _together(self.queries.out, self.keys.out)]

    @cached_property
    def queries_out(self) -> list[Routes]:
        """The exchanges that take queries alone, to servers that have kept the keys."""
        return [Routes(routes) for routes in _together(self.queries.out)]

    @cached_property
    def home(self) -> dict[str, list[Return]]:
        """The exchanges of results, by direction."""
        kinds = {"forward": [self.queries.home], "backward": [self.queries.home, self.keys.home]}
        return {direction: [Return(trips) for trips in _together(*of_kinds)] for direction, of_kinds in kinds.items()}

    @property
    def exchanges(self) -> list[Routes]:
        """All exchanges of the plan, those of either direction."""
        homeward = (back.routes for direction in self.home.values() for back in direction)
        return [*self.out, *self.queries_out, *homeward]

    @property
    def calls(self) -> list[KernelCall]:
        """Kernel calls of all rounds."""
        return [call for calls in self.rounds for call in calls]

    @property
    def is_plain(self) -> bool:
        """One kernel call over the local rows as they lie: no gather, no merge, no exchange."""
        return (
            not self.moves and len(self.calls) == 1 and self.calls[0].q_rows is None and self.calls[0].kv_rows is None
        )

    def copied_bytes(self, shape: AttentionShape) -> int:
        """Count the bytes of rows that a forward copies because its kernel calls need ranges in order."""
        queries = sum(_num_copied(call.q_rows, self.queries) for call in self.calls)
        keys = sum(_num_copied(call.kv_rows, self.keys) for call in self.calls)
        return (queries * shape.num_heads + 2 * keys * shape.num_kv_heads) * shape.head_dim * shape.dtype_bytes


def _together(*kinds: list[T]) -> list[tuple[T, ...]]:
    """Divide trips into exchanges: one of all kinds if each takes one trip, else one of every trip."""
    if all(len(trips) == 1 for trips in kinds):
        return [tuple(trip for (trip,) in kinds)]
    return [(trip,) for trips in kinds for trip in trips]


def _build_call(
    queries: RowTables,
    keys: RowTables,
    table: CallTable,
    causal: bool,
    *,
    device: torch.device,
    scale: float,
    sizes: TableSizes | None,
) -> KernelCall:
    args = VarlenArgs.from_numpy(
        cu_q=padded(table.cu_q, sizes, "tasks", table.cu_q[-1], more=1),
        cu_k=padded(table.cu_k, sizes, "tasks", table.cu_k[-1], more=1),
        q_start=padded(table.q_start, sizes, "tasks"),
        kv_start=padded(table.kv_start, sizes, "tasks"),
        causal=causal,
        scale=scale,
        device=device,
    )
    if sizes is not None:
        args = replace(args, max_q=sizes.longest, max_k=sizes.longest)
        rows = padded(table.q_rows, sizes, "call_queries"), padded(table.kv_rows, sizes, "call_keys")
        return KernelCall(args, *(rows_to_device(x, device) for x in rows))
    return KernelCall(args, _rows_of_call(table.q_rows, queries, device), _rows_of_call(table.kv_rows, keys, device))


def _rows_of_call(rows: np.ndarray, tables: RowTables, device: torch.device) -> Tensor | slice | None:
    if lie_in_order(rows):
        if rows.size == tables.num_local + tables.num_served:
            return None
        if rows[-1] < tables.num_local:
            return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows_to_device(rows, device)


def _num_copied(rows: Tensor | slice | None, tables: RowTables) -> int:
    if isinstance(rows, slice) or (rows is None and not tables.num_served):
        return 0
    return tables.num_local + tables.num_served if rows is None else len(rows)
