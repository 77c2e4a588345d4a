"""A rank's exchange tables as tensors, plus the fixed orders in which partial results are combined (``combine``)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape, CallTable, RankExchange
from torchtitan_cad.planning.exchange.calls import bounded, combine_early, halves, lie_in_order, squares
from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL, Trips
from torchtitan_cad.planning.exchange.tables import RowExchange
from torchtitan_cad.planning.intervals import concat_ranges
from torchtitan_cad.runtime.combine import Combination, build_combination
from torchtitan_cad.runtime.kernels.base import VarlenArgs
from torchtitan_cad.runtime.table_sizes import TableSizes, padded
from torchtitan_cad.runtime.transport.base import Route, Routes, rows_to_device


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


@dataclass(frozen=True)
class Trip:
    """Results of one kind that return to their homes in one exchange.

    Attributes:
        combination: results so far, and then those that return if rows move -> local rows. The results so far are those
            of the kernel calls in their order, or what an earlier combination has made of them.
        is_last: no other follows.
    """

    route: Route
    combination: Combination
    is_last: bool = True


class Return:
    """One exchange of results, of one kind or of both."""

    def __init__(self, **trips: Trip) -> None:
        self.kinds, self.trips = tuple(trips), tuple(trips.values())
        self.routes = Routes(trip.route for trip in self.trips)


@dataclass(frozen=True)
class PlanTables:
    """Everything one rank needs to execute one plan for ``num_local`` tokens, of which ``num_queries`` attend.

    ``moves`` is the same on all ranks: when False nobody sends anything and every exchange is skipped. Routes take
    queries or keys to their servers (``out``), and what was computed for them home (``home``).
    """

    num_local: int
    num_queries: int
    num_q: int
    num_kv: int
    moves: bool
    # At least a trip of each kind, without rows if nothing moves
    q_out: list[Route]
    kv_out: list[Route]
    rounds: list[list[KernelCall]]
    # Results of the calls, in their order, -> received rows, to be returned
    q_served: Combination
    kv_served: Combination
    # Results of the calls -> local rows, before others' return; None: with those of the first trip
    q_local: Combination | None
    kv_local: Combination | None
    q_home: list[Trip]
    kv_home: list[Trip]

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
        queries, keys = exchange.queries, exchange.keys
        num_queries, num_local = queries.num_local, keys.num_local
        num_q = num_queries + (queries.num_received if sizes is None else sizes.queries)
        num_kv = num_local + (keys.num_received if sizes is None else sizes.keys)

        def build_call(table: CallTable, causal: bool) -> KernelCall:
            return _build_call(exchange, table, causal, num_q, num_kv, device, scale, sizes)

        both = (exchange.causal, True), (exchange.full, False)
        used = [(t, causal) for t, causal in both if t.num_tasks or sizes is not None]
        rounds = halves(used) if two_rounds and moves else [used]
        if squares_only:
            rounds = [squares(tables) for tables in rounds]
        if sizes is None:
            rounds = bounded(rounds, num_local, split_keys=exchange.split_keys)
        computed = [table for tables in rounds for table, _ in tables]
        q_rows = [padded(table.q_rows, sizes, "call_queries", -1) for table in computed]
        kv_rows = [padded(table.kv_rows, sizes, "call_keys", -1) for table in computed]
        may_be_early = moves and sizes is None
        q_local, q_so_far = _at_home(q_rows, num_queries, device, may_be_early=may_be_early)
        kv_local, kv_so_far = _at_home(kv_rows, num_local, device, may_be_early=may_be_early)
        return cls(
            num_local=num_local,
            num_queries=num_queries,
            num_q=num_q,
            num_kv=num_kv,
            moves=moves,
            q_out=_routes_out(queries, "queries", trips.queries_out, 0, device, sizes),
            kv_out=_routes_out(keys, "keys", trips.keys_out, len(trips.queries_out), device, sizes),
            rounds=[[build_call(*table) for table in tables] for tables in rounds],
            q_served=_served(q_rows, num_queries, num_q, device),
            kv_served=_served(kv_rows, num_local, num_kv, device),
            q_local=q_local,
            kv_local=kv_local,
            q_home=_trips_home(queries, "queries", trips.queries_home, 0, q_so_far, moves, device, sizes),
            kv_home=_trips_home(
                keys, "keys", trips.keys_home, len(trips.queries_home), kv_so_far, moves, device, sizes
            ),
        )

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
        trips = (trip.combination for trip in (*self.q_home, *self.kv_home))
        for combination in (self.q_served, self.kv_served, self.q_local, self.kv_local, *trips):
            if combination is not None:
                yield from combination.tensors()

    @cached_property
    def num_served(self) -> dict[str, int]:
        """Rows of others that this rank serves, by kind."""
        return {"queries": self.num_q - self.num_queries, "keys": self.num_kv - self.num_local}

    @cached_property
    def out(self) -> list[Routes]:
        """The exchanges that take queries and keys to their servers: one, if they take a trip each."""
        if len(self.q_out) == len(self.kv_out) == 1:
            return [Routes((*self.q_out, *self.kv_out))]
        return [Routes((route,)) for route in (*self.q_out, *self.kv_out)]

    @cached_property
    def queries_out(self) -> list[Routes]:
        """The exchanges that take queries alone, to servers that have kept the keys."""
        return [Routes((route,)) for route in self.q_out]

    @cached_property
    def outputs_home(self) -> list[Return]:
        """The exchanges of forward's results."""
        return [Return(queries=trip) for trip in self.q_home]

    @cached_property
    def gradients_home(self) -> list[Return]:
        """The exchanges of backward's results: one, if queries and keys take a trip each."""
        if len(self.q_home) == len(self.kv_home) == 1:
            return [Return(queries=self.q_home[0], keys=self.kv_home[0])]
        return [*self.outputs_home, *(Return(keys=trip) for trip in self.kv_home)]

    @property
    def exchanges(self) -> list[Routes]:
        """All exchanges of the plan, those of either direction."""
        homeward = (*self.outputs_home, *self.gradients_home)
        return [*self.out, *self.queries_out, *(back.routes for back in homeward)]

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
        queries = sum(_num_copied(call.q_rows, self.num_q, self.num_queries) for call in self.calls)
        keys = sum(_num_copied(call.kv_rows, self.num_kv, self.num_local) for call in self.calls)
        return (queries * shape.num_heads + 2 * keys * shape.num_kv_heads) * shape.head_dim * shape.dtype_bytes


