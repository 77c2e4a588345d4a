# SPDX-License-Identifier: BSD-3-Clause
"""Choosing the kernel for ``cad.kernel``: by name, or the fastest of the correct ones, the same on all ranks."""

import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.kernels import cudnn
from torchtitan_cad.runtime.kernels.base import (
    AttentionKernel,
    Merged,
    VarlenArgs,
    random_rows,
    row_delta,
)
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.flash_attn import FlashAttnKernel, find_kernels
from torchtitan_cad.runtime.kernels.varlen import VarlenKernel
from torchtitan_cad.runtime.timing import median_milliseconds
from torchtitan_cad.runtime.transport.base import gather

KERNELS = ("auto", "varlen", "flash_attn", "cudnn", "cpu")
"""values of ``cad.kernel``"""

TOLERANCE = 0.02
"""largest difference in a trial / largest value: a few roundings of bf16."""
ROWS = 16384
"""tokens of a trial, whose documents have 1/2, 1/4, 1/8, ... of them"""
_SHORTEST = 128
"""tokens of a trial's shortest document"""
_MANY = 300
"""documents of one call of a trial: FlashAttention-4 has code of its own for more than 256"""
LAYERS = 16
"""runs of the calls of one plan in a trial, one per layer: a library's work for new shapes counts once per LAYERS."""
REPEATS = 3
"""timed runs of a trial, of which the median counts"""

_SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)

_logger = logging.getLogger(__name__)


def get_kernel(
    name: str,
    device: torch.device | str,
    shape: AttentionShape = _SHAPE,
    group: dist.ProcessGroup | None = None,
    *,
    timed: bool = True,
) -> AttentionKernel:
    """Return the kernel for the TOML key ``cad.kernel``, and log the reason for the choice of "auto".

    Args:
        name: one of ``KERNELS``. "auto" is "cpu" on CPU. On CUDA it is the fastest usable kernel whose trial agrees
            with varlen.
        timed: False makes "auto" the first of those in the order of ``preferred``, whatever time they take.
        device: device of the model's tensors.
        shape: heads of a rank and their size, for the trial.
        group: gloo group of ranks that choose together and must all call.

    Raises:
        ValueError: the kernel is unknown, does not run on ``device``, is not installed, or its trial fails.
    """
    kernel, reason = choose_kernel(name, device, shape, group, timed=timed)
    if padding := padding_remark(kernel, shape):
        _logger.info(padding)
    if name == "auto" and torch.device(device).type == "cuda":
        _logger.info(f"cad.kernel = 'auto': {kernel}; {reason}")
        if remark := slower_than_possible(kernel, torch.device(device)):
            _logger.warning(remark)
    return kernel


def choose_kernel(
    name: str,
    device: torch.device | str,
    shape: AttentionShape = _SHAPE,
    group: dist.ProcessGroup | None = None,
    *,
    timed: bool = True,
) -> tuple[AttentionKernel, str]:
    """Return the choice of ``get_kernel`` and its reason, without logging."""
    device = torch.device(device)
    match name, device.type:
        case "auto" | "cpu", "cpu":
            return CpuKernel(), "the one for CPU ranks" if name == "auto" else "as set"
        case "auto" | "flash_attn" | "cudnn", "cuda":
            return _best(name, device, shape, group=group, timed=timed)
        case "auto", _:
            raise ValueError(
                f"cad.kernel = 'auto' knows no kernel for {device.type} tensors; train on cuda or cpu"
            )
        case "varlen", "cuda":
            return VarlenKernel(), "as set"
    if name in KERNELS:
        raise ValueError(
            f"cad.kernel = {name!r} does not run on {device.type} tensors; set cad.kernel = 'auto'"
        )
    raise ValueError(
        f"cad.kernel = {name!r} is unknown; set one of {', '.join(map(repr, KERNELS))}"
    )


def padding_remark(kernel: AttentionKernel, shape: AttentionShape) -> str | None:
    """Return what it costs that ``kernel`` pads heads of this shape, by matrix products; None if it does not."""
    keys = shape.head_dim
    values = shape.out_dim
    if (common := kernel.common_dim(keys, values)) is None:
        return None
    forward = 2 * common / (keys + values)
    backward = 5 * common / (3 * keys + 2 * values)
    return (
        f"{kernel} takes heads of one size only: those of {min(keys, values)} elements are padded to {common}, so that "
        f"attention computes {forward:.2f} times as much forward and {backward:.2f} times as much backward, and copies "
        "values and outputs"
    )


