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
from torchtitan_cad.runtime.tables import PlanTables, Return
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


class Homeward(NamedTuple):
    """What this rank has computed for others' rows of one kind, and how to take in what others have for its own."""

    parts: list[Tensor]
    take_in: TakeIn


class Exchange:
    """A pending exchange that yields typed tensors instead of bytes.

    Args:
        formats: of its messages.
    """

    def __init__(
        self, pending: Pending, formats: Sequence[RowFormat], clock: ExchangeClock, phase: str, *, own: bool = False
    ) -> None:
        self._pending, self._formats, self._clock, self._phase = pending, formats, clock, phase
        self._own, self._released = own, own
        self._messages: list[Tensor] = []

    def land(self) -> list[Tensor]:
        """Make the messages, uint8 [rows, row_bytes], usable on the current stream; ``wait`` then returns at once."""
        if not self._messages:
            with record_function(f"cad/wait {self._phase}"), self._clock.measure(waits=True):
                self._messages = self._pending.take() if self._own else self._pending.wait()
        return self._messages

    def wait(self) -> list[list[Tensor]]:
        """Wait for the received rows of every part of every message, valid until ``release``.

        With ``own`` they are valid for good, and not to be released.
        """
        return [row_format.unpack(message) for row_format, message in zip(self._formats, self.land(), strict=True)]

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
    incoming: Exchange | None = None  # that brings the rows to serve
    results: tuple[list[Tensor], ...] = ()
    served: Sequence[Tensor] = ()
    returning: "deque[tuple[Exchange, Return, list[TakeIn]]]" = dataclasses.field(default_factory=deque)

    def __post_init__(self) -> None:
        self.like = [x.new_empty(0, *x.shape[1:]) for x in self.rows]
        self._tasks: TaskRunner | None = None

    def expect(self, exchange: Exchange) -> None:
        """Take charge of the exchange that brings the rows to serve."""
        self.incoming = exchange

    def await_rows(self) -> list[Tensor]:
        """Wait for the rows to serve, of every part."""
        assert self.incoming is not None
        return [rows for parts in self.incoming.wait() for rows in parts]

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
        """Give back the rows to serve."""
        if self.incoming is not None:
            self.incoming.release()
        self.incoming = None

    def land(self) -> None:
        """Make all rows under way usable on the current stream, before a step on another stream takes them in."""
        for exchange in (self.incoming, *(exchange for exchange, *_ in self.returning)):
            if exchange is not None:
                exchange.land()

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

    kept_q: Tensor | None = None
    kept_kv: Tensor | None = None

    def keep_messages(self) -> None:
        """Keep the messages of queries and of keys and values, for backward."""
        assert self.incoming is not None
        self.kept_q, self.kept_kv = self.incoming.land()

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
