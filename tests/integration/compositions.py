"""Jobs with CAD and their references without: the compositions that are tested, and what comparing them takes."""

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.integration.harness import RunResult, gradient_errors, run
from torchtitan_cad.cli.report_command import find_steps, read_steps, summarize
from torchtitan_cad.integration.pingpong.turn import FIRST_TORCH

CAD = (
    "--job.custom_config_module=torchtitan_cad.job_config",
    "--parallelism.cad",
    "--cad.placement=loader",
    "--cad.tolerance=0.02",  # plans of tests do not depend on how fast a machine is
)
"""Homes of the loader; test_placement.py repeats the compositions with the default."""
PLACED = (*CAD, "--cad.placement=auto")
COMMON = ("--training.seq_len=1024", "--validation.seq_len=1024", "--metrics.enable_tensorboard")
VALIDATION = ("--validation.enable", "--validation.steps=1")
"""One batch after step 1: cheap enough for every composition."""
TOLERANCE = 64 * torch.finfo(torch.float32).eps
"""Relative, for losses and gradient norms of two runs in fp32. They are sums over the 4,096 tokens of a batch, which
err by a random walk of as many roundings, hence by their square root."""


@dataclasses.dataclass(frozen=True)
class Composition:
    """A job with CAD (``args`` on ``nranks``) and its reference without (``reference_*``); both get ``shared``."""

    name: str
    args: tuple[str, ...] = ()
    nranks: int = 2
    shared: tuple[str, ...] = ()
    reference_args: tuple[str, ...] = ()
    reference_nranks: int | None = None
    moves: bool = True
    """Whether tasks can move: the CAD group has more than one rank."""
    needs_torch: str = "2.11"
    reports_loss: bool = True
    validates: bool = True
    partial_keys: bool | None = None
    """Whether plans must, or must not, have tasks with partial key ranges; None: either."""


def dp(**degrees: int) -> tuple[str, ...]:
    return tuple(f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items())


