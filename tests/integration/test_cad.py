# SPDX-License-Identifier: BSD-3-Clause
"""CAD composed with everything torchtitan offers, each composition against a run without CAD.

The reference is the same job with ``parallelism.cad`` off, on torchtitan's own varlen attention. Where stock torchtitan
0.2.2 cannot run that job (context parallelism with varlen, documents under pipelining) or scales its gradients wrongly
(PP, DDP; see patches/), the reference is the equivalent job it can run: the same global batch without that parallelism.
"""

import functools
import re
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torchtitan.distributed.context_parallel as titan_cp
from torchtitan.config import ConfigManager
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.train import Trainer

from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    COMPOSITIONS,
    DEFAULTS,
    FAST,
    PLACED,
    TOLERANCE,
    VALIDATION,
    Composition,
    alone,
    assert_not_recompiled,
    assert_trains_alike,
    cad_summary,
    name_of,
    options,
    pp2,
    reference,
    skip_if_torch_is_too_old,
    stock,
)
from tests.lib.jobs.harness import (
    RunResult,
    gradient_errors,
    run,
    tokenizer_folder,
)
from tests.lib.sets import matrix, params, slow
from tests.lib.threaded import needs_linux
from torchtitan_cad.integration.torchtitan_v0_2.models import ADAPTERS
from torchtitan_cad.integration.torchtitan_v0_2.plugin import cad_train_spec

SHORT = "ac_full_resend"
"""Composition that the short set trains over symmetric memory, beside those below and of test_compile_caches.py: one of
every kind."""
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
    args = options("validation batch12")
    job = [*COMMON, *args, *options("cad tolerance_auto")]
    cad = run(job, init_seed=None)
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
    args = [*COMMON, *validation, *cad, *case.job, *more]
    result = run(args, case.nranks, grads_at=2, link=link)
    expected = reference(case.reference_nranks, case.reference_job)
    if case.validates:
        assert result.validation_losses.keys() == expected.validation_losses.keys()
    assert_trains_alike(result, expected, reports_loss=case.reports_loss)
    assert_not_recompiled(result)
    return result


# Attention moves to where time is saved ------------------------------------------------------------------------------

BY_RATES = [
    Composition("fsdp2"),
    Composition("fsdp2xtp2", "tp2"),
    Composition("cp2", "cp2", dp=1),
    pp2("pp2_1f1b", "1f1b"),
    pp2("pp2_cad1f1b", "cad1f1b"),
    Composition("fsdp4", dp=4),
    Composition("fsdp2xcp2", "cp2"),
    Composition("halves", "halves"),
    Composition("compile", "compile"),
    Composition("accumulation_validation", shared="batch12 validate_often"),
]
DEBUG_TOML = Path(__file__).with_name("debug_model.toml")


def assert_moves(result: RunResult, *, in_ticks: bool = False) -> None:
    """Attention has moved, by rates and over the transport that CPU ranks have by default; servers keep rows."""
    assert cad_summary(result)["tasks_moved"] > 0
    for log in result.logs:
        assert "CAD plans by time: attention takes " in log
        assert "CAD exchanges rows by collective" in log
        assert "debug.deterministic" not in log
        assert ("cad.backward = 'auto': servers keep rows of up to" in log) != in_ticks


@pytest.mark.parametrize("case", params(BY_RATES, BY_RATES[:3]), ids=name_of)
def test_all_of_cad_as_it_is_by_default_trains_like_its_reference(case):
    """Ranks find links so fast that attention moves in jobs this small."""
    cad = (*DEFAULTS, "--debug.no-deterministic")
    assert_moves(check(case, cad=cad, link=FAST), in_ticks=case.name == "pp2_cad1f1b")


