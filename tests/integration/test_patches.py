# SPDX-License-Identifier: BSD-3-Clause
"""Every file of patches/ repairs a defect of torchtitan 0.2.2, which its reproducer shows without the patch."""

import inspect
import os
import subprocess
import sys

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.attention.varlen import varlen_attn

from tests.lib.jobs.harness import REPOSITORY
from tests.lib.jobs.patched import PATCHES
from tests.lib.patched_torchtitan import apply_patch, copy_torchtitan
from tests.lib.sets import matrix
from torchtitan_cad.integration.torchtitan_v0_2 import upstream

MET_BY_THIS_TORCH = {
    "varlen_gqa": "enable_gqa" in inspect.signature(varlen_attn).parameters,
    "tied_embeddings": hasattr(FSDPState, "_validate_no_duplicate_params"),
}
"""Defects that not every torch has met."""


def test_all_patches_apply_together_and_revert(tmp_path):
    assert len(PATCHES) == 8
    folder = copy_torchtitan(tmp_path)

    def contents():
        return [path.read_bytes() for path in sorted(folder.rglob("*.py"))]

    original = contents()
    for patch in PATCHES:
        apply_patch(folder, patch)
    assert contents() != original
    for patch in PATCHES:
        apply_patch(folder, patch, "--reverse")
    assert contents() == original


def test_what_a_patch_has_changed_is_known():
    assert upstream._has("train.py", "def forward_backward_step(")
    assert not upstream._has("train.py", "param.grad.div_(")


@matrix
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_reproducer(patch, tmp_path):
    """It says in one line what stock torchtitan does wrong, and nothing once the patch is applied."""

    script = REPOSITORY / "patches" / "reproducers" / f"{patch.stem}.py"

    def reproduce(search):
        own = {"PYTHONPATH": search, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            env={**os.environ, **own},
        )
        return done.returncode, done.stdout.splitlines()

    is_met = MET_BY_THIS_TORCH.get(patch.stem, True)
    code, lines = reproduce("")
    assert (code, len(lines)) == (is_met, is_met), lines
    assert reproduce(str(copy_torchtitan(tmp_path, patch))) == (0, [])
