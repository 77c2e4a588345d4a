# SPDX-License-Identifier: BSD-3-Clause
"""Jobs with CAD and their references without: the compositions that are tested, and what comparing them takes."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.lib.jobs.harness import RunResult, gradient_errors, run
from tests.lib.jobs.patched import torchtitan_with
from torchtitan_cad.integration.pingpong.segment_graph import FIRST_TORCH
from torchtitan_cad.tools.report import (
    check_logged_step,
    find_steps,
    read_steps,
    summarize,
)

DEFAULTS = ("--job.custom_config_module=torchtitan_cad.job_config", "--parallelism.cad")
"""All of [cad] as it is by default."""
BY_RATES = (*DEFAULTS, "--debug.no-deterministic")
"""Of which "auto" plans by rates, which must be planted, or plans depend on how fast a machine is."""
CAD = (
    *DEFAULTS,
    "--cad.placement=loader",
    "--cad.tolerance=0.02",  # plans of tests do not depend on how fast a machine is
)
"""Homes of the loader; test_placement.py repeats the compositions with the default."""
PLACED = (*CAD, "--cad.placement=auto")
COMMON = (
    "--training.seq_len=1024",
    "--validation.seq_len=1024",
    "--metrics.enable_tensorboard",
)
FAST = 1e12
SLOW = 1.0
"""bytes / s: links by which all attention moves that is uneven, and by which none does; see ``run``"""
VALIDATION = ("--validation.enable", "--validation.steps=1")
"""One batch after step 1: cheap enough for every composition."""
TOLERANCE = 64 * torch.finfo(torch.float32).eps
"""relative error of losses and gradient norms in fp32: sums over the 4,096 tokens of a batch err by a random walk of as
many roundings, hence by their square root"""


DEGREES = re.compile(r"\.(?:tensor|context|pipeline)_parallel_degree=(\d+)")


def ranks_per_loader(args: Iterable[str]) -> int:
    """Ranks among which every data-parallel rank's batch is divided."""
    return math.prod(map(int, DEGREES.findall(" ".join(args))))


@dataclasses.dataclass(frozen=True)
class Composition:
    """A job with CAD (``args``) and its reference without (``reference_args``); both get ``shared``."""

    name: str
    args: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    reference_args: tuple[str, ...] = ()
    dp: int = 2
    """Data-parallel ranks."""
    moves: bool = True
    """Whether tasks must move: the CAD group has more than one rank, and plans do not depend on measured times."""
    needs_torch: str = "2.11"
    reports_loss: bool = True
    validates: bool = True

    @property
    def nranks(self) -> int:
        return self.dp * ranks_per_loader((*self.shared, *self.args))

    @property
    def reference_nranks(self) -> int:
        return self.dp * ranks_per_loader((*self.shared, *self.reference_args))


def name_of(case: Composition) -> str:
    return case.name


def skip_if_torch_is_too_old(case: Composition) -> None:
    if TorchVersion(torch.__version__) < case.needs_torch:
        pytest.skip(f"stock torchtitan cannot run this with torch {torch.__version__}")


def dp(**degrees: int) -> tuple[str, ...]:
    return tuple(
        f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()
    )


def flavor(model: str, name: str = "tiny") -> tuple[str, ...]:
    return f"--model.name={model}", f"--model.flavor={name}"


def schedule(name: str) -> tuple[str, ...]:
    return (f"--parallelism.pipeline_parallel_schedule={name}",)


def global_batch(rows: int) -> tuple[str, ...]:
    return (f"--training.global_batch_size={rows}",)


