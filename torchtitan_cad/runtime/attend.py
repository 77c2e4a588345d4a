"""What one rank computes for a plan, once the rows are there: a round or two of kernel calls (``tables.Round``).

Imports torch and runtime modules; nothing here exchanges rows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from torchtitan_cad.runtime.kernels.base import AttentionKernel, compute_dtype
from torchtitan_cad.runtime.tables import Call, PlanTables, Round


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


class Progress:
    """A plan's rounds of kernel calls, of which some have run.

    Args:
        inputs: gathered rows of every call.
        run: runs a round with the inputs of its calls; with ``fresh`` nothing has been accumulated before.
        results: what accumulates.
    """

    def __init__(
        self, plan: PlanTables, inputs: list[list[Tensor]], run: "_RunRound", results: tuple[Tensor, ...]
    ) -> None:
        self._run, self._results = run, results
        self._left = deque((round_, [inputs.pop(0) for _ in round_.calls]) for round_ in plan.rounds)
        self._fresh = True

    @property
    def calls_left(self) -> list[Call]:
        return [call for round_, _ in self._left for call in round_.calls]

    def advance(self) -> None:
        """Runs the next round."""
        round_, inputs = self._left.popleft()
        self._run(round_, inputs, self._fresh)
        self._fresh = False

    def finish(self) -> tuple[Tensor, ...]:
        """Runs what is left and returns the results."""
        while self._left:
            self.advance()
        return self._results


_RunRound = Callable[[Round, list[list[Tensor]], bool], None]


def attend(kernel: AttentionKernel, plan: PlanTables, inputs: list[list[Tensor]], q: Tensor) -> Progress:
    """Outputs of all tasks, merged per query row.

    Args:
        inputs: gathered q, k and v of every call. q: for its shape [N, Hq, D] and dtype.

    Returns:
        Progress towards out [num_q, Hq, D] and lse [num_q, Hq], fp32 (fp64).
    """
    out_acc = q.new_empty(plan.num_q, *q.shape[1:], dtype=compute_dtype(q.dtype))
    lse_acc = out_acc.new_empty(out_acc.shape[:2])

    def run(round_: Round, inputs: list[list[Tensor]], fresh: bool) -> None:
        results = []
        for call, (rows_q, rows_k, rows_v) in zip(round_.calls, inputs, strict=True):
            results.append(kernel.forward(rows_q, rows_k, rows_v, call.args))
        outs, lses = [out for out, _ in results], [lse for _, lse in results]
        round_.q_partials.merge(out_acc, lse_acc, outs, lses, fresh=fresh)

    return Progress(plan, inputs, run, (out_acc, lse_acc))


def attend_backward(
    kernel: AttentionKernel, plan: PlanTables, inputs: list[list[Tensor]], q: Tensor, k: Tensor
) -> Progress:
    """Gradients of all tasks, summed per row.

    Args:
        inputs: gathered dout, q, lse, delta, k and v of every call. q, k: for their shapes [N, H, D] and dtype.

    Returns:
        Progress towards dq [num_q, Hq, D], dk and dv [num_kv, Hkv, D], fp32 (fp64).
    """
    dq_acc = q.new_empty(plan.num_q, *q.shape[1:], dtype=compute_dtype(q.dtype))
    dk_acc, dv_acc = (k.new_empty(plan.num_kv, *k.shape[1:], dtype=dq_acc.dtype) for _ in range(2))

    def run(round_: Round, inputs: list[list[Tensor]], fresh: bool) -> None:
        parts = []
        for call, (dout, rows_q, lse, delta, rows_k, rows_v) in zip(round_.calls, inputs, strict=True):
            parts.append(kernel.backward(dout, rows_q, rows_k, rows_v, lse, delta, call.args))
        dqs, dks, dvs = ([part[i] for part in parts] for i in range(3))
        round_.q_partials.add(dq_acc, dqs, fresh=fresh)
        round_.kv_partials.add(dk_acc, dks, fresh=fresh)
        round_.kv_partials.add(dv_acc, dvs, fresh=fresh)

    return Progress(plan, inputs, run, (dq_acc, dk_acc, dv_acc))
