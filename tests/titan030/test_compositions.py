# SPDX-License-Identifier: BSD-3-Clause
"""Jobs of torchtitan 0.3.0 with CAD against the same recipe without: losses and gradient norms of three steps."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.titan030.harness import Result, run

CP2, TP2, EP2, PP2 = (
    f"--parallelism.{kind}_parallel_degree=2"
    for kind in ("context", "tensor", "expert", "pipeline")
)
HSDP = "--parallelism.data_parallel_replicate_degree=2"
COMPILE = ("--compile.enable", "--compile.components=model")
VALIDATE = ("--validator.enable", "--validator.freq=2", "--validator.steps=2")
EAGER = (*COMPILE, "--compile.backend=aot_eager")


@dataclass(frozen=True)
class Case:
    """A composition: options of both jobs, and of the one with CAD alone, which may have more ranks."""

    name: str
    model: str = "llama3"
    both: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    nranks: int = 2
    reference_nranks: int = 0
    """by default as many"""
    tolerance: float = 1e-5


DENSE = ("llama3", "qwen3")
EXPERTS = ("qwen3_moe", "deepseek_v3", "gpt_oss")
MODELS = (*DENSE, *EXPERTS)
CASES = [
    *(Case(f"{model}_fsdp2", model) for model in MODELS),
    *(Case(f"{model}_cp2", model, own=(CP2,), reference_nranks=1) for model in MODELS),
    *(Case(f"{model}_fsdp2xtp2", model, both=(TP2,), nranks=4) for model in MODELS),
    *(Case(f"{model}_ep2", model, both=(EP2,)) for model in EXPERTS),
    *(
        Case(f"{model}_{kind}", model, own=(f"activation-checkpoint:{kind}",))
        for model in EXPERTS
        for kind in ("selective", "full")
    ),
    *(
        Case(f"{model}_pp2", f"{model}_deep", both=(PP2,), nranks=4)
        for model in EXPERTS  # stock refuses pipelines of tied embeddings, which qwen3 has
    ),
    # a stage for each kind of attention
    Case("gpt_oss_pp2_kinds_apart", "gpt_oss", both=(PP2,), nranks=4),
    *(
        Case(f"{model}_pp2xep2", f"{model}_deep", both=(PP2, EP2), nranks=4)
        for model in EXPERTS
    ),
    *(Case(f"{model}_compile", model, own=COMPILE) for model in DENSE),
    # compiled experts round to bfloat16, see tiny.compute_in_fp32
    *(Case(f"{model}_compile", model, both=EAGER, tolerance=1e-3) for model in EXPERTS),
    Case("hsdp", both=(HSDP,), nranks=4),
    Case("replicas", both=(HSDP,)),
    Case("fsdp2xcp2", own=(CP2,), nranks=4, reference_nranks=2),
    Case("accumulation", both=("--training.global_batch_size=8",)),
    Case("selective", own=("activation-checkpoint:selective",)),
    Case("full", own=("activation-checkpoint:full",)),
    Case(
        "full_attention_kept",
        own=("--cad.no-recompute_attention", "activation-checkpoint:full"),
    ),
    Case("compile_selective", own=(*COMPILE, "activation-checkpoint:selective")),
    Case("pp2_1f1b", "llama3_deep", both=(PP2,), nranks=4),
    Case(
        "pp2_interleaved",
        "llama3_deep",
        both=(PP2, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"),
        nranks=4,
    ),
    Case(
        "pp2xcp2", "llama3_deep", both=(PP2,), own=(CP2,), nranks=4, reference_nranks=2
    ),
    Case(
        "partial_dtensor_tp2",
        both=(TP2, "--parallelism.spmd_backend=partial_dtensor"),
        nranks=4,
    ),
    Case("validation", both=VALIDATE),
    Case("pp2_validation", "llama3_deep", both=(PP2, *VALIDATE), nranks=4),
]


@functools.cache
def reference(case: Case) -> Result:
    nranks = case.reference_nranks or case.nranks
    return run(case.model, *case.both, nranks=nranks, with_cad=False)


def assert_alike(result: Result, other: Result, tolerance: float) -> None:
    assert len(result.losses) == 3
    assert result.losses == pytest.approx(other.losses, rel=1e-5)
    # squares
    assert result.gradients == pytest.approx(other.gradients, rel=2 * tolerance)
    assert result.validation == pytest.approx(other.validation, rel=1e-5)


SHORT = {
    ("llama3_fsdp2", "auto"),
    ("deepseek_v3_cp2", "loader"),
    ("gpt_oss_fsdp2", "loader"),
    ("qwen3_moe_ep2", "auto"),
    ("pp2_interleaved", "loader"),
    ("compile_selective", "loader"),
    ("validation", "loader"),
}
"""What is not left to `make test-titan030 MARKS='matrix or not matrix'`."""


def cases() -> Iterator[object]:
    for case in CASES:
        for homes in ("loader", "auto"):
            marks = [] if (case.name, homes) in SHORT else [pytest.mark.matrix]
            yield pytest.param(case, homes, id=f"{case.name}-{homes}", marks=marks)


@pytest.mark.parametrize(("case", "homes"), list(cases()))
def test_trains_like_the_recipe_without_cad(case: Case, homes: str) -> None:
    result = run(
        case.model,
        f"--cad.placement={homes}",
        *case.both,
        *case.own,
        nranks=case.nranks,
    )
    assert_alike(result, reference(case), case.tolerance)
    assert result.graphs == [result.graphs[0]] * 3, "compiled anew"
    if homes == "loader":
        assert sum(result.moved) > 0