def test_a_new_users_job():
    """torchtitan's debug job with one switch, made shorter, beside stock torchtitan with attention inside documents."""
    job = (
        "--training.dataset=packed_documents",
        "--validation.dataset=packed_documents",
        "--training.steps=1",
        "--training.seq_len=512",
        "--validation.seq_len=512",
        "--training.local_batch_size=2",
        "--training.mixed_precision_param=float32",
        "--metrics.enable_tensorboard",
        *VALIDATION,
    )
    train = functools.partial(run, config=DEBUG_TOML, grads_at=1)
    cad = train([*job, *DEFAULTS], link=FAST)
    stock = train([*job, "--model.flavor=debugmodel_varlen_attn"])
    assert_moves(cad)
    assert cad.validation_losses.keys() == stock.validation_losses.keys() == {1}
    assert_trains_alike(cad, stock)


# Tokens move to other homes -------------------------------------------------------------------------------------------

OVER_STEPS = [
    Composition(
        "ignored_labels_accumulation",
        shared="--training.dataset=packed_documents_with_ignored_labels batch8",
    ),
    Composition("cp2_accumulation", "cp2", shared="batch8", dp=1),
    Composition("fsdp2xtp2_accumulation", "tp2", shared="batch16"),
    Composition("halves_by_row_accumulation", "halves", shared="batch16"),
    Composition("halves_in_the_middle_accumulation", "halves", shared="rows3 batch24"),
    pp2("1f1b_accumulation", "batch16", "batch16"),
    pp2("halves_pp2_1f1b", "halves"),
    pp2("ticks_halves_in_the_middle", "cad1f1b halves"),
    pp2("ticks_accumulation", "cad1f1b batch16", "batch16"),
    pp2("1f1b_alone_in_a_stage", dp=1, moves=False),
    pp2("ticks_alone_in_a_stage", "cad1f1b", dp=1),
]
"""Steps of four microbatches and more, between which documents go."""
REDISTRIBUTED = [
    *OVER_STEPS,
    # Training goes by the loader's positions, as that of stock torchtitan does.
    Composition(
        "positions", shared="--training.dataset=packed_documents_with_positions"
    ),
    # With single rows the loader's homes are as good.
    Composition("fsdp2xcp2", "cp2 --cad.min_shard=32", shared="rows3"),
    *(case for case in COMPOSITIONS if case.moves and case.name != "fsdp2xcp2"),
    Composition("fsdp8", dp=8),
    Composition("halves_by_row_fsdp2xtp2", "halves", shared="tp2"),
    Composition("halves_in_the_middle_compile", "halves compile", shared="rows3"),
    Composition("halves_in_the_middle_fsdp2xcp2", "halves cp2", shared="rows3"),
    pp2("ticks_cp2", "cad1f1b cp2", dp=1),
]


@pytest.mark.parametrize("case", params(REDISTRIBUTED, OVER_STEPS[:1]), ids=name_of)
def test_placement_trains_like_its_reference(case):
    """Whoever holds which tokens."""
    result = check(case, "--cad.placement=auto")
    if case in OVER_STEPS:
        assert re.search(r"[1-9]\d* documents change their microbatch", result.logs[0])


# Experts of qwen3 -----------------------------------------------------------------------------------------------------

