"""Core attention in flight: its exchanges, and what a rank holds of it between the engine's steps."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from torch.profiler import record_function

from torchtitan_cad.runtime.attend import TaskRunner
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.kernels.base import compute_dtype
from torchtitan_cad.runtime.packing import RowFormat
from torchtitan_cad.runtime.tables import PlanTables, Trip
from torchtitan_cad.runtime.transport import Pending


@dataclasses.dataclass
class ExchangeClock:
    """Host seconds spent on exchanges since ``reset``: to pack and start them, and to wait for what peers send.

    On CPU ranks the host blocks in the wait until the rows are there, so ``waiting`` is what no other work hides of the
    exchange and of the peers' delay. On CUDA the wait is put on a stream and both are the host's cost of launching:
    read the device's side from a profiler trace.
    """

    starting: float = 0.0
    waiting: float = 0.0

    @contextmanager
    def measure(self, *, waits: bool) -> Iterator[None]:
        """Add the time spent in the context to ``waiting``, or to ``starting`` if nothing ``waits``."""
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        if waits:
            self.waiting += seconds
        else:
            self.starting += seconds

    def reset(self) -> tuple[float, float]:
        """Return ``starting`` and ``waiting`` and set them to 0."""
        seconds = self.starting, self.waiting
        self.starting = self.waiting = 0.0
        return seconds


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


class Exchange:
    """A pending exchange that yields typed tensors instead of bytes."""

    def __init__(
        self, pending: Pending, row_format: RowFormat, clock: ExchangeClock, phase: str, *, own: bool = False
    ) -> None:
        self._pending, self._format, self._clock, self._phase = pending, row_format, clock, phase
        self._own, self._released = own, own
        self._message: Tensor | None = None

    def land(self) -> Tensor:
        """Make the message, uint8 [rows, row_bytes], usable on the current stream; ``wait`` then returns at once."""
        if self._message is None:
            with record_function(f"cad/wait {self._phase}"), self._clock.measure(waits=True):
                self._message = self._pending.take() if self._own else self._pending.wait()
        return self._message

    def wait(self) -> list[Tensor]:
        """Wait for the received rows of every part, valid until ``release``; with ``own`` for good, without one."""
        return self._format.unpack(self.land())

    def release(self) -> None:
        """Give the received rows back, once."""
        if not self._released:
            self._pending.release()
            self._released = True


@dataclasses.dataclass(eq=False)
class AttentionState:
    """Core attention in flight: this rank's rows until they are attended to, and the exchanges under way.

    Attributes:
        served: what this rank has computed for others' rows, until it is sent.
        results: of every kind the tensors that all kernel calls have computed; once combined, one tensor of local rows,
            in fp32 (fp64) until the last trip.
        returning: trips home under way, in the order in which they were started.
        like: the rows' shapes, dtypes and device, as tensors without rows.
    """

    key: int
    plan: PlanTables
    rows: tuple[Tensor, ...]
    number: int = 0  # that the transport knows the call by
    exchanges: tuple[Exchange, ...] = ()
    results: tuple[list[Tensor], ...] = ()
    served: Sequence[Tensor] = ()
    returning: "deque[tuple[Exchange, Trip, TakeIn]]" = dataclasses.field(default_factory=deque)

    def __post_init__(self) -> None:
        self.like = [x.new_empty(0, *x.shape[1:]) for x in self.rows]
        self._tasks: TaskRunner | None = None

    def take_rows(self) -> tuple[Tensor, ...]:
        """Return the rows, which the call no longer holds afterwards."""
        rows, self.rows = self.rows, ()
        return rows

    def begin_tasks(self, tasks: TaskRunner) -> None:
        """Run the first round of the kernel calls; ``take_tasks`` gives those that are left."""
        self._tasks = tasks
        tasks.advance()

    def take_tasks(self) -> TaskRunner | None:
        """Return the kernel calls, which the call no longer holds afterwards; None if the kernel ran without."""
        tasks, self._tasks = self._tasks, None
        return tasks

    def take_served(self) -> list[Tensor]:
        """Return what is served, which the call no longer holds afterwards."""
        served, self.served = self.served, ()
        return list(served)

    def release(self) -> None:
        """Give back the rows that the exchanges brought."""
        for exchange in self.exchanges:
            exchange.release()
        self.exchanges = ()

    def land(self) -> None:
        """Make all rows under way usable on the current stream, before a step on another stream takes them in."""
        for exchange in (*self.exchanges, *(exchange for exchange, *_ in self.returning)):
            exchange.land()

    def take_in_next(self) -> None:
        """Wait for the trip home that was started first, use its rows and give them back."""
        exchange, trip, take_in = self.returning.popleft()
        take_in(trip.combination, exchange.wait(), trip.is_last)
        exchange.release()

    def take_in_all(self) -> None:
        """Take in what returns and has not been taken in yet."""
        while self.returning:
            self.take_in_next()


@dataclasses.dataclass(eq=False)
class ForwardState(AttentionState):
    """Rows: q, k, v; results: out, lse."""

    kept_q: Tensor | None = None
    kept_kv: Tensor | None = None

    def keep_messages(self) -> None:
        """Keep what the exchanges of queries and of keys and values have brought, for backward."""
        self.kept_q, self.kept_kv = (exchange.land() for exchange in self.exchanges)

    def serve(self) -> None:
        """Merge the outputs of the kernel calls: those of others' rows, and this rank's own if they are many."""
        outs, lses = self.results
        if self.plan.moves:
            self.served = self.plan.q_served.merge(outs, lses, self.like[0])
        if self.plan.q_local is not None:
            self.merge(self.plan.q_local)

    def merge(self, combination: Combination, rows: Sequence[Tensor] = (), is_last: bool = False) -> None:
        """Merge the outputs so far, with their log-sum-exps, and those that have returned, if any."""
        outs, lses = (
            [*of_kind, *returned] for of_kind, returned in zip(self.results, (rows[:1], rows[1:]), strict=True)
        )
        out, lse = combination.merge(outs, lses, _like(self.like[0], is_last))
        self.results = [out], [lse]


@dataclasses.dataclass(eq=False)
class BackwardState(AttentionState):
    """Rows: dout, q, lse, delta, k, v; results: dq, dk, dv."""

    kept: tuple[Tensor, ...] = ()

    def take_kept(self) -> tuple[Tensor, ...]:
        """Return the messages that forward has kept, which the call no longer holds afterwards."""
        kept, self.kept = self.kept, ()
        return kept

    def serve(self) -> None:
        """Add up the gradients of the kernel calls: those of others' rows, and this rank's own if they are many."""
        plan = self.plan
        if plan.moves:
            self.served = plan.q_served.add(self.results[:1], self.like[1])
            if plan.q_local is not None:
                self.add_queries(plan.q_local)
            self.served = *self.served, *plan.kv_served.add(self.results[1:], self.like[4])
            if plan.kv_local is not None:
                self.add_keys(plan.kv_local)

    def add_queries(self, combination: Combination, rows: Sequence[Tensor] = (), is_last: bool = False) -> None:
        """Add up the gradients of queries so far and those that have returned, if any."""
        (sums,) = combination.add([[*self.results[0], *rows]], _like(self.like[1], is_last))
        self.results = [sums], *self.results[1:]

    def add_keys(self, combination: Combination, rows: Sequence[Tensor] = (), is_last: bool = False) -> None:
        """Add up the gradients of keys and values, as ``add_queries`` those of queries."""
        returned = [[part] for part in rows] or [[], []]
        parts = [[*of_kind, *more] for of_kind, more in zip(self.results[1:], returned, strict=True)]
        self.results = self.results[0], *([sums] for sums in combination.add(parts, _like(self.like[4], is_last)))


def _like(rows: Tensor, is_last: bool) -> Tensor:
    """``rows`` in the dtype of combined results: the model's if no more follow, else fp32 (fp64)."""
    return rows if is_last else rows.to(compute_dtype(rows.dtype))
