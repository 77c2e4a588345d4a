# SPDX-License-Identifier: BSD-3-Clause
"""Gradients relative to what undivided attention gets wrong in fp64."""

import pytest
import torch

from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    CP2,
    RESEND,
    TP2,
    alone,
)
from tests.lib.jobs.harness import gradient_errors, run
from tests.lib.sets import params

SUMMED = 64
"""roundings: a weight's gradient is a sum over up to 4,096 tokens, which in fp32 errs by a random walk of as many
steps, hence by their square root"""
SPLIT_KEYS = ("--cad.planner=test_split_keys",)
CASES = {
    # name: (CAD arguments, ranks, data-parallel degree)
    "whole documents": ((), 2, 2),
    "whole documents, resend": (RESEND, 2, 2),
    "spanning documents": (CP2, 2, 1),
    "spanning documents, resend": ((*CP2, *RESEND), 2, 1),
    "split keys": (SPLIT_KEYS, 2, 2),
    "split keys, spanning, resend": ((*CP2, *SPLIT_KEYS, *RESEND), 2, 1),
    "tensor parallel": (TP2, 4, 2),
}

SHORT = ("split keys, spanning, resend",)
"""Cases that the short set trains; the matrix trains all."""


@pytest.mark.parametrize("name", params(CASES, SHORT))
def test_gradients_are_as_exact_as_undivided_attention(name):
    """The first step's, with 8 heads of queries and 2 of keys."""
    args, nranks, degree = CASES[name]
    model = "tiny_varlen_8_2"
    job = [*COMMON, *CAD, f"--model.flavor={model}", "--training.steps=1", *args]
    result = run(job, nranks, grads_at=1)
    exact = alone(model, degree, 1)
    undivided = gradient_errors(alone(model, degree, 1, *CAD), exact)
    assert max(undivided.values()) < SUMMED * torch.finfo(torch.float32).eps, (
        "the references disagree"
    )
    for parameter, error in gradient_errors(result, exact).items():
        assert error <= 2 * undivided[parameter], parameter
