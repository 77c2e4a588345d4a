# SPDX-License-Identifier: BSD-3-Clause
"""Bad configurations: one clear error on every rank; and no checkpoint after an exchange that failed."""

import re
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import pytest

from tests.lib.jobs.compositions import options
from tests.lib.jobs.harness import run
from tests.lib.refusals import check_refusal
from tests.lib.sets import params
from torchtitan_cad.integration import failure
from torchtitan_cad.integration.run_state import begin_run, run_state
from torchtitan_cad.runtime.errors import PeerError

NO_LAYERS_LESS = (
    "--parallelism.pipeline_parallel_first_stage_less_layers=0 "
    "--parallelism.pipeline_parallel_last_stage_less_layers=0"
)
REFUSED = {
    "indivisible heads": (
        "tp2 --model.flavor=tiny_sdpa_3_heads",
        "parallelism.tensor_parallel_degree",
        2,
    ),
    "ticks and experts": (
        "stages2 cad1f1b --model.name=llama4 --model.flavor=debugmodel",
        "parallelism.pipeline_parallel_schedule",
        "CAD1F1B",
    ),
    "more stages than layers": (
        f"stages2 cad_interleaved {NO_LAYERS_LESS}",
        "parallelism.pipeline_parallel_schedule",
        "CADInterleaved1F1B",
    ),
    "deterministic and servers": ("--cad.servers", "cad.servers", True),
}
"""Found with the model; test_mistakes.py has those that are found when the config is read."""


@pytest.mark.parametrize("name", params(REFUSED, ["indivisible heads"]))
def test_bad_configuration_is_one_value_error_on_every_rank(name):
    words, key, value = REFUSED[name]
    job = run(options(f"cad {words}"), may_fail=True)
    for code, log in zip(job.returncodes, job.logs, strict=True):
        assert code not in (0, None), job.report()
        assert "Training starts" not in log
        *_, error = re.findall("^ValueError: .*", log, re.MULTILINE)
        check_refusal(error, key, value)


def test_no_checkpoint_is_made_after_an_exchange_that_failed_unnoticed(monkeypatch):
    confirm = Mock(side_effect=[None, PeerError("rank 1 has not sent its rows")])
    session = SimpleNamespace(confirm_exchanges=confirm)
    monkeypatch.setattr(failure, "current_session", lambda: session)
    checkpointer = Mock(_should_save=lambda step, last_step: step == 3 or last_step)
    save = checkpointer.save
    failure.check_before_saving(checkpointer)
    for step in range(1, 4):
        checkpointer.save(step, False)
    assert confirm.call_count == 1
    with pytest.raises(PeerError):
        checkpointer.save(4, True)
    assert save.call_count == 3


def test_a_job_whose_data_end_waits_for_its_checkpoint(monkeypatch):
    session = MagicMock(monitor=MagicMock(launcher=0))
    monkeypatch.setattr(failure, "current_session", lambda: session)
    trainer = MagicMock()
    begin_run()
    with run_state().signals:
        failure.train_and_name_peers(trainer, trainer.train)
    assert trainer.mock_calls[-2:] == [
        call.train(),
        call.checkpointer.save_future.result(),
    ]


DIVERGED = RuntimeError("Loss is not finite (global_avg_loss=nan) at step 3.")
LOST = PeerError("rank 1 has not sent its rows")


@pytest.mark.parametrize(
    ("exchange_error", "raised"), [(None, DIVERGED), (LOST, LOST)], ids=str
)
def test_a_loss_that_diverges_is_no_fault_of_a_peer(
    exchange_error, raised, monkeypatch
):
    """torchtitan 0.3.0 raises; unless an exchange has failed, after which a loss means nothing."""
    monitor = MagicMock(launcher=0, ended_by_signal=False)
    monitor.find_cause.return_value = []
    session = MagicMock(monitor=monitor)
    session.confirm_exchanges.side_effect = exchange_error
    monkeypatch.setattr(failure, "current_session", lambda: session)
    monkeypatch.setattr(failure.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(failure, "tell_launcher", Mock())
    begin_run()
    with pytest.raises(RuntimeError) as error, run_state().signals:
        failure.train_and_name_peers(MagicMock(), Mock(side_effect=DIVERGED))
    assert error.value is raised
    (asked,) = monitor.find_cause.mock_calls
    assert asked.kwargs == {"by_itself": raised is DIVERGED}
