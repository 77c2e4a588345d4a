"""Executes core attention of one rank according to a plan (design: docs/architecture.md).

Forward: send query and key/value rows -> at most one causal and one unmasked kernel call over everything this rank
serves -> return outputs with their log-sum-exps -> merge at home. Backward: home sends dO with the merged softmax
statistics (and Q, K, V again unless they were kept), servers run the kernel's backward, gradients return and are summed
in fp32 in a fixed order. As backward starts from rows that are at home, it may follow another plan than forward did.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

from torchtitan_cad.planning import AttentionShape, Plan
from torchtitan_cad.runtime.kernels.base import AttentionKernel, compute_dtype, row_delta
from torchtitan_cad.runtime.kernels.merge import merge_partials
from torchtitan_cad.runtime.packing import RowFormat, fold, unfold, widest_rows
from torchtitan_cad.runtime.tables import PlanTables, Wave
from torchtitan_cad.runtime.transport import Pending, Route, Transport


@dataclasses.dataclass
class ExchangeClock:
    """Host seconds spent starting and waiting for exchanges since ``reset``.

    With gloo the host blocks in the wait, so this is the exposed exchange time. With NCCL it is the launch cost only:
    read the device side from a profiler trace.
    """

    seconds: float = 0.0
    exchanges: int = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start
        self.exchanges += 1

    def reset(self) -> float:
        seconds, self.seconds, self.exchanges = self.seconds, 0.0, 0
        return seconds


class CoreAttentionEngine:
    """One rank's executor of core attention within a CAD group.

    Args:
        kernel: computes varlen attention on gathered rows.
        transport: moves rows between the ranks of the group; None for a group of one.
        rank: this rank's index within the group.
        device: where the model's tensors live.
        scale: factor on the scores before the softmax.
        keep: servers keep received Q, K and V for backward instead of receiving them again.
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
    ) -> None:
        self.kernel, self.transport = kernel, transport
        self.rank, self.device, self.scale, self.keep = rank, device, scale, keep
        self.clock = ExchangeClock()
        self._plans: dict[int, tuple[PlanTables, PlanTables]] = {}

    # Plans ------------------------------------------------------------------------------------------------------------

    def add_plan(self, key: int, plan: Plan, backward: Plan | None = None) -> None:
        """Makes ``plan`` executable under ``key``. May be called from a planning thread.

        Args:
            backward: by which to compute gradients, for the same tokens; by default ``plan`` itself.

        Raises:
            ValueError: a plan moves rows and there is no transport; or a ``backward`` that cannot follow ``plan``.
        """
        tables = self._build_tables(plan)
        if backward is None:
            self._plans[key] = tables, tables
            return
        if self.keep:
            raise ValueError("servers keep what the forward plan brought them: resend for a backward by another plan")
        backward_tables = self._build_tables(backward)
        if backward_tables.num_local != tables.num_local:
            raise ValueError(f"backward plan for {backward_tables.num_local} local tokens, forward {tables.num_local}")
        self._plans[key] = tables, backward_tables

    def _build_tables(self, plan: Plan) -> PlanTables:
        moves = plan.stats.total_bytes > 0
        if moves and self.transport is None:
            raise ValueError("a plan that moves rows needs a transport")
        tables = PlanTables.from_exchange(plan.exchange(self.rank), moves, self.device, self.scale)
        if moves and self.transport is not None:
            self.transport.prepare(tables.routes)
        return tables

    def drop_plan(self, key: int) -> None:
        self._plans.pop(key, None)

    def plan(self, key: int) -> PlanTables:
        """Tables of the forward plan."""
        return self._find(key)[0]

    def backward_plan(self, key: int) -> PlanTables:
        """Tables of the plan that gradients are computed by; the forward plan's unless ``add_plan`` got another."""
        return self._find(key)[1]

    def _find(self, key: int) -> tuple[PlanTables, PlanTables]:
        try:
            return self._plans[key]
        except KeyError:
            raise RuntimeError(
                f"no plan {key} on rank {self.rank} of the CAD group (known: {sorted(self._plans)}); "
                "it was dropped before its backward, or the batch did not come from the planning loader"
            ) from None

    # Forward ----------------------------------------------------------------------------------------------------------

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Core attention of this rank's tokens.

        Args:
            q: [T, Hq, D], this rank's tokens in layout order. k, v: [T, Hkv, D].
            key: the plan's key.

        Returns:
            out [T, Hq, D] in q's dtype; lse [T, Hq] natural log, fp32 (fp64 for fp64 inputs); and what this rank keeps
            for backward: the received messages of Q and of K and V, folded (see ``packing``), empty unless ``keep``.
        """
        plan = self.plan(key)
        if q.shape[0] != plan.num_local:
            raise ValueError(f"plan {key} is for {plan.num_local} local tokens, got {q.shape[0]}")
        kept_q = kept_kv = None
        if plan.is_plain:
            with record_function("cad/attention"):
                out, lse = self.kernel.forward(q, k, v, plan.calls[0].args)
            return out.contiguous(), lse, _folded(None, q), _folded(None, q)

        recv_q, recv_k, recv_v = q[:0], k[:0], v[:0]
        exchanges: tuple[_Exchange, ...] = ()
        if plan.moves:
            with record_function("cad/dispatch"):
                self._reserve(plan, q, k)
                queries = self._start([q], plan.q_out, "forward queries")
                keys = self._start([k, v], plan.kv_out, "forward keys")
                (recv_q,), (recv_k, recv_v) = queries.wait(own=self.keep), keys.wait(own=self.keep)
                exchanges = queries, keys
            if self.keep:
                kept_q, kept_kv = queries.message, keys.message
        with record_function("cad/attention"):
            spaces = _space(q, recv_q), _space(k, recv_k), _space(v, recv_v)
            _release(exchanges)
            out_acc, lse_acc = self._attend(plan, *spaces)
        out, lse = self._return_outputs(plan, out_acc, lse_acc, q.dtype)
        return out, lse, _folded(kept_q, q), _folded(kept_kv, q)

    def _attend(self, plan: PlanTables, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all this rank's tasks, merged per query row: [num_q, Hq, D] and [num_q, Hq] accumulators."""
        out_acc = q.new_zeros(plan.num_q, *q.shape[1:], dtype=compute_dtype(q.dtype))
        lse_acc = out_acc.new_full(out_acc.shape[:2], -torch.inf)
        outs, lses = [], []
        for call in plan.calls:
            out, lse = self.kernel.forward(
                _gather(q, call.q_rows), _gather(k, call.kv_rows), _gather(v, call.kv_rows), call.args
            )
            outs.append(out)
            lses.append(lse)
        _merge_waves(out_acc, lse_acc, outs, lses, plan.q_waves)
        return out_acc, lse_acc

    def _return_outputs(
        self, plan: PlanTables, out_acc: Tensor, lse_acc: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        local_out, local_lse = out_acc[: plan.num_local], lse_acc[: plan.num_local]
        if plan.moves:
            with record_function("cad/return"):
                served = [out_acc[plan.num_local :].to(dtype), lse_acc[plan.num_local :]]
                outputs = self._start(served, plan.q_back, "forward outputs")
                out, lse = outputs.wait()
            _merge_waves(local_out, local_lse, [out], [lse], plan.q_home_waves)
            outputs.release()
        return local_out.to(dtype, copy=True), local_lse.clone()

    # Backward ---------------------------------------------------------------------------------------------------------

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept_q: Tensor,
        kept_kv: Tensor,
        key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; arguments and shapes as in ``forward``, dout [T, Hq, D]."""
        plan = self.backward_plan(key)
        delta = row_delta(dout, out)
        if plan.is_plain:
            with record_function("cad/attention backward"):
                dq, dk, dv = self.kernel.backward(dout, q, k, v, lse, delta, plan.calls[0].args)
            return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()

        received, exchanges = self._send_for_backward(plan, dout, q, k, v, lse, delta, kept_q, kept_kv)
        with record_function("cad/attention backward"):
            local = (dout, q, lse, delta, k, v)
            spaces = [_space(mine, theirs) for mine, theirs in zip(local, received, strict=True)]
            _release(exchanges)
            dq_acc, dk_acc, dv_acc = self._attend_backward(plan, *spaces)
        return self._return_gradients(plan, dq_acc, dk_acc, dv_acc, q.dtype)

    def _send_for_backward(
        self,
        plan: PlanTables,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        kept_q: Tensor,
        kept_kv: Tensor,
    ) -> tuple[Sequence[Tensor], Sequence["_Exchange"]]:
        """The received rows of dout, q, lse, delta, k and v, and the exchanges that hold them."""
        if not plan.moves:
            return [x[:0] for x in (dout, q, lse, delta, k, v)], ()
        with record_function("cad/dispatch backward"):
            self._reserve(plan, q, k)
            if self.keep:
                (recv_q,) = _unpack_kept([q], kept_q, plan.q_out.num_received)
                recv_kv = _unpack_kept([k, v], kept_kv, plan.kv_out.num_received)
                queries = self._start([dout, lse, delta], plan.q_out, "backward queries")
                recv_do, recv_lse, recv_delta = queries.wait()
                return (recv_do, recv_q, recv_lse, recv_delta, *recv_kv), (queries,)
            queries = self._start([dout, q, lse, delta], plan.q_out, "backward queries")
            keys = self._start([k, v], plan.kv_out, "backward keys")
            return (*queries.wait(), *keys.wait()), (queries, keys)

    def _attend_backward(
        self, plan: PlanTables, dout: Tensor, q: Tensor, lse: Tensor, delta: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of all this rank's tasks, summed per row: [num_q, Hq, D] and twice [num_kv, Hkv, D]."""
        dq_acc = q.new_zeros(q.shape, dtype=compute_dtype(q.dtype))
        dk_acc, dv_acc = (k.new_zeros(k.shape, dtype=compute_dtype(k.dtype)) for _ in range(2))
        parts = [
            self.kernel.backward(
                _gather(dout, call.q_rows),
                _gather(q, call.q_rows),
                _gather(k, call.kv_rows),
                _gather(v, call.kv_rows),
                _gather(lse, call.q_rows),
                _gather(delta, call.q_rows),
                call.args,
            )
            for call in plan.calls
        ]
        if parts:
            dqs, dks, dvs = zip(*parts, strict=True)
            _sum_waves(dq_acc, dqs, plan.q_waves)
            _sum_waves(dk_acc, dks, plan.kv_waves)
            _sum_waves(dv_acc, dvs, plan.kv_waves)
        return dq_acc, dk_acc, dv_acc

    def _return_gradients(
        self, plan: PlanTables, dq_acc: Tensor, dk_acc: Tensor, dv_acc: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        n = plan.num_local
        dq, dk, dv = dq_acc[:n], dk_acc[:n], dv_acc[:n]
        if plan.moves:
            with record_function("cad/return backward"):
                served_q, served_kv = [dq_acc[n:].to(dtype)], [dk_acc[n:].to(dtype), dv_acc[n:].to(dtype)]
                queries = self._start(served_q, plan.q_back, "backward query gradients")
                keys = self._start(served_kv, plan.kv_back, "backward key gradients")
                (dq_back,) = queries.wait()
                dk_back, dv_back = keys.wait()
            _sum_waves(dq, [dq_back], plan.q_home_waves)
            _sum_waves(dk, [dk_back], plan.kv_home_waves)
            _sum_waves(dv, [dv_back], plan.kv_home_waves)
            _release((queries, keys))
        return dq.to(dtype, copy=True), dk.to(dtype, copy=True), dv.to(dtype, copy=True)

    # Exchange ---------------------------------------------------------------------------------------------------------

    def _reserve(self, plan: PlanTables, q: Tensor, k: Tensor) -> None:
        """Room for all exchanges of the plan at once, so that at most its first one allocates."""
        assert self.transport is not None
        shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], q.dtype.itemsize)
        query_bytes, key_bytes = widest_rows(shape, keep=self.keep)
        self.transport.reserve(max(plan.q_out.most_rows * query_bytes, plan.kv_out.most_rows * key_bytes))

    def _start(self, parts: list[Tensor], route: Route, phase: str) -> "_Exchange":
        assert self.transport is not None
        with self.clock.measure():
            pending = self.transport.start(parts, route, phase)
        return _Exchange(pending, RowFormat(parts), self.clock)


