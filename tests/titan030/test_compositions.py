# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of torchtitan 0.3.0 with CAD against the same recipe without: losses and gradient norms of three steps."""

import functools
from dataclasses import dataclass

import pytest

from tests.lib.jobs.compositions import cad_steps, cad_summary, options
from tests.titan030.harness import run, squared_norms

COMPILE = "compile --compile.components=model"
VALIDATE = "--validator.enable --validator.freq=2 --validator.steps=2"
SELECTIVE = "activation-checkpoint:selective"
FULL = "activation-checkpoint:full"


@dataclass(frozen=True)
class Case:
    """A composition: options of both jobs, and of the one with CAD alone, which may have more ranks, in words."""

    name: str
    model: str = "llama3"
    both: str = ""
    own: str = ""
    nranks: int = 2
    reference_nranks: int = 0
    """by default as many"""
    tolerance: float = 1e-5


def on_four(name, model="llama3", both="", own=""):
    """A job of four ranks; without context parallelism of its reference, that has two."""
    return Case(name, model, both, own=own, nranks=4, reference_nranks=2 if own else 4)


DENSE = ("llama3", "qwen3")
EXPERTS = ("qwen3_moe", "deepseek_v3", "gpt_oss")
CASES = [
    # a stage for each kind of attention
    on_four("gpt_oss_pp2_kinds_apart", "gpt_oss", "stages2"),
    on_four("hsdp", both="replicate2"),
    Case("replicas", both="replicate2"),
    on_four("fsdp2xcp2", own="cp2"),
    Case("accumulation", both="batch8"),
    Case("selective", own=SELECTIVE),
    Case("full", own=FULL),
    Case("full_attention_kept", own=f"--cad.no-recompute_attention {FULL}"),
    Case("compile_selective", own=f"{COMPILE} {SELECTIVE}"),
    on_four("pp2_1f1b", "llama3_deep", "stages2"),
    on_four("pp2_interleaved", "llama3_deep", "stages2 interleaved"),
    on_four("pp2xcp2", "llama3_deep", "stages2", own="cp2"),
    on_four(
        "partial_dtensor_tp2", both="tp2 --parallelism.spmd_backend=partial_dtensor"
    ),
    Case("validation", both=VALIDATE),
    on_four("pp2_validation", "llama3_deep", f"stages2 {VALIDATE}"),
]
for model in (*DENSE, *EXPERTS):
    CASES += [
        Case(f"{model}_fsdp2", model),
        Case(f"{model}_cp2", model, own="cp2", reference_nranks=1),
        on_four(f"{model}_fsdp2xtp2", model, "tp2"),
    ]
for model in DENSE:
    CASES.append(Case(f"{model}_compile", model, own=COMPILE))
for model in EXPERTS:  # stock refuses pipelines of tied embeddings, which qwen3 has
    eager = f"{COMPILE} --compile.backend=aot_eager"
    CASES += [
        Case(f"{model}_ep2", model, "ep2"),
        Case(f"{model}_selective", model, own=SELECTIVE),
        Case(f"{model}_full", model, own=FULL),
        on_four(f"{model}_pp2", f"{model}_deep", "stages2"),
        on_four(f"{model}_pp2xep2", f"{model}_deep", "stages2 ep2"),
        # compiled experts round to bfloat16, see tiny.compute_in_fp32
        Case(f"{model}_compile", model, eager, tolerance=1e-3),
    ]


@functools.cache
def reference(case):
    nranks = case.reference_nranks or case.nranks
    return run(case.model, *options(case.both), nranks=nranks, with_cad=False)


def assert_alike(result, other, tolerance):
    assert len(result.losses) == 3
    assert result.losses == pytest.approx(other.losses, rel=1e-5)
    # squares
    norms = pytest.approx(squared_norms(other), rel=2 * tolerance)
    assert squared_norms(result) == norms
    assert result.validation_losses == pytest.approx(other.validation_losses, rel=1e-5)


SHORT = {
    "llama3_fsdp2-auto",
    "deepseek_v3_cp2-loader",
    "gpt_oss_fsdp2-loader",
    "qwen3_moe_ep2-auto",
    "pp2_interleaved-loader",
    "compile_selective-loader",
    "validation-loader",
}
"""What is not left to `make test-titan030 MARKS='matrix or not matrix'`."""


def cases():
    for case in CASES:
        for homes in ("loader", "auto"):
            name = f"{case.name}-{homes}"
            marks = () if name in SHORT else pytest.mark.matrix
            yield pytest.param(case, homes, id=name, marks=marks)


@pytest.mark.parametrize(("case", "homes"), list(cases()))
def test_trains_like_the_recipe_without_cad(case, homes):
    result = run(
        case.model,
        f"--cad.placement={homes}",
        *options(case.both),
        *options(case.own),
        nranks=case.nranks,
    )
    assert_alike(result, reference(case), case.tolerance)
    assert result.graphs == [result.graphs[0]] * 3, "compiled anew"
    if homes == "loader":
        assert cad_summary(result)["tasks_moved"] > 0
        for step in cad_steps(result):
            assert min(step["pairs_per_token"]) >= 1
            assert max(step["pairs_per_token"]) <= (128 + 1) / 2
            assert step["tokens_per_second"] > 0
            assert step["mfu_percent"] > 0