TP2 = dp(tensor_parallel=2)
BATCH4 = ("--training.local_batch_size=4", "--validation.local_batch_size=4")
PP2 = (*dp(pipeline_parallel=2), *BATCH4)
SDPA_GQA = ("--model.flavor=tiny_sdpa_gqa",)
SMALL_BUFFERS = ("--cad.receive_buffer_gb=2e-5",)
"""Of 10 KB: rows travel in many trips."""
ROWS_CP4 = ("--cad.documents=row", "--cad.min_shard=32", *dp(context_parallel=4))
VALIDATE_OFTEN = ("--validation.enable", "--validation.freq=1", "--validation.steps=2")
COMPOSITIONS = [
    Composition("fsdp2"),
    Composition("fsdp4", nranks=4),
    Composition("keep", args=("--cad.backward=keep",)),
    Composition("tolerance_auto", args=("--cad.tolerance=auto",)),
    Composition("hsdp2x2", nranks=4, shared=dp(data_parallel_replicate=2, data_parallel_shard=2)),
    Composition("ddp2", args=dp(data_parallel_replicate=2, data_parallel_shard=1)),
    Composition("tp2", shared=TP2, moves=False),
    Composition("tp2_no_loss_parallel", shared=(*TP2, "--parallelism.disable_loss_parallel"), moves=False),
    Composition("fsdp2xtp2", nranks=4, args=TP2, reference_nranks=2),
    Composition("small_buffers", args=SMALL_BUFFERS),
    Composition("small_buffers_keep", args=(*SMALL_BUFFERS, "--cad.backward=keep")),
    Composition("gradient_accumulation", shared=("--training.global_batch_size=12",)),
    Composition("ac_selective_layer", args=("--activation_checkpoint.mode=selective",)),
    Composition(
        "ac_selective_op",
        args=("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
    ),
    Composition("ac_full", args=("--activation_checkpoint.mode=full",)),
    Composition("ac_full_attention_kept", args=("--activation_checkpoint.mode=full", "--cad.no-recompute-attention")),
    Composition("ac_full_keep", args=("--cad.backward=keep", "--activation_checkpoint.mode=full")),
    # The loss and validation, which are graphs of their own, are compiled in compile_keep_ac_op_tp2 and below.
    Composition("compile", args=("--compile.enable", "--compile.components=model"), validates=False),
    # Stock torchtitan's gradients under TP with compile differ from those without (torch 2.13): the twin compiles too.
    Composition(
        "compile_keep_ac_op_tp2",
        nranks=4,
        args=("--cad.backward=keep",),
        shared=(
            "--compile.enable",
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
            *TP2,
        ),
    ),
    Composition(
        "ddp2_gradient_accumulation",
        args=(*dp(data_parallel_replicate=2, data_parallel_shard=1), "--training.global_batch_size=8"),
        reference_args=("--training.global_batch_size=8",),
    ),
    Composition("cp2", args=dp(context_parallel=2), reference_nranks=1),
    Composition("fsdp2xcp2", nranks=4, args=dp(context_parallel=2), reference_nranks=2),
    Composition("cp2xtp2", nranks=4, args=(*dp(context_parallel=2), *TP2), reference_nranks=1),
    Composition("pp2_1f1b", nranks=4, args=PP2, reference_args=BATCH4, reference_nranks=2),
    Composition(
        "pp2_interleaved_tolerance_auto",
        nranks=4,
        args=(
            *PP2,
            "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
            "--model.flavor=tiny4_varlen",
            "--cad.tolerance=auto",
        ),
        reference_args=(*BATCH4, "--model.flavor=tiny4_varlen"),
        reference_nranks=2,
    ),
    Composition(
        "pp2_interleaved",
        nranks=4,
        args=(*PP2, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B", "--model.flavor=tiny4_varlen"),
        reference_args=(*BATCH4, "--model.flavor=tiny4_varlen"),
        reference_nranks=2,
    ),
    # torch cannot validate in V schedules, and its 2.11 cannot run them over gloo: a rank sends to itself.
    Composition(
        "pp2_zbv",
        needs_torch="2.13",
        nranks=4,
        validates=False,
        args=(*PP2, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--model.flavor=tiny4_varlen"),
        reference_args=(*BATCH4, "--model.flavor=tiny4_varlen"),
        reference_nranks=2,
    ),
    # torchtitan reports no loss with this one: it takes that of the first pipeline rank for ZBVZeroBubble alone.
    Composition(
        "pp2_dualpipev",
        needs_torch="2.13",
        nranks=4,
        args=(
            *PP2,
            "--parallelism.pipeline_parallel_schedule=DualPipeV",
            "--parallelism.no-pipeline-parallel-expert-parallel-overlap",
            "--model.flavor=tiny4_varlen",
        ),
        reference_args=(*BATCH4, "--model.flavor=tiny4_varlen"),
        reference_nranks=2,
        reports_loss=False,
        validates=False,
    ),
    Composition("pp2xcp2", nranks=4, args=(*PP2, *dp(context_parallel=2)), reference_args=BATCH4, reference_nranks=1),
    Composition("qwen3_fsdp2", shared=("--model.name=qwen3", "--model.flavor=tiny_varlen")),
    Composition(
        "qwen3_fsdp2xtp2",
        nranks=4,
        args=TP2,
        shared=("--model.name=qwen3", "--model.flavor=tiny_varlen"),
        reference_nranks=2,
    ),
    Composition(
        "qwen3_cp2",
        args=dp(context_parallel=2),
        shared=("--model.name=qwen3", "--model.flavor=tiny_varlen"),
        reference_nranks=1,
    ),
    # Plain causal attention over the whole row, with grouped queries: the sdpa flavors.
    Composition(
        "sdpa_gqa_rows",
        nranks=2,
        args=("--cad.documents=row", *dp(context_parallel=2)),
        shared=SDPA_GQA,
        reference_nranks=1,
    ),
    # One document over four ranks, cut finely: the default planner splits keys, the greedy one does not.
    Composition("split_kv_cp4", nranks=4, args=ROWS_CP4, shared=SDPA_GQA, reference_nranks=1, partial_keys=True),
    Composition(
        "whole_keys_cp4",
        nranks=4,
        args=(*ROWS_CP4, "--cad.planner=greedy"),
        shared=SDPA_GQA,
        reference_nranks=1,
        partial_keys=False,
    ),
    Composition("validation", shared=VALIDATE_OFTEN),
    Composition(
        "validation_pp2",
        nranks=4,
        args=PP2,
        shared=VALIDATE_OFTEN,
        reference_args=BATCH4,
        reference_nranks=2,
    ),
]

ROW1 = ("--training.local_batch_size=1",)
FULL = ("--activation_checkpoint.mode=full",)
ATTENTION_KEPT = (*FULL, "--cad.no-recompute-attention")
OP = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op")
FOUR_BLOCKS = ("--model.flavor=tiny4_varlen",)

HALVED = [
    Composition("rows_ac_op_accumulation", args=(*OP, "--training.global_batch_size=8")),
    Composition("middle_keep_ac_full", args=(*ROW1, *FULL, "--cad.backward=keep")),
    Composition("middle_attention_kept", args=(*ROW1, *ATTENTION_KEPT)),
    Composition("middle_cp2", args=(*ROW1, *dp(context_parallel=2))),
    Composition("rows_tp2", args=TP2),
    Composition("rows_compile", args=("--compile.enable",)),
    Composition(
        "middle_pp2_validation",
        nranks=4,
        args=(
            *PP2,
            "--validation.enable",
            "--validation.freq=1",
            "--validation.steps=2",
            "--validation.local_batch_size=4",
        ),
    ),
]
"""Jobs of two nano-batches, halved by rows or in the middle of rows."""

MORE_HALVED = [
    *COMPOSITIONS,
    Composition("middle_fsdp2", args=ROW1),
    Composition("middle_compile", args=(*ROW1, "--compile.enable")),
    Composition("middle_compile_ac_full", args=(*ROW1, *FULL, "--compile.enable")),
    Composition("rows_compile_attention_kept", args=(*ATTENTION_KEPT, "--compile.enable")),
    Composition("middle_ac_op_3_rows", args=(*OP, "--training.local_batch_size=3")),
    Composition(
        "middle_qwen3_cp2",
        args=(*ROW1, *dp(context_parallel=2)),
        shared=("--model.name=qwen3", "--model.flavor=tiny_varlen"),
    ),
    Composition(
        "middle_fsdp2xcp2_gqa", nranks=4, args=(*ROW1, *dp(context_parallel=2), "--model.flavor=tiny_varlen_gqa")
    ),
    Composition("fsdp2xtp2_attention_kept", nranks=4, args=(*TP2, *ATTENTION_KEPT)),
    Composition("fsdp2xtp2_ac_full", nranks=4, args=(*TP2, *FULL)),
    Composition(
        "fsdp2xtp2_ac_layer_accumulation_keep",
        nranks=4,
        args=(
            *TP2,
            "--activation_checkpoint.mode=selective",
            "--training.global_batch_size=8",
            "--cad.backward=keep",
        ),
    ),
    Composition("rows_pp2", nranks=4, args=(*PP2, "--parallelism.pipeline_parallel_microbatch_size=2")),
]
"""All that one nano-batch composes with, halved by rows, and what halving in the middle of rows adds to it."""

needs_traced = pytest.mark.skipif(
    TorchVersion(torch.__version__) < FIRST_TORCH,
    reason=f"compiled graphs lose the order of streams before torch {FIRST_TORCH}",
)
COMPILE = ("--compile.enable",)
TRACED = [
    Composition("rows", args=COMPILE),
    Composition("middle_keep", args=(*ROW1, *COMPILE, "--cad.backward=keep")),
    Composition("rows_ac_op_accumulation", args=(*OP, *COMPILE, "--training.global_batch_size=8")),
    Composition("rows_attention_kept", args=(*ATTENTION_KEPT, *COMPILE)),
    Composition(
        "middle_cp2_qwen3",
        args=(*ROW1, *COMPILE, *dp(context_parallel=2)),
        shared=("--model.name=qwen3", "--model.flavor=tiny_varlen"),
    ),
    Composition("rows_symm_mem", args=(*COMPILE, "--cad.transport=symm_mem")),
    Composition("rows_small_buffers", args=(*COMPILE, *SMALL_BUFFERS)),
    Composition(
        "rows_balanced_four_blocks_validation",
        args=(*FOUR_BLOCKS, *VALIDATE_OFTEN, *COMPILE, "--cad.placement=balanced"),
    ),
    Composition(
        "middle_pp2_validation", nranks=4, args=(*PP2, *COMPILE, *VALIDATE_OFTEN, "--validation.local_batch_size=4")
    ),
    Composition("ddp2", args=(*COMPILE, *dp(data_parallel_replicate=2, data_parallel_shard=1))),
]
"""Jobs whose exchanges can be compiled."""

HALVED_SYMMETRIC = [
    Composition("rows_keep_symm_mem", args=("--cad.backward=keep", "--cad.transport=symm_mem")),
    Composition("rows_small_buffers_symm_mem", args=(*SMALL_BUFFERS, "--cad.transport=symm_mem")),
    Composition("middle_cp2_symm_mem", args=(*ROW1, *dp(context_parallel=2), "--cad.transport=symm_mem")),
]


@functools.cache
def reference(nranks: int, args: tuple[str, ...]) -> RunResult:
    """A run without CAD that validates after step 1; one serves many compositions."""
    result = run([*COMMON, *VALIDATION, *args], nranks, grads_at=2)
    assert result.ok, result.report()
    return result


@functools.cache
def exact(flavor: str, degree: int, steps: int) -> RunResult:
    """One process in fp64 on the batches of ``degree`` data-parallel ranks, with the last step's gradients."""
    batch = f"--training.global_batch_size={2 * degree}"
    args = [*COMMON, f"--model.flavor={flavor}", f"--training.steps={steps}", batch]
    result = run(args, nranks=1, as_dp=degree, fp64=True, grads_at=steps)
    assert result.ok, result.report()
    return result


@functools.cache
def rounding() -> float:
    """What fp32 costs torchtitan's own run of two ranks on this machine: the largest relative error of a gradient."""
    return max(gradient_errors(reference(2, ()), exact("tiny_varlen", 2, 2)).values())


def assert_same_gradients(result: RunResult, expected: RunResult) -> None:
    """Asserts that gradients of two runs in fp32 differ by rounding: each errs at most twice ``rounding``."""
    worst = max(gradient_errors(result, expected).items(), key=lambda item: item[1])
    allowed = 4 * rounding()
    assert worst[1] <= allowed, f"gradient of {worst[0]} differs by {worst[1]:.2e} of its norm, more than {allowed:.2e}"


def cad_summary(result: RunResult) -> dict:
    return summarize(read_steps(find_steps(result.dump_folder)))


def assert_close(values: Sequence[float], expected: Sequence[float], name: str) -> None:
    assert len(values) == len(expected) > 0
    for step, (value, want) in enumerate(zip(values, expected, strict=True), start=1):
        assert value == pytest.approx(want, rel=TOLERANCE), f"{name} at step {step}: {value!r}, reference {want!r}"
