# SPDX-License-Identifier: BSD-3-Clause
"""Core attention as a custom operator: opaque to torch.compile, traceable forward and backward.

Output shapes depend on input shapes alone. A host tensor, which only the operator's body reads, holds the key of the
plan. Therefore one compiled graph serves every plan.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.runtime.call import Saved
from torchtitan_cad.runtime.directions import FORWARD
from torchtitan_cad.runtime.engine import get_engine

Remembered = tuple[Sequence[Tensor], Sequence[Any]]
"""tensors and other values that an operator's backward needs of its arguments and results"""
QKV = "Tensor q, Tensor k, Tensor v, Tensor? shared"
"""schema of this rank's tokens in layout order: arguments of ``CoreAttentionEngine.begin_forward``"""
RESULTS = "(Tensor, Tensor, Tensor, Tensor)"
"""schema of the results of a forward call"""


def define(
    signature: str,
    body: Callable[..., Any],
    like: Callable[..., Any],
    gradients: Callable[..., Sequence[Tensor | None]] | None = None,
    remember: Callable[[Sequence[Any], Any], Remembered] = lambda arguments, results: (
        (),
        (),
    ),
) -> Any:
    """Define the operator torchtitan_cad::``signature``, with the additional arguments plan_key and engine.

    Args:
        signature: name, arguments and results, as in torch's schemas.
        body: computes the results from the engine, the plan's key and the arguments.
        like: returns empty results of the right shapes from the arguments.
        gradients: returns the gradients of the arguments, from the gradients of the results, the remembered tensors,
            the other remembered values, plan_key and engine. The gradient of a result that was not used is None; it is
            not called if no result has a gradient. By default the operator has no gradients.
        remember: returns the values that ``gradients`` needs, from the arguments and the results.
    """
    name, arguments, results = re.fullmatch(
        r"(\w+)\((.*)\) -> (.*)", signature
    ).groups()  # type: ignore[union-attr]

    def run(*arguments: Any) -> Any:
        *rest, plan_key, engine = arguments
        return body(get_engine(engine), read_key(plan_key), *rest)

    operator = torch.library.custom_op(
        f"torchtitan_cad::{name}",
        run,
        mutates_args=(),
        schema=f"({arguments}, Tensor plan_key, str engine) -> {results}",
    )
    operator.register_fake(lambda *arguments: like(*arguments[:-2]))
    if gradients is None:
        return operator

    def set_up(ctx: Any, inputs: Any, output: Any) -> None:
        *arguments, plan_key, ctx.engine = inputs
        tensors, ctx.others = remember(arguments, output)
        ctx.num_arguments = len(arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, plan_key)

    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, plan_key = ctx.saved_tensors
        of_arguments: Sequence[Tensor | None] = (None,) * ctx.num_arguments
        if any(gradient is not None for gradient in of_results):
            of_arguments = gradients(
                of_results, tensors, *ctx.others, plan_key, ctx.engine
            )
        return *of_arguments, None, None

    operator.register_autograd(backward, setup_context=set_up)
    return operator


def results_like(rows: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return tensors of the shapes and dtypes of a forward call's results, from the arguments of ``QKV``."""
    out, lse = FORWARD.results_like(rows)["queries"]
    kept = out.new_empty(0, dtype=torch.uint8)
    return out, lse, kept, kept.clone()


def remember_call(arguments: Sequence[Any], results: Sequence[Tensor]) -> Remembered:
    """Remember ``Saved`` of an operator whose last arguments are those of ``QKV``."""
    q, k, v, shared = arguments[-4:]
    return [q, k, v, *results, *([] if shared is None else [shared])], ()


def gradients_of_qkv(gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the arguments of ``QKV`` from those of ``Saved.arguments``."""
    return [*gradients, *[None] * (4 - len(gradients))]


def backward_arguments(
    of_results: Sequence[Tensor | None], saved: Sequence[Tensor]
) -> tuple[Any, ...]:
    """Return dout, saved and dlse as ``begin_backward`` takes them; one of ``RESULTS`` has a gradient."""
    dout, dlse, *_ = of_results
    return torch.zeros_like(Saved(*saved).out) if dout is None else dout, saved, dlse


_core_attention_backward = define(
    "core_attention_backward(Tensor dout, Tensor[] saved, Tensor? dlse) -> Tensor[]",
    lambda engine, key, dout, saved, dlse: list(
        engine.begin_backward(dout, saved, key, dlse).run()
    ),
    lambda dout, saved, dlse: [x.new_empty(x.shape) for x in Saved(*saved).arguments],
)
_core_attention = define(
    f"core_attention({QKV}) -> {RESULTS}",
    lambda engine, key, q, k, v, shared: engine.begin_forward(
        q, k, v, key, shared
    ).run(),
    lambda *arguments: results_like(arguments),
    lambda of_results, saved, *call: gradients_of_qkv(
        _core_attention_backward(*backward_arguments(of_results, saved), *call)
    ),
    remember_call,
)


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan_key: Tensor,
    engine: str,
    *,
    shared: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax(Q K^T) V of this rank's tokens, computed by the servers of a plan (arXiv 2510.18121, section 4).

    All ranks of the CAD group must call it with the same plans in the same order.

    Args:
        q: [T, Hq, D] this rank's queries in layout order.
        k, v: [T, Hkv, D] and [T, Hkv, Dv] this rank's keys and values in layout order.
        plan_key: int64 host tensor whose elements all equal the plan's key in the engine.
        engine: name under which the ``CoreAttentionEngine`` is registered.
        shared: [T, 1, D'] the last elements of all heads of keys, if they share them, which travel once per token;
            k is [T, Hkv, D - D'] then.

    Returns:
        out [T, Hq, Dv] in q's dtype, and its log-sum-exp, by which models rescale outputs: the natural logarithm of the
        softmax's denominator, [T, Hq] in fp32 (fp64 for fp64). Gradients of both flow to q, k, v and shared.
    """
    out, lse, _, _ = _core_attention(q, k, v, shared, plan_key, engine)
    return out, lse


def read_key(plan_key: Tensor) -> int:
    """Return the key in the tensor ``plan_key``; raises RuntimeError if it is not a host tensor."""
    if plan_key.device.type != "cpu":
        raise RuntimeError(
            f"plan_key must be a host tensor, got one on {plan_key.device}: reading it would synchronise"
        )
    return int(plan_key.reshape(-1)[0])