def slower_than_possible(kernel: AttentionKernel, device: torch.device) -> str | None:
    """Return what to install if ``kernel`` is FlashAttention-2 on a device with faster libraries; otherwise None."""
    is_2 = kernel.name == "varlen" or (
        isinstance(kernel, FlashAttnKernel) and kernel.library.generation == 2
    )
    major, minor = torch.cuda.get_device_capability(device) if is_2 else (0, 0)
    if major not in (9, 10):
        return None
    stock = (
        ", and slower than stock attention, which is cuDNN's with this torch"
        if cudnn.lacking(device) is None
        else ""
    )
    package = "flash-attn-4 or FlashAttention-3" if major == 9 else "flash-attn-4"
    return (
        f"{kernel} is FlashAttention-2, far below what a device of compute capability {major}.{minor} can do{stock}: "
        f"install {package} and set cad.kernel = 'auto'"
    )


class Trial:
    """Calls like a plan's, with bf16 rows, by which kernels are compared with a trusted kernel and timed.

    Each document is one causal task, and its second half is also an unmasked task against the first half. The
    comparison adds one causal task of the second half against all keys, unless the kernel takes squares only, many
    short documents, and documents in windows, if the shape has one.
    """

    def __init__(
        self,
        trusted: AttentionKernel,
        device: torch.device,
        shape: AttentionShape,
        rows: int = ROWS,
    ) -> None:
        self._trusted = trusted
        self._device = device
        self._scale = shape.head_dim**-0.5
        self._num_rows = rows
        self._window = shape.window
        whole = VarlenArgs.from_numpy(
            [0, rows], [0, rows], causal=True, scale=self._scale, device=device
        )
        self._rows = random_rows(shape, torch.bfloat16, whole)

    def outcome(self, kernel: AttentionKernel, *, timed: bool = True) -> float | str:
        """Return the milliseconds of a forward and backward of ``kernel``, or a clause that tells what is wrong.

        Without ``timed`` the milliseconds are 0.
        """
        try:
            return self._disagreement(kernel) or (
                self._milliseconds(kernel) if timed else 0.0
            )
        except Exception as error:
            # packages and their compilers have exceptions of their own
            return f"failed: {type(error).__name__}: {error}"

    def _disagreement(self, kernel: AttentionKernel) -> str | None:
        squares, rectangles, prefixes = self._calls()
        short = [self._num_rows // _MANY] * _MANY
        calls = [squares, rectangles, self._call(short, short, causal=True)]
        if not kernel.squares_only:
            calls.append(prefixes)
        if self._window is not None:
            calls.append(replace(squares, window=self._window))
        for call in calls:
            want, merged = self._run(self._trusted, call)
            got, _ = self._run(kernel, call, merged)
            for name, actual, expected in zip(
                ("out", "lse", "dq", "dk", "dv"), got, want, strict=True
            ):
                if actual.shape != expected.shape:
                    return f"is wrong: {name} has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
                error = float(
                    (actual.double() - expected.double()).abs().max()
                    / expected.double().abs().max()
                )
                if not error < TOLERANCE:
                    return f"is wrong: {name} is off by {error:.2g} of its largest value, causal = {call.causal}"
        return None

    def _milliseconds(self, kernel: AttentionKernel) -> float:
        cut = itertools.count(1)

        def run_layers() -> None:
            calls = self._calls(next(cut))[:2]  # new shapes, as in a new plan
            for call in calls * LAYERS:
                self._run(kernel, call)

        return median_milliseconds(run_layers, self._device, REPEATS) / LAYERS

    def _calls(self, cut: int = 0) -> list[VarlenArgs]:
        """Return calls of squares, of rectangles, and of prefixes; ``cut`` shortens the first document."""
        lengths = [self._num_rows // 2 - cut]
        while lengths[-1] > _SHORTEST:
            lengths.append(lengths[-1] // 2)
        before = [length // 2 for length in lengths]
        after = [length - half for length, half in zip(lengths, before, strict=True)]

        return [
            self._call(lengths, lengths, causal=True),
            self._call(after, before, causal=False),
            self._call(after, lengths, causal=True),
        ]

    def _call(self, queries: list[int], keys: list[int], *, causal: bool) -> VarlenArgs:
        """Return a call of tasks with these numbers of queries and keys."""
        cu_q, cu_k = ([0, *itertools.accumulate(counts)] for counts in (queries, keys))
        return VarlenArgs.from_numpy(
            cu_q, cu_k, causal=causal, scale=self._scale, device=self._device
        )

    def _run(
        self, kernel: AttentionKernel, call: VarlenArgs, merged: Merged | None = None
    ) -> tuple[list[Tensor], Merged]:
        """Return out, lse, dq, dk and dv of a call, and the statistics for its backward, ``merged`` or its own."""
        num_q = int(call.cu_q_host[-1])
        num_k = int(call.cu_k_host[-1])
        q, k, v, dout = (
            x[:n] for x, n in zip(self._rows, (num_q, num_k, num_k, num_q), strict=True)
        )
        out, lse = kernel.forward(q, k, v, call)
        merged = merged or Merged(lse, row_delta(dout, out))
        return [out, lse, *kernel.backward(dout, q, k, v, merged, call)], merged


def compare_kernels(
    device: torch.device,
    shape: AttentionShape,
    name: str = "auto",
    *,
    timed: bool = True,
) -> tuple[list[tuple[AttentionKernel, float | str]], list[str]]:
    """Return every kernel for this shape in bf16 with its ``Trial.outcome``, varlen first; and reasons against others.

    A single kernel is not tried and has the outcome 0. ``name`` leaves out what is neither varlen nor of this name.
    """
    kernels: list[AttentionKernel] = [VarlenKernel()]
    reasons = list[str]()
    if name != "cudnn":
        packages, reasons = find_kernels(device)
        kernels += packages
    if name != "flash_attn":
        if lacking := cudnn.lacking(device):
            reasons.append(f"cudnn {lacking}")
        else:
            kernels.append(cudnn.CudnnKernel())
    for kernel in kernels[1:]:
        try:
            kernel.check(torch.bfloat16, shape.head_dim, shape.out_dim, shape.window)
        except ValueError as error:
            kernels.remove(kernel)
            reasons.append(str(error))
    if len(kernels) == 1:
        return [(kernels[0], 0.0)], reasons
    trial = Trial(kernels[0], device, shape)
    outcomes = [(kernel, trial.outcome(kernel, timed=timed)) for kernel in kernels]
    del trial
    torch.cuda.empty_cache()
    return outcomes, reasons


def preferred(names: Iterable[str]) -> str:
    """Return the newest FlashAttention of kernels' ``names``, or without one cudnn, or varlen."""
    return max(
        names, key=lambda name: (name.startswith("flash_attn"), name != "varlen", name)
    )


def _best(
    name: str,
    device: torch.device,
    shape: AttentionShape,
    group: dist.ProcessGroup | None,
    *,
    timed: bool,
) -> tuple[AttentionKernel, str]:
    """Return a kernel that is right on all ranks, and a text with the outcome of every kernel.

    It is that with the least time on its slowest rank; without ``timed`` the ``preferred`` one.

    Raises:
        ValueError: on all ranks; no kernel that has the name, other than "auto", is right.
    """
    timed = timed and name == "auto"
    compared, reasons = compare_kernels(device, shape, name, timed=timed)
    kernels = {str(kernel): kernel for kernel, _ in compared}
    outcomes = {str(kernel): outcome for kernel, outcome in compared}
    if group is not None:
        outcomes = _agree(outcomes, group)
    times = {
        title: outcome
        for title, outcome in outcomes.items()
        if isinstance(outcome, float)
    }
    found = {
        title: f"{time:.1f} ms" if timed else "is right"
        for title, time in times.items()
    }
    took = [
        f"{title} {found.get(title, outcome)}" for title, outcome in outcomes.items()
    ]
    said = took if len(outcomes) > 1 else []
    right = list(times) or [next(iter(kernels))]
    if name != "auto":
        right = [title for title in right if kernels[title].name == name]
    if not right:
        raise ValueError(
            f"cad.kernel = {name!r} cannot be used: {'; '.join([*said, *reasons])}; install what is missing, or set "
            "cad.kernel = 'auto'"
        )
    best = (
        min(right, key=lambda title: times.get(title, 0.0))
        if timed
        else preferred(right)
    )
    said = said or ["no other can be used"]
    return kernels[best], "; ".join([*said, *reasons])


def _agree(
    local: dict[str, float | str], group: dist.ProcessGroup
) -> dict[str, float | str]:
    """Return every kernel's longest time over the ranks of the group, or the first rank's reason against it."""
    everyone = gather(local, group)
    agreed = {}
    for name in sorted(set(itertools.chain(*everyone.values()))):
        of_ranks = {
            rank: outcomes.get(name, "cannot be used")
            for rank, outcomes in everyone.items()
        }
        wrong = [
            f"{outcome} (rank {rank})"
            for rank, outcome in of_ranks.items()
            if isinstance(outcome, str)
        ]
        agreed[name] = wrong[0] if wrong else max(of_ranks.values())
    return agreed
