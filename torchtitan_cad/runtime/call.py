"""Core attention in flight: what a rank holds of it between the engine's steps, and what the directions differ in."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_cad.runtime.attend import RowSpace, TaskRunner
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.exchange import Exchange, Incoming
from torchtitan_cad.runtime.kernels.base import AttentionKernel, Merged, VarlenArgs, compute_dtype
from torchtitan_cad.runtime.packing import RowFormat, hide_storage
from torchtitan_cad.runtime.row_tables import Trip
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.transport.base import Kind, Routes


class Saved(NamedTuple):
    """Tensors that backward needs of a forward: its arguments, then the results of ``CoreAttentionEngine.forward``."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept_q: Tensor
    kept_kv: Tensor


@dataclasses.dataclass(frozen=True)
class Direction:
    """What forward and backward differ in.

    Attributes:
        results_name: what travels home.
        num_results: of every kind of rows that has results, how many tensors there are of them.
        compute: runs a kernel call on rows of queries and keys. The flag says that it is the plan's only one and over
            the local rows as they lie.
        combine: makes a tensor of rows of every tensor of partials.
    """

    name: str
    results_name: str
    num_results: dict[Kind, int]
    compute: Callable[[AttentionKernel, bool, Sequence[Tensor], VarlenArgs], tuple[Tensor, ...]]
    combine: Callable[[Combination, Sequence[Sequence[Tensor]], Tensor], list[Tensor]]


def _forward(kernel: AttentionKernel, is_plain: bool, rows: Sequence[Tensor], args: VarlenArgs) -> tuple[Tensor, ...]:
    q, k, v = rows
    return kernel.forward(q, k, v, args)


def _backward(kernel: AttentionKernel, is_plain: bool, rows: Sequence[Tensor], args: VarlenArgs) -> tuple[Tensor, ...]:
    dout, lse, delta, q, k, v = rows
    if not is_plain:
        return kernel.backward(dout, q, k, v, Merged(lse, delta), args)
    return tuple(x.to(q.dtype) for x in kernel.backward(dout, q, k, v, Merged(lse, out=delta), args))


FORWARD = Direction("forward", "outputs", {"queries": 2}, _forward, lambda index, *rows: index.merge(*rows))
"""Queries: q; keys: k, v. Results: out, lse."""

BACKWARD = Direction(
    "backward", "gradients", {"queries": 1, "keys": 2}, _backward, lambda index, *rows: index.add(*rows)
)
"""Queries: dout, lse, delta (out, where one call computes everything), q; keys: k, v. Results: dq; dk, dv."""


