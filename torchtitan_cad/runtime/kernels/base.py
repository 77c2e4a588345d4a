"""What an attention kernel is: the arguments of one call, the protocol, and the choice by name.

A kernel computes one variable-length call: n tasks, each a range of query rows against a range of key rows, packed one
after the other. Imports torch and numpy; on CUDA its own Triton kernels too.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.runtime import triton

_logger = logging.getLogger(__name__)
_INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class CallArgs:
    """The tasks of one kernel call, on the compute device and on the host.

    Attributes:
        cu_q, cu_k: int32 [n + 1] on the compute device, offsets of the tasks in the packed query and key rows.
        max_q, max_k: most query and key rows of any task (0 without tasks).
        causal: bottom-right causal mask: of a task with Lq queries and Lk keys, query i sees keys j <= i + Lk - Lq.
            False: every query sees every key.
        scale: factor on the scores before the softmax.
        cu_q_host, cu_k_host: the offsets as int64 [n + 1] on the host.
        q_start, kv_start: int64 [n] on the host, document positions of each task's first query and first key. They
            decide how a kernel tiles, never what it computes.
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
    kv_start: np.ndarray

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
        kv_start: np.ndarray | Sequence[int] | None = None,
    ) -> "CallArgs":
        """Checks host arrays and copies the offsets to ``device``.

        Args:
            cu_q, cu_k: [n + 1] offsets of the tasks, from 0, non-decreasing.
            q_start, kv_start: [n] document positions. By default the later of a causal task's first query and first key
                gets the position that aligns their ends and the other one 0; without a mask both are 0.

        Raises:
            ValueError: offsets that are no offsets, or causal tasks whose queries and keys do not end at one position.
        """
        cu_q, cu_k = _offsets("cu_q", cu_q), _offsets("cu_k", cu_k)
        if len(cu_q) != len(cu_k):
            raise ValueError(f"cu_q describes {len(cu_q) - 1} tasks and cu_k {len(cu_k) - 1}")
        len_q, len_k = np.diff(cu_q), np.diff(cu_k)
        lead = len_k - len_q if causal else np.zeros_like(len_q)
        q_start = np.maximum(lead, 0) if q_start is None else np.asarray(q_start, np.int64)
        kv_start = np.maximum(-lead, 0) if kv_start is None else np.asarray(kv_start, np.int64)
        if q_start.shape != len_q.shape or kv_start.shape != len_q.shape:
            raise ValueError(f"q_start {q_start.shape} and kv_start {kv_start.shape} must have one entry per task")
        if causal and not np.array_equal(q_start + len_q, kv_start + len_k):
            raise ValueError("the queries and keys of a causal task must end at the same document position")
        return cls(
            cu_q=_to_device(cu_q, device),
            cu_k=_to_device(cu_k, device),
            max_q=int(len_q.max(initial=0)),
            max_k=int(len_k.max(initial=0)),
            causal=causal,
            scale=scale,
            cu_q_host=cu_q,
            cu_k_host=cu_k,
            q_start=q_start,
            kv_start=kv_start,
        )

    @property
    def num_tasks(self) -> int:
        return len(self.q_start)


