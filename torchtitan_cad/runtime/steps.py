# SPDX-License-Identifier: BSD-3-Clause
"""Core attention as several operators, so that other work can run between them (docs/pipelines.md, "Ping-pong").

    token = dispatch(q, k, v, shared, key, engine)   # sends rows to servers;       backward waits and sums gradients
    token = step(token, "attend", key, engine)       # waits, computes, sends back; backward likewise
    out, lse, *_ = combine(token, q, k, v, shared, key, engine)   # waits, merges;  backward sends dO, Q, K, V

``traced`` has the operators of graphs that contain streams.

Like ``ops.core_attention``, the operators are opaque to torch.compile, and their output shapes depend on input shapes
alone, so one graph serves every plan. Tokens are tensors of one number that order the operators in the graph. Calls in
flight are found by the plan's key: a plan has at most one call in flight per direction, because a block's call begins
after the call of the previous block.

Every operator takes the plan's key, an int64 host tensor whose elements all equal the key in the engine, and the
registered name of the engine. All ranks of its group must take the same steps in the same order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.call import AttentionCall
from torchtitan_cad.runtime.directions import BACKWARD, FORWARD, Direction
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.ops import (
    QKV,
    RESULTS,
    backward_arguments,
    define,
    gradients_of_qkv,
    remember_call,
    results_like,
)

STEP_METHODS = {
    "attend": ("attend", "attend"),
    # Steps of ``traced``:
    "dispatch": ("send", None),
    "arrive": (None, "send_home"),
    "give_back": ("send_home", None),
    "receive": (None, "send"),
    "keepalive": (None, None),
    "one output": (None, None),
}
"""name of a step -> methods of ``AttentionCall`` that it runs, forward and backward; None: nothing.

attend: wait for the rows that this rank serves, compute, send the outputs home."""


class PendingCall:
    """A call between its operators.

    Args:
        on_streams: True if its steps alternate between a main stream and a side stream. Each step then waits for the
            previous one.
    """

    def __init__(
        self, engine: CoreAttentionEngine, call: AttentionCall, on_streams: bool
    ) -> None:
        self._engine = engine
        self._call = call
        self._on_streams = on_streams
        self._event = streams.record_event(engine.device) if on_streams else None
        """End of the last step, on its stream."""
        self._keepalive: Sequence[Any] = ()
        """Tensors that the side stream may read until the main stream waits for it."""

    def run(self, step: str) -> Any:
        """Run a step of the engine.

        Steps that only exchange rows run on the side stream. On a device, that stream also waits for received rows; on
        CPU the host would wait.
        """
        device = self._engine.device
        call = self._call
        is_exchange = step in ("send", "send_home")
        streams.wait_event(device, self._event)
        self._keepalive = call.keepalive_tensors() if is_exchange else ()
        results = getattr(call, step)()
        if is_exchange and streams.module_of(device) is not None:
            call.receive_all()
        self._event = streams.record_event(device) if self._on_streams else None
        return results


def run_step(
    direction: Direction,
    step: str | None,
    engine: CoreAttentionEngine,
    key: int,
    *_: Any,
) -> Any:
    """Run a step of the call of plan ``key`` and return its results; "finish" is the last step.

    Raises:
        RuntimeError: no such call is in flight.
    """
    if step is None:
        return None
    call = engine.pending.get((direction.name, key))
    if call is None:
        raise RuntimeError(
            f"no {direction.name} by plan {key} is in flight: its first step has not run"
        )
    if step == "finish":
        del engine.pending[direction.name, key]
    return call.run(step)


def token_like(tensor: Tensor, *_: Any) -> Tensor:
    """Return a token on the device of ``tensor``."""
    return tensor.new_zeros(1)


def two_tokens_like(tensor: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return a token and a keepalive (see ``traced``) on the device of ``tensor``."""
    return token_like(tensor), token_like(tensor)


def _run_named(
    direction: Direction,
    engine: CoreAttentionEngine,
    key: int,
    token: Tensor,
    name: str,
) -> Tensor:
    run_step(direction, STEP_METHODS[name][direction is BACKWARD], engine, key)
    return token_like(token)


