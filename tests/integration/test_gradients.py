# SPDX-License-Identifier: BSD-3-Clause
"""Training with a measured profile; and gradients relative to what undivided attention gets wrong in fp64."""

from pathlib import Path

import pytest
import torch

from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import gradient_errors, run
from tests.lib.profiles import linear, make_profile
from tests.lib.sets import params
from torchtitan_cad.planning import AttentionShape, Profile
from torchtitan_cad.tools.report import find_steps, read_steps

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
        pytest.param(4, (), c.VALIDATE_OFTEN, marks=pytest.mark.matrix),
        (2, c.FULL, ()),
        pytest.param(4, (), (*c.TP2, "--compile.enable"), marks=pytest.mark.slow),
    ],
    ids=["fsdp4_validation", "ac_full", "fsdp2xtp2_compile"],
)
def test_measured_times_are_balanced(nranks, args, shared, tmp_path):
    result = run(
        [*c.COMMON, *c.CAD, *c.VALIDATION, *shared, *args, write(tmp_path, PAYS)],
        nranks,
        grads_at=2,
    )
    expected = c.reference(nranks, shared)
    c.assert_trains_alike(result, expected)
    assert result.validation_losses.keys() == expected.validation_losses.keys()
    steps = read_steps(find_steps(result.dump_folder))
    assert all(step["imbalance_after"] <= step["imbalance_before"] for step in steps)
    assert sum(step["tasks_moved"] for step in steps) > 0
    # Loads are in the profile's units: the steps' home plans cost picoseconds, not tiles.
    assert min(sum(step["loads_before"]) for step in steps) > 1e6


def test_a_profile_of_another_kernel_is_one_value_error_on_every_rank(tmp_path):
    """Other heads are found by test_doctor.py, files that are no profiles by tests/planning/test_cost.py."""
    args = [*c.CAD, write(tmp_path, make_profile(TINY, kernel="varlen"))]
    result = run(args, nranks=2, timeout_s=60, may_fail=True)
    result.assert_refused("cad.profile", "kernel 'varlen'")


@pytest.mark.matrix
def test_shards_smaller_than_the_profiles_tiles_are_refused(tmp_path):
    args = [*c.CAD, write(tmp_path, PAYS), "--cad.min_shard=64"]
    result = run(args, nranks=2, timeout_s=60, may_fail=True)
    result.assert_refused("cad.min_shard", 64, remedy="128")


STEP = 1
SUMMED = 64
"""roundings: a weight's gradient is a sum over up to 4,096 tokens, which in fp32 errs by a random walk of as many
steps, hence by their square root"""
CASES = {
    # name: (CAD arguments, ranks, data-parallel degree)
    "whole documents": ((), 2, 2),
    "whole documents, resend": (c.RESEND, 2, 2),
    "spanning documents": (c.CP2, 2, 1),
    "spanning documents, resend": ((*c.CP2, *c.RESEND), 2, 1),
    "split keys": (("--cad.planner=test_split_keys",), 2, 2),
    "split keys, spanning, resend": (
        (*c.CP2, "--cad.planner=test_split_keys", *c.RESEND),
        2,
        1,
    ),
    "tensor parallel": (c.TP2, 4, 2),
}

SHORT = ("split keys, spanning, resend",)
"""Cases that the short set trains; the matrix trains all."""


@pytest.mark.parametrize("heads", [pytest.param("1:1", marks=pytest.mark.slow), "8:2"])
@pytest.mark.parametrize("name", params(CASES, SHORT))
def test_gradients_are_as_exact_as_undivided_attention(name, heads):
    args, nranks, degree = CASES[name]
    flavor = {"1:1": "tiny_varlen", "8:2": "tiny_varlen_8_2"}[heads]
    result = run(
        [*c.COMMON, *c.CAD, f"--model.flavor={flavor}", "--training.steps=1", *args],
        nranks,
        grads_at=STEP,
    )
    exact = c.alone(flavor, degree, STEP)
    mine = gradient_errors(result, exact)
    undivided = gradient_errors(c.alone(flavor, degree, STEP, *c.CAD), exact)
    assert max(undivided.values()) < SUMMED * torch.finfo(torch.float32).eps, (
        "the references disagree"
    )
    for parameter, error in mine.items():
        allowed = 2 * undivided[parameter]
        assert error <= allowed, (
            f"{parameter}: {error:.2e}, twice that of undivided attention is {allowed:.2e}"
        )
