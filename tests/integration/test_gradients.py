# SPDX-License-Identifier: BSD-3-Clause
"""Training with a measured profile; and gradients relative to what undivided attention gets wrong in fp64."""

from pathlib import Path

import pytest
import torch

from tests.lib.jobs.compositions import (
    CAD,
    COMMON,
    COMPILE,
    CP2,
    FULL,
    RESEND,
    TP2,
    VALIDATE_OFTEN,
    VALIDATION,
    alone,
    assert_trains_alike,
    cad_steps,
    reference,
)
from tests.lib.jobs.harness import gradient_errors, run
from tests.lib.profiles import linear, make_profile
from tests.lib.sets import matrix, params, slow
from torchtitan_cad.planning import AttentionShape, Profile

TINY = AttentionShape(num_heads=4, num_kv_heads=4, head_dim=16, dtype_bytes=4)
PAYS = make_profile(TINY, forward=linear(0.001), backward=linear(0.001, fixed=0.02))
"""Backward costs rows rather than tiles, so that a plan balanced for forward is not for backward."""


def write(folder: Path, profile: Profile) -> str:
    path = folder / "profile.json"
    path.write_text(profile.to_json())
    return f"--cad.profile={path}"


@pytest.mark.parametrize(
    ("nranks", "args", "shared"),
    [
        pytest.param(4, (), VALIDATE_OFTEN, marks=matrix),
        (2, FULL, ()),
        pytest.param(4, (), (*TP2, *COMPILE), marks=slow),
    ],
    ids=["fsdp4_validation", "ac_full", "fsdp2xtp2_compile"],
)
def test_measured_times_are_balanced(nranks, args, shared, tmp_path):
    job = [*COMMON, *CAD, *VALIDATION, *shared, *args, write(tmp_path, PAYS)]
    result = run(job, nranks, grads_at=2)
    assert_trains_alike(result, reference(nranks, shared))
    steps = cad_steps(result)
    assert sum(step["tasks_moved"] for step in steps) > 0
    for step in steps:
        assert step["imbalance_after"] <= step["imbalance_before"]
        # Loads are in the profile's units: home plans cost picoseconds, not tiles.
        assert sum(step["loads_before"]) > 1e6


@pytest.mark.parametrize(
    ("profile", "args", "expected"),
    [
        # Other heads are found by test_doctor.py, files that are no profiles by tests/planning/test_cost.py.
        (make_profile(TINY, kernel="varlen"), (), ("cad.profile", "kernel 'varlen'")),
        pytest.param(
            PAYS, ("--cad.min_shard=64",), ("cad.min_shard", 64, "128"), marks=matrix
        ),
    ],
    ids=["another kernel", "shards smaller than tiles"],
)
def test_a_profile_that_does_not_fit_is_refused_on_every_rank(
    profile, args, expected, tmp_path
):
    job = [*CAD, write(tmp_path, profile), *args]
    run(job, timeout_s=60, may_fail=True).assert_refused(*expected)


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