class AttentionKernel(Protocol):
    """Attention over packed rows, forward and backward, on partial key ranges too.

    A task may hold only some of the keys that its queries attend to. Its forward is then one partial result, to be
    merged by log-sum-exp (``merge.merge_partials``); its backward is exact when given the statistics of the merged row.
    """

    name: str

    def check(self, dtype: torch.dtype, head_dim: int) -> None:
        """Raises a ValueError with the remedy if the kernel cannot take such queries, keys and values."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: CallArgs) -> tuple[Tensor, Tensor]:
        """softmax(scale * q k^T) v of every task.

        Args:
            q: [Tq, Hq, D]. k, v: [Tk, Hkv, D], Hq a multiple of Hkv.

        Returns:
            out [Tq, Hq, D] in q's dtype and lse [Tq, Hq] of any strides, the natural log of the softmax's denominator,
            fp32 (fp64 for fp64 inputs). A row that sees no key has out = 0 and an infinite lse, of either sign.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, call: CallArgs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of every task's contribution.

        Args:
            dout: [Tq, Hq, D] gradient of the merged rows. q, k, v: as in ``forward``.
            lse: [Tq, Hq] log-sum-exp of the merged row (over all its keys, wherever they are computed); infinite for a
                row without keys.
            delta: [Tq, Hq], rowsum(dout * out) of the merged row; lse and delta in fp32 (fp64 for fp64 inputs).

        Returns:
            dq [Tq, Hq, D], dk and dv [Tk, Hkv, D], in fp32 (fp64) or in the inputs' dtype, whichever the kernel has.
        """
        ...


def get_kernel(
    name: str, device: torch.device | str, head_dim: int = 128, group: dist.ProcessGroup | None = None
) -> AttentionKernel:
    """The kernel for the TOML key ``cad.kernel``.

    Args:
        name: "varlen", "flash_attn", "cpu" or "auto": on the CPU cpu; on CUDA flash_attn with FlashAttention-3 or 4 if
            one is installed that is made for the device and whose trial agrees with varlen, otherwise varlen.
        device: where the model's tensors live.
        head_dim: of the model; it decides what "auto" may take.
        group: ranks that choose together, all of which must call: if their choices by "auto" differ, all take varlen.

    Raises:
        ValueError: an unknown kernel, or one that does not run on ``device`` or is not installed.
    """
    kernel, reason = choose_kernel(name, device, head_dim)
    if name == "auto" and torch.device(device).type == "cuda":
        if group is not None:
            kernel, reason = _agree(kernel, reason, group)
        _logger.info(f"cad.kernel = 'auto': {kernel}; {reason}")
    return kernel


def choose_kernel(name: str, device: torch.device | str, head_dim: int = 128) -> tuple[AttentionKernel, str]:
    """As ``get_kernel``, with the reason for the choice, and without a word in the log."""
    device = torch.device(device)
    if name == "auto" and device.type == "cuda":
        return _best_on_cuda(device, head_dim)
    return _named_kernel(name, device), "the one for CPU ranks" if name == "auto" else "as set"


def _named_kernel(name: str, device: torch.device) -> AttentionKernel:
    match name, device.type:
        case "auto" | "cpu", "cpu":
            from .cpu import CpuKernel

            return CpuKernel()
        case "varlen", "cuda":
            from .varlen import VarlenKernel

            return VarlenKernel()
        case "flash_attn", "cuda":
            from .flash_attn import find_kernel

            return find_kernel(device)
        case "cpu" | "varlen" | "flash_attn", _:
            raise ValueError(f"cad.kernel = {name!r} does not run on {device.type} tensors; set cad.kernel = 'auto'")
        case "auto", _:
            raise ValueError(f"cad.kernel = 'auto' knows no kernel for {device.type} tensors; train on cuda or cpu")
        case _:
            raise ValueError(f"cad.kernel = {name!r} is unknown; set one of 'auto', 'varlen', 'flash_attn', 'cpu'")


def _best_on_cuda(device: torch.device, head_dim: int) -> tuple[AttentionKernel, str]:
    from .flash_attn import find_kernel, find_libraries
    from .trial import disagreement
    from .varlen import VarlenKernel

    varlen = VarlenKernel()
    if not any(library.generation > 2 for library in find_libraries()[0]):
        return varlen, "neither FlashAttention-3 nor 4 is installed"
    try:
        kernel = find_kernel(device)
        kernel.check(torch.bfloat16, head_dim)
        reason = disagreement(kernel, varlen, device, head_dim) if kernel.library.generation > 2 else "no better"
    except Exception as error:  # packages and their compilers have exceptions of their own
        reason = f"{type(error).__name__}: {error}"
    if reason:
        return varlen, f"not flash_attn: {reason}"
    return kernel, "it passed its trial"


def _agree(kernel: AttentionKernel, reason: str, group: dist.ProcessGroup) -> tuple[AttentionKernel, str]:
    """This rank's choice if it is that of all ranks of the group, else varlen; and why."""
    choices = [(str(kernel), reason)] * group.size()
    dist.all_gather_object(choices, choices[group.rank()], group=group)
    if all(choice == choices[0][0] for choice, _ in choices):
        return kernel, reason
    from .varlen import VarlenKernel

    ranks = dist.get_process_group_ranks(group)
    differing = next(i for i, (choice, _) in enumerate(choices) if choice != choices[0][0])
    odd = [f"rank {ranks[i]} chose {choices[i][0]} ({choices[i][1]})" for i in (0, differing)]
    return VarlenKernel(), f"the ranks' choices differ: {' and '.join(odd)}"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax statistics and accumulators: fp64 for fp64, otherwise fp32."""
    return torch.promote_types(dtype, torch.float32)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout * out), [T, H] in fp32 (fp64): the ``delta`` of ``AttentionKernel.backward``."""
    dtype = compute_dtype(out.dtype)
    if triton.runs_on(out.device):
        from torchtitan_cad.runtime.triton import delta

        sums = out.new_empty(out.shape[:-1], dtype=dtype)
        delta.row_delta(dout.contiguous(), out.contiguous(), sums)
        return sums
    return (dout.to(dtype) * out.to(dtype)).sum(-1)


def _offsets(name: str, values: np.ndarray | Sequence[int]) -> np.ndarray:
    offsets = np.array(values, dtype=np.int64)
    if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise ValueError(f"{name} must hold the tasks' offsets: from 0, non-decreasing, one more than tasks")
    if offsets[-1] > _INT32_MAX:
        raise ValueError(f"{name} ends at {offsets[-1]} rows; kernels take 32-bit offsets (at most {_INT32_MAX})")
    return offsets


def _to_device(offsets: np.ndarray, device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(offsets.astype(np.int32))
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor
