"""Core attention in three steps that overlap with other work, forward and backward (docs/architecture.md, "Ping-pong").

    call = Exchange(engine, key)
    token = dispatch(q, k, v, call)      # sends what others serve;      backward waits for gradients and adds them up
    token = attend(token, call)          # waits, computes, sends back;  backward likewise
    out = finish(token, q, k, v, call)   # waits and merges;             backward sends dO and what servers need again

Between two steps other work may run. The steps are plain autograd functions for eager code: whatever is compiled lies
between them, so no compiler can move a wait next to its start. What is in flight belongs to the ``Exchange`` that the
three nodes of one graph share: recomputation under activation checkpointing makes new ones, several microbatches in
flight have one each, and what a dropped graph held goes with it. Tokens are numbers that only tie the graph together.
Imports torch and the runtime room.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from torchtitan_cad.runtime.engine import BackwardCall, CoreAttentionEngine, ForwardCall
from torchtitan_cad.runtime.ticked import TickedEngine

Engine = CoreAttentionEngine | TickedEngine


class Exchange:
    """Core attention of some rows by one plan, once forward and once backward.

    Args:
        key: the plan's key in the engine. All ranks of the group must take the same steps in the same order.
    """

    def __init__(self, engine: Engine, key: int) -> None:
        self.engine, self.key = engine, key
        self.forward: ForwardCall | None = None
        self.backward: BackwardCall | None = None


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.forward = exchange.engine.start_forward(q, k, v, exchange.key)
        return q.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        call, ctx.exchange.backward = ctx.exchange.backward, None
        if call is None:  # the output had no gradient
            return None, None, None, None
        return *ctx.exchange.engine.finish_backward(call), None


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: Exchange) -> Tensor:
        assert exchange.forward is not None, "dispatch comes first"
        ctx.exchange = exchange
        exchange.engine.attend_forward(exchange.forward)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *token: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.exchange.backward is not None:
            ctx.exchange.engine.attend_backward(ctx.exchange.backward)
        return *token, None


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> Tensor:
        call, exchange.forward = exchange.forward, None
        assert call is not None, "attend comes first"
        ctx.exchange = exchange
        out, lse, kept_q, kept_kv = exchange.engine.finish_forward(call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, kept_q, kept_kv)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 5
        exchange = ctx.exchange
        exchange.backward = exchange.engine.start_backward(dout, *ctx.saved_tensors, exchange.key)
        return dout.new_zeros(1), None, None, None, None


def dispatch(q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> Tensor:
    """Sends the rows that other ranks serve; q [Tq, Hq, D], k and v [T, Hkv, D] as in ``CoreAttentionEngine.forward``.

    Returns:
        A token for ``attend``.
    """
    return _Dispatch.apply(q, k, v, exchange)


def attend(token: Tensor, exchange: Exchange) -> Tensor:
    """Waits for the rows that this rank serves, attends, sends their outputs home; returns a token for ``finish``."""
    return _Attend.apply(token, exchange)


def finish(token: Tensor, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange) -> Tensor:
    """Waits for the outputs that others computed: [Tq, Hq, D] in q's dtype. Takes the same q, k, v as ``dispatch``.

    Gradients flow to q, k and v through ``dispatch``.
    """
    return _Finish.apply(token, q, k, v, exchange)
