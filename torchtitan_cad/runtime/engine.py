# SPDX-License-Identifier: BSD-3-Clause
"""Execute core attention of one rank by a plan (docs/how_it_works.md).

Forward: send query and key/value rows -> run a causal and an unmasked kernel call over all tasks of this rank (more
calls if they have many rows) -> return outputs with their log-sum-exps -> merge local and returned results at home.
Backward: homes send dO with the merged softmax statistics (and Q, K, V again unless servers kept them), servers run the
kernel's backward, gradients return and are summed in fp32 in a fixed order. Backward starts from rows at home, so it
may follow another plan than forward.

A call's steps are in ``call.py``; the engine keeps plans and begins calls. Rows that do not fit into the receive
buffers travel in several chunks (planning/exchange/messages.py): rows to serve are copied out before kernels run, and
results are combined chunk by chunk, the last chunks in the last step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.planning import Plan
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.call import AttentionCall, Saved, Step
from torchtitan_cad.runtime.directions import BACKWARD, FORWARD, Direction
from torchtitan_cad.runtime.exchange import ExchangeClock
from torchtitan_cad.runtime.kernels.base import (
    AttentionKernel,
    row_delta,
    subtract_lse_gradient,
)
from torchtitan_cad.runtime.servers.client import ServerPool
from torchtitan_cad.runtime.tables import PlanTables
from torchtitan_cad.runtime.transport.base import Kind, Transport


class CoreAttentionEngine:
    """One rank's executor of core attention within a CAD group.

    Args:
        kernel: computes varlen attention on gathered rows.
        transport: moves rows between the ranks of the group; None for a group of one.
        rank: this rank's index within the group.
        device: device of the model's tensors.
        scale: factor on the scores before the softmax.
        kept_bytes: servers keep the Q, K and V that they receive in a call, instead of receiving them again for
            backward, by plans that bring no rank more bytes than these. Equal on all ranks of the group.
    """

    def __init__(
        self,
        kernel: AttentionKernel,
        transport: Transport | None,
        *,
        rank: int,
        device: torch.device,
        scale: float,
        kept_bytes: float = 0.0,
    ) -> None:
        self.kernel = kernel
        self.transport = transport
        self.rank = rank
        self.device = device
        self.scale = scale
        self.kept_bytes = kept_bytes
        self.servers: ServerPool | None = None
        """That have joined the job, and by which plans may have tasks computed."""
        self.clock = ExchangeClock()
        self.pending: dict[tuple[str, int], Any] = {}
        """Calls between operators (steps.py), by direction and by the key of the operators."""
        self._plans: dict[int, tuple[PlanTables, torch.cuda.Event | None]] = {}
        """Tables by key, and the events after which they are on the device."""

    # Plans ------------------------------------------------------------------------------------------------------------

    def add_plan(self, key: int, plan: Plan) -> None:
        """Make ``plan`` executable under ``key``. May be called from a planning thread, on any stream.

        Raises:
            ValueError: the plan moves rows and the engine has no transport, or it has a window and the kernel takes
                squares only.
        """
        if plan.shape.window is not None and self.kernel.squares_only:
            raise ValueError(
                f"cad.kernel = {self.kernel.name!r} takes no windows: set cad.kernel = 'auto'"
            )
        if plan.moves_rows and self.transport is None:
            raise ValueError(
                f"plan {key} moves rows: give the engine a transport, see build_transport"
            )
        exchange = plan.exchange(self.rank)
        chunks = exchange.most.in_one_chunk()
        keeps = exchange.most.are_kept(plan.shape, self.kept_bytes)
        if self.transport is not None:
            row_bytes = RowBytes.of(plan.shape, keep=keeps)
            chunks = exchange.most.chunks(row_bytes, self.transport.buffer_bytes)
        tables = PlanTables.from_exchange(
            exchange,
            plan.moves_rows,
            self.device,
            self.scale,
            chunks=chunks,
            squares_only=self.kernel.squares_only,
            keeps=keeps,
        )
        if plan.moves_rows and self.transport is not None:
            self.transport.prepare(tables.exchanges)
        self._plans[key] = tables, streams.record_event(self.device)

    def drop_plan(self, key: int) -> None:
        """Forget a plan, if it is known."""
        self._plans.pop(key, None)

    def plan(self, key: int) -> PlanTables:
        """Return the tables of a plan; the current stream waits until they are on the device."""
        try:
            tables, copied = self._plans[key]
        except KeyError:
            raise RuntimeError(
                f"no plan {key} on rank {self.rank} of the CAD group (known: {sorted(self._plans)}); "
                "it was dropped before its backward, or the batch did not come from the planning loader"
            ) from None
        streams.wait_event(self.device, copied)
        return tables

    # Steps ------------------------------------------------------------------------------------------------------------

    def begin_forward(
        self, q: Tensor, k: Tensor, v: Tensor, key: int, shared: Tensor | None = None
    ) -> AttentionCall:
        """Begin core attention of this rank's tokens; ``run`` makes all steps of the call.

        The call returns out [Tq, Hq, Dv] in q's dtype; lse [Tq, Hq] natural log, fp32 (fp64 for fp64 inputs); and, if
        servers keep them, the received messages of Q and of K and V with hidden storage (see ``packing``), otherwise
        empty tensors. ``begin_backward`` takes ``Saved(q, k, v, *results, shared)``.

        Args:
            q: [Tq, Hq, D], this rank's queries in layout order.
            k, v: [T, Hkv, D] and [T, Hkv, Dv], this rank's tokens in layout order (Tq = T unless the layout leaves
                queries out).
            key: the plan's key.
            shared: [T, 1, D'], the last elements of all heads of keys, if they share them; k is [T, Hkv, D - D'] then.

        Raises:
            ValueError: another number of rows than the plan has.
        """
        key = self.enter("start", FORWARD, key, q)
        plan = self.plan(key)
        if (q.shape[0], k.shape[0]) != (plan.queries.num_local, plan.keys.num_local):
            raise ValueError(
                f"plan {key} is for {plan.queries.num_local} local queries and {plan.keys.num_local} local tokens, "
                f"got {q.shape[0]} and {k.shape[0]}"
            )
        keys = [k, v] if shared is None else [k, v, shared]
        return AttentionCall(self, FORWARD, key, plan, {"queries": [q], "keys": keys})

    def begin_backward(
        self, dout: Tensor, saved: Sequence[Any], key: int, dlse: Tensor | None = None
    ) -> AttentionCall:
        """Begin to compute the gradients of ``Saved.arguments``, in their shapes and dtype; ``run`` makes all steps.

        Args:
            dout: [Tq, Hq, Dv], the gradient of out.
            saved: the tensors of ``Saved``.
            key: the plan's key.
            dlse: [Tq, Hq], the gradient of lse, if it has one.
        """
        state = Saved(*saved)
        q, *keys = state.arguments
        key = self.enter("start", BACKWARD, key, q)
        plan = self.plan(key)
        dout = dout.contiguous()
        takes_output = plan.is_plain and dlse is None
        delta = state.out if takes_output else row_delta(dout, state.out)
        if dlse is not None:
            dout, delta = subtract_lse_gradient(dout, delta, dlse)
        queries = [dout, state.lse, delta, q]
        rows: dict[Kind, list[Tensor]] = {"queries": queries, "keys": keys}
        kept = [state.kept_q, state.kept_kv]
        return AttentionCall(self, BACKWARD, key, plan, rows, kept)

    def enter(
        self, step: Step, direction: Direction, key: int, rows: Tensor | None = None
    ) -> int:
        """Begin a step that starts exchanges; an engine that orders calls (tick_engine.py) waits here.

        Args:
            key: the call's key.
            rows: the call's queries, at its start.

        Returns:
            The key of the plan to follow.
        """
        return key


# Compiled graphs refer to an engine by name: a string is a constant of the graph, and deep-copying a model (as pipeline
# splitting does) never copies process groups.
_ENGINES: dict[str, CoreAttentionEngine] = {}


def register_engine(name: str, engine: CoreAttentionEngine) -> None:
    """Register ``engine`` under ``name`` for operators; replaces an earlier engine of that name."""
    _ENGINES[name] = engine


def get_engine(name: str) -> CoreAttentionEngine:
    try:
        return _ENGINES[name]
    except KeyError:
        raise RuntimeError(
            f"no core-attention engine named {name!r}; known: {sorted(_ENGINES)}"
        ) from None
