"""What one rank computes for a plan, once the rows are there: at most one causal and one unmasked kernel call.

Imports torch and runtime modules; nothing here exchanges rows.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import AttentionKernel, compute_dtype
from torchtitan_cad.runtime.tables import PlanTables


class RowSpace:
    """Local rows [N, ...] followed by received rows [M, ...], which may be views of messages."""

    def __init__(self, local: Tensor, received: Tensor) -> None:
        self.local, self.received = local, received

    def take(self, rows: Tensor | slice | None) -> Tensor:
        """Rows as a ``Call`` names them: a view where they are local and lie in order, otherwise a copy."""
        if rows is None:
            return self._joined
        if isinstance(rows, slice):
            return self.local[rows]
        if self.local.device.type == "cuda":
            from torchtitan_cad.runtime.triton.gather import gather_rows

            return gather_rows(self.local, self.received, rows)
        return self._joined.index_select(0, rows)

    @cached_property
    def _joined(self) -> Tensor:
        return torch.cat((self.local, self.received)) if self.received.shape[0] else self.local


def gather(plan: PlanTables, queries: Sequence[RowSpace], keys: Sequence[RowSpace]) -> list[list[Tensor]]:
    """Per call of the plan its rows of every space, first those of queries. Received rows are not needed afterwards."""
    return [
        [*(space.take(call.q_rows) for space in queries), *(space.take(call.kv_rows) for space in keys)]
        for call in plan.calls
    ]


def attend(
    kernel: AttentionKernel, plan: PlanTables, inputs: Sequence[Sequence[Tensor]], q: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of all tasks, merged per query row.

    Args:
        inputs: gathered q, k and v of every call. q: for its shape [N, Hq, D] and dtype.

    Returns:
        out [num_q, Hq, D] and lse [num_q, Hq], fp32 (fp64).
    """
    out_acc = q.new_empty(plan.num_q, *q.shape[1:], dtype=compute_dtype(q.dtype))
    lse_acc = out_acc.new_empty(out_acc.shape[:2])
    results = [
        kernel.forward(rows_q, rows_k, rows_v, call.args)
        for call, (rows_q, rows_k, rows_v) in zip(plan.calls, inputs, strict=True)
    ]
    plan.q_partials.merge(out_acc, lse_acc, [out for out, _ in results], [lse for _, lse in results], fresh=True)
    return out_acc, lse_acc


def attend_backward(
    kernel: AttentionKernel, plan: PlanTables, inputs: Sequence[Sequence[Tensor]], q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of all tasks, summed per row.

    Args:
        inputs: gathered dout, q, lse, delta, k and v of every call. q, k: for their shapes [N, H, D] and dtype.

    Returns:
        dq [num_q, Hq, D], dk and dv [num_kv, Hkv, D], fp32 (fp64).
    """
    dq_acc = q.new_empty(plan.num_q, *q.shape[1:], dtype=compute_dtype(q.dtype))
    dk_acc, dv_acc = (k.new_empty(plan.num_kv, *k.shape[1:], dtype=dq_acc.dtype) for _ in range(2))
    parts = [
        kernel.backward(dout, rows_q, rows_k, rows_v, lse, delta, call.args)
        for call, (dout, rows_q, lse, delta, rows_k, rows_v) in zip(plan.calls, inputs, strict=True)
    ]
    dqs, dks, dvs = ([part[i] for part in parts] for i in range(3))
    plan.q_partials.add(dq_acc, dqs, fresh=True)
    plan.kv_partials.add(dk_acc, dks, fresh=True)
    plan.kv_partials.add(dv_acc, dvs, fresh=True)
    return dq_acc, dk_acc, dv_acc
