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

from tests.integration.compositions import TOLERANCE
from tests.integration.harness import REPOSITORY, RunResult, run

PATCHES = sorted((REPOSITORY / "patches").glob("*.patch"))
TIMEOUT_S = 60


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


def assert_same_training(result: RunResult, reference: RunResult) -> None:
    assert result.ok, result.report()
    assert reference.ok, reference.report()
    assert result.steps == reference.steps
    assert result.losses == pytest.approx(reference.losses, rel=TOLERANCE)
    assert result.grad_norms == pytest.approx(reference.grad_norms, rel=TOLERANCE)


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


@TRAINS
def test_pp_gradient_scale(tmp_path: Path) -> None:
    """Pipeline gradients are divided by the token count, also over several accumulated batches."""
    args = ["--model.flavor=tiny_sdpa", "--training.global_batch_size=4"]
    pipeline = [*args, "--parallelism.pipeline_parallel_degree=2"]
    reference = run(args, nranks=1, timeout_s=TIMEOUT_S)

    stock = run(pipeline, timeout_s=TIMEOUT_S)
    assert stock.ok, stock.report()
    tokens = 4 * 256
    assert stock.grad_norms[0] == pytest.approx(reference.grad_norms[0] * tokens, rel=TOLERANCE)

    patched = run(pipeline, timeout_s=TIMEOUT_S, pythonpath=[copy_torchtitan(tmp_path, "pp_gradient_scale")])
    assert_same_training(patched, reference)


@TRAINS
def test_ddp_gradient_scale(tmp_path: Path) -> None:
    """DDP gradients equal FSDP2's, also over several accumulated batches."""
    args = ["--model.flavor=tiny_sdpa", "--training.global_batch_size=8"]
    ddp = [*args, "--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"]
    reference = run(args, timeout_s=TIMEOUT_S)

    stock = run(ddp, timeout_s=TIMEOUT_S)
    assert stock.ok, stock.report()
    assert stock.grad_norms[0] == pytest.approx(reference.grad_norms[0] / 2, rel=TOLERANCE)

    patched = run(ddp, timeout_s=TIMEOUT_S, pythonpath=[copy_torchtitan(tmp_path, "ddp_gradient_scale")])
    assert_same_training(patched, reference)


@TRAINS
@pytest.mark.parametrize("patch", ["pp_gradient_scale", "ddp_gradient_scale"])
def test_patch_and_run_time_repair_do_not_add_up(tmp_path: Path, patch: str) -> None:
    """With CAD on, gradients are the same whether or not torchtitan is patched."""
    args = {
        "pp_gradient_scale": ["--parallelism.pipeline_parallel_degree=2"],
        "ddp_gradient_scale": [
            "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=1",
        ],
    }[patch]
    cad = ["--job.custom_config_module=torchtitan_cad.job_config", "--parallelism.cad", *args]
    stock = run(cad, timeout_s=TIMEOUT_S)
    patched = run(cad, timeout_s=TIMEOUT_S, pythonpath=[copy_torchtitan(tmp_path, patch)])
    assert_same_training(patched, stock)


@TRAINS
def test_cp_validation_loss(tmp_path: Path) -> None:
    """The validation loss does not depend on how many ranks share a sequence.

    Stock torchtitan has no context parallelism on CPU, so all these runs have CAD on, and its repair off. That the
    repair agrees as well is shown by the compositions of test_cad.py.
    """
    cad = ["--job.custom_config_module=torchtitan_cad.job_config", "--parallelism.cad", "--training.steps=1"]
    args = [*cad, "--validation.enable", "--validation.steps=2"]
    cp2 = [*args, "--parallelism.context_parallel_degree=2"]
    reference = run(args, nranks=1, timeout_s=TIMEOUT_S)
    assert reference.ok, reference.report()
    expected = reference.validation_losses[1]

    stock = run([*cp2, "--experimental.custom_import=tests.integration.unrepaired_validation"], timeout_s=TIMEOUT_S)
    assert stock.validation_losses == {1: pytest.approx(2 * expected, rel=TOLERANCE)}, stock.report()

    patched = run(cp2, timeout_s=TIMEOUT_S, pythonpath=[copy_torchtitan(tmp_path, "cp_validation_loss")])
    assert patched.validation_losses == {1: pytest.approx(expected, rel=TOLERANCE)}, patched.report()


@TRAINS
def test_varlen_pipeline(tmp_path: Path) -> None:
    """Every pipeline microbatch gets the document boundaries of its own sequences."""
    args = ["--model.flavor=tiny_varlen", "--training.local_batch_size=4"]
    # The other pipeline defect is repaired on both sides, so that only the boundaries differ.
    pipeline = [*args, "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=2"]
    reference = run(args, nranks=1, timeout_s=TIMEOUT_S)

    scaled = copy_torchtitan(tmp_path / "scaled", "pp_gradient_scale")
    unpatched = run(pipeline, timeout_s=TIMEOUT_S, pythonpath=[scaled])
    if unpatched.ok:
        assert unpatched.losses != pytest.approx(reference.losses, rel=TOLERANCE)

    both = copy_torchtitan(tmp_path / "both", "pp_gradient_scale", "varlen_pipeline")
    patched = run(pipeline, timeout_s=TIMEOUT_S, pythonpath=[both])
    assert_same_training(patched, reference)


@TRAINS
def test_varlen_pipeline_keeps_other_runs(tmp_path: Path) -> None:
    """Without a pipeline the patch changes no bit."""
    stock = run([], timeout_s=TIMEOUT_S)
    patched = run([], timeout_s=TIMEOUT_S, pythonpath=[copy_torchtitan(tmp_path, "varlen_pipeline")])
    assert patched.ok, patched.report()
    assert (patched.losses, patched.grad_norms) == (stock.losses, stock.grad_norms)


@TRAINS
def test_varlen_gqa(tmp_path: Path) -> None:
    """Varlen attention accepts fewer key/value heads; with one document per sequence it equals SDPA."""
    args = ["--training.dataset=one_document"]
    reference = run([*args, "--model.flavor=tiny_sdpa_gqa"], timeout_s=TIMEOUT_S)

    varlen = [*args, "--model.flavor=tiny_varlen_gqa"]
    stock = run(varlen, timeout_s=TIMEOUT_S)
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        assert not stock.ok
        assert "enable_gqa" in "".join(stock.logs), stock.report()
    else:
        assert_same_training(stock, reference)

    patched = run(varlen, timeout_s=TIMEOUT_S, pythonpath=[copy_torchtitan(tmp_path, "varlen_gqa")])
    assert_same_training(patched, reference)
