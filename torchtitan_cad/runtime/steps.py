"""Core attention as three custom operators, between which other work may run (docs/architecture.md, "Ping-pong").

    token = dispatch(q, k, v, key, engine)      # sends what others serve;     backward waits and adds up gradients
    token = attend(token, key, engine)          # waits, computes, sends back; backward likewise
    out = combine(token, q, k, v, key, engine)  # waits and merges;            backward sends dO and what servers need

``attend_first`` and ``attend_rest`` do what ``attend`` does in two parts, with other work between; in backward the
rest comes first.

Like ``ops.core_attention`` they are opaque to torch.compile, with output shapes that depend on input shapes alone, so
that one graph serves every plan. Tokens are numbers that tie the graph together. What is in flight is found by the
plan's key: of one plan there is one core attention in flight at a time forward, and one backward, because a block's
begins after that of the block before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.runtime.call import BackwardState, ForwardState, Saved
from torchtitan_cad.runtime.engine import get_engine
from torchtitan_cad.runtime.ops import CallsInFlight, fake_results, read_key, save_call

COMPILE_OPTIONS = {"reorder_for_peak_memory": False}
"""``torch.compile(..., options=...)`` for graphs that contain both a ``dispatch`` and its ``combine``. To save memory,
Inductor would otherwise move a wait next to its start, where nothing is left to overlap with (torch 2.11 to 2.15)."""

_forward: CallsInFlight[ForwardState] = CallsInFlight()
_backward: CallsInFlight[BackwardState] = CallsInFlight()


def dispatch(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Send the rows that other ranks serve.

    Args:
        q: [Tq, Hq, D]; k, v: [T, Hkv, D], this rank's tokens in layout order (Tq = T unless the layout leaves queries
            out).
        plan_key: int64 host tensor whose elements all equal the plan's key in the engine.
        engine: name under which the engine is registered. All ranks of its group must take the same steps in the same
            order.

    Returns:
        A token for ``attend``.
    """
    return _dispatch(q, k, v, plan_key, engine)


def attend(token: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Wait for the rows that this rank serves, attend, send their outputs home; returns a token for ``combine``."""
    return _attend(token, plan_key, engine)


def attend_first(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    """Wait for the rows that this rank serves and compute the first round; returns a token for ``attend_rest``.

    Args:
        undivided: whether a plan of one round is computed here, in either direction, or in ``attend_rest``.
    """
    return _attend_first(token, plan_key, engine, undivided)


def attend_rest(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    """Compute what ``attend_first`` has left and send the outputs home; returns a token for ``combine``.

    Args:
        undivided: as in ``attend_first``.
    """
    return _attend_rest(token, plan_key, engine, undivided)


def combine(token: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Wait for the outputs that others computed: [Tq, Hq, D] in q's dtype. Takes the same q, k, v as ``dispatch``.

    Gradients flow to q, k and v through ``dispatch``.
    """
    return _combine(token, q, k, v, plan_key, engine)[0]


# Forward --------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchtitan_cad::dispatch", mutates_args=())
def _dispatch(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    key = read_key(plan_key)
    _forward.put(engine, key, get_engine(engine).start_forward(q, k, v, key))
    return q.new_zeros(1)


@_dispatch.register_fake
def _dispatch_fake(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    return q.new_zeros(1)


@torch.library.custom_op("torchtitan_cad::attend", mutates_args=())
def _attend(token: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    get_engine(engine).attend(_forward.get(engine, plan_key))
    return token.clone()


@torch.library.custom_op("torchtitan_cad::attend_first", mutates_args=())
def _attend_first(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    get_engine(engine).attend_first(_forward.get(engine, plan_key), undivided=undivided)
    return token.clone()


@torch.library.custom_op("torchtitan_cad::attend_rest", mutates_args=())
def _attend_rest(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    get_engine(engine).attend(_forward.get(engine, plan_key))
    return token.clone()


@torch.library.custom_op("torchtitan_cad::combine", mutates_args=())
def _combine(
    token: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return get_engine(engine).finish(_forward.take(engine, plan_key))


@_combine.register_fake
def _combine_fake(
    token: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_results(q)


# Backward -------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchtitan_cad::combine_backward", mutates_args=())
def _combine_backward(dout: Tensor, saved: Sequence[Tensor], plan_key: Tensor, engine: str) -> Tensor:
    key = read_key(plan_key)
    _backward.put(engine, key, get_engine(engine).start_backward(dout, Saved(*saved), key))
    return dout.new_zeros(1)


@_combine_backward.register_fake
def _combine_backward_fake(dout: Tensor, *_: Any) -> Tensor:
    return dout.new_zeros(1)


@torch.library.custom_op("torchtitan_cad::attend_backward", mutates_args=())
def _attend_backward(token: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Backward of ``attend``, and of ``attend_first``, which comes after that of ``attend_rest``."""
    get_engine(engine).attend(_backward.get(engine, plan_key))
    return token.clone()


@torch.library.custom_op("torchtitan_cad::attend_rest_backward", mutates_args=())
def _attend_rest_backward(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    get_engine(engine).attend_first(_backward.get(engine, plan_key), undivided=not undivided)
    return token.clone()


@torch.library.custom_op("torchtitan_cad::dispatch_backward", mutates_args=())
def _dispatch_backward(
    token: Tensor, q_shape: Sequence[int], kv_shape: Sequence[int], plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor]:
    return get_engine(engine).finish(_backward.take(engine, plan_key))


@_dispatch_backward.register_fake
def _dispatch_backward_fake(
    token: Tensor, q_shape: Sequence[int], kv_shape: Sequence[int], plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor]:
    return token.new_empty(q_shape), token.new_empty(kv_shape), token.new_empty(kv_shape)


@_attend.register_fake
@_attend_first.register_fake
@_attend_rest.register_fake
@_attend_backward.register_fake
@_attend_rest_backward.register_fake
def _same_token(token: Tensor, *_: Any) -> Tensor:
    return token.clone()


# Autograd -------------------------------------------------------------------------------------------------------------


def _dispatch_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    q, k, _, plan_key, ctx.engine = inputs
    ctx.q_shape, ctx.kv_shape = q.shape, k.shape
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(plan_key)


def _dispatch_gradients(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
    if token is None:  # the output had no gradient
        return (None,) * 5
    (plan_key,) = ctx.saved_tensors
    return *_dispatch_backward(token, ctx.q_shape, ctx.kv_shape, plan_key, ctx.engine), None, None


def _attend_context(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, plan_key, ctx.engine, *undivided = inputs
    ctx.undivided = bool(undivided and undivided[0])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(plan_key)


def _attend_gradients(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
    if token is None:
        return (None,) * 3
    return _attend_backward(token, *ctx.saved_tensors, ctx.engine), None, None


def _attend_first_gradients(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_attend_gradients(ctx, token), None


def _attend_rest_gradients(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
    if token is None:
        return (None,) * 4
    return _attend_rest_backward(token, *ctx.saved_tensors, ctx.engine, ctx.undivided), None, None, None


def _combine_gradients(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *saved, plan_key = ctx.saved_tensors
    token = None if dout is None else _combine_backward(dout, saved, plan_key, ctx.engine)
    return token, None, None, None, None, None


_dispatch.register_autograd(_dispatch_gradients, setup_context=_dispatch_context)
_attend.register_autograd(_attend_gradients, setup_context=_attend_context)
_attend_first.register_autograd(_attend_first_gradients, setup_context=_attend_context)
_attend_rest.register_autograd(_attend_rest_gradients, setup_context=_attend_context)
_combine.register_autograd(_combine_gradients, setup_context=save_call)