# Stock torchtitan's varlen attention does not take the sharded heads that qwen3 gives it under TP; runner.py lets it.
# Where experts compute in bf16, in grouped matrix products, the reference divides them as the run does.
EXPERTS = [
    Composition("ep2", "ep2", shared="moe"),
    Composition("rows_ep2", "halves ep2", shared="moe"),
    Composition("fsdp2", shared="moe"),
    Composition("ep2_grouped", shared="grouped ep2"),
    Composition("ep2_placed", "ep2 placed", shared="moe"),
    Composition("ep2_ac_full_resend", "ep2 ac_full resend", shared="moe"),
    Composition("ep2_ac_op_accumulation", "ep2 ac_op", shared="moe batch12"),
    Composition("ep2_compile", shared="grouped ep2 compile"),
    Composition("ep2xcp2", "ep2 cp2", shared="moe"),
    Composition("cp2", "cp2", shared="moe", dp=1),
    Composition("hsdp2x2_ep2", "ep2", shared="moe replicate2", dp=4),
    Composition("fsdp2xtp2", shared="moe tp2"),
    Composition("ep2xtp2", shared="moe tp2 ep2"),
    Composition("ep2xtp2_etp2", shared="moe tp2 ep2 etp2"),
    Composition("middle_ep2", "halves ep2", shared="moe row1"),
    # Rounding sends a token of this batch to another expert, one of two whose scores are equal but for it.
    Composition(
        "middle_ep2xcp2", "halves ep2 cp2", shared="moe row1 routed_in_turn", dp=1
    ),
    Composition("rows_ep2_ac_op_accumulation", "halves ep2 ac_op", shared="moe batch8"),
    Composition("rows_ep2_ac_full_resend", "halves ep2 ac_full resend", shared="moe"),
    Composition("rows_ep2_compile_ac_op", "halves compile ac_op", shared="moe ep2"),
    # The replicas of a router drift apart under TP (torchtitan 0.2.2), and gradients of other tokens are then added.
    Composition(
        "rows_ep2xtp2_etp2", "halves", shared="moe tp2 ep2 etp2 routed_in_turn"
    ),
]


@pytest.mark.parametrize("case", params(EXPERTS, EXPERTS[:2]), ids=name_of)
def test_experts_train_like_without_cad(case):
    """Gradients, losses, and the biases that balance experts."""
    result = check(case, "--cad.transport=collective")
    assert sum(name.endswith("expert_bias") for name in result.grads) == 2


# Gradients relative to what undivided attention gets wrong in fp64 ----------------------------------------------------

SUMMED = 64
"""roundings: a weight's gradient is a sum over up to 4,096 tokens, which in fp32 errs by a random walk of as many
steps, hence by their square root"""
SPLIT_KEYS = "--cad.planner=test_split_keys"
EXACT = [
    Composition("split keys, spanning, resend", f"cp2 {SPLIT_KEYS} resend", dp=1),
    Composition("whole documents"),
    Composition("whole documents, resend", "resend"),
    Composition("spanning documents", "cp2", dp=1),
    Composition("spanning documents, resend", "cp2 resend", dp=1),
    Composition("split keys", SPLIT_KEYS),
    Composition("tensor parallel", "tp2"),
]


@pytest.mark.parametrize("case", params(EXACT, EXACT[:1]), ids=name_of)
def test_gradients_are_as_exact_as_undivided_attention(case):
    """The first step's, with 8 heads of queries and 2 of keys."""
    model = "tiny_varlen_8_2"
    job = [*COMMON, *CAD, f"--model.flavor={model}", "--training.steps=1", *case.job]
    result = run(job, case.nranks, grads_at=1)
    exact = alone(model, case.dp, 1)
    undivided = gradient_errors(alone(model, case.dp, 1, *CAD), exact)
    assert max(undivided.values()) < SUMMED * torch.finfo(torch.float32).eps, (
        "the references disagree"
    )
    for parameter, error in gradient_errors(result, exact).items():
        assert error <= 2 * undivided[parameter], parameter


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
    with torch.no_grad():
        for tensor in chain(model.parameters(), model.buffers()):
            tensor.fill_(torch.nan)
        model.init_weights(buffer_device=torch.device("cpu"))
    for tensor in chain(model.parameters(), model.buffers()):
        assert not tensor.isnan().any()


def test_preparing_for_one_job_after_another_leaves_no_trace():
    def state():
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
    assert len(result.figures) == 2
    for figures in result.figures:
        memory = {x["step"]: x["resident_bytes"] for x in figures}
        means = [
            fmean(num for step, num in memory.items() if 0 < step - start <= WINDOW)
            for start in range(SETTLED, STEPS, WINDOW)
        ]
        assert max(means) <= 1.01 * min(means), f"{max(means)} and {min(means)} bytes"
