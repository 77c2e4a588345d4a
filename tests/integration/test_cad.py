"""CAD composed with everything torchtitan offers, each composition against a run without CAD.

The reference is the same job with ``parallelism.cad`` off, on torchtitan's own varlen attention. Where stock torchtitan
0.2.2 cannot run that job (context parallelism with varlen, documents under pipelining) or scales its gradients wrongly
(PP, DDP; see patches/), the reference is the equivalent job it can run: the same global batch without that parallelism.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from harness import RunResult, gradient_errors, run, tokenizer_folder
from torch.torch_version import TorchVersion

from tests.runtime.threaded import needs_compiler
from torchtitan_cad.integration.titan022.cpu import enable_cpu

CAD = ("--job.custom_config_module=torchtitan_cad.job_config", "--parallelism.cad")
COMMON = ("--training.seq_len=1024", "--validation.seq_len=1024", "--metrics.enable_tensorboard")
VALIDATION = ("--validation.enable", "--validation.steps=1")
"""One batch after step 1: cheap enough for every composition."""
TOLERANCE = 1e-5
"""Relative, fp32: losses and gradient norms at every step."""


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
    marks: tuple[pytest.MarkDecorator, ...] = ()
    partial_keys: bool | None = None
    """Whether plans must, or must not, have tasks with partial key ranges; None: either."""


def dp(**degrees: int) -> tuple[str, ...]:
    return tuple(f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items())


TP2 = dp(tensor_parallel=2)
BATCH4 = ("--training.local_batch_size=4", "--validation.local_batch_size=4")
PP2 = (*dp(pipeline_parallel=2), *BATCH4)
SDPA_GQA = ("--model.flavor=tiny_sdpa_gqa",)
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
    Composition("fsdp2xtp2", nranks=4, shared=TP2),
    Composition("gradient_accumulation", shared=("--training.global_batch_size=12",)),
    Composition("ac_selective_layer", shared=("--activation_checkpoint.mode=selective",)),
    Composition(
        "ac_selective_op",
        shared=("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"),
    ),
    Composition("ac_full", shared=("--activation_checkpoint.mode=full",)),
    Composition("ac_full_keep", args=("--cad.backward=keep",), shared=("--activation_checkpoint.mode=full",)),
    Composition("compile", shared=("--compile.enable",)),
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
        marks=(pytest.mark.slow,),
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
    # One document over four ranks, cut finely: the default planner splits keys.
    Composition("split_kv_cp4", nranks=4, args=ROWS_CP4, shared=SDPA_GQA, reference_nranks=1, partial_keys=True),
    Composition(
        "whole_keys_cp4",
        nranks=4,
        args=(*ROWS_CP4, "--cad.no-split-kv"),
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


SYMMETRIC_BY_DEFAULT = ("fsdp4", "ac_full_keep", "pp2xcp2", "validation")
"""Compositions that the default run also trains over symmetric memory; the slow one trains all."""


SLOW = ("compile_keep_ac_op_tp2", "pp2_interleaved_tolerance_auto", "hsdp2x2", "tp2_no_loss_parallel")
"""Combinations of what other compositions show, too long for the default run."""


def cases_and_transports() -> Iterator[object]:
    for case in COMPOSITIONS:
        marks = [*case.marks, pytest.mark.slow] if case.name in SLOW else case.marks
        yield pytest.param(case, "collective", id=case.name, marks=marks)
        if case.moves:
            marks = [needs_compiler] if case.name in SYMMETRIC_BY_DEFAULT else [needs_compiler, pytest.mark.slow]
            yield pytest.param(case, "symm_mem", id=f"{case.name}-symm_mem", marks=marks)


@functools.cache
def reference(nranks: int, args: tuple[str, ...]) -> RunResult:
    """A run without CAD that validates after step 1; one serves many compositions."""
    result = run([*COMMON, *VALIDATION, *args], nranks, grads_at=2)
    assert result.ok, result.report()
    return result


def cad_summary(result: RunResult) -> dict:
    (path,) = (result.dump_folder / "tb").glob("*/cad_summary.json")
    return json.loads(path.read_text())


def assert_close(values: Sequence[float], expected: Sequence[float], name: str) -> None:
    assert len(values) == len(expected) > 0
    for step, (value, want) in enumerate(zip(values, expected, strict=True), start=1):
        assert value == pytest.approx(want, rel=TOLERANCE), f"{name} at step {step}: {value!r}, reference {want!r}"


@pytest.mark.parametrize(("case", "transport"), list(cases_and_transports()))
def test_composition_trains_like_its_reference(case: Composition, transport: str) -> None:
    if TorchVersion(torch.__version__) < case.needs_torch:
        pytest.skip(f"stock torchtitan cannot run this with torch below {case.needs_torch}")
    validation = VALIDATION if case.validates else ()
    args = [*COMMON, *validation, *CAD, *case.shared, *case.args, f"--cad.transport={transport}"]
    result = run(args, case.nranks, grads_at=2)
    assert result.ok, result.report()
    assert f"CAD exchanges rows by {transport}" in result.logs[0] or not case.moves
    expected = reference(case.reference_nranks or case.nranks, (*case.shared, *case.reference_args))
    assert_close(result.grad_norms, expected.grad_norms, "gradient norm")
    if case.reports_loss:
        assert_close(result.losses, expected.losses, "loss")
    if case.validates:
        assert result.validation_losses.keys() == expected.validation_losses.keys()
        assert_close([*result.validation_losses.values()], [*expected.validation_losses.values()], "validation loss")
    worst = max(gradient_errors(result, expected).items(), key=lambda item: item[1])
    assert worst[1] < 1e-4, f"gradient of {worst[0]} differs by {worst[1]:.2e} of its norm"
    if case.partial_keys is not None:
        counts = [int(n) for log in result.logs for n in re.findall(r"test: (\d+) tasks with partial keys", log)]
        assert len(counts) >= 3 * case.nranks
        assert (min(counts) > 0) if case.partial_keys else (max(counts) == 0)
    if case.moves:
        summary = cad_summary(result)
        assert summary["loss_last"] == pytest.approx(result.losses[-1])
        assert summary["tasks_moved"] > 0
        assert summary["imbalance_after"] < summary["imbalance_before"]


@needs_compiler
def test_the_transport_does_not_change_a_bit() -> None:
    args = [*COMMON, *CAD, "--parallelism.context_parallel_degree=2"]
    runs = [run([*args, f"--cad.transport={name}"], nranks=2) for name in ("collective", "symm_mem")]
    for result in runs:
        assert result.ok, result.report()
    assert (runs[0].losses, runs[0].grad_norms) == (runs[1].losses, runs[1].grad_norms)


@pytest.mark.parametrize("validation", [False, True])
def test_explicit_document_ids_replace_eos_tokens(validation: bool) -> None:
    """Ids that make every row one document give what ``documents = "row"`` gives."""
    args = [*COMMON, *CAD, "--training.dataset=packed_documents_with_row_ids"]
    if validation:
        args += ["--validation.enable", "--validation.freq=1", "--validation.steps=1"]
        args += ["--validation.dataset=packed_documents_with_row_ids"]
    by_ids = run(args, nranks=2)
    assert by_ids.ok, by_ids.report()
    by_row = run([*(arg.replace("_with_row_ids", "") for arg in args), "--cad.documents=row"], nranks=2)
    assert by_row.ok, by_row.report()
    by_eos = run([arg.replace("_with_row_ids", "") for arg in args], nranks=2)
    assert by_ids.losses == by_row.losses != by_eos.losses
    assert by_ids.validation_losses == by_row.validation_losses
    assert len(by_ids.validation_losses) == (3 if validation else 0)


def test_figures_are_per_step_whatever_the_logging() -> None:
    """Logging every second step, with accumulation: the summary's imbalance is that of the log lines."""
    result = run([*COMMON, *CAD, "--training.steps=4", "--metrics.log_freq=2", "--training.global_batch_size=8"], 2)
    assert result.ok, result.report()
    logged = re.findall(r"cad: imbalance ([\d.]+) -> ([\d.]+)", result.logs[0])
    assert len(logged) == 3  # torchtitan logs the first step as well
    summary = cad_summary(result)
    for name, values in zip(("before", "after"), zip(*logged, strict=True), strict=True):
        assert summary[f"imbalance_{name}"] == pytest.approx(np.mean([float(v) for v in values]), abs=1e-3)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_every_flavor_becomes_a_cad_flavor(name: str) -> None:
    enable_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_cad.integration.titan022.plugin import cad_train_spec

    stock = get_train_spec(name)
    for flavor in list(stock.model_args):
        spec = cad_train_spec(stock, flavor)
        args = spec.model_args[flavor]
        args.update_from_config(ConfigManager().parse_args([*CAD[:1], f"--model.name={name}"]))
        assert (args.attn_type, args.attn_mask_type) == ("varlen", "block_causal")
        args.n_layers = min(args.n_layers, 2)
        with torch.device("meta"):
            model = spec.model_cls(args)
        assert all(hasattr(block.attention, "inner_attention") for block in model.layers.values())


