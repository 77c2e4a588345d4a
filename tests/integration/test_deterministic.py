# SPDX-License-Identifier: BSD-3-Clause
"""``debug.deterministic``: equal jobs compute equal bits, with [cad] as it is by default.

Between runs that must repeat each other, ranks find other rates, by which other plans would take the least time.
"""

import functools
import hashlib

import pytest

from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import RunResult, run
from tests.lib.sets import params

HALVES = ("--cad.nano_batches=2",)
JOB = (*c.COMMON, *c.DEFAULTS, *c.VALIDATION, "--training.steps=4")
SAVED = ("--checkpoint.enable", "--checkpoint.interval=2")
ACCUMULATED_2, ACCUMULATED_4 = c.global_batch(8), c.global_batch(16)
PP2 = (*c.PP2, "--parallelism.pipeline_parallel_microbatch_size=1")

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "2 ranks": (2, ()),
    "2 ranks, accumulation, halves": (2, (*ACCUMULATED_2, *HALVES)),
    "4 ranks": (4, ()),
    "4 ranks, accumulation": (4, ACCUMULATED_4),
    "4 ranks, halves": (4, HALVES),
    "2 ranks, halves, compiled": (2, (*HALVES, *c.COMPILE)),
    "2 stages, 1F1B": (2, (*PP2, *c.schedule("1F1B"))),
    "2 stages, 1F1B, accumulation": (2, (*PP2, *c.schedule("1F1B"), *ACCUMULATED_2)),
    "2 stages, CAD1F1B": (2, (*PP2, *c.schedule("CAD1F1B"))),
    "2 stages, CAD1F1B, accumulation, halves": (
        2,
        (*PP2, *c.schedule("CAD1F1B"), *ACCUMULATED_2, *HALVES),
    ),
    "2 stages of 2 ranks, 1F1B": (4, (*PP2, *c.schedule("1F1B"))),
    "2 stages of 2 ranks, 1F1B, accumulation, halves": (
        4,
        (*PP2, *c.schedule("1F1B"), *ACCUMULATED_4, *HALVES),
    ),
    "2 stages of 2 ranks, CAD1F1B": (4, (*PP2, *c.schedule("CAD1F1B"))),
    "2 stages of 2 ranks, CAD1F1B, accumulation": (
        4,
        (*PP2, *c.schedule("CAD1F1B"), *ACCUMULATED_4),
    ),
}
ALONE = ("2 stages, 1F1B", "2 stages, 1F1B, accumulation")
"""Cases with groups of one rank, in which placement alone has a choice."""
SHORT = ("2 ranks, accumulation, halves",)


def bits(result: RunResult) -> list[str]:
    """Every loss, gradient norm and validation loss, to the bit."""
    return [
        number.hex()
        for number in (
            *result.losses,
            *result.grad_norms,
            *result.validation_losses.values(),
        )
    ]


@functools.cache
def trained(name: str) -> RunResult:
    """The case's job, which saves a checkpoint at step 2 of 4; ranks find links by which moving attention pays."""
    nranks, args = CASES[name]
    return run([*JOB, *SAVED, *args], nranks, 300, link=c.FAST)


@pytest.mark.parametrize("name", params(CASES, SHORT))
def test_equal_jobs_have_equal_bits(name):
    nranks, args = CASES[name]
    first, second = trained(name), run([*JOB, *args], nranks, 300, link=c.SLOW)
    assert len(first.losses) == 4
    assert bits(second) == bits(first)
    assert c.cad_summary(first)["tasks_moved"] > 0 or name in ALONE
    for log in first.logs:
        assert (
            log.count(
                "debug.deterministic = true: plans depend on the batch alone (cad.tolerance = 0.02)"
            )
            == 1
        )
    print(f"{name}: {hashlib.sha256(' '.join(bits(first)).encode()).hexdigest()[:16]}")


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_job_has_the_same_bits(name):
    """The one case of the short set is ``test_resumes_exactly``."""
    nranks, args = CASES[name]
    whole = trained(name)
    resume = (
        "--checkpoint.load_step=2",
        f"--checkpoint.folder={whole.dump_folder / 'checkpoint'}",
    )
    resumed = run([*JOB, *SAVED, *args, *resume], nranks, 300, link=c.SLOW)
    assert resumed.steps == [3, 4]
    assert (resumed.losses, resumed.grad_norms) == (
        whole.losses[2:],
        whole.grad_norms[2:],
    )


@pytest.mark.matrix
def test_without_it_rates_decide():
    """What the runs above are given does make other plans, and other bits."""
    fast, slow = (
        run([*JOB, "--debug.no-deterministic"], link=link) for link in (c.FAST, c.SLOW)
    )
    assert bits(fast) != bits(slow)
    assert c.cad_summary(fast)["tasks_moved"] > 0 == c.cad_summary(slow)["tasks_moved"]