step_backward = define(
    "step_backward(Tensor token, str name) -> Tensor",
    partial(_run_named, BACKWARD),
    token_like,
)
step = define(
    "step(Tensor token, str name) -> Tensor",
    partial(_run_named, FORWARD),
    token_like,
    lambda tokens, _, name, *call: (step_backward(tokens[0], name, *call), None),
    lambda arguments, _: ((), arguments[1:]),
)
"""step(token, name): run the step ``STEP_METHODS[name]``; returns another token."""


def _begin(
    direction: Direction,
    on_streams: bool,
    engine: CoreAttentionEngine,
    key: int,
    *arguments: Any,
) -> Any:
    *rows, option = arguments
    call_key = (direction.name, key)
    if call_key in engine.pending:
        raise RuntimeError(
            f"a {direction.name} of core attention by plan {key} begins, but another one by this plan is in flight, or "
            "has failed: a plan serves one layer at a time"
        )
    call = getattr(engine, f"begin_{direction.name}")(*rows, key, option)
    engine.pending[call_key] = PendingCall(
        engine, call if on_streams else call.send(), on_streams
    )
    return (
        two_tokens_like(rows[0])
        if on_streams and direction is FORWARD
        else token_like(rows[0])
    )


def define_ends(
    family: str, *, on_streams: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Define a family's operators that begin and end a call; in backward the latter begins it.

    Args:
        on_streams: True for two tokens instead of one (see ``traced``), and for sending rows as a step of its own.

    Returns:
        open(q, k, v, shared, key, engine), which returns the call's tokens; and close(tokens, q, k, v, shared, key,
        engine), which returns what a forward call does.
    """
    num_tokens = 2 if on_streams else 1
    tokens = ", ".join(f"Tensor token{number}" for number in range(num_tokens))
    return (
        _define_open(family, tokens, on_streams),
        _define_close(family, tokens, num_tokens, on_streams),
    )


def _define_open(family: str, tokens: str, on_streams: bool) -> Callable[..., Any]:
    """Define what begins a call forward, and returns gradients backward."""
    shapes = ", ".join(f"SymInt[] {name}_shape" for name in ("q", "k", "v", "shared"))
    open_backward = define(
        f"{family}_open_backward({tokens}, {shapes}) -> Tensor[]",
        lambda *arguments: list(run_step(BACKWARD, "finish", *arguments)),
        lambda token, *others: [
            token.new_empty(shape) for shape in others[-4:] if len(shape)
        ],
    )

    def gradients_of_rows(
        tokens: Sequence[Tensor], _: Any, *others: Any
    ) -> list[Tensor | None]:
        token, *keepalive = tokens
        if on_streams:  # torch 2.15 takes the device of an operator that waits for a stream from its only output
            *_, key, engine = others
            token = step_backward(token, "one output", key, engine)
        return gradients_of_qkv(open_backward(token, *keepalive, *others))

    return define(
        f"{family}_open({QKV}) -> {'(Tensor, Tensor)' if on_streams else 'Tensor'}",
        partial(_begin, FORWARD, on_streams),
        two_tokens_like if on_streams else token_like,
        gradients_of_rows,
        lambda rows, _: ((), [() if x is None else x.shape for x in rows]),
    )


def _define_close(
    family: str, tokens: str, num_tokens: int, on_streams: bool
) -> Callable[..., Any]:
    """Define what returns results forward, and begins the call backward."""
    close_backward = define(
        f"{family}_close_backward(Tensor dout, Tensor[] saved, Tensor? dlse) -> Tensor",
        partial(_begin, BACKWARD, on_streams),
        token_like,
    )

    def gradients_of_call(
        of_results: Any, saved: Sequence[Tensor], *call: Any
    ) -> tuple[Tensor | None, ...]:
        token = close_backward(*backward_arguments(of_results, saved), *call)
        return *(token,) * num_tokens, *gradients_of_qkv([])

    return define(
        f"{family}_close({tokens}, {QKV}) -> {RESULTS}",
        partial(run_step, FORWARD, "finish"),
        lambda *arguments: results_like(arguments[num_tokens:]),
        gradients_of_call,
        remember_call,
    )


dispatch, combine = define_ends("steps", on_streams=False)
"""dispatch(q, k, v, shared): send the rows that other ranks serve; returns a token for ``step``. The arguments are
those of ``CoreAttentionEngine.begin_forward``.
combine(token, q, k, v, shared): wait for the outputs of other ranks; returns the results of a forward call. Gradients
flow to q, k, v and shared through dispatch."""
