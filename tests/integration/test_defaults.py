# SPDX-License-Identifier: BSD-3-Clause
"""All of [cad] as it is by default, tolerance, placement, kernel, transport and backward at once, beside stock runs.

Ranks find links so fast that attention moves in jobs this small.
"""

from pathlib import Path

import pytest

from tests.integration.test_cad import check
from tests.lib.jobs import compositions as c
from tests.lib.jobs.harness import RunResult, run
from tests.lib.sets import matrix, params

DEBUG_TOML = Path(__file__).with_name("debug_model.toml")

COMPOSITIONS = [
    c.Composition("fsdp2"),
    c.Composition("fsdp2xtp2", nranks=4, args=c.TP2, reference_nranks=2),
    c.Composition("cp2", args=c.CP2, reference_nranks=1),
    c.pp2("pp2_1f1b", *c.schedule("1F1B")),
    c.pp2("pp2_cad1f1b", *c.schedule("CAD1F1B")),
    c.Composition("fsdp4", nranks=4),
    c.Composition("fsdp2xcp2", nranks=4, args=c.CP2, reference_nranks=2),
    c.Composition("halves", args=("--cad.nano_batches=2",)),
    c.Composition("compile", args=c.COMPILE),
]
SHORT = COMPOSITIONS[:3]
RESUMED = c.Composition(
    "accumulation_validation", shared=(*c.global_batch(12), *c.VALIDATE_OFTEN)
)


def assert_moves(result: RunResult, *, in_ticks: bool = False) -> None:
    """Attention has moved, by rates and over the transport that CPU ranks have by default; servers keep rows."""
    assert c.cad_summary(result)["tasks_moved"] > 0
    for log in result.logs:
        assert "CAD plans by time: attention takes " in log
        assert "CAD exchanges rows by collective" in log
        assert "debug.deterministic" not in log
        assert ("cad.backward = 'auto': servers keep rows of up to" in log) != in_ticks


@pytest.mark.parametrize(
    "case", params(COMPOSITIONS, SHORT), ids=lambda case: case.name
)
def test_trains_like_its_reference(case):
    assert_moves(
        check(case, cad=c.BY_RATES, link=c.FAST), in_ticks=case.name == "pp2_cad1f1b"
    )


@matrix
def test_accumulates_validates_and_resumes_like_its_reference():
    saved = ("--checkpoint.enable", "--checkpoint.interval=2")
    whole = check(RESUMED, *saved, cad=c.BY_RATES, link=c.FAST)
    assert_moves(whole)
    folder = f"--checkpoint.folder={whole.dump_folder / 'checkpoint'}"
    job = [
        *c.COMMON,
        *c.BY_RATES,
        *RESUMED.shared,
        *saved,
        folder,
        "--checkpoint.load_step=2",
    ]
    resumed = run(job, RESUMED.nranks, link=c.FAST)
    assert_moves(resumed)
    expected = c.reference(RESUMED.nranks, RESUMED.shared)
    assert resumed.steps == [3]
    c.assert_close(resumed.losses, expected.losses[2:], "loss")
    c.assert_close(resumed.grad_norms, expected.grad_norms[2:], "gradient norm")


@pytest.mark.parametrize(
    ("nranks", "seq_len", "steps"),
    [(2, 512, 1), pytest.param(4, 1024, 2, marks=matrix)],
)
def test_a_new_users_job(nranks, seq_len, steps):
    """torchtitan's debug job with one switch, made shorter, beside stock torchtitan with attention inside documents."""
    job = (
        *(
            "--training.dataset=packed_documents",
            "--validation.dataset=packed_documents",
            "--validation.enable",
        ),
        *(f"--training.steps={steps}", "--validation.steps=1"),
        *(
            f"--training.seq_len={seq_len}",
            f"--validation.seq_len={seq_len}",
            "--training.local_batch_size=2",
        ),
        *("--training.mixed_precision_param=float32", "--metrics.enable_tensorboard"),
    )
    cad = run(
        [*job, *c.DEFAULTS], nranks, config=DEBUG_TOML, grads_at=steps, link=c.FAST
    )
    stock = run(
        [*job, "--model.flavor=debugmodel_varlen_attn"],
        nranks,
        config=DEBUG_TOML,
        grads_at=steps,
    )
    assert_moves(cad)
    assert cad.validation_losses.keys() == stock.validation_losses.keys() == {1}
    c.assert_trains_alike(cad, stock)
