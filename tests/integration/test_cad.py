# SPDX-License-Identifier: BSD-3-Clause
"""CAD composed with everything torchtitan offers, each composition against a run without CAD.

The reference is the same job with ``parallelism.cad`` off, on torchtitan's own varlen attention. Where stock torchtitan
0.2.2 cannot run that job (context parallelism with varlen, documents under pipelining) or scales its gradients wrongly
(PP, DDP; see patches/), the reference is the equivalent job it can run: the same global batch without that parallelism.
"""

from statistics import fmean
from typing import Any

import pytest
import torch

from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    COMPOSITIONS,
    PLACED,
    TOLERANCE,
    TOLERANCE_AUTO,
    VALIDATION,
    Composition,
    assert_not_recompiled,
    assert_trains_alike,
    cad_summary,
    global_batch,
    reference,
    skip_if_torch_is_too_old,
    stock,
)
from tests.lib.jobs.harness import RunResult, run, tokenizer_folder
from tests.lib.sets import matrix, slow
from tests.lib.threaded import needs_linux
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu

enable_cpu()

# torchtitan must not be imported before enable_cpu().
import torchtitan.distributed.context_parallel as titan_cp  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from torchtitan_cad.integration.torchtitan_v0_2.models import ADAPTERS  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.plugin import cad_train_spec  # noqa: E402

SHORT = "ac_full_resend"
"""Composition that the short set trains over symmetric memory, beside those of test_defaults.py, test_placement.py and
test_compile_caches.py: one of every kind."""
SLOW = (
    "compile_resend_ac_op_tp2",
    "pp2_interleaved_tolerance_auto",
    "pp2_dualpipev",
    "hsdp2x2",
    "tp2_no_loss_parallel",
)
"""Combinations of what other compositions show, too long for the matrix."""
MATRIX = ("fsdp4", "pp2xcp2", "validation")
"""Compositions that the matrix trains over symmetric memory too; the slow set trains all."""
SYMMETRIC_SETS = {SHORT: [], **{name: [matrix] for name in MATRIX}}
CASES = [
    pytest.param(
        case, "collective", id=case.name, marks=slow if case.name in SLOW else matrix
    )
    for case in COMPOSITIONS
]
CASES += [
    pytest.param(
        case,
        "symm_mem",
        id=f"{case.name}-symm_mem",
        marks=[needs_linux, *SYMMETRIC_SETS.get(case.name, [slow])],
    )
    for case in COMPOSITIONS
    if case.moves
]


@matrix
def test_starts_from_the_parameters_of_stock():
    """What a job measures at its start takes none of torchtitan's random numbers, from which parameters are drawn."""
    args = (*VALIDATION, *global_batch(12))
    cad = run([*COMMON, *args, *CAD, *TOLERANCE_AUTO], 2, init_seed=None)
    assert cad.losses == pytest.approx(stock(2, *args).losses, rel=TOLERANCE)


@pytest.mark.parametrize(("case", "transport"), CASES)
def test_composition_trains_like_its_reference(case, transport):
    result = check(case, f"--cad.transport={transport}")
    assert f"CAD exchanges rows by {transport}" in result.logs[0] or not case.moves
    if case.moves:
        summary = cad_summary(result)
        assert summary["loss_last"] == pytest.approx(result.losses[-1])
        assert summary["tasks_moved"] > 0
        assert summary["imbalance_after"] < summary["imbalance_before"]


def check(
    case: Composition,
    *more: str,
    cad: tuple[str, ...] = CAD,
    link: float | None = None,
) -> RunResult:
    """The composition's run, with ``more`` arguments; it has trained as its reference does."""
    skip_if_torch_is_too_old(case)
    validation = VALIDATION if case.validates else ()
    args = [*COMMON, *validation, *cad, *case.shared, *case.args, *more]
    result = run(args, case.nranks, grads_at=2, link=link)
    reference_args = (*case.shared, *case.reference_args)
    expected = reference(case.reference_nranks, reference_args)
    if case.validates:
        assert result.validation_losses.keys() == expected.validation_losses.keys()
    assert_trains_alike(result, expected, reports_loss=case.reports_loss)
    assert_not_recompiled(result)
    return result


every_model = pytest.mark.parametrize("name", list(ADAPTERS))


def build_on_meta(name: str, flavor: str) -> tuple[Any, Any]:
    """A CAD flavor's arguments and its model of two layers, without memory."""
    spec = cad_train_spec(get_train_spec(name), ADAPTERS[name], flavor)
    config = ConfigManager().parse_args([*CAD[:1], f"--model.name={name}"])
    args = spec.model_args[flavor]
    args.update_from_config(config)
    args.n_layers = min(args.n_layers, 2)
    with torch.device("meta"):
        return args, spec.model_cls(args)


@every_model
def test_every_flavor_becomes_a_cad_flavor(name):
    for flavor in list(get_train_spec(name).model_args):
        args, model = build_on_meta(name, flavor)
        assert (args.attn_type, args.attn_mask_type) == ("varlen", "block_causal")
        for block in model.layers.values():
            assert hasattr(block.attention, "inner_attention")


@every_model
def test_every_parameter_is_initialised(name, monkeypatch):
    # drawing takes seconds
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda x, **_: x.zero_())
    _, model = build_on_meta(name, "debugmodel")
    model.to_empty(device="cpu")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
        model.init_weights(buffer_device=torch.device("cpu"))
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert [key for key, tensor in tensors.items() if tensor.isnan().any()] == []


def test_preparing_for_one_job_after_another_leaves_no_trace():
    def state() -> list[object]:
        model = get_train_spec("llama3").model_cls
        return [model, titan_cp.cp_shard, Trainer.train, Trainer.close]

    before = state()
    job = [*CAD, f"--model.hf_assets_path={tokenizer_folder()}"]
    for args in (job, job, [*CAD[:1], "--parallelism.no-cad"], []):
        ConfigManager().parse_args(args)
        for current, former in zip(state(), before, strict=True):
            assert (current is former) == (args is not job)


def test_without_cad_a_job_is_stock_torchtitan():
    """The config module alone changes nothing, to the bit."""
    result = run(
        [*COMMON, "--job.custom_config_module=torchtitan_cad.job_config"], nranks=2
    )
    expected = reference(2, ())
    assert result.losses == expected.losses
    assert result.grad_norms == expected.grad_norms
    assert not any("CAD" in log for log in result.logs)


STEPS = 2000
SETTLED = 300
WINDOW = 100


@slow
@needs_linux
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", ["collective", "symm_mem"])
def test_resident_memory_does_not_grow(transport):
    """From step 300 on, means over 100 steps are within 1% of each other, on every rank and over 1,700 plans."""
    job = [*PLACED, f"--cad.transport={transport}", f"--training.steps={STEPS}"]
    result = run([*job, "--metrics.log_freq=10"], timeout_s=3000)
    assert len(result.resident_bytes) == 2
    for memory in result.resident_bytes:
        means = [
            fmean(num for step, num in memory.items() if 0 < step - start <= WINDOW)
            for start in range(SETTLED, STEPS, WINDOW)
        ]
        assert max(means) <= 1.01 * min(means), f"{max(means)} and {min(means)} bytes"
