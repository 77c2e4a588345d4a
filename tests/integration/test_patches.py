# SPDX-License-Identifier: BSD-3-Clause
"""Every file of patches/ repairs a defect of torchtitan 0.2.2, which its reproducer shows without the patch.

Jobs on a torchtitan with all patches agree with jobs that do not have the defect.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.attention.varlen import varlen_attn

from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import REPOSITORY, RunResult, run
from tests.lib.jobs.patched import PATCHES
from tests.lib.patched_torchtitan import apply_patch, copy_torchtitan
from tests.lib.sets import matrix
from torchtitan_cad.tools.doctor.defects import DEFECTS

MET_BY_THIS_TORCH = {
    "varlen_gqa": "enable_gqa" in inspect.signature(varlen_attn).parameters,
    "tied_embeddings": hasattr(FSDPState, "_validate_no_duplicate_params"),
}
"""Defects that not every torch has met."""


def test_all_patches_apply_together_and_revert(tmp_path):
    assert len(PATCHES) == 8
    folder = copy_torchtitan(tmp_path)
    original = {path: path.read_bytes() for path in folder.rglob("*.py")}
    for patch in PATCHES:
        apply_patch(folder, patch)
    assert {path: path.read_bytes() for path in folder.rglob("*.py")} != original
    assert [defect.patch for defect in sorted(DEFECTS, key=lambda x: x.patch)] == [
        patch.stem for patch in PATCHES
    ]
    for defect in DEFECTS:  # the code by which `doctor` knows a patched torchtitan
        source = folder / "torchtitan" / defect.source
        assert defect.code in source.read_text()
        assert defect.code.encode() not in original[source]
    for patch in PATCHES:
        apply_patch(folder, patch, "--reverse")
    assert {path: path.read_bytes() for path in folder.rglob("*.py")} == original


@matrix
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_reproducer(patch, tmp_path):
    """It says in one line what stock torchtitan does wrong, and nothing once the patch is applied."""

    def reproduce(*search: Path) -> tuple[int, list[str]]:
        script = REPOSITORY / "patches" / "reproducers" / f"{patch.stem}.py"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, search)),
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            timeout=120,
            env=env,
        )
        return done.returncode, (done.stdout + done.stderr).splitlines()

    code, lines = reproduce()
    is_met = MET_BY_THIS_TORCH.get(patch.stem, True)
    assert (code, len(lines)) == ((1, 1) if is_met else (0, 0)), lines
    assert reproduce(copy_torchtitan(tmp_path, patch)) == (0, [])


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_torchtitan(tmp_path_factory.mktemp("patched"), *PATCHES)


def train(*args: str, nranks: int = 2, patched: Path | None = None) -> RunResult:
    """A run with stock torchtitan, or with that of a folder."""
    return run(args, nranks, timeout_s=60, pythonpath=[patched] if patched else [])


def assert_same_training(result: RunResult, reference: RunResult) -> None:
    c.assert_close(result.losses, reference.losses, "loss")
    c.assert_close(result.grad_norms, reference.grad_norms, "gradient norm")


SDPA, VARLEN = "--model.flavor=tiny_sdpa", "--model.flavor=tiny_varlen"
ONE_DOCUMENT = "--training.dataset=one_document"
PP2 = c.dp(pipeline_parallel=2)
JOBS = {
    # arguments of the patched job, and of the reference on so many ranks
    "pp_gradient_scale": (
        (SDPA, *c.global_batch(4), *PP2),
        (SDPA, *c.global_batch(4)),
        1,
    ),
    "ddp_gradient_scale": (
        (SDPA, *c.global_batch(8), *c.DDP2),
        (SDPA, *c.global_batch(8)),
        2,
    ),
    "varlen_pipeline": ((VARLEN, *c.BATCH4, *PP2, *c.BY_ROW), (VARLEN, *c.BATCH4), 1),
    "varlen_gqa": (
        (ONE_DOCUMENT, "--model.flavor=tiny_varlen_gqa"),
        (ONE_DOCUMENT, *c.SDPA_GQA),
        2,
    ),
    "no defect": ((), (), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_patched_jobs(job, patched):
    """Losses and gradients are those without the parallelism, also over several accumulated batches."""
    args, reference_args, nranks = JOBS[job]
    result, reference = (
        train(*args, patched=patched),
        train(*reference_args, nranks=nranks),
    )
    assert_same_training(result, reference)
    if job == "no defect":  # no bit changes
        assert (result.losses, result.grad_norms) == (
            reference.losses,
            reference.grad_norms,
        )


@pytest.mark.slow
@pytest.mark.parametrize("args", [PP2, c.DDP2], ids=["pp2", "ddp2"])
def test_repairs_at_run_time_and_patches_do_not_add_up(args, patched):
    assert_same_training(
        train(*c.PLACED, *args, patched=patched), train(*c.PLACED, *args)
    )


@pytest.mark.slow
def test_validation_loss_of_patched_jobs(patched):
    """The validation loss does not depend on how many ranks share a sequence.

    Stock torchtitan has no context parallelism on CPU, so both runs have CAD on.
    """
    args = (
        *c.PLACED,
        "--training.steps=1",
        "--validation.enable",
        "--validation.steps=2",
    )
    reference = train(*args, nranks=1).validation_losses[1]
    result = train(*args, *c.CP2, patched=patched)
    assert result.validation_losses == {1: pytest.approx(reference, rel=c.TOLERANCE)}
