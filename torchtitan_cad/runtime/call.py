"""Core attention in flight: what a rank holds of it between the engine's steps, and what the directions differ in."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchtitan_cad.runtime.attend import RowSpace, TaskRunner
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.exchange import Exchange, Incoming
from torchtitan_cad.runtime.kernels.base import AttentionKernel, Merged, VarlenArgs, compute_dtype
from torchtitan_cad.runtime.packing import hide_storage, unpack_hidden
from torchtitan_cad.runtime.tables import PlanTables, Return
from torchtitan_cad.runtime.transport import Routes


class Saved(NamedTuple):
    """Tensors that backward needs of a forward: its arguments, then the results of ``CoreAttentionEngine.forward``."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept_q: Tensor
    kept_kv: Tensor


TakeIn = Callable[[Combination, list[Tensor], bool], None]
"""Combines the returned rows of every part with the results so far; the flag says that no more follow."""


class Homeward(NamedTuple):
    """What this rank has computed for others' rows of one kind, and how to take in what others have for its own."""

    parts: list[Tensor]
    take_in: TakeIn


@dataclasses.dataclass(eq=False)
class AttentionState:
    """Core attention in flight, in one direction: this rank's rows until they are attended to, and what is under way.

    Attributes:
        rows: tensors of this rank's queries, ``num_query_rows`` of them, then those of its keys.
        number: by which the transport knows the call.
        served: what this rank has computed for others' rows, until it is sent.
        results: of every kind the tensors that all kernel calls have computed; once combined, one tensor of local rows,
            in fp32 (fp64) until the last trip.
        returning: trips home under way, in the order in which they were started.
        like: the rows' shapes, dtypes and device, as tensors without rows.
    """

    direction: ClassVar[str]
    results_name: ClassVar[str]
    num_query_rows: ClassVar[int]
    num_results: ClassVar[int]

    key: int
    plan: PlanTables
    rows: tuple[Tensor, ...]
    number: int = 0
    incoming: Incoming | None = None
    results: tuple[list[Tensor], ...] = ()
    served: Sequence[Tensor] = ()
    returning: "deque[tuple[Exchange, Return, list[TakeIn]]]" = dataclasses.field(default_factory=deque)

    def __post_init__(self) -> None:
        self.like = [x.new_empty(0, *x.shape[1:]) for x in self.rows]
        self._tasks: TaskRunner | None = None

    # What the directions differ in ------------------------------------------------------------------------------------

    def dispatched(self, *, keep: bool) -> tuple[list[Routes], dict[str, list[Tensor]]]:
        """Return the exchanges of the rows that others serve, and the parts of each kind's message."""
        raise NotImplementedError

    def received(self, *, keep: bool) -> list[Tensor]:
        """Wait for the rows that this rank serves, of every tensor of ``rows``."""
        raise NotImplementedError

    def compute(self, kernel: AttentionKernel, rows: Sequence[Tensor], args: VarlenArgs) -> tuple[Tensor, ...]:
        """Return a kernel call's results for rows like ``rows``."""
        raise NotImplementedError

    def serve(self) -> None:
        """Combine the results of the kernel calls: those of others' rows, and this rank's own if they are many."""
        raise NotImplementedError

    def homeward(self) -> tuple[list[Return], dict[str, Homeward]]:
        """Return the exchanges of the results, and what travels of each kind."""
        raise NotImplementedError

    def finish(self) -> tuple[Tensor, ...]:
        """Return the results for this rank's rows, once everything has been taken in."""
        raise NotImplementedError

    # Steps ------------------------------------------------------------------------------------------------------------

    def expect(self, incoming: Incoming) -> None:
        """Take charge of the rows to serve, which are on their way."""
        self.incoming = incoming

    def take_rows(self, *, keep: bool) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Wait for the rows to serve and return the local rows, which the call no longer holds, and those to serve."""
        local, self.rows = self.rows, ()
        return local, self.received(keep=keep) if self.plan.moves else [x[:0] for x in local]

    def begin_tasks(self, kernel: AttentionKernel, local: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Run the first round of the kernel calls, or the only call of a plan over the local rows as they lie."""
        if self.plan.is_plain:
            self.results = tuple([x] for x in self.compute(kernel, local, self.plan.calls[0].args))
            return
        n = self.num_query_rows
        queries, keys = RowSpace(local[:n], received[:n]), RowSpace(local[n:], received[n:])
        self._tasks = TaskRunner(self.plan, queries, keys, partial(self.compute, kernel), self.release)
        self._tasks.advance()

    @property
    def calls_left(self) -> Sequence[object] | None:
        """Kernel calls that ``finish_tasks`` makes; None if it has nothing to do."""
        return None if self._tasks is None else self._tasks.calls_left

    def finish_tasks(self) -> None:
        """Run the other rounds of the kernel calls and combine what others wait for."""
        assert self._tasks is not None
        self.results = _by_kind(self._tasks.finish(), self.num_results)
        self._tasks = None
        self.serve()

    def land(self) -> None:
        """Make all rows under way usable on the current stream, before a step on another stream takes them in."""
        for travelling in (self.incoming, *(exchange for exchange, *_ in self.returning)):
            if travelling is not None:
                travelling.land()

    def release(self) -> None:
        """Give back the rows to serve."""
        if self.incoming is not None:
            self.incoming.release()
        self.incoming = None

    def take_in_next(self) -> None:
        """Wait for the exchange of results that was started first, use its rows and give them back."""
        exchange, back, take_ins = self.returning.popleft()
        for trip, take_in, rows in zip(back.trips, take_ins, exchange.wait(), strict=True):
            take_in(trip.combination, rows, trip.is_last)
        exchange.release()

    def take_in_all(self) -> None:
        """Take in what returns and has not been taken in yet."""
        while self.returning:
            self.take_in_next()


