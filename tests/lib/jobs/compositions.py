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

NAMED = {
    "cad_defaults": "--job.custom_config_module=torchtitan_cad.job_config --parallelism.cad",
    # Plans of tests do not depend on how fast a machine is.
    "cad": "cad_defaults --cad.placement=loader --cad.tolerance=0.02",
    "placed": "cad --cad.placement=auto",
    "tp2": "--parallelism.tensor_parallel_degree=2",
    "tp4": "--parallelism.tensor_parallel_degree=4",
    "cp2": "--parallelism.context_parallel_degree=2",
    "cp4": "--parallelism.context_parallel_degree=4",
    "ep2": "--parallelism.expert_parallel_degree=2",
    "etp2": "--parallelism.expert_tensor_parallel_degree=2",
    "shard2": "--parallelism.data_parallel_shard_degree=2",
    "shard1": "--parallelism.data_parallel_shard_degree=1",
    "replicate2": "--parallelism.data_parallel_replicate_degree=2",
    "ddp2": "replicate2 shard1",
    "hsdp2x2": "replicate2 shard2",
    "stages2": "--parallelism.pipeline_parallel_degree=2",
    "stages4": "--parallelism.pipeline_parallel_degree=4",
    "pp2": "stages2 rows4 --validation.local_batch_size=4",
    "1f1b": "--parallelism.pipeline_parallel_schedule=1F1B",
    "interleaved": "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
    "zbv": "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
    "cad1f1b": "--parallelism.pipeline_parallel_schedule=CAD1F1B",
    "cad_interleaved": "--parallelism.pipeline_parallel_schedule=CADInterleaved1F1B",
    "by_one_row": "--parallelism.pipeline_parallel_microbatch_size=1",
    "by_row": "--parallelism.pipeline_parallel_microbatch_size=2",
    "halves": "--cad.nano_batches=2",
    "traced": "--cad.streams=traced",
    "opaque": "--cad.streams=opaque",
    "resend": "--cad.backward=resend",
    "symm_mem": "--cad.transport=symm_mem",
    "collective": "--cad.transport=collective",
    "documents_of_rows": "--cad.documents=row",
    # 10 KB: rows travel in many chunks.
    "small_buffers": "--cad.receive_buffer_gb=2e-5",
    "tolerance_auto": "--cad.tolerance=auto --debug.no-deterministic",
    "compile": "--compile.enable",
    "compile_loss": "compile --compile.components=loss",
    "ac_layer": "--activation_checkpoint.mode=selective",
    "ac_op": "ac_layer --activation_checkpoint.selective_ac_option=op",
    "ac_full": "--activation_checkpoint.mode=full",
    "attention_kept": "ac_full --cad.no-recompute-attention",
    "row1": "--training.local_batch_size=1",
    "rows2": "--training.local_batch_size=2",
    "rows3": "--training.local_batch_size=3",
    "rows4": "--training.local_batch_size=4",
    "rows8": "--training.local_batch_size=8",
    "rows16": "--training.local_batch_size=16",
    "batch4": "--training.global_batch_size=4",
    "batch8": "--training.global_batch_size=8",
    "batch12": "--training.global_batch_size=12",
    "batch16": "--training.global_batch_size=16",
    "batch24": "--training.global_batch_size=24",
    # One batch after step 1: cheap enough for every composition.
    "validation": "--validation.enable --validation.steps=1",
    "validate_often": "--validation.enable --validation.freq=1 --validation.steps=2",
    "validate4": "validate_often --validation.local_batch_size=4",
    "qwen3": "--model.name=qwen3 --model.flavor=tiny_varlen",
    "tied": "--model.name=qwen3 --model.flavor=tiny_tied",
    "moe": "--model.name=qwen3 --model.flavor=tiny_moe",
    "grouped": "--model.name=qwen3 --model.flavor=tiny_moe_grouped",
    "routed_in_turn": "--debug.moe_force_load_balance",
    "sdpa_gqa": "--model.flavor=tiny_sdpa_gqa",
    "four_blocks": "--model.flavor=tiny4_varlen",
    "eight_blocks": "--model.flavor=tiny8_varlen",
}
"""What options of jobs are called here."""


def options(words: str) -> tuple[str, ...]:
    """Return the arguments that the words name; those without a name are arguments themselves."""
    found = ()
    for word in words.split():
        found += options(NAMED[word]) if word in NAMED else (word,)
    return found


DEFAULTS = options("cad_defaults")
"""All of [cad] as it is by default."""
CAD = options("cad")
"""Homes of the loader; test_cad.py repeats the compositions with the default."""
PLACED = options("placed")
COMMON = (
    "--training.seq_len=1024",
    "--validation.seq_len=1024",
    "--metrics.enable_tensorboard",
)
FAST = 1e12
SLOW = 1.0
"""bytes / s: links by which all attention moves that is uneven, and by which none does; see ``run``"""
VALIDATION = options("validation")
TOLERANCE = 64 * torch.finfo(torch.float32).eps
"""relative error of losses and gradient norms in fp32: sums over the 4,096 tokens of a batch err by a random walk of as
many roundings, hence by their square root"""


