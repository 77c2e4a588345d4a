"""Core attention as operators between which other work may run (docs/architecture.md, "Ping-pong").

    token = dispatch(q, k, v, key, engine)      # sends what others serve;     backward waits and adds up gradients
    token = attend(token, key, engine)          # waits, computes, sends back; backward likewise
    out = combine(token, q, k, v, key, engine)  # waits and merges;            backward sends dO and what servers need

``attend_first`` and ``attend_rest`` do what ``attend`` does in two parts, with other work between; in backward the
rest comes first. ``traced`` has the operators of graphs that contain streams.

Like ``ops.core_attention`` they are opaque to torch.compile, with output shapes that depend on input shapes alone, so
that one graph serves every plan. Tokens are numbers that tie the graph together. What is in flight is found by the
plan's key: of one plan there is one core attention in flight at a time forward, and one backward, because a block's
begins after that of the block before.

Every operator takes the plan's key, an int64 host tensor whose elements all equal the key in the engine, and the name
under which the engine is registered. All ranks of its group must take the same steps in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

from torch import Tensor

from torchtitan_cad.runtime import streams
from torchtitan_cad.runtime.call import BACKWARD, FORWARD, AttentionState, Direction, Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.ops import QKV, RESULTS, define, remember_call, results_like

COMPILE_OPTIONS = {"reorder_for_peak_memory": False}
"""``torch.compile(..., options=...)`` for graphs that contain both a ``dispatch`` and its ``combine``. To save memory,
Inductor would otherwise move a wait next to its start, where nothing is left to overlap with (torch 2.11 to 2.15)."""


class Flight:
    """A call between its operators.

    Args:
        on_streams: whether parts of it alternate between a main stream and a side stream. Each then waits for the one
            before.
    """

    def __init__(self, engine: CoreAttentionEngine, call: AttentionState, on_streams: bool) -> None:
        self._engine, self._call, self._on_streams = engine, call, on_streams
        self._mark = streams.mark(engine.device) if on_streams else None
        """The end of the last part, on its stream."""
        self._held: Sequence[Any] = ()
        """Tensors that the side stream may still read, until the main stream has waited for it."""

    def run(self, step: str, **options: Any) -> Any:
        """Run a step of the engine on the main stream."""
        with self._part():
            self._held = ()
            return getattr(self._engine, step)(self._call, **options)

    def exchange(self, step: str) -> None:
        """Run a step on the side stream, which on a device also waits for what others send; on CPU the host would."""
        with self._part():
            self._held = [*self._call.served.values(), *self._call.results.values()]
            getattr(self._engine, step)(self._call)
            if streams.module_of(self._engine.device) is not None:
                self._call.land()

    @contextmanager
    def _part(self) -> Iterator[None]:
        streams.join(self._engine.device, self._mark)
        yield
        if self._on_streams:
            self._mark = streams.mark(self._engine.device)


def find(engine: CoreAttentionEngine, direction: Direction, key: int) -> Flight:
    """Return the call by that plan; raises RuntimeError if there is none."""
    try:
        return engine.in_flight[direction.name, key]
    except KeyError:
        raise RuntimeError(f"no core attention by plan {key} is in flight: its first part has not run") from None


def token_like(tensor: Tensor, *_: Any) -> Tensor:
    """Return a token on the device of ``tensor``."""
    return tensor.new_zeros(1)


def gradients_of_tokens(token: Tensor, num_tokens: int, *call: Any) -> tuple[Tensor, ...]:
    """Return the gradients of an operator's tokens."""
    return (token,) * num_tokens


# Between the ends -----------------------------------------------------------------------------------------------------

_attend, _send, _send_home = (
    methodcaller(*names) for names in (("run", "attend"), ("exchange", "send"), ("exchange", "send_home"))
)
_first, _first_undivided = (methodcaller("run", "attend_first", undivided=undivided) for undivided in (False, True))

STEPS: dict[str, tuple[Callable[[Flight], Any] | None, Callable[[Flight], Any] | None]] = {
    "attend": (_attend, _attend),
    "attend_first": (_first, _attend),
    "attend_rest": (_attend, _first_undivided),
    "attend_first undivided": (_first_undivided, _attend),
    "attend_rest undivided": (_attend, _first),
    "dispatch": (_send, None),
    "arrive": (None, _send_home),
    "give_back": (_send_home, None),
    "receive": (None, _send),
    "keep": (None, None),
    "one output": (None, None),
}
"""What the step of each name does forward and backward; None: nothing. The last six are those of ``traced``."""


def _run_step(direction: Direction, engine: CoreAttentionEngine, key: int, token: Tensor, name: str) -> Tensor:
    run = STEPS[name][direction is BACKWARD]
    if run is not None:
        run(find(engine, direction, key))
    return token_like(token)


