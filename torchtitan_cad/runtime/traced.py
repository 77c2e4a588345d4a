# SPDX-License-Identifier: BSD-3-Clause
"""Core attention as operators that enqueue on the current stream and return, for graphs that contain streams.

``steps`` hides streams inside operators; here the graph sets the stream of each operator, and has events between them.
torch.compile runs an operator's backward on the stream of its forward, and orders streams in backward by itself. So
every operator of one direction has a counterpart in the other direction, which may be idle:

                        main                        side                        backward
    token, keepalive =  prepare(q, k, v)                                        adds up gradients
    token =                                         step("dispatch")            (idle)
    the other nano-batch's, then:
    token =                                         step("arrive"), idle        sends the gradients home
    token, keepalive =  attend(token, keepalive)                                attends
    token =                                         step("give_back")           (idle)
    next graph:
    keepalive =         step("keepalive"), idle                                 (idle)
    token =                                         step("receive"), idle       sends dO and what servers need
    out =               combine(token, keepalive, q, k, v)                      prepares what is sent

Backward runs the operators in reverse. ``receive`` starts an exchange in the graph that computes its rows, because
graphs do not wait for gradients that enter them. ``keepalive`` gives tensors that the side stream reads in backward a
later reader on the main stream; otherwise the main stream would wait for the side stream before it frees their memory.

A call's steps alternate between the streams, and each also waits for the event of the previous step, as in backward the
compiler may put a wait before its record (torch 2.14 and 2.15).

Every operator takes the plan's key, an int64 host tensor, and the engine's name, as in ``steps``.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_cad.runtime import steps
from torchtitan_cad.runtime.directions import BACKWARD, FORWARD, Direction
from torchtitan_cad.runtime.engine import CoreAttentionEngine
from torchtitan_cad.runtime.ops import define
from torchtitan_cad.runtime.steps import step, token_like, two_tokens_like  # noqa: F401  one of the operators

prepare, combine = steps.define_ends("traced", on_streams=True)
"""prepare(q, k, v, shared): arguments as ``steps.dispatch``; returns token and keepalive.
combine(token, keepalive, q, k, v, shared): returns what ``steps.combine`` does."""


def _compute(
    direction: Direction,
    engine: CoreAttentionEngine,
    key: int,
    token: Tensor,
    keepalive: Tensor,
) -> Any:
    steps.run_step(direction, "compute", engine, key)
    return two_tokens_like(token) if direction is FORWARD else token_like(token)


_attend_backward = define(
    "traced_attend_backward(Tensor token, Tensor keepalive) -> Tensor",
    partial(_compute, BACKWARD),
    token_like,
)
attend = define(
    "traced_attend(Tensor token, Tensor keepalive) -> (Tensor, Tensor)",
    partial(_compute, FORWARD),
    two_tokens_like,
    lambda tokens, _, *call: (_attend_backward(*tokens, *call),) * 2,
)
"""attend(token, keepalive): run the kernel calls; returns token and keepalive."""


@torch.library.custom_op("torchtitan_cad::traced_after", mutates_args=())
def after(token: Tensor, earlier: Tensor) -> Tensor:
    """Return ``token``, whose later steps then run after those of another call's token ``earlier``; backward: before.

    Without it, Inductor fuses linear work of both nano-batches, and waits for one come before the work of the other. It
    is for CPU alone: on devices, the graph's waits keep the nano-batches apart.
    """
    return token_like(token)


after.register_fake(token_like)
after.register_autograd(lambda ctx, token: (token, token))
