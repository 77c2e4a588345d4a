"""The kernel for ``cad.kernel``: by name, or of those that agree on the device the fastest, the same on all ranks."""

import itertools
import logging

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_cad.planning import AttentionShape
from torchtitan_cad.runtime.kernels import cudnn
from torchtitan_cad.runtime.kernels.base import AttentionKernel, Merged, VarlenArgs, random_rows, row_delta
from torchtitan_cad.runtime.kernels.cpu import CpuKernel
from torchtitan_cad.runtime.kernels.flash_attn import FlashAttnKernel, find_kernels
from torchtitan_cad.runtime.kernels.varlen import VarlenKernel
from torchtitan_cad.runtime.timing import median_milliseconds
from torchtitan_cad.runtime.transport.base import gather

KERNELS = ("auto", "varlen", "flash_attn", "cudnn", "cpu")
"""Values of ``cad.kernel``."""

TOLERANCE = 0.02
"""Largest difference in a trial, relative to the largest value: a few roundings of bf16."""
ROWS, SHORTEST = 16384, 128
"""Tokens of a trial, in documents of a half, a quarter, an eighth, ... of them down to the second number."""
LAYERS = 16
"""How often a trial runs the calls of one plan: once a layer. It counts what a library does for new shapes so often."""
REPEATS = 3

_SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype_bytes=2)

_logger = logging.getLogger(__name__)


def get_kernel(
    name: str,
    device: torch.device | str,
    shape: AttentionShape = _SHAPE,
    group: dist.ProcessGroup | None = None,
) -> AttentionKernel:
    """Return the kernel for the TOML key ``cad.kernel``, and say in the log why "auto" took it.

    Args:
        name: one of ``KERNELS``. "auto" is on the CPU cpu; on CUDA the fastest of those that can be used and whose
            trial gives what varlen gives.
        device: where the model's tensors live.
        shape: heads of a rank and their size, for the trial.
        group: ranks that choose together, all of which must call: a gloo group, as NCCL would make a communicator.

    Raises:
        ValueError: an unknown kernel, or one that does not run on ``device`` or is not installed.
    """
    kernel, reason = choose_kernel(name, device, shape, group)
    if name == "auto" and torch.device(device).type == "cuda":
        _logger.info(f"cad.kernel = 'auto': {kernel}; {reason}")
        if remark := slower_than_possible(kernel, torch.device(device)):
            _logger.warning(remark)
    return kernel


def choose_kernel(
    name: str, device: torch.device | str, shape: AttentionShape = _SHAPE, group: dist.ProcessGroup | None = None
) -> tuple[AttentionKernel, str]:
    """Choose as ``get_kernel``, with the reason for the choice, and without a word in the log."""
    device = torch.device(device)
    match name, device.type:
        case "auto" | "cpu", "cpu":
            return CpuKernel(), "the one for CPU ranks" if name == "auto" else "as set"
        case "auto", "cuda":
            return _fastest(device, shape, group)
        case "auto", _:
            raise ValueError(f"cad.kernel = 'auto' knows no kernel for {device.type} tensors; train on cuda or cpu")
        case "varlen", "cuda":
            return VarlenKernel(), "as set"
        case "flash_attn", "cuda":
            kernels, reasons = find_kernels(device)
            if not kernels:
                raise ValueError(
                    f"cad.kernel = 'flash_attn' needs a FlashAttention package for this device: {'; '.join(reasons)}; "
                    "install flash-attn-4, or flash-attn (2.7 or newer), or set cad.kernel = 'varlen'"
                )
            return kernels[0], "as set"
        case "cudnn", "cuda":
            if lacking := cudnn.lacking(device):
                raise ValueError(f"cad.kernel = 'cudnn' {lacking}; set cad.kernel = 'auto'")
            return cudnn.CudnnKernel(), "as set"
    if name in KERNELS:
        raise ValueError(f"cad.kernel = {name!r} does not run on {device.type} tensors; set cad.kernel = 'auto'")
    raise ValueError(f"cad.kernel = {name!r} is unknown; set one of {', '.join(map(repr, KERNELS))}")


def slower_than_possible(kernel: AttentionKernel, device: torch.device) -> str | None:
    """Say what to install if ``kernel`` is FlashAttention-2 on a device that is made for more."""
    is_2 = kernel.name == "varlen" or (isinstance(kernel, FlashAttnKernel) and kernel.library.generation == 2)
    major, minor = torch.cuda.get_device_capability(device) if is_2 else (0, 0)
    if major not in (9, 10):
        return None
    stock = (
        ", and slower than stock attention, which is cuDNN's with this torch" if cudnn.lacking(device) is None else ""
    )
    package = "flash-attn-4 or FlashAttention-3" if major == 9 else "flash-attn-4"
    return (
        f"{kernel} is FlashAttention-2, far below what a device of compute capability {major}.{minor} can do{stock}: "
        f"install {package} and set cad.kernel = 'auto'"
    )