TP2 = dp(tensor_parallel=2)
CP2 = dp(context_parallel=2)
EP2 = dp(expert_parallel=2)
ETP2 = dp(expert_tensor_parallel=2)
HALVES = ("--cad.nano_batches=2",)
"""Two nano-batches: halves of rows, or of an odd number of rows in their middle."""
DDP2 = dp(data_parallel_replicate=2, data_parallel_shard=1)
BATCH4 = ("--training.local_batch_size=4", "--validation.local_batch_size=4")
PP2 = (*dp(pipeline_parallel=2), *BATCH4)
BY_ROW = ("--parallelism.pipeline_parallel_microbatch_size=2",)
SDPA_GQA = ("--model.flavor=tiny_sdpa_gqa",)
QWEN3 = flavor("qwen3", "tiny_varlen")
TIED = flavor("qwen3", "tiny_tied")
FOUR_BLOCKS = ("--model.flavor=tiny4_varlen",)
SMALL_BUFFERS = ("--cad.receive_buffer_gb=2e-5",)
"""10 KB: rows travel in many chunks."""
ROWS_CP4 = ("--cad.documents=row", "--cad.min_shard=32", *dp(context_parallel=4))
VALIDATE_OFTEN = ("--validation.enable", "--validation.freq=1", "--validation.steps=2")
VALIDATE4 = (*VALIDATE_OFTEN, "--validation.local_batch_size=4")
PROFILED = (
    "--profiling.enable_profiling",
    "--profiling.profile_freq=2",
    "--profiling.profiler_warmup=0",
    "--profiling.profiler_active=1",
)
"""Traces of every second step."""
RESEND = ("--cad.backward=resend",)
SYMMETRIC = ("--cad.transport=symm_mem",)
TOLERANCE_AUTO = ("--cad.tolerance=auto", "--debug.no-deterministic")
COMPILE = ("--compile.enable",)
LAYER = ("--activation_checkpoint.mode=selective",)
OP = (*LAYER, "--activation_checkpoint.selective_ac_option=op")
FULL = ("--activation_checkpoint.mode=full",)
ATTENTION_KEPT = (*FULL, "--cad.no-recompute-attention")


def pp2(
    name: str, *args: str, reference_args: tuple[str, ...] = (), **options: Any
) -> Composition:
    """Two stages of two data-parallel ranks, beside a run without stages."""
    return Composition(
        name, args=(*PP2, *args), reference_args=(*BATCH4, *reference_args), **options
    )


def pp2_of_four_blocks(name: str, *args: str, **options: Any) -> Composition:
    return pp2(name, *args, *FOUR_BLOCKS, reference_args=FOUR_BLOCKS, **options)


COMPOSITIONS = [
    Composition("fsdp2"),
    Composition("fsdp4", dp=4),
    Composition("resend", args=RESEND),
    Composition("tolerance_auto", args=TOLERANCE_AUTO, moves=False),
    Composition(
        "hsdp2x2", dp=4, shared=dp(data_parallel_replicate=2, data_parallel_shard=2)
    ),
    Composition("ddp2", args=DDP2),
    Composition("tp2", shared=TP2, dp=1, moves=False),
    Composition(
        "tp2_no_loss_parallel",
        shared=(*TP2, "--parallelism.disable_loss_parallel"),
        dp=1,
        moves=False,
    ),
    Composition("fsdp2xtp2", args=TP2),
    Composition("small_buffers", args=SMALL_BUFFERS),
    Composition("small_buffers_resend", args=(*SMALL_BUFFERS, *RESEND)),
    Composition("gradient_accumulation", shared=global_batch(12)),
    Composition("ac_selective_layer", args=LAYER),
    Composition("ac_selective_op", args=OP),
    Composition("ac_full", args=FULL),
    Composition("ac_full_attention_kept", args=ATTENTION_KEPT),
    Composition("ac_full_resend", args=(*RESEND, *FULL)),
    # The loss and validation, which are graphs of their own, are compiled in compile_resend_ac_op_tp2 and below.
    Composition(
        "compile", args=(*COMPILE, "--compile.components=model"), validates=False
    ),
    # Stock torchtitan's gradients under TP with compile differ from those without (torch 2.13): the twin compiles too.
    Composition("compile_resend_ac_op_tp2", args=RESEND, shared=(*COMPILE, *OP, *TP2)),
    Composition(
        "ddp2_gradient_accumulation",
        args=(*DDP2, *global_batch(8)),
        reference_args=global_batch(8),
    ),
    Composition("cp2", args=CP2, dp=1),
    Composition("fsdp2xcp2", args=CP2),
    Composition("cp2xtp2", args=(*CP2, *TP2), dp=1),
    pp2("pp2_1f1b"),
    pp2_of_four_blocks(
        "pp2_interleaved_tolerance_auto", *schedule("Interleaved1F1B"), *TOLERANCE_AUTO
    ),
    pp2_of_four_blocks("pp2_interleaved", *schedule("Interleaved1F1B")),
    # torch cannot validate in V schedules, and its 2.11 cannot run them over gloo: a rank sends to itself.
    pp2_of_four_blocks(
        "pp2_zbv", *schedule("ZBVZeroBubble"), needs_torch="2.13", validates=False
    ),
    # torchtitan reports no loss with this one: it takes that of the first pipeline rank for ZBVZeroBubble alone.
    pp2_of_four_blocks(
        "pp2_dualpipev",
        *schedule("DualPipeV"),
        "--parallelism.no-pipeline-parallel-expert-parallel-overlap",
        needs_torch="2.13",
        reports_loss=False,
        validates=False,
    ),
    pp2("pp2xcp2", *CP2, dp=1),
    Composition("qwen3_fsdp2", shared=QWEN3),
    Composition("qwen3_fsdp2xtp2", args=TP2, shared=QWEN3),
    Composition("qwen3_cp2", args=CP2, shared=QWEN3, dp=1),
    Composition("tied_fsdp2", shared=TIED),
    Composition("tied_fsdp2xtp2", args=TP2, shared=TIED),
    Composition("tied_cp2", args=CP2, shared=TIED, dp=1),
    # Plain causal attention over the whole row, with grouped queries: the sdpa flavors.
    Composition(
        "sdpa_gqa_rows",
        args=("--cad.documents=row", *CP2),
        shared=SDPA_GQA,
        dp=1,
    ),
    # One document over four ranks, cut finely.
    Composition("split_kv_cp4", args=ROWS_CP4, shared=SDPA_GQA, dp=1),
    Composition("validation", shared=VALIDATE_OFTEN),
    pp2("validation_pp2", shared=VALIDATE_OFTEN),
]

