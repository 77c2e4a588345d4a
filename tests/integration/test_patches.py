"""Every file of patches/ repairs a defect of torchtitan 0.2.2, and the defect is there without it.

Each test runs one job three times: a configuration that stock torchtitan computes correctly (the reference), the
affected configuration on stock torchtitan, and the same on a patched copy.
"""

import inspect
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.nn.attention.varlen import varlen_attn

from tests.integration import compositions as c
from tests.integration.harness import REPOSITORY, RunResult, run

PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))


def copy_torchtitan(destination: Path, *patches: str) -> Path:
    """Copy the installed torchtitan below `destination`, apply patches there, and return the folder to import from."""
    spec = find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations
    installed = Path(spec.submodule_search_locations[0])
    shutil.copytree(installed, destination / "torchtitan", ignore=shutil.ignore_patterns("__pycache__"))
    for patch in patches:
        apply_patch(destination, REPOSITORY / "patches" / f"{patch}.patch")
    return destination


def apply_patch(folder: Path, patch: Path, *options: str) -> None:
    # Inside a repository git would resolve the paths against its root, and skip what it does not find.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", "-p1", *options, str(patch)], cwd=folder, env=env, check=True)


TRAINS = pytest.mark.slow
"""Jobs of torchtitan with and without a patch: they change with its version only."""


def train(*args: str, nranks: int = 2, patched: Path | None = None, may_fail: bool = False) -> RunResult:
    """A run with stock torchtitan, or with that of a folder."""
    return run(args, nranks, timeout_s=60, pythonpath=[patched] if patched else [], may_fail=may_fail)


def assert_same_training(result: RunResult, reference: RunResult) -> None:
    c.assert_close(result.losses, reference.losses, "loss")
    c.assert_close(result.grad_norms, reference.grad_norms, "gradient norm")


def test_all_patches_apply_together_and_revert(tmp_path: Path) -> None:
    assert len(PATCHES) == 5
    folder = copy_torchtitan(tmp_path)
    original = {path: path.read_bytes() for path in folder.rglob("*.py")}
    for patch in PATCHES:
        apply_patch(folder, patch)
    assert {path: path.read_bytes() for path in folder.rglob("*.py")} != original
    for patch in PATCHES:
        apply_patch(folder, patch, "--reverse")
    assert {path: path.read_bytes() for path in folder.rglob("*.py")} == original


SDPA = "--model.flavor=tiny_sdpa"
GRADIENT_SCALES = {
    # name of the patch: (arguments that need it, those of both jobs, ranks of the other job, the wrong factor)
    "pp_gradient_scale": (c.dp(pipeline_parallel=2), (SDPA, *c.global_batch(4)), 1, 4 * 256),  # tokens
    "ddp_gradient_scale": (c.DDP2, (SDPA, *c.global_batch(8)), 2, 0.5),
}


@TRAINS
@pytest.mark.parametrize("patch", GRADIENT_SCALES)
def test_gradient_scale(patch: str, tmp_path: Path) -> None:
    """Gradients are those without the parallelism, also over several accumulated batches.

    With CAD they are the same whether or not torchtitan is patched: its repair at run time does not add up.
    """
    args, shared, nranks, factor = GRADIENT_SCALES[patch]
    reference, patched = train(*shared, nranks=nranks), copy_torchtitan(tmp_path, patch)
    stock = train(*shared, *args)
    assert stock.grad_norms[0] == pytest.approx(reference.grad_norms[0] * factor, rel=c.TOLERANCE)
    assert_same_training(train(*shared, *args, patched=patched), reference)
    with_cad = (*c.PLACED, *args)
    assert_same_training(train(*with_cad, patched=patched), train(*with_cad))


@TRAINS
def test_cp_validation_loss(tmp_path: Path) -> None:
    """The validation loss does not depend on how many ranks share a sequence.

    Stock torchtitan has no context parallelism on CPU, so all these runs have CAD on, and its repair off. That the
    repair agrees as well is shown by the compositions of test_cad.py.
    """
    args = (*c.PLACED, "--training.steps=1", "--validation.enable", "--validation.steps=2")
    reference = train(*args, nranks=1).validation_losses[1]
    stock = train(*args, *c.CP2, "--experimental.custom_import=tests.integration.unrepaired_validation")
    assert stock.validation_losses == {1: pytest.approx(2 * reference, rel=c.TOLERANCE)}
    patched = train(*args, *c.CP2, patched=copy_torchtitan(tmp_path, "cp_validation_loss"))
    assert patched.validation_losses == {1: pytest.approx(reference, rel=c.TOLERANCE)}


@TRAINS
def test_varlen_pipeline(tmp_path: Path) -> None:
    """Every pipeline microbatch gets the document boundaries of its own sequences.

    The other pipeline defect is repaired on both sides, so that only the boundaries differ.
    """
    args = ("--model.flavor=tiny_varlen", "--training.local_batch_size=4")
    pipeline = (*args, *c.dp(pipeline_parallel=2), *c.BY_ROW)
    reference = train(*args, nranks=1)
    scaled = copy_torchtitan(tmp_path / "scaled", "pp_gradient_scale")
    unpatched = train(*pipeline, patched=scaled, may_fail=True)
    if unpatched.ok:
        assert unpatched.losses != pytest.approx(reference.losses, rel=c.TOLERANCE)
    both = copy_torchtitan(tmp_path / "both", "pp_gradient_scale", "varlen_pipeline")
    assert_same_training(train(*pipeline, patched=both), reference)


@TRAINS
def test_varlen_pipeline_keeps_other_runs(tmp_path: Path) -> None:
    """The patch changes no bit where there is no pipeline."""
    stock, patched = train(), train(patched=copy_torchtitan(tmp_path, "varlen_pipeline"))
    assert (patched.losses, patched.grad_norms) == (stock.losses, stock.grad_norms)


@TRAINS
def test_varlen_gqa(tmp_path: Path) -> None:
    """Varlen attention accepts fewer key/value heads; with one document per sequence it equals SDPA."""
    dataset, varlen = "--training.dataset=one_document", "--model.flavor=tiny_varlen_gqa"
    reference = train(dataset, *c.SDPA_GQA)
    stock = train(dataset, varlen, may_fail=True)
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        assert not stock.ok
        assert "enable_gqa" in "".join(stock.logs), stock.report()
    else:
        assert_same_training(stock, reference)
    assert_same_training(train(dataset, varlen, patched=copy_torchtitan(tmp_path, "varlen_gqa")), reference)