class Trial:
    """Calls of bf16 rows as a plan's, by which kernels are compared with a trusted one and timed.

    Documents are whole at home, but for half of each there is also an unmasked task. In the comparison this half sees
    its document's keys in one causal task as well, unless the kernel takes squares only.
    """

    def __init__(self, trusted: AttentionKernel, device: torch.device, shape: AttentionShape, rows: int = ROWS) -> None:
        self._trusted, self._device, self._scale, self._num_rows = trusted, device, shape.head_dim**-0.5, rows
        whole = VarlenArgs.from_numpy([0, rows], [0, rows], causal=True, scale=self._scale, device=device)
        self._rows = random_rows(shape, torch.bfloat16, whole, torch.Generator(device).manual_seed(0))

    def outcome(self, kernel: AttentionKernel) -> float | str:
        """Return how many milliseconds a forward and backward of ``kernel`` take, or what is wrong with it."""
        try:
            return self._disagreement(kernel) or self._milliseconds(kernel)
        except Exception as error:  # packages and their compilers have exceptions of their own
            return f"failed: {type(error).__name__}: {error}"

    def _disagreement(self, kernel: AttentionKernel) -> str | None:
        squares, rectangles, prefixes = self._calls()
        for call in (squares, rectangles) if kernel.squares_only else (squares, rectangles, prefixes):
            want, merged = self._run(self._trusted, call)
            got, _ = self._run(kernel, call, merged)
            for name, mine, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
                if mine.shape != theirs.shape:
                    return f"is wrong: {name} has shape {tuple(mine.shape)} instead of {tuple(theirs.shape)}"
                error = float((mine.double() - theirs.double()).abs().max() / theirs.double().abs().max())
                if not error < TOLERANCE:
                    return f"is wrong: {name} is off by {error:.2g} of its largest value, causal = {call.causal}"
        return None

    def _milliseconds(self, kernel: AttentionKernel) -> float:
        cut = itertools.count(1)

        def run_layers() -> None:
            calls = self._calls(next(cut))[:2]  # a plan's shapes are new
            for call in calls * LAYERS:
                self._run(kernel, call)

        return median_milliseconds(run_layers, self._device, REPEATS) / LAYERS

    def _calls(self, cut: int = 0) -> list[VarlenArgs]:
        """Return squares, rectangles, and the two as one task of each document; the first one shorter by ``cut``."""
        lengths = [self._num_rows // 2 - cut]
        while lengths[-1] > SHORTEST:
            lengths.append(lengths[-1] // 2)
        before = [length // 2 for length in lengths]
        after = [length - half for length, half in zip(lengths, before, strict=True)]

        def call(queries: list[int], keys: list[int], causal: bool) -> VarlenArgs:
            cu_q, cu_k = ([0, *itertools.accumulate(each)] for each in (queries, keys))
            return VarlenArgs.from_numpy(cu_q, cu_k, causal=causal, scale=self._scale, device=self._device)

        return [call(lengths, lengths, True), call(after, before, False), call(after, lengths, True)]

    def _run(
        self, kernel: AttentionKernel, call: VarlenArgs, merged: Merged | None = None
    ) -> tuple[list[Tensor], Merged]:
        """Return out, lse, dq, dk and dv of a call, and the statistics for the backward: those given or its own."""
        num_q, num_k = int(call.cu_q_host[-1]), int(call.cu_k_host[-1])
        q, k, v, dout = (x[:n] for x, n in zip(self._rows, (num_q, num_k, num_k, num_q), strict=True))
        out, lse = kernel.forward(q, k, v, call)
        merged = merged or Merged(lse, row_delta(dout, out))
        return [out, lse, *kernel.backward(dout, q, k, v, merged, call)], merged


def compare_kernels(
    device: torch.device, shape: AttentionShape
) -> tuple[list[tuple[AttentionKernel, float | str]], list[str]]:
    """Return every kernel for bf16 of this shape with its ``Trial.outcome``, varlen first; and why there are no others.

    A kernel that is the only one is not tried and has the outcome 0.
    """
    packages, reasons = find_kernels(device)
    kernels: list[AttentionKernel] = [VarlenKernel(), *packages]
    if lacking := cudnn.lacking(device):
        reasons.append(f"cudnn {lacking}")
    else:
        kernels.append(cudnn.CudnnKernel())
    for kernel in kernels[1:]:
        try:
            kernel.check(torch.bfloat16, shape.head_dim)
        except ValueError as error:
            kernels.remove(kernel)
            reasons.append(str(error))
    if len(kernels) == 1:
        return [(kernels[0], 0.0)], reasons
    trial = Trial(kernels[0], device, shape)
    outcomes = [(kernel, trial.outcome(kernel)) for kernel in kernels]
    del trial
    torch.cuda.empty_cache()
    return outcomes, reasons


def _fastest(
    device: torch.device, shape: AttentionShape, group: dist.ProcessGroup | None
) -> tuple[AttentionKernel, str]:
    """Return the kernel that is fastest on the rank where it is slowest; and what each took, or why it is out."""
    compared, reasons = compare_kernels(device, shape)
    kernels, outcomes = {str(each): each for each, _ in compared}, {str(each): outcome for each, outcome in compared}
    if group is not None:
        outcomes = _agree(outcomes, group)
    times = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, float)}
    best = min(times, key=lambda name: times[name], default=next(iter(kernels)))
    took = [f"{name} {outcome if name not in times else f'{outcome:.1f} ms'}" for name, outcome in outcomes.items()]
    return kernels[best], "; ".join([*(took if len(outcomes) > 1 else ["no other can be used"]), *reasons])


def _agree(mine: dict[str, float | str], group: dist.ProcessGroup) -> dict[str, float | str]:
    """Return of every kernel its longest time over the ranks of the group, or why it is out on the first such rank."""
    everyone, agreed = gather(mine, group), {}
    for name in sorted({name for outcomes in everyone.values() for name in outcomes}):
        of_ranks = {rank: outcomes.get(name, "cannot be used") for rank, outcomes in everyone.items()}
        wrong = [f"{each} (rank {rank})" for rank, each in of_ranks.items() if isinstance(each, str)]
        agreed[name] = wrong[0] if wrong else max(of_ranks.values())
    return agreed
