# SPDX-License-Identifier: BSD-3-Clause
"""Stock torchtitan 0.2.2 on CPU ranks, with which every run with CAD is compared, and what makes it possible."""

import numpy as np
import pytest
import torch

from tests.lib.jobs.compositions import (
    DEFAULTS,
    EP2,
    FAST,
    HALVES,
    PLACED,
    SLOW,
    TOLERANCE,
    flavor,
    global_batch,
)
from tests.lib.jobs.harness import run
from tests.lib.jobs.launched import TORCHRUN, launched
from torchtitan_cad.integration.torchtitan_v0_2 import cpu

SAVED = ("--training.steps=4", "--checkpoint.enable", "--checkpoint.interval=2")
RESUMED = "--checkpoint.load_step=2"
JOBS = {
    "stock": (),
    "cad": (*DEFAULTS, *global_batch(8)),
    "halves": (*DEFAULTS, *EP2, *flavor("qwen3", "tiny_moe"), *HALVES),
    **{
        model: (*DEFAULTS, *EP2, *flavor(model))
        for model in ("deepseek_v3", "llama4", "gpt_oss")
    },
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", JOBS)
def test_resumes_exactly(name, tmp_path):
    """A run resumed from a checkpoint repeats every bit of training, though the batch after it had been redistributed
    already, and though other plans would take the least time.

    Validation is only checked to run: torchtitan does not checkpoint its loader, and has none for some models.
    """
    job = [*JOBS[name], *SAVED]
    validates = "--model.name" not in " ".join(job)
    if validates:
        job += ["--validation.enable", "--validation.freq=2", "--validation.steps=2"]
    whole = run(job, timeout_s=240, dump_folder=tmp_path, link=FAST)
    resumed = run([*job, RESUMED], timeout_s=240, dump_folder=tmp_path, link=SLOW)
    assert resumed.steps == [3, 4]
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]
    # torchtitan also validates after the first step
    assert [*whole.validation_losses] == [1, 2, 4] * validates
    assert [*resumed.validation_losses] == [4] * validates


@pytest.mark.matrix
@pytest.mark.parametrize("saved_with", ["cad", "no-cad"])
def test_checkpoints_are_the_same_with_and_without_cad(saved_with, tmp_path):
    job = (*PLACED, *global_batch(8), *SAVED)
    other = "no-cad" if saved_with == "cad" else "cad"
    whole = run([*job, f"--parallelism.{saved_with}"], dump_folder=tmp_path)
    resumed = run([*job, f"--parallelism.{other}", RESUMED], dump_folder=tmp_path)
    assert resumed.steps == [3, 4]
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=TOLERANCE)
    assert resumed.grad_norms == pytest.approx(whole.grad_norms[2:], rel=TOLERANCE)


@pytest.mark.matrix
def test_entry_point_under_torchrun_without_cad(tmp_path):
    with launched(
        ["--parallelism.no-cad", "--training.steps=2"], tmp_path, launcher=TORCHRUN
    ) as job:
        returncode, _ = job.finish(180)
    assert returncode == 0, "\n".join(job.lines)
    assert any("Training completed" in line for line in job.lines)


@pytest.mark.parametrize(
    ("experts", "ranks", "alignment"), [(1, 1, 8), (3, 2, 8), (8, 4, 16), (2, 3, 32)]
)
def test_tokens_are_ordered_by_experts_into_aligned_slots(experts, ranks, alignment):
    """Tokens come by rank and expert; some experts get none of a rank."""
    rng = torch.Generator().manual_seed(experts)
    counts = torch.randint(-20, 40, (ranks * experts,), generator=rng).clamp(min=0)
    expert_of_token = (torch.arange(ranks * experts) % experts).repeat_interleave(
        counts
    )
    slots = []
    sizes = []
    for expert in range(experts):
        tokens = torch.where(expert_of_token == expert)[0].tolist()
        size = -(-max(1, len(tokens)) // alignment) * alignment
        slots += tokens + [-1] * (size - len(tokens))
        sizes.append(size)
    slots += [-1] * alignment
    cpu.enable_cpu()
    from torchtitan.models.moe.kernels import generate_permute_indices

    found = generate_permute_indices(counts, experts, ranks, len(slots), alignment)
    expected = slots, sizes, np.cumsum(sizes).tolist()
    assert tuple(tensor.tolist() for tensor in found) == expected
    assert {tensor.dtype for tensor in found} == {torch.int32}


def test_integers_are_counted():
    cpu.enable_cpu()
    values = torch.randint(0, 61, (4096,))
    counts = torch.histc(values, bins=61, min=0, max=61)
    assert torch.equal(counts, torch.bincount(values, minlength=61))
    assert torch.histc(torch.rand(64), bins=4).sum() == 64
