"""CAD composed with everything torchtitan offers, each composition against a run without CAD.

The reference is the same job with ``parallelism.cad`` off, on torchtitan's own varlen attention. Where stock torchtitan
0.2.2 cannot run that job (context parallelism with varlen, documents under pipelining) or scales its gradients wrongly
(PP, DDP; see patches/), the reference is the equivalent job it can run: the same global batch without that parallelism.
"""

from collections.abc import Iterator

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.integration.compositions import (
    CAD,
    COMMON,
    COMPOSITIONS,
    VALIDATION,
    Composition,
    assert_not_recompiled,
    assert_trains_alike,
    cad_summary,
    reference,
)
from tests.integration.harness import RunResult, run, tokenizer_folder
from tests.runtime.threaded import needs_linux
from torchtitan_cad.integration.titan022.cpu import enable_cpu

SHORT = {
    "collective": (
        "fsdp2",
        "small_buffers_keep",
        "gradient_accumulation",
        "compile",
        "fsdp2xtp2",
        "cp2",
        "pp2_1f1b",
        "qwen3_fsdp2",
    ),
    "symm_mem": ("ac_full_keep", "small_buffers"),
}
"""Compositions that the short set trains by each transport: one of every kind."""
SLOW = ("compile_keep_ac_op_tp2", "pp2_interleaved_tolerance_auto", "pp2_dualpipev", "hsdp2x2", "tp2_no_loss_parallel")
"""Combinations of what other compositions show, too long for the matrix."""
SYMMETRIC = ("fsdp4", "pp2xcp2", "validation")
"""Compositions that the matrix trains over symmetric memory too; the slow set trains all."""


def cases_and_transports() -> Iterator[object]:
    for case in COMPOSITIONS:
        for transport in ("collective", "symm_mem") if case.moves else ("collective",):
            in_matrix = case.name not in SLOW if transport == "collective" else case.name in SYMMETRIC
            marks = [needs_linux] if transport == "symm_mem" else []
            if case.name not in SHORT[transport]:
                marks.append(pytest.mark.matrix if in_matrix else pytest.mark.slow)
            name = case.name if transport == "collective" else f"{case.name}-{transport}"
            yield pytest.param(case, transport, id=name, marks=marks)


@pytest.mark.parametrize(("case", "transport"), list(cases_and_transports()))
def test_composition_trains_like_its_reference(case: Composition, transport: str) -> None:
    result = check(case, f"--cad.transport={transport}")
    assert f"CAD exchanges rows by {transport}" in result.logs[0] or not case.moves
    if case.moves:
        summary = cad_summary(result)
        assert summary["loss_last"] == pytest.approx(result.losses[-1])
        assert summary["tasks_moved"] > 0
        assert summary["imbalance_after"] < summary["imbalance_before"]


def check(case: Composition, *more: str) -> RunResult:
    """The composition's run, with ``more`` arguments; it has trained as its reference does."""
    if TorchVersion(torch.__version__) < case.needs_torch:
        pytest.skip(f"stock torchtitan cannot run this with torch below {case.needs_torch}")
    validation = VALIDATION if case.validates else ()
    args = [*COMMON, *validation, *CAD, *case.shared, *case.args, *more]
    result = run(args, case.nranks, grads_at=2)
    assert result.ok, result.report()
    expected = reference(case.reference_nranks or case.nranks, (*case.shared, *case.reference_args))
    assert not case.validates or result.validation_losses.keys() == expected.validation_losses.keys()
    assert_trains_alike(result, expected, reports_loss=case.reports_loss)
    assert_not_recompiled(result)
    return result


@pytest.mark.matrix
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
