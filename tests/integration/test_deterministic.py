# SPDX-License-Identifier: BSD-3-Clause
"""``debug.deterministic``: equal jobs compute equal bits, with [cad] as it is by default.

Between runs that must repeat each other, ranks find other rates, by which other plans would take the least time.
"""

import functools

import pytest

from tests.lib.jobs.compositions import (
    COMMON,
    FAST,
    SLOW,
    TOLERANCE,
    cad_summary,
    options,
)
from tests.lib.jobs.harness import RunResult, run
from tests.lib.sets import matrix, params

JOB = (
    *COMMON,
    *options("cad_defaults validation --validation.freq=3"),
    "--training.steps=3",
)
SAVED = ("--checkpoint.enable", "--checkpoint.interval=2")
CASES = {
    "batch8 halves": 2,
    "halves compile": 2,
    "batch16": 4,
    "halves": 4,
    "pp2 by_one_row 1f1b batch8": 2,
    "pp2 by_one_row cad1f1b batch8 halves": 2,
    "pp2 by_one_row 1f1b": 4,
    "pp2 by_one_row 1f1b batch16 halves": 4,
    "pp2 by_one_row cad1f1b batch16": 4,
}
"""Options and ranks."""
RESUMED = CASES | {
    "--parallelism.no-cad": 2,
    # torchtitan has no validation for some models.
    "--validation.no-enable ep2 moe halves": 2,
    "--validation.no-enable ep2 --model.name=deepseek_v3 --model.flavor=tiny": 2,
    "--validation.no-enable ep2 --model.name=llama4 --model.flavor=tiny": 2,
    "--validation.no-enable ep2 --model.name=gpt_oss --model.flavor=tiny": 2,
}
ALONE = "pp2 by_one_row 1f1b batch8"
"""Groups of one rank, in which placement alone has a choice."""


def numbers(result: RunResult) -> list[float]:
    """Every loss, gradient norm and validation loss."""
    return [*result.losses, *result.grad_norms, *result.validation_losses.values()]


@functools.cache
def trained(words: str) -> RunResult:
    """The case's job, which saves a checkpoint at step 2 of 3; ranks find links by which moving attention pays."""
    return run([*JOB, *SAVED, *options(words)], RESUMED[words], 300, link=FAST)


@pytest.mark.parametrize("words", params(CASES, ["batch8 halves"]))
def test_equal_jobs_have_equal_bits(words):
    first = trained(words)
    second = run([*JOB, *options(words)], CASES[words], 300, link=SLOW)
    assert len(first.losses) == 3
    assert numbers(second) == numbers(first)
    assert cad_summary(first)["tasks_moved"] > 0 or words == ALONE
    said = "debug.deterministic = true: plans depend on the batch alone (cad.tolerance = 0.02)"
    for log in first.logs:
        assert log.count(said) == 1


@pytest.mark.parametrize("words", params(RESUMED, ["batch8 halves"]))
def test_a_resumed_job_has_the_same_bits(words):
    """Though the batch after the checkpoint had been redistributed already.

    Validation is only checked to run: torchtitan does not checkpoint its loader.
    """
    whole = trained(words)
    folder = f"--checkpoint.folder={whole.dump_folder / 'checkpoint'}"
    job = [*JOB, *SAVED, *options(words), folder, "--checkpoint.load_step=2"]
    resumed = run(job, RESUMED[words], 300, link=SLOW)
    assert resumed.steps == [3]
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]
    assert [*resumed.validation_losses] == [*whole.validation_losses][1:]


@matrix
def test_without_it_rates_decide():
    """What the runs above are given does make other plans, and other bits."""
    job = [*JOB, "--debug.no-deterministic"]
    fast = run(job, link=FAST)
    slow = run(job, link=SLOW)
    assert numbers(fast) != numbers(slow)
    assert cad_summary(fast)["tasks_moved"] > 0 == cad_summary(slow)["tasks_moved"]
    for log in slow.logs:
        # once of training, and of validation
        assert log.count("CAD leaves attention where its tokens are") == 2
        assert "a link of 1e-09 GB/s" in log


@matrix
@pytest.mark.parametrize("saved_with", ["cad", "no-cad"])
def test_checkpoints_are_the_same_with_and_without_cad(saved_with, tmp_path):
    job = (*options("placed batch8 --training.steps=4"), *SAVED)
    other = "no-cad" if saved_with == "cad" else "cad"
    whole = run([*job, f"--parallelism.{saved_with}"], dump_folder=tmp_path)
    load = (f"--parallelism.{other}", "--checkpoint.load_step=2")
    resumed = run([*job, *load], dump_folder=tmp_path)
    assert resumed.steps == [3, 4]
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=TOLERANCE)
    assert resumed.grad_norms == pytest.approx(whole.grad_norms[2:], rel=TOLERANCE)
