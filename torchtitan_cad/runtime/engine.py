"""Executes core attention of one rank according to a plan (design: docs/architecture.md).

Forward: send query and key/value rows -> a causal and an unmasked kernel call over everything this rank serves (more of
them where their rows are many; in two rounds on request) -> return outputs with their log-sum-exps -> merge at home,
the rank's own results and returned ones at once. Backward: home sends dO with the merged softmax statistics (and Q, K,
V again unless they were kept), servers run the kernel's backward, gradients return and are summed in fp32 in a fixed
order. As backward starts from rows that are at home, it may follow another plan than forward did.

Either direction has three steps, start, attend and finish, between which other work may run while rows travel. All
exchanges are started in ``start`` and ``attend``, in the same order on all ranks. Results that return in several trips
(planning/exchange/messages.py) are taken in one after the other; the last ones travel until ``finish``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from torchtitan_cad.planning import AttentionShape, Plan
from torchtitan_cad.planning.exchange.messages import RowBytes
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.attend import RowSpace, attend, attend_backward
from torchtitan_cad.runtime.call import (
    AttentionState,
    BackwardState,
    Exchange,
    ExchangeClock,
    ForwardState,
    Homeward,
    Saved,
)
from torchtitan_cad.runtime.kernels.base import AttentionKernel, row_delta
from torchtitan_cad.runtime.packing import RowFormat, hide_storage, unpack_hidden
from torchtitan_cad.runtime.table_sizes import TableSizes
from torchtitan_cad.runtime.tables import PlanTables, Return
from torchtitan_cad.runtime.transport import SLOTS_PER_CALL, Routes, Transport


class CoreAttentionEngine:
    """One rank's executor of core attention within a CAD group.

    Args:
        kernel: computes varlen attention on gathered rows.
        transport: moves rows between the ranks of the group; None for a group of one.
        rank: this rank's index within the group.
        device: where the model's tensors live.
        scale: factor on the scores before the softmax.
        keep: servers keep received Q, K and V for backward instead of receiving them again.
        two_rounds: where rows move, makes the kernel calls in two rounds of equal work, between which other work may
            run: ``attend_first_forward`` and ``attend_forward``.
        sizes: pads the tables of all plans, so that every plan runs the same operations on tensors of the same shapes,
            which a CUDA graph can replay (``replay.py``). Then every row that a kernel call reads is gathered.

    Raises:
        ValueError: ``two_rounds`` and ``sizes``.
    """

    def __init__(
        self,
        kernel: AttentionKernel,
        transport: Transport | None,
        *,
        rank: int,
        device: torch.device,
        scale: float,
        keep: bool = False,
        two_rounds: bool = False,
        sizes: TableSizes | None = None,
    ) -> None:
        if two_rounds and sizes is not None:
            raise ValueError("tables of two rounds are not padded to sizes")
        self.kernel, self.transport, self.sizes = kernel, transport, sizes
        self.rank, self.device, self.scale, self.keep, self.two_rounds = rank, device, scale, keep, two_rounds
        self.clock = ExchangeClock()
        self.observer: Callable[[str, int], None] | None = None
        self._plans: dict[int, _Planned] = {}

    # Plans ------------------------------------------------------------------------------------------------------------

    def add_plan(self, key: int, plan: Plan, backward: Plan | None = None) -> None:
        """Make ``plan`` executable under ``key``. May be called from a planning thread, on any stream.

        Args:
            backward: by which to compute gradients, for the same tokens; by default ``plan`` itself.

        Raises:
            ValueError: a plan moves rows and there is no transport; a ``backward`` that cannot follow ``plan``; or a
                plan too large for ``sizes``.
        """
        tables = self._build_tables(plan)
        backward_tables = tables if backward is None else self._build_backward_tables(backward, tables)
        self._plans[key] = _Planned(tables, backward_tables, streams.mark(self.device))

    def _build_backward_tables(self, plan: Plan, forward: PlanTables) -> PlanTables:
        if self.keep:
            raise ValueError("servers keep what the forward plan brought them: resend for a backward by another plan")
        tables = self._build_tables(plan)
        if tables.num_local != forward.num_local or tables.num_queries != forward.num_queries:
            raise ValueError(f"backward plan for {tables.num_local} local tokens, forward {forward.num_local}")
        return tables

    def _build_tables(self, plan: Plan) -> PlanTables:
        moves = plan.moves_rows
        if moves and self.transport is None:
            raise ValueError("a plan that moves rows needs a transport")
        moves = moves if self.sizes is None else self.transport is not None
        exchange = plan.exchange(self.rank)
        trips = exchange.most.trips(RowBytes.of(plan.shape, keep=self.keep))
        options: dict[str, Any] = {"two_rounds": self.two_rounds, "squares_only": self.kernel.squares_only}
        tables = PlanTables.from_exchange(
            exchange, moves, self.device, self.scale, trips=trips, sizes=self.sizes, **options
        )
        if moves and self.transport is not None:
            self.transport.prepare(tables.exchanges)
        return tables

    def drop_plan(self, key: int) -> None:
        """Forget a plan, if it is known."""
        self._plans.pop(key, None)

    def plan(self, key: int) -> PlanTables:
        """Return the tables of the forward plan."""
        return self._find(key).forward

    def backward_plan(self, key: int) -> PlanTables:
        """Return the tables by which gradients are computed: the forward plan's unless ``add_plan`` got another."""
        return self._find(key).backward

    def _find(self, key: int) -> "_Planned":
        """Return the tables of a plan, which the current stream may read from now on."""
        try:
            planned = self._plans[key]
        except KeyError:
            raise RuntimeError(
                f"no plan {key} on rank {self.rank} of the CAD group (known: {sorted(self._plans)}); "
                "it was dropped before its backward, or the batch did not come from the planning loader"
            ) from None
        streams.join(self.device, planned.copied)
        return planned

    # Forward ----------------------------------------------------------------------------------------------------------

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute core attention of this rank's tokens: ``start_forward``, ``attend_forward``, ``finish_forward``.

        Args:
            q: [Tq, Hq, D], this rank's queries in layout order. k, v: [T, Hkv, D], all its tokens in layout order
                (Tq = T unless the layout leaves queries out).
            key: the plan's key.

        Returns:
            out [Tq, Hq, D] in q's dtype; lse [Tq, Hq] natural log, fp32 (fp64 for fp64 inputs); and what this rank
            keeps for backward: the received messages of Q and of K and V, their storage hidden (see ``packing``), empty
            unless ``keep``. ``Saved(q, k, v, *results)`` is what ``backward`` takes.
        """
        call = self.start_forward(q, k, v, key)
        self.attend_forward(call)
        return self.finish_forward(call)

    def start_forward(self, q: Tensor, k: Tensor, v: Tensor, key: int) -> ForwardState:
        """Send the rows that others serve. Arguments as in ``forward``; raises ValueError for other row counts."""
        call = self.begin_forward(q, k, v, key)
        self.send_forward(call)
        return call

    def begin_forward(self, q: Tensor, k: Tensor, v: Tensor, key: int) -> ForwardState:
        """Run the first part of ``start_forward``."""
        key = self._enter("start_forward", key, q)
        self.note("start_forward", key)
        plan = self.plan(key)
        if (q.shape[0], k.shape[0]) != (plan.num_queries, plan.num_local):
            raise ValueError(
                f"plan {key} is for {plan.num_queries} local queries and {plan.num_local} local tokens, "
                f"got {q.shape[0]} and {k.shape[0]}"
            )
        return ForwardState(key, plan, (q, k, v))

    def send_forward(self, call: ForwardState) -> None:
        """Run the second part of ``start_forward``."""
        plan, (q, k, v) = call.plan, call.rows
        if plan.moves:
            call.number = self._begin(plan, q, k)
            call.expect(self._start(call, [[q], [k, v]], plan.out, "forward rows", own=self.keep))

    def attend_first_forward(self, call: ForwardState, *, undivided: bool) -> None:
        """Wait for the rows to serve and compute the first round of this rank's tasks.

        Args:
            undivided: whether to compute all tasks of a plan of one round; otherwise ``attend_forward`` does.
        """
        if undivided or len(call.plan.rounds) > 1:
            self.note("attend_first_forward", call.key)
            self._begin_to_attend_forward(call)

    def _begin_to_attend_forward(self, call: ForwardState) -> None:
        plan, local = call.plan, call.take_rows()
        if plan.is_plain:
            with self._computing(call, "forward"):
                out, lse = self.kernel.forward(local[0], local[1], local[2], plan.calls[0].args)
            call.results = [out], [lse]
            return
        received = [x[:0] for x in local]
        if plan.moves:
            received = call.await_rows()
            if self.keep:
                call.keep_messages()
        with self._computing(call, "forward", plan.rounds[0]):
            queries, keys = RowSpace(local[:1], received[:1]), RowSpace(local[1:], received[1:])
            call.begin_tasks(attend(self.kernel, plan, queries, keys, call.release))

    def attend_forward(self, call: ForwardState) -> None:
        """Compute every task, or those that ``attend_first_forward`` has left, and send the outputs home."""
        self.compute_forward(call)
        self.return_forward(call)

    def compute_forward(self, call: ForwardState) -> None:
        """Run the first part of ``attend_forward``."""
        self._enter("attend_forward", call.key)
        self.note("attend_forward", call.key)
        if call.rows:
            self._begin_to_attend_forward(call)
        tasks = call.take_tasks()
        if tasks is None:
            return
        with self._computing(call, "forward", tasks.calls_left):
            call.results = _by_kind(tasks.finish(), 2)
            call.serve()

    def return_forward(self, call: ForwardState) -> None:
        """Run the second part of ``attend_forward``."""
        if call.plan.moves:
            homeward = {"queries": Homeward(call.take_served(), call.merge)}
            self._send_home(call, homeward, call.plan.outputs_home, "forward outputs")

    def finish_forward(self, call: ForwardState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Wait for what others computed and merge it; returns what ``forward`` does."""
        self.note("finish_forward", call.key)
        call.take_in_all()
        outs, lses = call.results
        if call.plan.is_plain:
            out, lse = outs[0].contiguous(), lses[0].contiguous()
        else:
            if not call.plan.moves:
                call.merge(call.plan.q_home[0].combination, is_last=True)
            ((out,), (lse,)) = call.results
        return out, lse, _hidden(call.kept_q, out), _hidden(call.kept_kv, out)

    # Backward ---------------------------------------------------------------------------------------------------------

    def backward(self, dout: Tensor, saved: Saved, key: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of q, k and v, in their shapes and dtype, from dout [Tq, Hq, D], out's gradient."""
        call = self.start_backward(dout, saved, key)
        self.attend_backward(call)
        return self.finish_backward(call)

    def start_backward(self, dout: Tensor, saved: Saved, key: int) -> BackwardState:
        """Send dO and what else servers need of the rows they serve. Arguments as in ``backward``."""
        call = self.begin_backward(dout, saved, key)
        self.send_backward(call)
        return call

    def begin_backward(self, dout: Tensor, saved: Saved, key: int) -> BackwardState:
        """Run the first part of ``start_backward``."""
        key = self._enter("start_backward", key, saved.q)
        self.note("start_backward", key)
        plan = self.backward_plan(key)
        q, k, v, out, lse, *kept = saved
        dout = dout.contiguous()
        statistic = out if plan.is_plain else row_delta(dout, out)
        return BackwardState(key, plan, (dout, q, lse, statistic, k, v), kept=tuple(kept))

    def send_backward(self, call: BackwardState) -> None:
        """Run the second part of ``start_backward``."""
        plan, (dout, q, lse, delta, k, v) = call.plan, call.rows
        if plan.moves:
            call.number = self._begin(plan, q, k)
            messages = [[dout, lse, delta]] if self.keep else [[dout, q, lse, delta], [k, v]]
            routes = plan.queries_out if self.keep else plan.out
            call.expect(self._start(call, messages, routes, "backward rows"))

    def attend_first_backward(self, call: BackwardState, *, undivided: bool) -> None:
        """Wait for the rows to serve and compute the gradients of the first round of this rank's tasks.

        Args:
            undivided: whether to compute all gradients of a plan of one round; otherwise ``attend_backward`` does.
        """
        if undivided or len(call.plan.rounds) > 1:
            self.note("attend_first_backward", call.key)
            self._begin_to_attend_backward(call)

    def _begin_to_attend_backward(self, call: BackwardState) -> None:
        plan, local = call.plan, call.take_rows()
        if plan.is_plain:
            dout, q, lse, out, k, v = local
            with self._computing(call, "backward"):
                gradients = self.kernel.backward(dout, q, k, v, lse, None, plan.calls[0].args, out)
            call.results = tuple([x] for x in gradients)
            return
        received = self._received_for_backward(call, local)
        with self._computing(call, "backward", plan.rounds[0]):
            queries, keys = RowSpace(local[:4], received[:4]), RowSpace(local[4:], received[4:])
            call.begin_tasks(attend_backward(self.kernel, plan, queries, keys, call.release))

    def attend_backward(self, call: BackwardState) -> None:
        """Compute the gradients of all tasks, or of what is left, and send those of served rows home."""
        self.compute_backward(call)
        self.return_backward(call)

    def compute_backward(self, call: BackwardState) -> None:
        """Run the first part of ``attend_backward``."""
        self._enter("attend_backward", call.key)
        self.note("attend_backward", call.key)
        if call.rows:
            self._begin_to_attend_backward(call)
        tasks = call.take_tasks()
        if tasks is None:
            return
        with self._computing(call, "backward", tasks.calls_left):
            call.results = _by_kind(tasks.finish(), 3)
            call.serve()

    def return_backward(self, call: BackwardState) -> None:
        """Run the second part of ``attend_backward``."""
        if call.plan.moves:
            dq, *dkv = call.take_served()
            homeward = {"queries": Homeward([dq], call.add_queries), "keys": Homeward(dkv, call.add_keys)}
            self._send_home(call, homeward, call.plan.gradients_home, "backward gradients")

    def _received_for_backward(self, call: BackwardState, local: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rows of dout, q, lse, delta, k and v that this rank serves."""
        plan, (_, q, _, _, k, v) = call.plan, local
        kept = call.take_kept()
        if not plan.moves:
            return [x[:0] for x in local]
        received = call.await_rows()
        if self.keep:
            kept_q, kept_kv = kept
            received[1:1] = unpack_hidden([q], kept_q, plan.q_out.num_received)
            received += unpack_hidden([k, v], kept_kv, plan.kv_out.num_received)
        return received

    def finish_backward(self, call: BackwardState) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the gradients that others computed and add them up; returns what ``backward`` does."""
        self.note("finish_backward", call.key)
        call.take_in_all()
        plan = call.plan
        if plan.is_plain:
            dq, dk, dv = (x.to(call.like[0].dtype).contiguous() for (x,) in call.results)
            return dq, dk, dv
        if not plan.moves:
            call.add_queries(plan.q_home[0].combination, is_last=True)
            call.add_keys(plan.kv_home[0].combination, is_last=True)
        (dq,), (dk,), (dv,) = call.results
        return dq, dk, dv

    @contextmanager
    def _computing(self, call: AttentionState, direction: str, kernel_calls: object = True) -> Iterator[None]:
        """Name what follows in traces; as computation only if there are kernel calls in it."""
        if kernel_calls:
            self.note(f"compute_{direction}", call.key)
        with record_function("cad/attention" if direction == "forward" else "cad/attention backward"):
            yield

    # Exchange ---------------------------------------------------------------------------------------------------------

    def _enter(self, step: str, key: int, rows: Tensor | None = None) -> int:
        """Let a step begin that starts exchanges; an engine that orders calls (tick_engine.py) waits here.

        Args:
            step: name of the method.
            key: of the call; ``rows``: its queries where it starts.

        Returns:
            The key of the plan to follow.
        """
        return key

    def _begin(self, plan: PlanTables, q: Tensor, k: Tensor) -> int:
        """Begin a call with room for all exchanges of the plan in either direction, so that forward makes it."""
        assert self.transport is not None
        shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], q.dtype.itemsize)
        row_bytes = RowBytes.of(shape, keep=self.keep)
        num_bytes = list(row_bytes.received(plan.q_out.most_rows, plan.kv_out.most_rows))
        for trips, each in ((plan.q_home, row_bytes.query_results), (plan.kv_home, row_bytes.key_gradients)):
            for route in (trip.route for trip in trips):
                num_bytes[route.slot] = max(num_bytes[route.slot], route.most_rows * each)
        return self.transport.begin(*num_bytes)

    def _start(
        self, call: AttentionState, messages: list[list[Tensor]], routes: Routes, phase: str, *, own: bool = False
    ) -> Exchange:
        assert self.transport is not None
        with record_function(f"cad/exchange {phase}"), self.clock.measure(waits=False):
            pending = self.transport.start(messages, routes, phase, call.number)
        return Exchange(pending, [RowFormat(parts) for parts in messages], self.clock, phase, own=own)

    def _send_home(
        self, call: AttentionState, homeward: dict[str, Homeward], exchanges: Sequence[Return], phase: str
    ) -> None:
        """Start all exchanges. For those that do not travel at the same time, earlier ones are taken in first."""
        for back in exchanges:
            if len(call.returning) == SLOTS_PER_CALL:
                call.take_in_next()
            exchange = self._start(call, [homeward[kind].parts for kind in back.kinds], back.routes, phase)
            call.returning.append((exchange, back, [homeward[kind].take_in for kind in back.kinds]))

    def observe(self, observer: Callable[[str, int], None] | None) -> None:
        """Call ``observer`` from now on with the name and the plan key of every step as it begins; None: nobody."""
        self.observer = observer

    def note(self, step: str, key: int) -> None:
        """Tell the observer that a step begins."""
        if self.observer is not None:
            self.observer(step, key)


class _Planned(NamedTuple):
    """Tables of a plan and of the plan of its gradients; ``copied``: when they have reached the device."""

    forward: PlanTables
    backward: PlanTables
    copied: "torch.cuda.Event | None"


def _by_kind(results: Sequence[tuple[Tensor, ...]], num_kinds: int) -> tuple[list[Tensor], ...]:
    return tuple([of_call[kind] for of_call in results] for kind in range(num_kinds))


def _hidden(message: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8) if message is None else hide_storage(message)


# Compiled graphs refer to an engine by name: a string is a constant of the graph, and deep-copying a model (as pipeline
# splitting does) never copies process groups.
_ENGINES: dict[str, CoreAttentionEngine] = {}


def register_engine(name: str, engine: CoreAttentionEngine) -> None:
    """Let operators find ``engine`` by ``name``, in place of an earlier one."""
    _ENGINES[name] = engine


def get_engine(name: str) -> CoreAttentionEngine:
    try:
        return _ENGINES[name]
    except KeyError:
        raise RuntimeError(f"no core-attention engine named {name!r}; known: {sorted(_ENGINES)}") from None