@dataclasses.dataclass(eq=False)
class ForwardState(AttentionState):
    """Rows: q, k, v; results: out, lse."""

    direction = "forward"
    results_name = "outputs"
    num_query_rows = 1
    num_results = 2

    kept: Sequence[Tensor] = ()
    """Messages of queries and of keys and values, for backward."""

    def dispatched(self, *, keep: bool) -> tuple[list[Routes], dict[str, list[Tensor]]]:
        q, k, v = self.rows
        return self.plan.out, {"queries": [q], "keys": [k, v]}

    def received(self, *, keep: bool) -> list[Tensor]:
        assert self.incoming is not None
        if keep:
            self.kept = self.incoming.land()
        return self.incoming.wait()

    def compute(self, kernel: AttentionKernel, rows: Sequence[Tensor], args: VarlenArgs) -> tuple[Tensor, ...]:
        q, k, v = rows
        return kernel.forward(q, k, v, args)

    def serve(self) -> None:
        outs, lses = self.results
        if self.plan.moves:
            self.served = self.plan.queries.served.merge([outs, lses], self.like[0])
        if self.plan.queries.local is not None:
            self.merge(self.plan.queries.local)

    def homeward(self) -> tuple[list[Return], dict[str, Homeward]]:
        served, self.served = list(self.served), ()
        return self.plan.outputs_home, {"queries": Homeward(served, self.merge)}

    def merge(self, combination: Combination, rows: Sequence[Tensor] = (), is_last: bool = False) -> None:
        """Merge the outputs so far, with their log-sum-exps, and those that have returned, if any."""
        outs, lses = (
            [*of_kind, *returned] for of_kind, returned in zip(self.results, (rows[:1], rows[1:]), strict=True)
        )
        out, lse = combination.merge([outs, lses], _like(self.like[0], is_last))
        self.results = [out], [lse]

    def finish(self) -> tuple[Tensor, ...]:
        if not (self.plan.moves or self.plan.is_plain):
            self.merge(self.plan.queries.home[0].combination, is_last=True)
        (out,), (lse,) = self.results
        kept = [hide_storage(message) for message in self.kept] or [
            out.new_empty(0, dtype=torch.uint8) for _ in range(2)
        ]
        return out.contiguous(), lse.contiguous(), *kept


