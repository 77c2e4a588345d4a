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

from torch import Tensor

from torchtitan_cad.runtime.call import BackwardState, ForwardState, Saved
from torchtitan_cad.runtime.engine import get_engine
from torchtitan_cad.runtime.ops import (
    CallsInFlight,
    Gradients,
    Remembered,
    Results,
    define,
    read_key,
    remember_call,
    results_like,
)

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
    return _attend(token, "all", False, plan_key, engine)


def attend_first(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    """Wait for the rows that this rank serves and compute the first round; returns a token for ``attend_rest``.

    Args:
        undivided: whether a plan of one round is computed here, in either direction, or in ``attend_rest``.
    """
    return _attend(token, "first", undivided, plan_key, engine)


def attend_rest(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    """Compute what ``attend_first`` has left and send the outputs home; returns a token for ``combine``.

    Args:
        undivided: as in ``attend_first``.
    """
    return _attend(token, "rest", undivided, plan_key, engine)


def combine(token: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Wait for the outputs that others computed: [Tq, Hq, D] in q's dtype. Takes the same q, k, v as ``dispatch``.

    Gradients flow to q, k and v through ``dispatch``.
    """
    return _combine(token, q, k, v, plan_key, engine)[0]


def token_like(tensor: Tensor, *_: Any) -> Tensor:
    """Return a token on the device of ``tensor``."""
    return tensor.new_zeros(1)


def gradients_like(token: Tensor, q_shape: Sequence[int], kv_shape: Sequence[int], *_: Any) -> Gradients:
    """Return gradients of q, k and v without their values."""
    return token.new_empty(q_shape), token.new_empty(kv_shape), token.new_empty(kv_shape)


def remember_shapes(arguments: Sequence[Any], _: Any) -> Remembered:
    """Remember the shapes of q and of k, an operator's first arguments."""
    return (), (arguments[0].shape, arguments[1].shape)


def remember_options(arguments: Sequence[Any], _: Any) -> Remembered:
    """Remember the arguments that are no tensors."""
    return (), [value for value in arguments if not isinstance(value, Tensor)]


def _start_forward(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    key = read_key(plan_key)
    _forward.put(engine, key, get_engine(engine).start_forward(q, k, v, key))
    return token_like(q)


def _attend_forward(token: Tensor, part: str, undivided: bool, plan_key: Tensor, engine: str) -> Tensor:
    call = _forward.get(engine, plan_key)
    if part == "first":
        get_engine(engine).attend_first(call, undivided=undivided)
    else:
        get_engine(engine).attend(call)
    return token.clone()


def _finish_forward(token: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Results:
    return get_engine(engine).finish(_forward.take(engine, plan_key))


def _start_backward(dout: Tensor, saved: Sequence[Tensor], plan_key: Tensor, engine: str) -> Tensor:
    key = read_key(plan_key)
    _backward.put(engine, key, get_engine(engine).start_backward(dout, Saved(*saved), key))
    return token_like(dout)


def _attend_in_backward(token: Tensor, part: str, undivided: bool, plan_key: Tensor, engine: str) -> Tensor:
    """Backward of ``attend``; that of ``attend_rest`` comes before that of ``attend_first``."""
    call = _backward.get(engine, plan_key)
    if part == "rest":
        get_engine(engine).attend_first(call, undivided=not undivided)
    else:
        get_engine(engine).attend(call)
    return token.clone()


def _finish_backward(
    token: Tensor, q_shape: Sequence[int], kv_shape: Sequence[int], plan_key: Tensor, engine: str
) -> Gradients:
    return get_engine(engine).finish(_backward.take(engine, plan_key))


_dispatch_backward = define("dispatch_backward", _finish_backward, gradients_like)
_dispatch = define(
    "dispatch",
    _start_forward,
    token_like,
    lambda tokens, _, q_shape, kv_shape, *call: _dispatch_backward(tokens[0], q_shape, kv_shape, *call),
    remember_shapes,
)
_attend_backward = define("attend_backward", _attend_in_backward, token_like)
_attend = define(
    "attend",
    _attend_forward,
    token_like,
    lambda tokens, _, part, undivided, *call: (_attend_backward(tokens[0], part, undivided, *call), None, None),
    remember_options,
)
_combine_backward = define("combine_backward", _start_backward, token_like)
_combine = define(
    "combine",
    _finish_forward,
    lambda token, q, *_: results_like(q),
    lambda douts, saved, *call: (_combine_backward(douts[0], saved, *call), None, None, None),
    remember_call,
    has_statistics=True,
)
