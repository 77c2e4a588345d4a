# SPDX-License-Identifier: BSD-3-Clause
"""Core attention in flight: a rank's state of it between the engine's steps, and the two directions."""

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
    """Tensors that backward needs: the arguments and the results of ``CoreAttentionEngine.forward``."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept_q: Tensor
    kept_kv: Tensor
    shared: Tensor | None = None

    @property
    def arguments(self) -> list[Tensor]:
        """The tensors that have gradients: q, k, v and, if heads of keys share a part, shared."""
        return [self.q, self.k, self.v, *([] if self.shared is None else [self.shared])]


@dataclasses.dataclass(frozen=True)
class Direction:
    """The differences between forward and backward.

    Attributes:
        results_name: name of the results that travel home.
        results: returns tensors like the results, by kind of rows, from such tensors like the rows.
        compute: runs a kernel call on rows of queries and keys. The flag is ``PlanTables.is_plain``.
        combine: combines the partials of each result into one tensor.
    """

    name: str
    results_name: str
    results: Callable[[dict[Kind, list[Tensor]]], dict[Kind, list[Tensor]]]
    compute: Callable[[AttentionKernel, bool, Sequence[Tensor], VarlenArgs], tuple[Tensor, ...]]
    combine: Callable[[Combination, Sequence[Sequence[Tensor]], Sequence[Tensor]], list[Tensor]]


def _forward(kernel: AttentionKernel, is_plain: bool, rows: Sequence[Tensor], args: VarlenArgs) -> tuple[Tensor, ...]:
    q, *keys = rows
    return kernel.forward(q, *_join(*keys), args)


def _backward(kernel: AttentionKernel, is_plain: bool, rows: Sequence[Tensor], args: VarlenArgs) -> tuple[Tensor, ...]:
    dout, lse, delta, q, *keys = rows
    merged = Merged(lse, out=delta) if delta.dim() == dout.dim() else Merged(lse, delta)
    dq, dk, dv = kernel.backward(dout, q, *_join(*keys), merged, args)
    gradients = dq, *_split(dk, dv, *keys)
    return tuple(x.to(q.dtype) for x in gradients) if is_plain else gradients


def _join(k: Tensor, v: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return k [T, Hkv, D], to whose heads the ``shared`` part [T, 1, D'] is appended, and v."""
    return k if shared is None else torch.cat((k, shared.expand(-1, k.shape[1], -1)), -1), v


