# SPDX-License-Identifier: BSD-3-Clause
"""What differs between the forward and the backward of core attention.

A call's ``rows`` are tensors of query rows, followed by those of key rows: k, v and, if all heads of keys share a part,
that part. Its results are those of query rows, followed by those of key rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_cad.runtime.combine import Combination
from torchtitan_cad.runtime.kernels.base import (
    AttentionKernel,
    Merged,
    VarlenArgs,
    compute_dtype,
)
from torchtitan_cad.runtime.transport.base import Kind

Results = tuple[Tensor, ...]
Partials = Sequence[Sequence[Tensor]]
"""per result of one kind, the tensors of its partials"""


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction of core attention.

    Attributes:
        name: "forward" or "backward".
        results_name: name of the results that travel home.
        trace_name: name of the kernel calls in traces.
        compute: runs a kernel call on rows, and returns its results.
        results_like: returns tensors like the results of a call on rows, by the kind of rows that they belong to.
        combine: combines the partials of each result of one kind into one tensor, in the dtype of tensors like it.
    """

    name: str
    results_name: str
    trace_name: str
    compute: Callable[[AttentionKernel, Sequence[Tensor], VarlenArgs], Results]
    results_like: Callable[[Sequence[Tensor]], dict[Kind, list[Tensor]]]
    combine: Callable[[Combination, Partials, Sequence[Tensor]], list[Tensor]]


def _attend(
    kernel: AttentionKernel, rows: Sequence[Tensor], args: VarlenArgs
) -> Results:
    q, *keys = rows
    k, v = _join(*keys)
    return kernel.forward(q, k, v, args)


def _outputs_like(rows: Sequence[Tensor]) -> dict[Kind, list[Tensor]]:
    q, _, v, *_ = rows
    num_rows, heads, _ = q.shape
    out = q.new_empty(num_rows, heads, v.shape[2])
    lse = q.new_empty(num_rows, heads, dtype=compute_dtype(q.dtype))
    return {"queries": [out, lse]}


FORWARD = Direction(
    name="forward",
    results_name="outputs",
    trace_name="cad/attention",
    compute=_attend,
    results_like=_outputs_like,
    combine=lambda combination, partials, like: combination.merge(partials, like[0]),
)
"""Query rows: q. Results: out and its log-sum-exp, lse."""


def _differentiate(
    kernel: AttentionKernel, rows: Sequence[Tensor], args: VarlenArgs
) -> Results:
    dout, lse, delta, q, *keys = rows
    is_output = delta.dim() == dout.dim()
    merged = Merged(lse, out=delta) if is_output else Merged(lse, delta)
    k, v = _join(*keys)
    dq, dk, dv = kernel.backward(dout, q, k, v, merged, args)
    return dq, *_split(dk, dv, *keys)


def _gradients_like(rows: Sequence[Tensor]) -> dict[Kind, list[Tensor]]:
    _, _, _, q, *keys = rows
    return {"queries": [q], "keys": keys}


BACKWARD = Direction(
    name="backward",
    results_name="gradients",
    trace_name="cad/attention backward",
    compute=_differentiate,
    results_like=_gradients_like,
    combine=lambda combination, partials, like: combination.add(partials, like),
)
"""Query rows: dout, lse, delta (or out, by a plan of one plain kernel call), q. Results: gradients of q, k, v."""


def _join(k: Tensor, v: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return k [T, Hkv, D], to whose heads the ``shared`` part [T, 1, D'] is appended, and v."""
    if shared is None:
        return k, v
    of_heads = shared.expand(-1, k.shape[1], -1)
    return torch.cat((k, of_heads), -1), v


def _split(
    dk: Tensor, dv: Tensor, k: Tensor, v: Tensor, shared: Tensor | None = None
) -> Results:
    """Return the gradients of k, v and ``shared`` from those of the results of ``_join``."""
    if shared is None:
        return dk, dv
    own = dk[..., : k.shape[2]].contiguous()
    of_heads = dk[..., k.shape[2] :]
    of_shared = of_heads.sum(1, keepdim=True, dtype=compute_dtype(dk.dtype))
    return own, dv, of_shared.to(dk.dtype)