ROW1 = ("--training.local_batch_size=1",)

HALVED = [
    Composition("rows_ac_op_accumulation", args=(*OP, *global_batch(8))),
    Composition("middle_resend_ac_full", args=(*ROW1, *FULL, *RESEND)),
    Composition("middle_attention_kept", args=(*ROW1, *ATTENTION_KEPT)),
    Composition("middle_cp2", args=(*ROW1, *CP2), dp=1),
    Composition("rows_tp2", args=TP2, dp=1),
    Composition("rows_compile", args=COMPILE),
    pp2("middle_pp2_validation", *VALIDATE4),
]
"""Jobs of two nano-batches, halved by rows or in the middle of rows."""

MORE_HALVED = [
    *COMPOSITIONS,
    Composition("middle_fsdp2", args=ROW1),
    Composition("middle_compile", args=(*ROW1, *COMPILE)),
    Composition("middle_compile_ac_full", args=(*ROW1, *FULL, *COMPILE)),
    Composition("rows_compile_attention_kept", args=(*ATTENTION_KEPT, *COMPILE)),
    Composition("middle_ac_op_3_rows", args=(*OP, "--training.local_batch_size=3")),
    Composition("middle_qwen3_cp2", args=(*ROW1, *CP2), shared=QWEN3, dp=1),
    Composition(
        "middle_fsdp2xcp2_gqa",
        args=(*ROW1, *CP2, "--model.flavor=tiny_varlen_gqa"),
    ),
    Composition("fsdp2xtp2_attention_kept", args=(*TP2, *ATTENTION_KEPT)),
    Composition("fsdp2xtp2_ac_full", args=(*TP2, *FULL)),
    # Stock's blocks, compiled, lose a gradient with TP on CPU (torch 2.13), and so do segments.
    Composition("fsdp2xtp2_compile", args=(*TP2, *COMPILE, "--training.steps=20")),
    Composition(
        "fsdp2xtp2_ac_layer_accumulation_resend",
        args=(*TP2, *LAYER, *global_batch(8), *RESEND),
    ),
    pp2("rows_pp2", *BY_ROW),
    pp2_of_four_blocks(
        "rows_pp2_zbv_tp2",
        *(*schedule("ZBVZeroBubble"), *BY_ROW, *TP2),
        "--training.local_batch_size=8",
        dp=1,
        needs_torch="2.13",
        validates=False,
    ),
]
"""All that one nano-batch composes with, halved by rows, and what halving in the middle of rows adds to it."""

CAN_TRACE = TorchVersion(torch.__version__) >= FIRST_TORCH
needs_traced = pytest.mark.skipif(
    not CAN_TRACE,
    reason=f"compiled graphs lose the order of streams before torch {FIRST_TORCH}",
)
TRACED = [
    Composition("rows", args=COMPILE),
    Composition("middle_resend", args=(*ROW1, *COMPILE, *RESEND)),
    Composition("rows_ac_op_accumulation", args=(*OP, *COMPILE, *global_batch(8))),
    Composition("rows_attention_kept", args=(*ATTENTION_KEPT, *COMPILE)),
    Composition("middle_cp2_qwen3", args=(*ROW1, *COMPILE, *CP2), shared=QWEN3, dp=1),
    Composition("rows_symm_mem", args=(*COMPILE, *SYMMETRIC)),
    Composition("rows_small_buffers", args=(*COMPILE, *SMALL_BUFFERS)),
    Composition(
        "rows_balanced_four_blocks_validation",
        args=(*FOUR_BLOCKS, *VALIDATE_OFTEN, *COMPILE, "--cad.placement=balanced"),
    ),
    pp2("middle_pp2_validation", *COMPILE, *VALIDATE4),
    Composition("ddp2", args=(*COMPILE, *DDP2)),
]
"""Jobs whose exchanges can be compiled."""

