# SPDX-License-Identifier: BSD-3-Clause
"""All of [cad] as it is by default, tolerance, placement, kernel, transport and backward at once, beside stock runs.

Ranks find links so fast that attention moves in jobs this small.
"""

import functools
from pathlib import Path

import pytest

from tests.integration.test_cad import check
from tests.lib.jobs.compositions import (
    BY_RATES,
    COMPILE,
    CP2,
    DEFAULTS,
    FAST,
    HALVES,
    TP2,
    VALIDATE_OFTEN,
    VALIDATION,
    Composition,
    assert_trains_alike,
    cad_summary,
    global_batch,
    name_of,
    pp2,
    schedule,
)
from tests.lib.jobs.harness import RunResult, run
from tests.lib.sets import matrix, params

DEBUG_TOML = Path(__file__).with_name("debug_model.toml")

COMPOSITIONS = [
    Composition("fsdp2"),
    Composition("fsdp2xtp2", args=TP2),
    Composition("cp2", args=CP2, dp=1),
    pp2("pp2_1f1b", *schedule("1F1B")),
    pp2("pp2_cad1f1b", *schedule("CAD1F1B")),
    Composition("fsdp4", dp=4),
    Composition("fsdp2xcp2", args=CP2),
    Composition("halves", args=HALVES),
    Composition("compile", args=COMPILE),
    Composition("accumulation_validation", shared=(*global_batch(12), *VALIDATE_OFTEN)),
]
SHORT = COMPOSITIONS[:3]


def assert_moves(result: RunResult, *, in_ticks: bool = False) -> None:
    """Attention has moved, by rates and over the transport that CPU ranks have by default; servers keep rows."""
    assert cad_summary(result)["tasks_moved"] > 0
    for log in result.logs:
        assert "CAD plans by time: attention takes " in log
        assert "CAD exchanges rows by collective" in log
        assert "debug.deterministic" not in log
        assert ("cad.backward = 'auto': servers keep rows of up to" in log) != in_ticks


@pytest.mark.parametrize("case", params(COMPOSITIONS, SHORT), ids=name_of)
def test_trains_like_its_reference(case):
    result = check(case, cad=BY_RATES, link=FAST)
    assert_moves(result, in_ticks=case.name == "pp2_cad1f1b")


@pytest.mark.parametrize(
    ("nranks", "seq_len", "steps"),
    [(2, 512, 1), pytest.param(4, 1024, 2, marks=matrix)],
)
def test_a_new_users_job(nranks, seq_len, steps):
    """torchtitan's debug job with one switch, made shorter, beside stock torchtitan with attention inside documents."""
    job = (
        "--training.dataset=packed_documents",
        "--validation.dataset=packed_documents",
        f"--training.steps={steps}",
        f"--training.seq_len={seq_len}",
        f"--validation.seq_len={seq_len}",
        "--training.local_batch_size=2",
        "--training.mixed_precision_param=float32",
        "--metrics.enable_tensorboard",
        *VALIDATION,
    )
    train = functools.partial(run, nranks=nranks, config=DEBUG_TOML, grads_at=steps)
    cad = train([*job, *DEFAULTS], link=FAST)
    stock = train([*job, "--model.flavor=debugmodel_varlen_attn"])
    assert_moves(cad)
    assert cad.validation_losses.keys() == stock.validation_losses.keys() == {1}
    assert_trains_alike(cad, stock)