@dataclasses.dataclass(eq=False)
class AttentionState:
    """Core attention in flight, in one direction: this rank's rows until they are attended to, and what is under way.

    Attributes:
        rows: of each kind tensors of this rank's rows, the last of the shape and dtype of the results.
        keeps: whether servers keep q, k and v for backward.
        kept: their messages of queries and of keys and values, their storage hidden.
        number: by which the transport knows the call.
        incoming: the rows to serve, which are on their way.
        tasks: the kernel calls, while they run.
        served: of each kind what this rank has computed for others' rows, until it is sent.
        results: of each kind and result the tensors that all kernel calls have computed; once combined, one tensor of
            local rows, in fp32 (fp64) until the last trip.
        returning: trips home under way, in the order in which they were started.
    """

    direction: Direction
    key: int
    plan: PlanTables
    rows: dict[Kind, list[Tensor]]
    keeps: bool = False
    kept: Sequence[Tensor] = ()
    number: int = 0
    incoming: Incoming | None = None
    tasks: TaskRunner | None = None
    served: dict[Kind, list[Tensor]] = dataclasses.field(default_factory=dict)
    results: dict[Kind, list[list[Tensor]]] = dataclasses.field(default_factory=dict)
    returning: deque[tuple[Exchange, Sequence[Trip]]] = dataclasses.field(default_factory=deque)

    def __post_init__(self) -> None:
        self._like = {kind: [x.new_empty(0, *x.shape[1:]) for x in rows] for kind, rows in self.rows.items()}

    # Kernel calls -----------------------------------------------------------------------------------------------------

    def begin_tasks(self, kernel: AttentionKernel, received: dict[Kind, list[Tensor]]) -> TaskRunner:
        """Return the kernel calls over local and ``received`` rows. The state no longer holds the local ones."""
        local, self.rows = self.rows, {}
        queries, keys = (RowSpace(rows, received.get(kind) or [x[:0] for x in rows]) for kind, rows in local.items())
        compute = partial(self.direction.compute, kernel, self.plan.is_plain)
        self.tasks = TaskRunner(self.plan, queries, keys, compute, self.release)
        return self.tasks

    def received(self) -> dict[Kind, list[Tensor]]:
        """Wait for the rows to serve, in the order of ``rows``; returns nothing if none move."""
        if self.incoming is None:
            return {}
        if self.keeps and self.direction is FORWARD:
            self.kept = [hide_storage(message) for message in self.incoming.land()]
        received = self.incoming.wait()
        if self.keeps and self.direction is BACKWARD:
            (kept_q, kept_kv), self.kept = self.kept, ()
            queries, keys = RowFormat(self._like["queries"][-1:]), RowFormat(self._like["keys"])
            received["queries"] += queries.reveal(kept_q, self.plan.queries.num_served)
            received["keys"] = keys.reveal(kept_kv, self.plan.keys.num_served)
        return received

    def finish_tasks(self) -> None:
        """Run the kernel calls that are left, and combine what others wait for, and this rank's results if many."""
        assert self.tasks is not None
        results = [list(of_calls) for of_calls in zip(*self.tasks.finish(), strict=True)] or [[], [], []]
        self.tasks = None
        for kind, count in self.direction.num_results.items():
            self.results[kind], results = results[:count], results[count:]
        for kind in self.direction.num_results:
            tables = getattr(self.plan, kind)
            if self.plan.moves:
                self.served[kind] = self.direction.combine(tables.served, self.results[kind], self._like[kind][-1])
            if tables.local is not None:
                self.combine(kind, tables.local)

    # Exchanges --------------------------------------------------------------------------------------------------------

    def send(self, start: Callable[[Routes, Sequence[list[Tensor]]], Exchange]) -> None:
        """Send the rows that others serve by exchanges that ``start`` starts; those to serve are then on their way."""
        what, messages = "all", self.rows
        if self.keeps and self.direction is BACKWARD:
            what, messages = "queries", {"queries": self.rows["queries"][:-1]}
        num_rows = {kind: getattr(self.plan, kind).num_served for kind in messages}
        self.incoming = Incoming(
            lambda routes: start(routes, [messages[route.kind] for route in routes]), self.plan.out[what], num_rows
        )

    def land(self) -> None:
        """Make all rows under way usable on the current stream, before a step on another stream takes them in."""
        for travelling in (self.incoming, *(exchange for exchange, _ in self.returning)):
            if travelling is not None:
                travelling.land()

    def release(self) -> None:
        """Give back the rows to serve."""
        if self.incoming is not None:
            self.incoming.release()
        self.incoming = None

    def take_in_next(self) -> None:
        """Wait for the exchange of results that was started first, use its rows and give them back."""
        exchange, trips = self.returning.popleft()
        for trip, returned in zip(trips, exchange.wait(), strict=True):
            self.combine(trip.kind, trip.combination, returned, is_last=trip.is_last)
        exchange.release()

    def combine(
        self, kind: Kind, combination: Combination, returned: Sequence[Tensor] = (), *, is_last: bool = False
    ) -> None:
        """Combine the results so far and, of each result, the rows that have returned, if any.

        The results get the model's dtype if no more follow, else fp32 (fp64).
        """
        partials, like = self.results[kind], self._like[kind][-1]
        if returned:
            partials = [[*of_result, rows] for of_result, rows in zip(partials, returned, strict=True)]
        like = like if is_last else like.to(compute_dtype(like.dtype))
        self.results[kind] = [[rows] for rows in self.direction.combine(combination, partials, like)]

    def finish(self) -> tuple[Tensor, ...]:
        """Take in what still returns; returns the results for this rank's rows, and what forward keeps for backward."""
        while self.returning:
            self.take_in_next()
        if not (self.plan.moves or self.plan.is_plain):
            for kind in self.results:
                self.combine(kind, getattr(self.plan, kind).home[0].combination, is_last=True)
        results = [rows.contiguous() for kind in self.results.values() for (rows,) in kind]
        if self.direction is FORWARD:
            nothing = (results[0].new_empty(0, dtype=torch.uint8) for _ in range(2))
            results += self.kept or nothing
        return tuple(results)