DEGREES = re.compile(r"\.(?:tensor|context|pipeline)_parallel_degree=(\d+)")


def ranks_per_loader(args: Iterable[str]) -> int:
    """Ranks among which every data-parallel rank's batch is divided."""
    return math.prod(map(int, DEGREES.findall(" ".join(args))))


@dataclasses.dataclass(frozen=True)
class Composition:
    """A job with CAD (``args``) and its reference without (``reference_args``), in words; both get ``shared``."""

    name: str
    args: str = ""
    shared: str = ""
    reference_args: str = ""
    dp: int = 2
    """Data-parallel ranks."""
    moves: bool = True
    """Whether tasks must move: the CAD group has more than one rank, and plans do not depend on measured times."""
    needs_torch: str = "2.11"
    reports_loss: bool = True
    validates: bool = True

    @property
    def job(self) -> tuple[str, ...]:
        return options(f"{self.shared} {self.args}")

    @property
    def reference_job(self) -> tuple[str, ...]:
        return options(f"{self.shared} {self.reference_args}")

    @property
    def nranks(self) -> int:
        return self.dp * ranks_per_loader(self.job)

    @property
    def reference_nranks(self) -> int:
        return self.dp * ranks_per_loader(self.reference_job)


def name_of(case: Composition) -> str:
    return case.name


def skip_if_torch_is_too_old(case: Composition) -> None:
    if TorchVersion(torch.__version__) < case.needs_torch:
        pytest.skip(f"stock torchtitan cannot run this with torch {torch.__version__}")


def pp2(name: str, args: str = "", reference_args: str = "", **more) -> Composition:
    """Two stages of two data-parallel ranks, beside a run without stages."""
    beside = f"rows4 --validation.local_batch_size=4 {reference_args}"
    return Composition(name, f"pp2 {args}", reference_args=beside, **more)


def pp2_of_four_blocks(name: str, args: str, **more) -> Composition:
    return pp2(name, f"{args} four_blocks", "four_blocks", **more)


COMPOSITIONS = [
    Composition("fsdp2"),
    Composition("fsdp4", dp=4),
    Composition("resend", "resend"),
    Composition("tolerance_auto", "tolerance_auto", moves=False),
    Composition("hsdp2x2", shared="hsdp2x2", dp=4),
    Composition("ddp2", "ddp2"),
    Composition("tp2", shared="tp2", dp=1, moves=False),
    Composition(
        "tp2_no_loss_parallel",
        shared="tp2 --parallelism.disable_loss_parallel",
        dp=1,
        moves=False,
    ),
    Composition("fsdp2xtp2", "tp2"),
    Composition("small_buffers", "small_buffers"),
    Composition("small_buffers_resend", "small_buffers resend"),
    Composition("gradient_accumulation", shared="batch12"),
    Composition("ac_selective_layer", "ac_layer"),
    Composition("ac_selective_op", "ac_op"),
    Composition("ac_full", "ac_full"),
    Composition("ac_full_attention_kept", "attention_kept"),
    Composition("ac_full_resend", "resend ac_full"),
    # The loss and validation, which are graphs of their own, are compiled in compile_resend_ac_op_tp2 and below.
    Composition("compile", "compile --compile.components=model", validates=False),
    # Stock torchtitan's gradients under TP with compile differ from those without (torch 2.13): the twin compiles too.
    Composition("compile_resend_ac_op_tp2", "resend", shared="compile ac_op tp2"),
    Composition("ddp2_gradient_accumulation", "ddp2 batch8", reference_args="batch8"),
    Composition("cp2", "cp2", dp=1),
    Composition("fsdp2xcp2", "cp2"),
    Composition("cp2xtp2", "cp2 tp2", dp=1),
    pp2("pp2_1f1b"),
    pp2_of_four_blocks("pp2_interleaved_tolerance_auto", "interleaved tolerance_auto"),
    pp2_of_four_blocks("pp2_interleaved", "interleaved"),
    # torch cannot validate in V schedules, and its 2.11 cannot run them over gloo: a rank sends to itself.
    pp2_of_four_blocks("pp2_zbv", "zbv", needs_torch="2.13", validates=False),
    # torchtitan reports no loss with this one: it takes that of the first pipeline rank for ZBVZeroBubble alone.
    pp2_of_four_blocks(
        "pp2_dualpipev",
        "--parallelism.pipeline_parallel_schedule=DualPipeV --parallelism.no-pipeline-parallel-expert-parallel-overlap",
        needs_torch="2.13",
        reports_loss=False,
        validates=False,
    ),
    pp2("pp2xcp2", "cp2", dp=1),
    Composition("qwen3_fsdp2", shared="qwen3"),
    Composition("qwen3_fsdp2xtp2", "tp2", shared="qwen3"),
    Composition("qwen3_cp2", "cp2", shared="qwen3", dp=1),
    Composition("tied_fsdp2", shared="tied"),
    Composition("tied_fsdp2xtp2", "tp2", shared="tied"),
    Composition("tied_cp2", "cp2", shared="tied", dp=1),
    # Plain causal attention over the whole row, with grouped queries: the sdpa flavors.
    Composition("sdpa_gqa_rows", "documents_of_rows cp2", shared="sdpa_gqa", dp=1),
    # One document over four ranks, cut finely.
    Composition(
        "split_kv_cp4",
        "documents_of_rows --cad.min_shard=32 cp4",
        shared="sdpa_gqa",
        dp=1,
    ),
    Composition("validation", shared="validate_often"),
    pp2("validation_pp2", shared="validate_often"),
]