class _Exchange:
    """A pending exchange that yields typed tensors instead of bytes."""

    def __init__(self, pending: Pending, row_format: RowFormat, clock: ExchangeClock) -> None:
        self._pending, self._format, self._clock = pending, row_format, clock

    def wait(self, *, own: bool = False) -> list[Tensor]:
        """The received rows of every part, valid until ``release``; with ``own`` for good, and there is no release."""
        with self._clock.measure():
            self.message = self._pending.take() if own else self._pending.wait()
        self._released = own
        return self._format.unpack(self.message)

    def release(self) -> None:
        if not self._released:
            self._pending.release()
            self._released = True


def _release(exchanges: Sequence[_Exchange]) -> None:
    for exchange in exchanges:
        exchange.release()


def _folded(message: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.uint8) if message is None else fold(message)


def _unpack_kept(parts: list[Tensor], kept: Tensor, num_rows: int) -> list[Tensor]:
    row_format = RowFormat(parts)
    return row_format.unpack(unfold(kept, num_rows, row_format.row_bytes))


def _space(local: Tensor, received: Tensor) -> Tensor:
    return torch.cat((local, received)) if received.shape[0] else local


def _gather(space: Tensor, rows: Tensor | None) -> Tensor:
    return space if rows is None else space.index_select(0, rows)