step_backward = define("step_backward(Tensor token, str name) -> Tensor", partial(_run_step, BACKWARD), token_like)
step = define(
    "step(Tensor token, str name) -> Tensor",
    partial(_run_step, FORWARD),
    token_like,
    lambda tokens, _, name, *call: (step_backward(tokens[0], name, *call), None),
    lambda arguments, _: ((), arguments[1:]),
)
"""Take (token, name): the step of ``STEPS``; returns another token."""


# The ends -------------------------------------------------------------------------------------------------------------


def define_ends(family: str, *, on_streams: bool) -> tuple[Any, Any]:
    """Define a family's operators ``open`` and ``close``, which begin and end a call, in backward the other way round.

    Args:
        on_streams: Two tokens tie the operators together, not one (see ``traced``), and to send rows is a step.
    """
    num_tokens = 1 + on_streams
    tokens = ", ".join(f"Tensor token{number}" for number in range(num_tokens))

    def begin(engine: CoreAttentionEngine, key: int, call: AttentionState) -> None:
        in_flight, place = engine.in_flight, (call.direction.name, key)
        if place in in_flight:
            raise RuntimeError(
                f"two core attentions by plan {key} at the same time, in one direction, or an earlier one has failed"
            )
        in_flight[place] = Flight(engine, call if on_streams else engine.send(call), on_streams)

    def begin_forward(engine: CoreAttentionEngine, key: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        begin(engine, key, engine.begin_forward(q, k, v, key))
        return tokens_like(q)

    def begin_backward(engine: CoreAttentionEngine, key: int, dout: Tensor, saved: Sequence[Tensor]) -> Tensor:
        begin(engine, key, engine.begin_backward(dout, Saved(*saved), key))
        return token_like(dout)

    def finish(direction: Direction, engine: CoreAttentionEngine, key: int, *_: Any) -> Any:
        flight = find(engine, direction, key)
        del engine.in_flight[direction.name, key]
        return flight.run("finish")

    def tokens_like(tensor: Tensor, *_: Any) -> Any:
        return (token_like(tensor), token_like(tensor)) if on_streams else token_like(tensor)

    def gradients_like(token: Tensor, *others: Any) -> tuple[Tensor, ...]:
        *_, q_shape, kv_shape = others
        return token.new_empty(q_shape), token.new_empty(kv_shape), token.new_empty(kv_shape)

    def gradients_of_rows(tokens: Sequence[Tensor], _: Any, *others: Any) -> tuple[Tensor, ...]:
        token, *hold = tokens
        if on_streams:  # torch 2.15 looks for the device of what waits for another stream in its one output
            token = step_backward(token, "one output", *others[-2:])
        return open_backward(token, *hold, *others)

    open_backward = define(
        f"{family}_open_backward({tokens}, SymInt[] q_shape, SymInt[] kv_shape) -> (Tensor, Tensor, Tensor)",
        partial(finish, BACKWARD),
        gradients_like,
    )
    close_backward = define(
        f"{family}_close_backward(Tensor dout, Tensor[] saved) -> Tensor", begin_backward, token_like
    )
    opening = define(
        f"{family}_open({QKV}) -> {'(Tensor, Tensor)' if on_streams else 'Tensor'}",
        begin_forward,
        tokens_like,
        gradients_of_rows,
        lambda rows, _: ((), (rows[0].shape, rows[1].shape)),
    )
    closing = define(
        f"{family}_close({tokens}, {QKV}) -> {RESULTS}",
        partial(finish, FORWARD),
        lambda *arguments: results_like(arguments[num_tokens]),
        lambda douts, saved, *call: (
            *gradients_of_tokens(close_backward(douts[0], saved, *call), num_tokens, *call),
            *(None, None, None),
        ),
        remember_call,
        has_statistics=True,
    )
    return opening, closing


_open, _close = define_ends("steps", on_streams=False)


def dispatch(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Send the rows that other ranks serve; returns a token for ``attend``.

    Args:
        q: [Tq, Hq, D]; k, v: [T, Hkv, D], this rank's tokens in layout order (Tq = T unless the layout leaves queries
            out).
    """
    return _open(q, k, v, plan_key, engine)


def attend(token: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Wait for the rows that this rank serves, attend, send their outputs home; returns a token for ``combine``."""
    return step(token, "attend", plan_key, engine)


def attend_first(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    """Wait for the rows that this rank serves and compute the first round; returns a token for ``attend_rest``.

    Args:
        undivided: whether a plan of one round is computed here, in either direction, or in ``attend_rest``.
    """
    return step(token, "attend_first undivided" if undivided else "attend_first", plan_key, engine)


def attend_rest(token: Tensor, plan_key: Tensor, engine: str, undivided: bool) -> Tensor:
    """Compute what ``attend_first`` has left and send the outputs home; returns a token for ``combine``."""
    return step(token, "attend_rest undivided" if undivided else "attend_rest", plan_key, engine)


def combine(token: Tensor, q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Wait for the outputs that others computed: [Tq, Hq, D] in q's dtype. Takes the same q, k, v as ``dispatch``.

    Gradients flow to q, k and v through ``dispatch``.
    """
    return _close(token, q, k, v, plan_key, engine)[0]