HALVED = [
    Composition("rows_ac_op_accumulation", "ac_op batch8"),
    Composition("middle_resend_ac_full", "row1 ac_full resend"),
    Composition("middle_attention_kept", "row1 attention_kept"),
    Composition("middle_cp2_ac_full", "row1 cp2 ac_full", dp=1),
    Composition("rows_tp2", "tp2", dp=1),
    Composition("rows_compile", "compile"),
    pp2("middle_pp2_validation", "validate4"),
]
"""Jobs of two nano-batches, halved by rows or in the middle of rows."""

MORE_HALVED = [
    *COMPOSITIONS,
    Composition("middle_fsdp2", "row1"),
    Composition("middle_compile", "row1 compile"),
    Composition("middle_compile_ac_full", "row1 ac_full compile"),
    Composition("rows_compile_attention_kept", "attention_kept compile"),
    Composition("middle_ac_op_3_rows", "ac_op rows3"),
    Composition("middle_qwen3_cp2", "row1 cp2", shared="qwen3", dp=1),
    Composition("middle_fsdp2xcp2_gqa", "row1 cp2 --model.flavor=tiny_varlen_gqa"),
    Composition("fsdp2xtp2_attention_kept", "tp2 attention_kept"),
    Composition("fsdp2xtp2_ac_full", "tp2 ac_full"),
    # Stock's blocks, compiled, lose a gradient with TP on CPU (torch 2.13), and so do segments.
    Composition("fsdp2xtp2_compile", "tp2 compile --training.steps=20"),
    Composition("fsdp2xtp2_ac_layer_accumulation_resend", "tp2 ac_layer batch8 resend"),
    pp2("rows_pp2", "by_row"),
    pp2_of_four_blocks(
        "rows_pp2_zbv_tp2",
        "zbv by_row tp2 rows8",
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
    Composition("rows", "compile"),
    Composition("middle_resend", "row1 compile resend"),
    Composition("rows_ac_op_accumulation", "ac_op compile batch8"),
    Composition("rows_attention_kept", "attention_kept compile"),
    Composition("middle_cp2_qwen3", "row1 compile cp2", shared="qwen3", dp=1),
    Composition("rows_symm_mem", "compile symm_mem"),
    Composition("rows_small_buffers", "compile small_buffers"),
    Composition(
        "rows_balanced_four_blocks_validation",
        "four_blocks validate_often compile --cad.placement=balanced",
    ),
    pp2("middle_pp2_validation", "compile validate4"),
    Composition("ddp2", "compile ddp2"),
]
"""Jobs whose exchanges can be compiled."""

HALVED_SYMMETRIC = [
    Composition("rows_ac_layer_resend_symm_mem", "ac_layer resend symm_mem"),
    Composition("rows_ac_op_chunks_symm_mem", "ac_op small_buffers symm_mem"),
    Composition("middle_cp2_symm_mem", "row1 cp2 symm_mem", dp=1),
]


@functools.cache
def reference(
    nranks: int,
    args: tuple[str, ...],
    *,
    validates: bool = True,
    grads_at: int = 2,
    fp64: bool = False,
) -> RunResult:
    """A run without CAD that validates after step 1 if it can; one serves many compositions.

    Stock torchtitan's ranks would take each other's graphs of the loss under tensor parallelism, and FSDP2 refuses its
    sharding of tied embeddings.
    """
    validation = VALIDATION if validates else ()
    needed = {"compile_caches": "compile tp2", "tied_embeddings": "tied"}
    names = [name for name, words in needed.items() if {*options(words)} <= {*args}]
    search = [torchtitan_with(*names)] if names else []
    return run(
        [*COMMON, *validation, *args],
        nranks,
        300,
        grads_at=grads_at,
        fp64=fp64,
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
        f"--training.global_batch_size={2 * degree}",
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
