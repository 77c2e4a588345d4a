# SPDX-License-Identifier: BSD-3-Clause
"""Models whose attention CAD replaces as a whole, each composition against stock torchtitan without CAD.

Stock torchtitan 0.2.2 gives these models masks for flex attention, which dense_twin.py computes on CPU.
"""

import functools
from itertools import product

import pytest

from tests.lib.jobs import compositions
from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    PLACED,
    VALIDATION,
    Composition,
    assert_close,
    assert_not_recompiled,
    assert_trains_alike,
    cad_summary,
    options,
    pp2,
    reference,
)
from tests.lib.jobs.harness import run
from tests.lib.jobs.patched import torchtitan_with
from tests.lib.sets import matrix

COMPOSITIONS = [
    Composition("fsdp2"),
    # Stock torchtitan's gradients of gpt_oss differ under TP, and those of routers where experts borrow ranks of it:
    # these twins have TP, too.
    Composition("fsdp2xtp2", shared="tp2"),
    Composition("ep2", "ep2"),
    Composition("ep2xtp2", shared="ep2 tp2"),
    Composition("ep2xetp2", shared="ep2 tp2 etp2"),
    Composition("cp2", "cp2", dp=1),
    Composition("fsdp2xcp2", "cp2"),
    Composition("resend", "resend"),
    Composition("ac_selective_op", "ac_op"),
    Composition("ac_full", "ac_full"),
    Composition("compile", "compile --compile.components=model"),
    Composition("gradient_accumulation", shared="batch8"),
    Composition("halved_rows_ac_full", "halves ac_full"),
    Composition("halved_middle_cp2", "halves cp2", shared="row1", dp=1),
    Composition("halved_tp2", "halves", shared="tp2"),
]
"""What is tested of every model."""
# The one flavor that stock torchtitan trains on CPU: sdpa knows no documents.
SDPA = Composition(
    "sdpa_rows_cp2",
    "documents_of_rows cp2",
    shared="--model.flavor=tiny_sdpa",
    dp=1,
)
OWN = {
    "deepseek_v3": [
        Composition("q_lora_fsdp2xtp2", "tp2", shared="--model.flavor=tiny_q_lora"),
        SDPA,
        pp2("pp2_1f1b"),
        pp2("pp2xcp2", "cp2", dp=1),
    ],
    "llama4": [
        SDPA,
        Composition("validation", shared="validate_often"),
        pp2("pp2_1f1b"),
    ],
    # Rows are no longer than the window, so all layers attend in full.
    "gpt_oss": [Composition("wide_fsdp2", shared="--model.flavor=tiny_wide")],
}
"""What is tested of one model alone."""
TINY = "--model.flavor=tiny --model.name="
STEADY = ("--optimizer.eps=1e-3",)
"""Adam steps in proportion to small gradients: those of keys' biases are nearly zero, and else it would raise their
rounding to the size of the others. After one step with its default stock torchtitan's router gradient is 1.0e-4 of its
norm off fp64's, and that of CAD with CP 2 2.3e-4."""
SHORT = ("deepseek_v3-cp2-loader", "gpt_oss-cp2-loader")
"""What the short set trains of models with attention of their own: documents that lie across ranks."""


def steps_of(model: str, case: Composition, homes: str) -> int:
    """How many steps agree with stock torchtitan's.

    Where experts borrow TP's ranks, its router gradients are half wrong and replicas drift apart: where tokens go to
    other columns or come in halves, the first step's gradients agree, later ones do not. Halves of other columns differ
    in the first.
    """
    if case.name != "ep2xtp2" and (model != "gpt_oss" or "tp2" not in case.shared):
        return 3
    return 3 - 2 * ("halved" in case.name) - 2 * (homes == "placed")


CASES = []
for model, homes in product(OWN, ("loader", "placed")):
    for case in (*COMPOSITIONS, *OWN[model]):
        name = f"{model}-{case.name}-{homes}"
        if steps_of(model, case, homes) > 0:
            marks = () if name in SHORT else matrix
            CASES.append(pytest.param(model, case, homes, id=name, marks=marks))


@pytest.mark.parametrize(("model", "case", "homes"), CASES)
def test_composition_trains_like_its_reference(model, case, homes, monkeypatch):
    steps = steps_of(model, case, homes)
    shared = options(f"{TINY}{model} --training.steps={steps}")
    if model == "gpt_oss":
        shared += STEADY
    # Stock torchtitan has no validation for the other models, and none for this one's sdpa.
    validates = model == "llama4" and "sdpa" not in case.name
    validation = VALIDATION if validates else ()
    cad = CAD if homes == "loader" else PLACED
    job = [*COMMON, *validation, *cad, *shared, *case.job]
    grads_at = min(2, steps)
    result = run(job, case.nranks, 300, grads_at=grads_at)
    without_cad = functools.partial(
        reference,
        case.reference_nranks,
        (*shared, *case.reference_job),
        validates=validates,
        grads_at=grads_at,
    )
    exact = functools.partial(without_cad, fp64=True)
    if f"{model}-{case.name}-{homes}" == SHORT[0]:
        # Judge by fp64 here, so that no CPU is the first to do so.
        monkeypatch.setattr(compositions, "rounding", lambda: 0.0)
    assert_trains_alike(result, without_cad(), exact=exact)
    if steps > 1:
        assert_not_recompiled(result)
    assert homes == "placed" or cad_summary(result)["tasks_moved"] > 0


@matrix
def test_gpt_oss_from_scratch_trains_like_patched_torchtitan():
    """The biases of its routers begin at zero. Stock begins with NaN, with which `debug.deterministic` fills memory."""
    job = (*COMMON, *options(f"{TINY}gpt_oss"), *STEADY)
    result = run([*job, *CAD], init_seed=None)
    expected = run(job, init_seed=None, pythonpath=[torchtitan_with("router_bias")])
    assert_close(result.losses, expected.losses, "loss")
    assert_close(result.grad_norms, expected.grad_norms, "gradient norm")
