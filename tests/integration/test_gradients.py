"""Every parameter's gradient against a single process in fp64, relative to what undivided attention gets wrong."""

import pytest
import torch

from tests.integration.compositions import CAD, COMMON, CP2, KEEP, TP2, alone
from tests.integration.harness import gradient_errors, run
from tests.sets import params

STEP = 1
SUMMED = 64
"""roundings: a weight's gradient is a sum over up to 4,096 tokens, which in fp32 errs by a random walk of as many
steps, hence by their square root"""
CASES = {
    # name: (CAD arguments, ranks, data-parallel degree)
    "whole documents": ((), 2, 2),
    "whole documents, keep": (KEEP, 2, 2),
    "spanning documents": (CP2, 2, 1),
    "spanning documents, keep": ((*CP2, *KEEP), 2, 1),
    "split keys": (("--cad.planner=test_split_keys",), 2, 2),
    "split keys, spanning, keep": ((*CP2, "--cad.planner=test_split_keys", *KEEP), 2, 1),
    "tensor parallel": (TP2, 4, 2),
}

SHORT = ("split keys, spanning, keep",)
"""Cases that the short set trains; the matrix trains all."""


@pytest.mark.parametrize("heads", [pytest.param("1:1", marks=pytest.mark.slow), "8:2"])
@pytest.mark.parametrize("name", params(CASES, SHORT))
def test_gradients_are_as_exact_as_undivided_attention(name: str, heads: str) -> None:
    args, nranks, degree = CASES[name]
    flavor = {"1:1": "tiny_varlen", "8:2": "tiny_varlen_8_2"}[heads]
    result = run([*COMMON, *CAD, f"--model.flavor={flavor}", "--training.steps=1", *args], nranks, grads_at=STEP)
    assert result.ok, result.report()
    reference = alone(flavor, degree, STEP)
    mine = gradient_errors(result, reference)
    undivided = gradient_errors(alone(flavor, degree, STEP, *CAD), reference)
    assert max(undivided.values()) < SUMMED * torch.finfo(torch.float32).eps, "the references disagree"
    for parameter, error in mine.items():
        allowed = 2 * undivided[parameter]
        assert error <= allowed, f"{parameter}: {error:.2e}, twice that of undivided attention is {allowed:.2e}"