def _split(dk: Tensor, dv: Tensor, k: Tensor, v: Tensor, shared: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the gradients of k, v and ``shared`` from those of the results of ``_join``."""
    if shared is None:
        return dk, dv
    of_shared = dk[..., k.shape[2] :].sum(1, keepdim=True, dtype=compute_dtype(dk.dtype))
    return dk[..., : k.shape[2]].contiguous(), dv, of_shared.to(dk.dtype)


def _outputs(rows: dict[Kind, list[Tensor]]) -> dict[Kind, list[Tensor]]:
    (q,), (_, v, *_) = rows["queries"], rows["keys"]
    return {"queries": [q.new_empty(0, q.shape[1], v.shape[2]), q.new_empty(0, q.shape[1])]}


FORWARD = Direction(
    "forward", "outputs", _outputs, _forward, lambda index, partials, like: index.merge(partials, like[0])
)
"""query rows: q; key rows: k, v and the part that all heads of keys share, if any; results: out, lse"""

BACKWARD = Direction(
    "backward",
    "gradients",
    lambda rows: {"queries": rows["queries"][-1:], "keys": rows["keys"]},
    _backward,
    lambda index, partials, like: index.add(partials, like),
)
"""query rows: dout, lse, delta (or out, if ``PlanTables.is_plain``), q; key rows as forward; results: dq; those of key
rows"""


@dataclasses.dataclass(eq=False)
class AttentionState:
    """Core attention in flight, in one direction.

    Attributes:
        rows: by kind, tensors of this rank's rows, until kernels run.
        kept: the kept messages of queries, and of keys, with hidden storage.
        number: the call's number in the transport.
        incoming: the rows to serve, while they arrive and until they are used.
        tasks: the kernel calls, while they run.
        served: by kind, the results for rows of other ranks, until they are sent.
        results: by kind and result, the tensors of all kernel calls; after combining, one tensor of local rows, in fp32
            (fp64) until the last trip.
        returning: exchanges of results in flight and their trips, in the order of their starts.
    """

    direction: Direction
    key: int
    plan: PlanTables
    rows: dict[Kind, list[Tensor]]
    kept: Sequence[Tensor] = ()
    number: int = 0
    incoming: Incoming | None = None
    tasks: TaskRunner | None = None
    served: dict[Kind, list[Tensor]] = dataclasses.field(default_factory=dict)
    results: dict[Kind, list[list[Tensor]]] = dataclasses.field(default_factory=dict)
    returning: deque[tuple[Exchange, Sequence[Trip]]] = dataclasses.field(default_factory=deque)

    def __post_init__(self) -> None:
        self._like = {kind: [x.new_empty(0, *x.shape[1:]) for x in rows] for kind, rows in self.rows.items()}
        self._results_like = self.direction.results(self._like)

    # Kernel calls -----------------------------------------------------------------------------------------------------

    def begin_tasks(self, kernel: AttentionKernel, received: dict[Kind, list[Tensor]]) -> TaskRunner:
        """Return the kernel calls over local and ``received`` rows. The state no longer holds the local rows."""
        local, self.rows = self.rows, {}
        queries, keys = (RowSpace(rows, received.get(kind) or [x[:0] for x in rows]) for kind, rows in local.items())
        compute = partial(self.direction.compute, kernel, self.plan.is_plain)
        self.tasks = TaskRunner(self.plan, queries, keys, compute, self.release)
        return self.tasks

    def received(self) -> dict[Kind, list[Tensor]]:
        """Wait for the rows to serve, in the order of ``rows``; returns an empty dictionary if no rows move."""
        if self.incoming is None:
            return {}
        if self.plan.keeps and self.direction is FORWARD:
            self.kept = [hide_storage(message) for message in self.incoming.receive()]
        received = self.incoming.wait()
        if self.plan.keeps and self.direction is BACKWARD:
            (kept_q, kept_kv), self.kept = self.kept, ()
            queries, keys = RowFormat.of(self._like["queries"][-1:]), RowFormat.of(self._like["keys"])
            received["queries"] += queries.reveal(kept_q, self.plan.queries.num_served)
            received["keys"] = keys.reveal(kept_kv, self.plan.keys.num_served)
        return received

    def finish_tasks(self) -> None:
        """Run the remaining kernel calls and combine results for other ranks, and local results if they are many."""
        assert self.tasks is not None
        count = sum(map(len, self._results_like.values()))
        results = [list(of_calls) for of_calls in zip(*self.tasks.finish(), strict=True)] or [[]] * count
        self.tasks = None
        for kind, like in self._results_like.items():
            self.results[kind], results = results[: len(like)], results[len(like) :]
        for kind, like in self._results_like.items():
            tables = getattr(self.plan, kind)
            if self.plan.moves:
                self.served[kind] = self.direction.combine(tables.served, self.results[kind], like)
            if tables.local is not None:
                self.combine(kind, tables.local)

    # Exchanges --------------------------------------------------------------------------------------------------------

    def send(self, start: Callable[[Routes, Sequence[list[Tensor]]], Exchange]) -> None:
        """Start, by ``start``, the exchanges that send rows to their servers and bring the rows to serve."""
        kinds, messages = "all", self.rows
        if self.plan.keeps and self.direction is BACKWARD:
            kinds, messages = "queries", {"queries": self.rows["queries"][:-1]}
        num_rows = {kind: getattr(self.plan, kind).num_served for kind in messages}
        self.incoming = Incoming(
            lambda routes: start(routes, [messages[route.kind] for route in routes]), self.plan.out[kinds], num_rows
        )

    def receive_all(self) -> None:
        """Wait for all rows in flight on the current stream, before a step on another stream uses them."""
        for travelling in (self.incoming, *(exchange for exchange, _ in self.returning)):
            if travelling is not None:
                travelling.receive()

    def release(self) -> None:
        """Free the receive buffers of the rows to serve."""
        if self.incoming is not None:
            self.incoming.release()
        self.incoming = None

    def take_in_next(self) -> None:
        """Wait for the oldest exchange of results, combine its rows and free its receive buffers."""
        exchange, trips = self.returning.popleft()
        for trip, returned in zip(trips, exchange.wait(), strict=True):
            self.combine(trip.kind, trip.combination, returned, is_last=trip.is_last)
        exchange.release()

    def combine(
        self, kind: Kind, combination: Combination, returned: Sequence[Tensor] = (), *, is_last: bool = False
    ) -> None:
        """Combine the results so far with the ``returned`` rows of each result, if any.

        The results get the model's dtype if this ``is_last``, else fp32 (fp64).
        """
        partials, like = self.results[kind], self._results_like[kind]
        if returned:
            partials = [[*of_result, rows] for of_result, rows in zip(partials, returned, strict=True)]
        like = like if is_last else [x.to(compute_dtype(x.dtype)) for x in like]
        self.results[kind] = [[rows] for rows in self.direction.combine(combination, partials, like)]

    def finish(self) -> tuple[Tensor, ...]:
        """Take in the remaining results; returns the results of this rank's rows and, forward, the kept messages."""
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
