"""Core attention as a custom operator: opaque to torch.compile, traceable forward and backward.

Output shapes depend on input shapes alone, and the plan is named by the value of a host tensor that only the operator's
body reads. One compiled graph therefore serves every plan.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine, get_engine
from torchtitan_cad.runtime.kernels.base import compute_dtype

T = TypeVar("T")
Remembered = tuple[Sequence[Tensor], Sequence[Any]]
"""What an operator's backward needs of its arguments and results: tensors, and other values."""
Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of ``CoreAttentionEngine.forward``."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


def define(
    name: str,
    body: Callable[..., Any],
    like: Callable[..., Any],
    gradients: Callable[..., Sequence[Tensor | None]] | None = None,
    remember: Callable[[Sequence[Any], Any], Remembered] = lambda arguments, results: ((), ()),
    *,
    has_statistics: bool = False,
) -> Any:
    """Make ``body`` the operator torchtitan_cad::``name``.

    Args:
        body: has annotated arguments, the last two of which are plan_key and engine, see ``core_attention``.
        like: returns results without their values, from the same arguments.
        gradients: called with the gradients of the results, unless that of the first one is None, the remembered
            tensors and other values, plan_key and engine; returns the gradients of the arguments before plan_key. By
            default the operator has none.
        remember: from the arguments before plan_key, and the results.
        has_statistics: only the first result has a gradient.
    """
    operator = torch.library.custom_op(f"torchtitan_cad::{name}", body, mutates_args=())
    operator.register_fake(like)
    if gradients is None:
        return operator

    def set_up(ctx: Any, inputs: Any, output: Any) -> None:
        *arguments, plan_key, ctx.engine = inputs
        tensors, ctx.others = remember(arguments, output)
        ctx.num_arguments = len(arguments)
        ctx.set_materialize_grads(False)
        if has_statistics:
            ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, plan_key)

    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, plan_key = ctx.saved_tensors
        of_arguments: Sequence[Tensor | None] = (None,) * ctx.num_arguments
        if of_results[0] is not None:
            of_arguments = gradients(of_results, tensors, *ctx.others, plan_key, ctx.engine)
        return *of_arguments, None, None

    operator.register_autograd(backward, setup_context=set_up)
    return operator


def results_like(q: Tensor) -> Results:
    """Give tensors of the shapes and dtypes of ``CoreAttentionEngine.forward``'s results, for q [Tq, Hq, D]."""
    kept = q.new_empty(0, dtype=torch.uint8)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype)), kept, kept.clone()


def remember_call(arguments: Sequence[Any], results: Sequence[Tensor]) -> Remembered:
    """Remember ``Saved`` of an operator whose last arguments before plan_key are q, k and v."""
    return Saved(*arguments[-3:], *results), ()


def _forward(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Results:
    return get_engine(engine).forward(q, k, v, read_key(plan_key))


def _backward(dout: Tensor, saved: Sequence[Tensor], plan_key: Tensor, engine: str) -> Gradients:
    return get_engine(engine).backward(dout, Saved(*saved), read_key(plan_key))


_core_attention_backward = define(
    "core_attention_backward", _backward, lambda dout, saved, *_: tuple(x.new_empty(x.shape) for x in saved[:3])
)
_core_attention = define(
    "core_attention",
    _forward,
    lambda q, *_: results_like(q),
    lambda douts, saved, plan_key, engine: _core_attention_backward(douts[0], saved, plan_key, engine),
    remember_call,
    has_statistics=True,
)


def core_attention(q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str) -> Tensor:
    """Return softmax(Q K^T) V of this rank's tokens, computed wherever the plan says (arXiv 2510.18121, section 4).

    Every rank of the CAD group must call it with the same plan, in the same order.

    Args:
        q: [T, Hq, D] this rank's tokens in layout order; k, v: [T, Hkv, D].
        plan_key: int64 host tensor whose elements all equal the plan's key in the engine.
        engine: name under which the ``CoreAttentionEngine`` is registered.

    Returns:
        [T, Hq, D] in q's dtype. Gradients flow to q, k and v.
    """
    return _core_attention(q, k, v, plan_key, engine)[0]


class CallsInFlight(Generic[T]):
    """Core attentions between their parts, in one direction, by engine and plan."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], tuple[CoreAttentionEngine, T]] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, engine: str, key: int, call: T) -> None:
        """Add one, in place of one that an earlier engine of that name has left.

        Raises RuntimeError if there is one by the same plan.
        """
        current = get_engine(engine)
        if self._calls.get((engine, key), (None,))[0] is current:
            raise RuntimeError(
                f"two core attentions by plan {key} at the same time, in one direction, or an earlier one has failed"
            )
        self._calls[engine, key] = current, call

    def get(self, engine: str, plan_key: Tensor) -> T:
        """Return the one by that plan; raises RuntimeError if there is none."""
        key = read_key(plan_key)
        try:
            return self._calls[engine, key][1]
        except KeyError:
            raise RuntimeError(
                f"no core attention by plan {key} of engine {engine!r} is in flight: its first part has not run"
            ) from None

    def take(self, engine: str, plan_key: Tensor) -> T:
        """Return the one by that plan for its last part, and forget it; raises as ``get``."""
        call = self.get(engine, plan_key)
        del self._calls[engine, read_key(plan_key)]
        return call


def read_key(plan_key: Tensor) -> int:
    """Return the key that a ``plan_key`` names; raises RuntimeError if it is not a host tensor."""
    if plan_key.device.type != "cpu":
        raise RuntimeError(
            f"plan_key must be a host tensor, got one on {plan_key.device}: reading it would synchronise"
        )
    return int(plan_key.reshape(-1)[0])