def test_preparing_for_one_job_after_another_leaves_no_trace() -> None:
    enable_cpu()
    import torchtitan.distributed.context_parallel as titan_cp
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.train import Trainer

    def state() -> tuple:
        return (get_train_spec("llama3").model_cls, titan_cp.cp_shard, Trainer.train, Trainer.close)

    before = state()
    for _ in range(2):
        ConfigManager().parse_args([*CAD, f"--model.hf_assets_path={tokenizer_folder()}"])
        assert get_train_spec("llama3").model_cls.__name__ == "CadTransformer"
        assert all(now is not then for now, then in zip(state(), before, strict=True))
    ConfigManager().parse_args([CAD[0], "--parallelism.no-cad"])
    assert state() == before
    ConfigManager().parse_args([])
    assert state() == before


def test_without_cad_a_job_is_stock_torchtitan() -> None:
    """The config module alone changes nothing, to the bit."""
    result = run([*COMMON, "--job.custom_config_module=torchtitan_cad.job_config"], nranks=2)
    assert result.ok, result.report()
    stock = reference(2, ())
    assert (result.losses, result.grad_norms) == (stock.losses, stock.grad_norms)
    assert not any("CAD" in log for log in result.logs)


@pytest.mark.parametrize(
    ("args", "tolerance"),
    [
        (("--cad.link_bytes_per_second=1e18",), 0.0),
        (("--cad.link_bytes_per_second=1.0", "--cad.nano_batches=2"), 0.5),
    ],
)
def test_the_tolerance_follows_the_link(args: tuple[str, ...], tolerance: float) -> None:
    """Perfect balance where the exchange takes no time, as little of it as can be where it takes all of it."""
    result = run([*COMMON, *CAD, "--cad.tolerance=auto", *args], nranks=2)
    assert result.ok, result.report()
    assert "cad.tolerance = 'auto': attention takes" in result.logs[0]
    (path,) = (result.dump_folder / "tb").glob("*/cad_steps.jsonl")
    chosen = [json.loads(line)["tolerance"] for line in path.read_text().splitlines()]
    assert len(chosen) == 3
    assert set(chosen) == {0.0} if tolerance == 0 else max(chosen) > 0.02