@dataclasses.dataclass(eq=False)
class BackwardState(AttentionState):
    """Rows: dout, q, lse, delta (out, where one call computes everything), k, v; results: dq, dk, dv."""

    direction = "backward"
    results_name = "gradients"
    num_query_rows = 4
    num_results = 3

    kept: Sequence[Tensor] = ()
    """Messages that forward has kept, storage hidden."""

    def dispatched(self, *, keep: bool) -> tuple[list[Routes], dict[str, list[Tensor]]]:
        dout, q, lse, delta, k, v = self.rows
        if keep:
            return self.plan.queries_out, {"queries": [dout, lse, delta]}
        return self.plan.out, {"queries": [dout, q, lse, delta], "keys": [k, v]}

    def received(self, *, keep: bool) -> list[Tensor]:
        assert self.incoming is not None
        received = self.incoming.wait()
        if keep:
            (kept_q, kept_kv), self.kept = self.kept, ()
            _, q, _, _, k, v = self.like
            received[1:1] = unpack_hidden([q], kept_q, self.plan.queries.num_served)
            received += unpack_hidden([k, v], kept_kv, self.plan.keys.num_served)
        return received

    def compute(self, kernel: AttentionKernel, rows: Sequence[Tensor], args: VarlenArgs) -> tuple[Tensor, ...]:
        dout, q, lse, delta, k, v = rows
        merged = Merged(lse, out=delta) if self.plan.is_plain else Merged(lse, delta)
        return kernel.backward(dout, q, k, v, merged, args)

    def serve(self) -> None:
        plan = self.plan
        if plan.moves:
            self.served = plan.queries.served.add(self.results[:1], self.like[1])
            if plan.queries.local is not None:
                self.add_queries(plan.queries.local)
            self.served = *self.served, *plan.keys.served.add(self.results[1:], self.like[4])
            if plan.keys.local is not None:
                self.add_keys(plan.keys.local)

    def homeward(self) -> tuple[list[Return], dict[str, Homeward]]:
        (dq, *dkv), self.served = self.served, ()
        homeward = {"queries": Homeward([dq], self.add_queries), "keys": Homeward(dkv, self.add_keys)}
        return self.plan.gradients_home, homeward

    def add_queries(self, combination: Combination, rows: Sequence[Tensor] = (), is_last: bool = False) -> None:
        """Add up the gradients of queries so far and those that have returned, if any."""
        (sums,) = combination.add([[*self.results[0], *rows]], _like(self.like[1], is_last))
        self.results = [sums], *self.results[1:]

    def add_keys(self, combination: Combination, rows: Sequence[Tensor] = (), is_last: bool = False) -> None:
        """Add up the gradients of keys and values, as ``add_queries`` those of queries."""
        returned = [[part] for part in rows] or [[], []]
        parts = [[*of_kind, *more] for of_kind, more in zip(self.results[1:], returned, strict=True)]
        self.results = self.results[0], *([sums] for sums in combination.add(parts, _like(self.like[4], is_last)))

    def finish(self) -> tuple[Tensor, ...]:
        if not (self.plan.moves or self.plan.is_plain):
            self.add_queries(self.plan.queries.home[0].combination, is_last=True)
            self.add_keys(self.plan.keys.home[0].combination, is_last=True)
        return tuple(x.to(self.like[0].dtype).contiguous() for (x,) in self.results)


def _by_kind(results: Sequence[tuple[Tensor, ...]], num_kinds: int) -> tuple[list[Tensor], ...]:
    return tuple([of_call[kind] for of_call in results] for kind in range(num_kinds))


def _like(rows: Tensor, is_last: bool) -> Tensor:
    """``rows`` in the dtype of combined results: the model's if no more follow, else fp32 (fp64)."""
    return rows if is_last else rows.to(compute_dtype(rows.dtype))
