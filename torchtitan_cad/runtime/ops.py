"""Core attention as custom operators: opaque to torch.compile, traceable forward and backward.

Output shapes depend on input shapes alone, and the plan is named by the value of a host tensor that only the operator's
body reads. One compiled graph therefore serves every plan.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.engine import CoreAttentionEngine, get_engine
from torchtitan_cad.runtime.kernels.base import compute_dtype

T = TypeVar("T")


@torch.library.custom_op("torchtitan_cad::core_attention", mutates_args=())
def _core_attention(
    q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return get_engine(engine).forward(q, k, v, read_key(plan_key))


@_core_attention.register_fake
def _core_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_results(q)


@torch.library.custom_op("torchtitan_cad::core_attention_backward", mutates_args=())
def _core_attention_backward(
    dout: Tensor, saved: Sequence[Tensor], plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor]:
    return get_engine(engine).backward(dout, Saved(*saved), read_key(plan_key))


@_core_attention_backward.register_fake
def _core_attention_backward_fake(
    dout: Tensor, saved: Sequence[Tensor], plan_key: Tensor, engine: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = saved
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def fake_results(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give tensors of the shapes and dtypes of ``CoreAttentionEngine.forward``'s results, for q [Tq, Hq, D]."""
    kept = q.new_empty(0, dtype=torch.uint8)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype)), kept, kept.clone()


def save_call(ctx: Any, inputs: Any, output: Any) -> None:
    """Save ``Saved``, the plan's key and the engine's name, of an operator whose last arguments are (q, k, v, plan_key,
    engine) and which returns the results of ``CoreAttentionEngine.forward``.
    """
    *_, q, k, v, plan_key, ctx.engine = inputs
    _, *statistics = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*statistics)
    ctx.save_for_backward(*Saved(q, k, v, *output), plan_key)


def _backward(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 5
    *saved, plan_key = ctx.saved_tensors
    return *_core_attention_backward(dout, saved, plan_key, ctx.engine), None, None


_core_attention.register_autograd(_backward, setup_context=save_call)


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