def _merge_waves(
    out_acc: Tensor, lse_acc: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor], waves: Sequence[Wave]
) -> None:
    if not waves:
        return
    out = torch.cat(tuple(outs)) if len(outs) > 1 else outs[0]
    lse = torch.cat(tuple(lses)) if len(lses) > 1 else lses[0]
    for wave in waves:
        merge_partials(
            out_acc, lse_acc, out.index_select(0, wave.source), lse.index_select(0, wave.source), wave.target
        )


def _sum_waves(acc: Tensor, parts: Sequence[Tensor], waves: Sequence[Wave]) -> None:
    if not waves:
        return
    part = torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]
    for wave in waves:
        acc.index_add_(0, wave.target, part.index_select(0, wave.source).to(acc.dtype))


# Compiled graphs refer to an engine by name: a string is a constant of the graph, and deep-copying a model (as pipeline
# splitting does) never copies process groups.
_ENGINES: dict[str, CoreAttentionEngine] = {}


def register_engine(name: str, engine: CoreAttentionEngine) -> None:
    _ENGINES[name] = engine


def get_engine(name: str) -> CoreAttentionEngine:
    try:
        return _ENGINES[name]
    except KeyError:
        raise RuntimeError(f"no core-attention engine named {name!r}; known: {sorted(_ENGINES)}") from None
