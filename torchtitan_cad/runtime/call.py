# SPDX-License-Identifier: BSD-3-Clause
"""One call of core attention, step by step."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from torchtitan_cad.planning.exchange.messages import BUFFERS_PER_CALL
from torchtitan_cad.runtime.attend import RowSpace, TaskRunner
from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.directions import BACKWARD, FORWARD, Direction
from torchtitan_cad.runtime.exchange import Exchange, ExchangeClock, Incoming
from torchtitan_cad.runtime.kernels.base import AttentionKernel, compute_dtype
from torchtitan_cad.runtime.packing import RowFormat, hide_storage
from torchtitan_cad.runtime.row_tables import Chunk
from torchtitan_cad.runtime.servers.client import OwedAnswer, ServerPool
from torchtitan_cad.runtime.servers.request import Request
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.traces import named
from torchtitan_cad.runtime.transport.base import Kind, Routes, Transport

Step = Literal["start", "attend"]
"""the steps that start exchanges"""


class Saved(NamedTuple):
    """Tensors that backward needs: the arguments and the results of a forward call."""

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


class Engine(Protocol):
    """What a call needs of its engine, ``CoreAttentionEngine``."""

    kernel: AttentionKernel
    transport: Transport | None
    clock: ExchangeClock
    servers: ServerPool | None

    def enter(
        self, step: Step, direction: Direction, key: int, rows: Tensor | None = None
    ) -> int:
        """Begin a step that starts exchanges."""
        ...


class AttentionCall:
    """Core attention of one rank, in one direction, from its first step to its last.

    The steps are ``send``, ``compute``, ``send_home`` and ``finish``, in this order. Other work may run between them
    while rows travel. ``send`` and ``send_home`` start exchanges, so all ranks of the group make the same steps in the
    same order.

    Args:
        engine: gives kernel, transport and clock, and orders calls.
        direction: forward or backward.
        key: the plan's key.
        plan: of this call.
        rows: by kind, tensors of this rank's rows.
        kept: messages of queries, and of keys, with hidden storage, which the forward call has kept.
    """

    def __init__(
        self,
        engine: Engine,
        direction: Direction,
        key: int,
        plan: PlanTables,
        rows: dict[Kind, list[Tensor]],
        kept: Sequence[Tensor] = (),
    ) -> None:
        self.engine = engine
        self.direction = direction
        self.key = key
        self._plan = plan
        self._kept = kept
        self._number = 0
        """The call's number in the transport."""
        self._rows = rows
        """By kind, the rows at home, until kernels run."""
        self._incoming: Incoming | None = None
        """The rows to serve, while they arrive and until they are used."""
        self._remote_results: dict[Kind, list[Tensor]] = {}
        """By kind, the results for rows of other ranks, until they are sent."""
        nothing = [x.new_empty(0, *x.shape[1:]) for x in chain(*rows.values())]
        self._like = direction.results_like(nothing)
        """By kind, tensors without rows that are like the results."""
        self._results: dict[Kind, list[list[Tensor]]] = {
            kind: [[] for _ in like] for kind, like in self._like.items()
        }
        """By kind and result, the partials of all kernel calls; once combined, one tensor of the rows at home, in fp32
        (fp64) until the last chunk."""
        self._returning: deque[tuple[Exchange, Sequence[Chunk]]] = deque()
        """Exchanges of results in flight and their chunks, in the order of their starts."""
        self._asked: list[tuple[Request, OwedAnswer | None]] = []
        """What joined servers compute for this rank, until it is taken in; None: the server is gone."""

    def run(self) -> tuple[Tensor, ...]:
        """Make all steps, and return the results as ``finish``."""
        self.send()
        self.attend()
        return self.finish()

    # Rows to their servers --------------------------------------------------------------------------------------------

    def send(self) -> "AttentionCall":
        """Start the exchanges that take rows to their servers, and bring the rows that this rank serves."""
        self._ask_servers()
        if not self._plan.moves:
            return self
        assert self.engine.transport is not None
        self._number = self.engine.transport.begin()
        exchanges = self._plan.out[self.direction.name]
        num_rows: dict[Kind, int] = {
            "queries": self._plan.queries.num_remote,
            "keys": self._plan.keys.num_remote,
        }
        self._incoming = Incoming(self._send_rows, exchanges, num_rows)
        return self

    def _ask_servers(self) -> None:
        """Send the rows of the calls that joined servers compute for this rank."""
        for server, seconds, call in self._plan.stand_ins:
            queries, keys = map(RowSpace, self._rows.values())
            rows = queries.take(call.q_rows) + keys.take(call.kv_rows)
            request = Request(self.direction, rows, call.args)
            pool = self.engine.servers
            answer = None if pool is None else pool.ask(server, request, seconds)
            self._asked.append((request, answer))

    @property
    def _has_kept_rows(self) -> bool:
        """True if this rank need not receive Q, K and V again."""
        return self._plan.keeps and self.direction is BACKWARD

    def _send_rows(self, routes: Routes) -> Exchange:
        """Start an exchange of rows to their servers."""
        messages = dict(self._rows)
        if self._has_kept_rows:
            messages["queries"] = messages["queries"][:-1]  # without Q
        return self._start("rows", routes, [messages[route.kind] for route in routes])

    def _start(
        self, what: str, routes: Routes, messages: Sequence[list[Tensor]]
    ) -> Exchange:
        assert self.engine.transport is not None
        return Exchange(
            self.engine.transport,
            self.engine.clock,
            messages,
            routes=routes,
            phase=f"{self.direction.name} {what}",
            call=self._number,
        )

    # Kernel calls -----------------------------------------------------------------------------------------------------

    def attend(self) -> None:
        """Compute this rank's tasks, and send results home."""
        self.compute()
        self.send_home()

    def compute(self) -> None:
        """Compute this rank's tasks, and combine results for other ranks, and local results if they are many."""
        self.engine.enter("attend", self.direction, self.key)
        tasks = self.begin_tasks(self._receive())
        with named(self.direction.trace_name):
            self.combine_results(tasks)

    def begin_tasks(self, received: dict[Kind, list[Tensor]]) -> TaskRunner:
        """Return the kernel calls over rows at home and ``received`` rows. The call then holds no rows at home."""
        spaces = [
            RowSpace(rows, received.get(kind, ())) for kind, rows in self._rows.items()
        ]
        self._rows = {}
        compute = partial(self.direction.compute, self.engine.kernel)
        return TaskRunner(self._plan.calls, spaces, compute, self._release)

    def _receive(self) -> dict[Kind, list[Tensor]]:
        """Wait for the rows to serve, by kind; returns an empty dictionary if no rows move."""
        if self._incoming is None:
            return {}
        if self._plan.keeps and self.direction is FORWARD:
            self._kept = [hide_storage(message) for message in self._incoming.receive()]
        received = self._incoming.wait()
        if self._has_kept_rows:
            kept_q, kept_kv = self._kept
            self._kept = ()
            format_q = RowFormat.of(self._rows["queries"][-1:])
            format_kv = RowFormat.of(self._rows["keys"])
            received["queries"] += format_q.reveal(
                kept_q, self._plan.queries.num_remote
            )
            received["keys"] = format_kv.reveal(kept_kv, self._plan.keys.num_remote)
        return received

    def _release(self) -> None:
        """Free the receive buffers of the rows to serve."""
        if self._incoming is not None:
            self._incoming.release()
        self._incoming = None

    def combine_results(self, tasks: TaskRunner) -> None:
        """Run the kernel calls and combine their results, for other ranks and, if they are many, at home.

        Results of joined servers are taken in later, when those for other ranks are on their way.
        """
        self._collect(tasks)
        for kind, like in self._like.items():
            if self._plan.moves:
                remote = getattr(self._plan, kind).remote
                self._remote_results[kind] = self.direction.combine(
                    remote, self._results[kind], like
                )
            if not self._asked:
                self._combine_local(kind)

    def _collect(self, tasks: TaskRunner) -> None:
        """Run the kernel calls."""
        for results in tasks.run():
            self._add_partials(results)

    def _add_partials(self, results: Sequence[Tensor]) -> None:
        """Add the results of one kernel call to those of the others."""
        partials = chain(*self._results.values())
        for of_result, rows in zip(partials, results, strict=True):
            of_result.append(rows)

    def _combine_local(self, kind: Kind) -> None:
        """Combine the results of all kernel calls at home, if they are many."""
        local = getattr(self._plan, kind).local
        if local is not None:
            self.combine(kind, local)

    def _take_in_servers(self) -> None:
        """Wait for the results of joined servers, or compute what does not come, and add them to those of this rank."""
        if not self._asked:
            return
        asked = self._asked
        self._asked = []
        for request, answer in asked:
            results = None if answer is None else answer.result()
            if results is None:
                with named(self.direction.trace_name):
                    results = request.compute(self.engine.kernel)
            device = request.rows[0].device
            self._add_partials([x.to(device, non_blocking=True) for x in results])
        for kind in self._results:
            self._combine_local(kind)

    # Results to their homes -------------------------------------------------------------------------------------------

    def send_home(self) -> None:
        """Start all exchanges of results. If all receive buffers are in use, the oldest exchange is taken in first."""
        remote_results = self._remote_results
        self._remote_results = {}
        exchanges = self._plan.home[self.direction.name] if self._plan.moves else []
        for routes, chunks in exchanges:
            if len(self._returning) == BUFFERS_PER_CALL:
                self._take_in_next()
            exchange = self._start(
                self.direction.results_name,
                routes,
                [remote_results[chunk.kind] for chunk in chunks],
            )
            self._returning.append((exchange, chunks))

    def receive_all(self) -> None:
        """Wait for all rows in flight on the current stream, before a step on another stream uses them."""
        for travelling in (
            self._incoming,
            *(exchange for exchange, _ in self._returning),
        ):
            if travelling is not None:
                travelling.receive()

    def keepalive_tensors(self) -> list[Any]:
        """Return what exchanges may still read or write."""
        asked = [request.rows for request, _ in self._asked]
        return [*self._remote_results.values(), *self._results.values(), *asked]

    def _take_in_next(self) -> None:
        """Wait for the oldest exchange of results, combine its rows and free its receive buffers."""
        self._take_in_servers()
        exchange, chunks = self._returning.popleft()
        for chunk, returned in zip(chunks, exchange.wait(), strict=True):
            self.combine(chunk.kind, chunk.combination, returned, is_last=chunk.is_last)
        exchange.release()

    def combine(
        self,
        kind: Kind,
        combination: Combination,
        returned: Sequence[Tensor] = (),
        *,
        is_last: bool = False,
    ) -> None:
        """Combine the results so far with the ``returned`` rows of each result, if any.

        The results get the model's dtype if this ``is_last``, else fp32 (fp64).
        """
        partials = self._results[kind]
        if returned:
            partials = [
                [*of_result, rows]
                for of_result, rows in zip(partials, returned, strict=True)
            ]
        like = self._like[kind]
        if not is_last:
            like = [x.to(compute_dtype(x.dtype)) for x in like]
        combined = self.direction.combine(combination, partials, like)
        self._results[kind] = [[rows] for rows in combined]

    def finish(self) -> tuple[Tensor, ...]:
        """Take in the remaining results; returns the results of the rows at home and, forward, the kept messages."""
        self._take_in_servers()
        while self._returning:
            self._take_in_next()
        if not (self._plan.moves or self._plan.is_plain):
            for kind in self._results:
                chunk = getattr(self._plan, kind).home[0]
                self.combine(kind, chunk.combination, is_last=True)
        of_kinds = zip(
            chain(*self._results.values()), chain(*self._like.values()), strict=True
        )
        results = [rows.to(like.dtype).contiguous() for (rows,), like in of_kinds]
        if self.direction is FORWARD:
            nothing = [results[0].new_empty(0, dtype=torch.uint8) for _ in range(2)]
            results += self._kept or nothing
        return tuple(results)
