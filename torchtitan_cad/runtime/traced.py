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
from torchtitan_cad.runtime.call import BackwardState, ForwardState, Saved
from torchtitan_cad.runtime.engine import get_engine
from torchtitan_cad.runtime.ops import CallsInFlight, fake_results, read_key, save_call


class _CallInParts:
    """A call between its parts, which alternate between the main stream and the side stream."""

    def __init__(self, engine: str, call: ForwardState | BackwardState) -> None:
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


def _token(like: Tensor) -> Tensor:
    return like.new_zeros(1)


# Forward --------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchtitan_cad::traced_prepare", mutates_args=())
def prepare(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> tuple[Tensor, Tensor]:
    """Take q [Tq, Hq, D], k and v [T, Hkv, D] as ``steps.dispatch``; returns token and hold."""
    key = read_key(plan_key)
    _forward.put(engine, key, _CallInParts(engine, get_engine(engine).begin_forward(q, k, v, key)))
    return _token(q), _token(q)


@torch.library.custom_op("torchtitan_cad::traced_step", mutates_args=())
def step(token: Tensor, name: str, plan_key: Tensor, engine: str) -> Tensor:
    """Take the step called ``name``, see the module's docstring; returns another token."""
    if name in _FORWARD_STEPS:
        _forward.get(engine, plan_key).exchange(_FORWARD_STEPS[name])
    return _token(token)


@torch.library.custom_op("torchtitan_cad::traced_after", mutates_args=())
def after(token: Tensor, earlier: Tensor) -> Tensor:
    """Return ``token`` for steps after those of ``earlier``, another call's token, and in backward before them.

    Otherwise Inductor fuses linear work of both halves, and one's wait comes before the other's work. For CPU alone: on
    devices the graph's waits keep the halves apart, and this would make the main stream wait for a side stream.
    """
    return _token(token)


@torch.library.custom_op("torchtitan_cad::traced_attend", mutates_args=())
def attend(token: Tensor, hold: Tensor, plan_key: Tensor, engine: str) -> tuple[Tensor, Tensor]:
    """Run the kernel calls; returns token and hold."""
    _forward.get(engine, plan_key).compute("compute")
    return _token(token), _token(token)


@torch.library.custom_op("torchtitan_cad::traced_combine", mutates_args=())
def _combine(
    token: Tensor, hold: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward.take(engine, plan_key).compute("finish")


def combine(token: Tensor, hold: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Return core attention's output [Tq, Hq, D]; q, k and v as in ``prepare``, through which their gradients flow."""
    return _combine(token, hold, q, k, v, plan_key, engine)[0]


# Backward -------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchtitan_cad::traced_combine_backward", mutates_args=())
def _combine_backward(dout: Tensor, saved: Sequence[Tensor], plan_key: Tensor, engine: str) -> Tensor:
    key = read_key(plan_key)
    call = get_engine(engine).begin_backward(dout, Saved(*saved), key)
    _backward.put(engine, key, _CallInParts(engine, call))
    return _token(dout)


@torch.library.custom_op("torchtitan_cad::traced_step_backward", mutates_args=())
def _step_backward(token: Tensor, name: str, plan_key: Tensor, engine: str) -> Tensor:
    if name in _BACKWARD_STEPS:
        _backward.get(engine, plan_key).exchange(_BACKWARD_STEPS[name])
    return _token(token)


@torch.library.custom_op("torchtitan_cad::traced_attend_backward", mutates_args=())
def _attend_backward(token: Tensor, hold: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    _backward.get(engine, plan_key).compute("compute")
    return _token(token)


@torch.library.custom_op("torchtitan_cad::traced_prepare_backward", mutates_args=())
def _prepare_backward(
    token: Tensor, hold: Tensor, q_shape: Sequence[int], kv_shape: Sequence[int], plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward.take(engine, plan_key).compute("finish")


# Shapes ---------------------------------------------------------------------------------------------------------------


@step.register_fake
@after.register_fake
@_combine_backward.register_fake
@_step_backward.register_fake
@_attend_backward.register_fake
def _one_token(token: Tensor, *_: Any) -> Tensor:
    return _token(token)


@prepare.register_fake
@attend.register_fake
def _two_tokens(token: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _token(token), _token(token)


@_combine.register_fake
def _combine_fake(token: Tensor, hold: Tensor, q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_results(q)


@_prepare_backward.register_fake
def _prepare_backward_fake(
    token: Tensor, hold: Tensor, q_shape: Sequence[int], kv_shape: Sequence[int], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return token.new_empty(q_shape), token.new_empty(kv_shape), token.new_empty(kv_shape)


# Autograd -------------------------------------------------------------------------------------------------------------


def _context(ctx: Any, inputs: Any, output: Any) -> None:
    *_, plan_key, ctx.engine = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(plan_key)


def _prepare_context(ctx: Any, inputs: Any, output: Any) -> None:
    _context(ctx, inputs, output)
    ctx.q_shape, ctx.kv_shape = inputs[0].shape, inputs[1].shape


def _prepare_gradients(ctx: Any, token: Tensor | None, hold: Tensor | None) -> tuple[Tensor | None, ...]:
    if token is None:  # the output had no gradient
        return (None,) * 5
    # torch 2.15 looks for the device of what waits for another stream in its one output.
    token = _step_backward(token, "one output", *ctx.saved_tensors, ctx.engine)
    return *_prepare_backward(token, hold, ctx.q_shape, ctx.kv_shape, *ctx.saved_tensors, ctx.engine), None, None


def _step_context(ctx: Any, inputs: Any, output: Any) -> None:
    _context(ctx, inputs, output)
    ctx.name = inputs[1]


def _step_gradients(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
    if token is not None:
        token = _step_backward(token, ctx.name, *ctx.saved_tensors, ctx.engine)
    return token, None, None, None


def _after_gradients(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
    return token, token


def _attend_gradients(ctx: Any, token: Tensor | None, hold: Tensor | None) -> tuple[Tensor | None, ...]:
    if token is not None:
        token = _attend_backward(token, hold, *ctx.saved_tensors, ctx.engine)
    return token, token, None, None


def _combine_gradients(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    *saved, plan_key = ctx.saved_tensors
    token = None if dout is None else _combine_backward(dout, saved, plan_key, ctx.engine)
    return token, token, None, None, None, None, None


prepare.register_autograd(_prepare_gradients, setup_context=_prepare_context)
step.register_autograd(_step_gradients, setup_context=_step_context)
after.register_autograd(_after_gradients)
attend.register_autograd(_attend_gradients, setup_context=_context)
_combine.register_autograd(_combine_gradients, setup_context=save_call)
