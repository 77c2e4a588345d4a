# SPDX-License-Identifier: BSD-3-Clause
"""``debug.deterministic``: equal jobs compute equal bits, with [cad] as it is by default.

Between runs that must repeat each other, ranks find other rates, by which other plans would take the least time.
"""

import functools

import pytest

from tests.lib.jobs.compositions import (
    COMMON,
    COMPILE,
    DEFAULTS,
    FAST,
    HALVES,
    PP2,
    SLOW,
    VALIDATION,
    cad_summary,
    global_batch,
    schedule,
)
from tests.lib.jobs.harness import RunResult, run
from tests.lib.sets import matrix, params

JOB = (*COMMON, *DEFAULTS, *VALIDATION, "--training.steps=3")
SAVED = ("--checkpoint.enable", "--checkpoint.interval=2")
PP1 = (*PP2, "--parallelism.pipeline_parallel_microbatch_size=1")
IN_TURN = (*PP1, *schedule("1F1B"))
IN_TICKS = (*PP1, *schedule("CAD1F1B"))

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "2 ranks, accumulation, halves": (2, (*global_batch(8), *HALVES)),
    "2 ranks, halves, compiled": (2, (*HALVES, *COMPILE)),
    "4 ranks, accumulation": (4, global_batch(16)),
    "4 ranks, halves": (4, HALVES),
    "2 stages, accumulation": (2, (*IN_TURN, *global_batch(8))),
    "2 stages in ticks, accumulation, halves": (
        2,
        (*IN_TICKS, *global_batch(8), *HALVES),
    ),
    "2 stages of 2 ranks": (4, IN_TURN),
    "2 stages of 2 ranks, accumulation, halves": (
        4,
        (*IN_TURN, *global_batch(16), *HALVES),
    ),
    "2 stages of 2 ranks in ticks, accumulation": (4, (*IN_TICKS, *global_batch(16))),
}
ALONE = ("2 stages, accumulation",)
"""Cases with groups of one rank, in which placement alone has a choice."""
SHORT = ("2 ranks, accumulation, halves",)


def numbers(result: RunResult) -> list[float]:
    """Every loss, gradient norm and validation loss."""
    return [*result.losses, *result.grad_norms, *result.validation_losses.values()]


@functools.cache
def trained(name: str) -> RunResult:
    """The case's job, which saves a checkpoint at step 2 of 3; ranks find links by which moving attention pays."""
    nranks, args = CASES[name]
    return run([*JOB, *SAVED, *args], nranks, 300, link=FAST)


@pytest.mark.parametrize("name", params(CASES, SHORT))
def test_equal_jobs_have_equal_bits(name):
    nranks, args = CASES[name]
    first = trained(name)
    second = run([*JOB, *args], nranks, 300, link=SLOW)
    assert len(first.losses) == 3
    assert numbers(second) == numbers(first)
    assert cad_summary(first)["tasks_moved"] > 0 or name in ALONE
    said = "debug.deterministic = true: plans depend on the batch alone (cad.tolerance = 0.02)"
    for log in first.logs:
        assert log.count(said) == 1


@matrix
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_job_has_the_same_bits(name):
    nranks, args = CASES[name]
    whole = trained(name)
    folder = f"--checkpoint.folder={whole.dump_folder / 'checkpoint'}"
    job = [*JOB, *SAVED, *args, folder, "--checkpoint.load_step=2"]
    resumed = run(job, nranks, 300, link=SLOW)
    assert resumed.steps == [3]
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]


@matrix
def test_without_it_rates_decide():
    """What the runs above are given does make other plans, and other bits."""
    job = [*JOB, "--debug.no-deterministic"]
    fast = run(job, link=FAST)
    slow = run(job, link=SLOW)
    assert numbers(fast) != numbers(slow)
    assert cad_summary(fast)["tasks_moved"] > 0 == cad_summary(slow)["tasks_moved"]