def _served(computed: list[np.ndarray], num_local: int, num_rows: int, device: torch.device) -> Combination:
    """Results of kernel calls, whose rows in the row space are ``computed``, by received row."""
    targets = [np.where(rows < num_local, -1, rows - num_local) for rows in computed]
    return build_combination(targets, num_rows - num_local, device)


def _at_home(
    computed: list[np.ndarray], num_local: int, device: torch.device, *, may_be_early: bool
) -> tuple[Combination | None, list[np.ndarray]]:
    """Return how the calls' results become local rows before others' return, if so, and the local rows of each part."""
    so_far = [np.where(rows < num_local, rows, -1) for rows in computed]
    if not (may_be_early and combine_early(sum(map(len, computed)), num_local)):
        return None, so_far
    return build_combination(so_far, num_local, device), [np.arange(num_local)]


Counts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of a rank, per rank: rows sent and received, and where those sent begin at their receiver."""


def _routes_out(
    exchange: RowExchange,
    kind: Literal["queries", "keys"],
    trips: Sequence[int],
    first_buffer: int,
    device: torch.device,
    sizes: TableSizes | None,
) -> list[Route]:
    """Routes of the trips that take local rows to their servers."""
    counts = exchange.send_counts, exchange.recv_counts, exchange.put_offsets
    rows = padded(exchange.send_rows, sizes, kind)
    return _routes(kind, rows, counts, trips, first_buffer, device, None if sizes is None else getattr(sizes, kind))


def _trips_home(
    exchange: RowExchange,
    kind: Literal["queries", "keys"],
    trips: Sequence[int],
    first_buffer: int,
    so_far: list[np.ndarray],
    moves: bool,
    device: torch.device,
    sizes: TableSizes | None,
) -> list[Trip]:
    """Trips of the results for all received rows. A home's rows return in the order in which it has sent them.

    ``so_far`` are the local rows of the results that the first trip's are combined with.
    """
    counts = exchange.recv_counts, exchange.send_counts, exchange.return_offsets
    padded_to = None if sizes is None else getattr(sizes, kind)
    routes = _routes("results", None, counts, trips, first_buffer, device, padded_to)
    returned = np.split(padded(exchange.send_rows, sizes, kind, -1), np.cumsum(trips[:-1]))
    homeward: list[Trip] = []
    for route, rows in zip(routes, returned, strict=True):
        combination = build_combination([*so_far, rows] if moves else so_far, exchange.num_local, device)
        homeward.append(Trip(route, combination, is_last=len(homeward) == len(trips) - 1))
        so_far = [np.arange(exchange.num_local)]
    return homeward


def _routes(
    kind: Literal["queries", "keys", "results"],
    rows: np.ndarray | None,
    counts: Counts,
    trips: Sequence[int],
    first_buffer: int,
    device: torch.device,
    padded_to: int | None,
) -> list[Route]:
    """Divide a route into one for each trip: the next rows in the order of arrival.

    Args:
        rows: what is sent; None for all in order.
        trips: of each the most rows that it brings any rank.
        first_buffer: number of the first trip among all; the trips use the buffers by turns.
        padded_to: rows of tensors of the only trip.
    """

    def route(number: int, rows: np.ndarray | None, counts: Counts, most_rows: int) -> Route:
        sent, received, offsets = (each.tolist() for each in counts)
        device_rows = None if rows is None else rows_to_device(rows, device)
        buffer = (first_buffer + number) % BUFFERS_PER_CALL
        return Route(kind, device_rows, sent, received, offsets, most_rows, buffer, padded_to)

    if len(trips) == 1:
        return [route(0, rows, counts, trips[0] if padded_to is None else padded_to)]
    sent, received, offsets = counts
    first_sent, first_received = np.cumsum(sent) - sent, np.cumsum(received) - received
    routes, end = [], 0
    for number, most_rows in enumerate(trips):
        begin, end = end, end + most_rows
        first, sent_now = _within(offsets, sent, begin, end)
        _, received_now = _within(first_received, received, begin, end)
        index = concat_ranges(first_sent + first - offsets, sent_now)
        counts_now = sent_now, received_now, np.where(sent_now, first - begin, 0)
        routes.append(route(number, index if rows is None else rows[index], counts_now, most_rows))
    return routes


def _within(first: np.ndarray, counts: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ranges of ``counts`` rows from ``first``, as far as they lie in [begin, end)."""
    head, tail = np.clip(first, begin, end), np.clip(first + counts, begin, end)
    return head, tail - head


def _build_call(
    exchange: RankExchange,
    table: CallTable,
    causal: bool,
    num_q: int,
    num_kv: int,
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
    q_rows = _rows_of_call(table.q_rows, num_q, exchange.queries.num_local, device)
    return KernelCall(args, q_rows, _rows_of_call(table.kv_rows, num_kv, exchange.keys.num_local, device))


def _rows_of_call(rows: np.ndarray, num_rows: int, num_local: int, device: torch.device) -> Tensor | slice | None:
    if lie_in_order(rows):
        if rows.size == num_rows:
            return None
        if rows[-1] < num_local:
            return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows_to_device(rows, device)


def _num_copied(rows: Tensor | slice | None, num_rows: int, num_local: int) -> int:
    if isinstance(rows, slice) or (rows is None and num_rows == num_local):
        return 0
    return num_rows if rows is None else len(rows)