HALVED_SYMMETRIC = [
    Composition("rows_resend_symm_mem", args=(*RESEND, *SYMMETRIC)),
    Composition("rows_small_buffers_symm_mem", args=(*SMALL_BUFFERS, *SYMMETRIC)),
    Composition("middle_cp2_symm_mem", args=(*ROW1, *CP2, *SYMMETRIC), dp=1),
]


@functools.cache
def reference(
    nranks: int,
    args: tuple[str, ...],
    *,
    validates: bool = True,
    grads_at: int = 2,
) -> RunResult:
    """A run without CAD that validates after step 1 if it can; one serves many compositions.

    Stock torchtitan's ranks would take each other's graphs of the loss under tensor parallelism, and FSDP2 refuses its
    sharding of tied embeddings.
    """
    validation = VALIDATION if validates else ()
    needed = {"compile_caches": {*COMPILE, *TP2}, "tied_embeddings": {*TIED}}
    names = [name for name, met_by in needed.items() if met_by <= {*args}]
    search = [torchtitan_with(*names)] if names else []
    return run(
        [*COMMON, *validation, *args],
        nranks,
        300,
        grads_at=grads_at,
        pythonpath=search,
    )


@functools.cache
def stock(nranks: int, *args: str) -> RunResult:
    """A run without CAD from the parameters that torchtitan draws."""
    return run([*COMMON, *args], nranks, init_seed=None)


@functools.cache
def alone(flavor: str, degree: int, steps: int, *cad: str) -> RunResult:
    """One process on the batches of ``degree`` data-parallel ranks, with the last gradients; without CAD in fp64."""
    args = [
        *COMMON,
        *cad,
        f"--model.flavor={flavor}",
        f"--training.steps={steps}",
        *global_batch(2 * degree),
    ]
    return run(args, nranks=1, as_dp=degree, fp64=not cad, grads_at=steps)


@functools.cache
def rounding() -> float:
    """Largest relative error of a gradient in torchtitan's own run of two ranks in fp32, on this machine."""
    return max(gradient_errors(reference(2, ()), alone("tiny_varlen", 2, 2)).values())


def assert_trains_alike(
    result: RunResult,
    expected: RunResult,
    *,
    reports_loss: bool = True,
    exact: Callable[[], RunResult] | None = None,
) -> None:
    """Losses, gradients, their norms and the validation losses that ``result`` has differ by rounding.

    Each of two gradients in fp32 errs at most twice as much as ``rounding``; where that does not suffice, and there is
    an ``exact`` run, ``result`` errs at most four times as much as ``expected`` does.
    """
    assert_close(result.grad_norms, expected.grad_norms, "gradient norm")
    if reports_loss:
        assert_close(result.losses, expected.losses, "loss")
    for step, loss in result.validation_losses.items():
        assert_close(
            [loss],
            [expected.validation_losses[step]],
            f"validation loss of step {step}",
        )
    name, error = max(
        gradient_errors(result, expected).items(), key=lambda item: item[1]
    )
    allowed = 4 * rounding()
    if error > allowed and exact:
        error, allowed = (
            max(gradient_errors(one_run, exact()).values())
            for one_run in (result, expected)
        )
        allowed *= 4
    assert error <= allowed, (
        f"gradient of {name} differs by {error:.2e} of its norm, more than {allowed:.2e}"
    )


def assert_not_recompiled(result: RunResult) -> None:
    """Plans of later steps take the graphs of the first; validation, after the first step, has its own."""
    assert len(set(result.graphs[bool(result.validation_losses) :])) == 1, (
        "recompiled for another plan"
    )


def cad_steps(result: RunResult) -> list[dict[str, Any]]:
    """The figures of every logged step."""
    return read_steps(find_steps(result.dump_folder), check_logged_step)


def cad_summary(result: RunResult) -> dict:
    return summarize(cad_steps(result))


def assert_close(values: Sequence[float], expected: Sequence[float], name: str) -> None:
    assert len(values) > 0
    assert values == pytest.approx(expected, rel=TOLERANCE), name
