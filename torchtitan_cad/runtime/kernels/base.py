# SPDX-License-Identifier: BSD-3-Clause
"""The protocol of attention kernels, and the arguments of one call.

A kernel computes one variable-length call: n tasks, each a range of query rows against a range of key rows, packed one
after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime import triton
from torchtitan_cad.runtime.transport.base import rows_to_device


@dataclass(frozen=True, eq=False)
class VarlenArgs:
    """The tasks of one kernel call, on the compute device and on the host.

    Attributes:
        cu_q, cu_k: int32 [n + 1] on the compute device, offsets of the tasks in the packed query and key rows.
        max_q, max_k: most query and key rows of any task (0 without tasks).
        causal: bottom-right causal mask: in a task with Lq queries and Lk keys, query i sees keys j <= i + Lk - Lq.
            False: every query sees every key.
        scale: factor on the scores before the softmax.
        cu_q_host, cu_k_host: the offsets as int64 [n + 1] on the host.
        q_start: int64 [n] on the host, document positions of each task's first query. They affect the tiles of a
            kernel, not its results.
        window: in a causal call, query i sees only the last ``window`` of its keys; None: all of them.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    scale: float
    cu_q_host: np.ndarray
    cu_k_host: np.ndarray
    q_start: np.ndarray
    window: int | None = None

    @classmethod
    def from_numpy(
        cls,
        cu_q: np.ndarray | Sequence[int],
        cu_k: np.ndarray | Sequence[int],
        *,
        causal: bool,
        scale: float,
        device: torch.device | str = "cpu",
        q_start: np.ndarray | Sequence[int] | None = None,
        window: int | None = None,
    ) -> "VarlenArgs":
        """Check host arrays and copy the offsets to ``device``.

        Args:
            cu_q, cu_k: [n + 1] offsets of the tasks, from 0, non-decreasing.
            q_start: [n] document positions. By default max(Lk - Lq, 0) in a causal call, which aligns the ends of
                queries and keys, and 0 without a mask.

        Raises:
            ValueError: these are no offsets of the same tasks.
        """
        cu_q = np.array(cu_q, np.int64)
        cu_k = np.array(cu_k, np.int64)
        if cu_q.shape != cu_k.shape or not (_are_offsets(cu_q) and _are_offsets(cu_k)):
            raise ValueError(
                "cu_q and cu_k must hold the offsets of the same tasks: from 0, non-decreasing, one more than tasks"
            )
        len_q = np.diff(cu_q)
        len_k = np.diff(cu_k)
        if q_start is None:
            q_start = np.maximum(len_k - len_q, 0) if causal else np.zeros_like(len_q)
        return cls(
            rows_to_device(cu_q, torch.device(device), np.int32),
            rows_to_device(cu_k, torch.device(device), np.int32),
            max_q=int(len_q.max(initial=0)),
            max_k=int(len_k.max(initial=0)),
            causal=causal,
            scale=scale,
            cu_q_host=cu_q,
            cu_k_host=cu_k,
            q_start=np.asarray(q_start, np.int64),
            window=window,
        )


def random_rows(
    shape: AttentionShape, dtype: torch.dtype, call: VarlenArgs
) -> list[Tensor]:
    """Return random q, k, v and dout for the rows of a call, [rows, heads, D or Dv] on its device.

    They have a generator of their own: a job's parameters are drawn as if nothing was measured.
    """
    num_q = int(call.cu_q_host[-1])
    num_k = int(call.cu_k_host[-1])
    queries = (num_q, shape.num_heads)
    keys = (num_k, shape.num_kv_heads)
    sizes = [
        (*queries, shape.head_dim),
        (*keys, shape.head_dim),
        (*keys, shape.out_dim),
        (*queries, shape.out_dim),
    ]
    device = call.cu_q.device
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(*size, dtype=dtype, device=device, generator=generator)
        for size in sizes
    ]


class Merged(NamedTuple):
    """Statistics of merged rows, over all their keys on all servers. Either delta or out is set.

    Attributes:
        lse: [Tq, Hq] log-sum-exp, infinite for a row without keys, in fp32 (fp64 for fp64 inputs).
        delta: [Tq, Hq], rowsum(dout * out), in fp32 (fp64 for fp64 inputs).
        out: [Tq, Hq, Dv], contiguous, if this rank has computed all keys of every row; libraries take it directly.
    """

    lse: Tensor
    delta: Tensor | None = None
    out: Tensor | None = None


class AttentionKernel(Protocol):
    """Attention over packed rows, forward and backward, on partial key ranges too.

    A task may hold only some of the keys that its queries attend to. Its forward is then one partial result, to be
    merged by log-sum-exp (``merge.merge_partials``); its backward is exact when given the statistics of the merged row.

    Attributes:
        name: value of ``cad.kernel``.
        squares_only: True if causal tasks must have as many keys as queries; others are divided (``PlanTables``).
            Such kernels take no windows.
    """

    name: str
    squares_only: bool = False

    def __str__(self) -> str:
        return self.name

    def check(self, dtype: torch.dtype, shape: AttentionShape) -> None:
        """Raise a ValueError with the remedy if the kernel does not take rows of this dtype, such heads or windows."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: VarlenArgs
    ) -> tuple[Tensor, Tensor]:
        """Return softmax(scale * q k^T) v of every task.

        Args:
            q: [Tq, Hq, D].
            k, v: [Tk, Hkv, D] and [Tk, Hkv, Dv], Hq a multiple of Hkv.

        Returns:
            out [Tq, Hq, Dv] in q's dtype and lse [Tq, Hq] of any strides, the natural log of the softmax's denominator,
            fp32 (fp64 for fp64 inputs). A row that sees no key has out = 0 and an infinite lse, of either sign.
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        merged: Merged,
        call: VarlenArgs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of every task's contribution.

        Args:
            dout: [Tq, Hq, Dv] gradient of the merged rows.
            q, k, v: as in ``forward``.

        Returns:
            dq, dk and dv in the shapes of q, k and v, in fp32 (fp64) or in the inputs' dtype, depending on the kernel.
        """
        ...


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax statistics and accumulators: fp64 for fp64, otherwise fp32."""
    return torch.promote_types(dtype, torch.float32)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """Return rowsum(dout * out), [T, H] in fp32 (fp64): the ``delta`` of ``AttentionKernel.backward``."""
    dtype = compute_dtype(out.dtype)
    if triton.runs_on(out.device):
        from torchtitan_cad.runtime.triton import delta

        return delta.row_delta(dout.contiguous(), out.contiguous(), dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1)


def subtract_lse_gradient(
    dout: Tensor, delta: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``dout`` and ``delta`` of rows whose log-sum-exp has the gradient ``dlse`` [T, H].

    The gradient of the scores is P * (dout v^T - delta + dlse), so a kernel needs no more than delta - dlse. Libraries
    for 16-bit dtypes take it as a product of dout and an output, which only exists if dout is not negligible: the first
    element of such a row gets 2^-14 of dlse, far below the precision of the row's other terms.
    """
    if dout.dtype.itemsize == 2:
        least = dlse * 2**-14
        dout = dout.clone()
        first = dout[..., 0]
        first.copy_(torch.where(first.abs() < least.abs(), least, first))
    return dout, delta - dlse


def _are_offsets(values: np.ndarray) -> bool:
    return len(values) > 0 and values[0] == 0 and bool((np.diff(values) >= 0).all())
