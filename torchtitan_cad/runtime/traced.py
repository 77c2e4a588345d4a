"""Core attention as operators that enqueue on the current stream and return, for graphs that contain streams.

Where ``steps`` hides streams inside operators, here the graph says on which stream an operator runs, and its events lie
between them. torch.compile runs an operator's backward on the stream of its forward, and orders streams in backward by
itself. So what one direction does on a stream has an operator in the other one too, if need be an idle one:

                   main                        side                        backward
    token, hold =  prepare(q, k, v)                                        adds up gradients
    token =                                    step("dispatch")            (idle)
    the other half's, then:
    token =                                    step("arrive"), idle        sends the gradients home
    token, hold =  attend(token, hold)                                     attends
    token =                                    step("give_back")           (idle)
    next graph:
    hold =         step("keep"), idle                                      (idle)
    token =                                    step("receive"), idle       sends dO and what servers need
    out =          combine(token, hold, q, k, v)                           prepares what is sent

Backward runs them in reverse: ``receive`` starts an exchange in the graph that makes its rows, because a gradient that
enters a graph is not waited for. ``hold`` gives what the side stream reads in backward a later reader on the main one:
otherwise the main stream would wait for the side stream before the memory of it is free.

A call's parts alternate between the streams, and each also waits for the mark of the one before: in backward the
compiler may put a wait before its record (torch 2.14 and 2.15).

Every operator takes the plan's key, an int64 host tensor, and the engine's name, as in ``steps``. Tokens are numbers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.call import AttentionState, Saved
from torchtitan_cad.runtime.engine import get_engine
from torchtitan_cad.runtime.ops import (
    CallsInFlight,
    Gradients,
    Results,
    define,
    read_key,
    remember_call,
    results_like,
)
from torchtitan_cad.runtime.steps import gradients_like, remember_options, remember_shapes, token_like


class _CallInParts:
    """A call between its parts, which alternate between the main stream and the side stream."""

    def __init__(self, engine: str, call: AttentionState) -> None:
        self._engine, self._call = get_engine(engine), call
        self._mark = streams.mark(self._engine.device)
        """The end of the last part, on its stream."""
        self._held: tuple[Any, ...] = ()
        """Tensors that the side stream may still read, until the main stream has waited for it."""

    def exchange(self, step: str) -> None:
        """Run a part on the side stream, which on a device also waits for what others send; on CPU the host would."""
        with self._part():
            self._held = self._call.served, self._call.results
            getattr(self._engine, step)(self._call)
            if streams.module_of(self._engine.device) is not None:
                self._call.land()

    def compute(self, step: str) -> Any:
        """Run a part on the main stream."""
        with self._part():
            self._held = ()
            return getattr(self._engine, step)(self._call)

    @contextmanager
    def _part(self) -> Iterator[None]:
        streams.join(self._engine.device, self._mark)
        yield
        self._mark = streams.mark(self._engine.device)


_forward: CallsInFlight[_CallInParts] = CallsInFlight()
_backward: CallsInFlight[_CallInParts] = CallsInFlight()

_FORWARD_STEPS = {"dispatch": "send", "give_back": "send_home"}
_BACKWARD_STEPS = {"receive": "send", "arrive": "send_home"}


# Forward --------------------------------------------------------------------------------------------------------------


def _begin_forward(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> tuple[Tensor, Tensor]:
    key = read_key(plan_key)
    _forward.put(engine, key, _CallInParts(engine, get_engine(engine).begin_forward(q, k, v, key)))
    return _two_tokens(q)


def _exchange_forward(token: Tensor, name: str, plan_key: Tensor, engine: str) -> Tensor:
    if name in _FORWARD_STEPS:
        _forward.get(engine, plan_key).exchange(_FORWARD_STEPS[name])
    return token_like(token)


def _compute_forward(token: Tensor, hold: Tensor, plan_key: Tensor, engine: str) -> tuple[Tensor, Tensor]:
    _forward.get(engine, plan_key).compute("compute")
    return _two_tokens(token)


def _finish_forward(
    token: Tensor, hold: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str
) -> Results:
    return _forward.take(engine, plan_key).compute("finish")


# Backward -------------------------------------------------------------------------------------------------------------


def _begin_backward(dout: Tensor, saved: Sequence[Tensor], plan_key: Tensor, engine: str) -> Tensor:
    key = read_key(plan_key)
    call = get_engine(engine).begin_backward(dout, Saved(*saved), key)
    _backward.put(engine, key, _CallInParts(engine, call))
    return token_like(dout)


def _exchange_backward(token: Tensor, name: str, plan_key: Tensor, engine: str) -> Tensor:
    if name in _BACKWARD_STEPS:
        _backward.get(engine, plan_key).exchange(_BACKWARD_STEPS[name])
    return token_like(token)


def _compute_backward(token: Tensor, hold: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    _backward.get(engine, plan_key).compute("compute")
    return token_like(token)


def _finish_backward(
    token: Tensor, hold: Tensor, q_shape: Sequence[int], kv_shape: Sequence[int], plan_key: Tensor, engine: str
) -> Gradients:
    return _backward.take(engine, plan_key).compute("finish")


def _two_tokens(tensor: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return token_like(tensor), token_like(tensor)


def _prepare_gradients(tokens: Sequence[Tensor], _: Any, q_shape: Any, kv_shape: Any, *call: Any) -> Gradients:
    # torch 2.15 looks for the device of what waits for another stream in its one output.
    token = _step_backward(tokens[0], "one output", *call)
    return _prepare_backward(token, tokens[1], q_shape, kv_shape, *call)


def _attend_gradients(tokens: Sequence[Tensor], _: Any, *call: Any) -> tuple[Tensor, Tensor]:
    token = _attend_backward(*tokens, *call)
    return token, token


def _combine_gradients(douts: Sequence[Tensor], saved: Sequence[Tensor], *call: Any) -> tuple[Tensor | None, ...]:
    token = _combine_backward(douts[0], saved, *call)
    return token, token, None, None, None


# Operators ------------------------------------------------------------------------------------------------------------

_prepare_backward = define(
    "traced_prepare_backward", _finish_backward, lambda token, hold, *shapes: gradients_like(token, *shapes)
)
_step_backward = define("traced_step_backward", _exchange_backward, token_like)
_attend_backward = define("traced_attend_backward", _compute_backward, token_like)
_combine_backward = define("traced_combine_backward", _begin_backward, token_like)

prepare = define("traced_prepare", _begin_forward, _two_tokens, _prepare_gradients, remember_shapes)
"""Take q [Tq, Hq, D], k and v [T, Hkv, D] as ``steps.dispatch``; returns token and hold."""

step = define(
    "traced_step",
    _exchange_forward,
    token_like,
    lambda tokens, _, name, *call: (_step_backward(tokens[0], name, *call), None),
    remember_options,
)
"""Take (token, name): the step called ``name``, see the module's docstring; returns another token."""

attend = define(
    "traced_attend",
    _compute_forward,
    _two_tokens,
    lambda *arguments: _attend_gradients(*arguments),
)
"""Take (token, hold): run the kernel calls; returns token and hold."""

_combine = define(
    "traced_combine",
    _finish_forward,
    lambda token, hold, q, *_: results_like(q),
    lambda *arguments: _combine_gradients(*arguments),
    remember_call,
    has_statistics=True,
)


def combine(token: Tensor, hold: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Return core attention's output [Tq, Hq, D]; q, k and v as in ``prepare``, through which their gradients flow."""
    return _combine(token, hold, q, k, v, plan_key, engine)[0]


@torch.library.custom_op("torchtitan_cad::traced_after", mutates_args=())
def after(token: Tensor, earlier: Tensor) -> Tensor:
    """Return ``token`` for steps after those of ``earlier``, another call's token, and in backward before them.

    Otherwise Inductor fuses linear work of both halves, and one's wait comes before the other's work. For CPU alone: on
    devices the graph's waits keep the halves apart, and this would make the main stream wait for a side stream.
    """
    return token_like(token)


after.register_fake(token_like)
after.register_autograd(lambda ctx, token: (token, token))
