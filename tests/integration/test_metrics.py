# SPDX-License-Identifier: BSD-3-Clause
"""Figures of a run: TensorBoard, the log line and the steps file; traces that training writes."""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, product
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.lib.jobs.compositions import CAD, COMMON, cad_steps, options
from tests.lib.jobs.harness import REPOSITORY, read_scalars, run
from tests.lib.refusals import refusal
from tests.lib.sets import matrix
from torchtitan_cad.integration.report import metrics as report_metrics
from torchtitan_cad.integration.report.metrics import TAGS, CadMetrics, scalars_of
from torchtitan_cad.integration.session import CadSession
from torchtitan_cad.runtime.errors import PeerError

OF_OTHER_JOBS = ("cad/hosts/", "cad/servers/")
"""Tags of jobs on several hosts, and with joined servers."""
FIGURES = {name: 1.0 for name, _ in TAGS.values()}


def documented(section: str) -> list[str]:
    """Names in the first column of the table in a section of docs/operations.md."""
    page = (REPOSITORY / "docs" / "operations.md").read_text()
    _, _, text = page.partition(f"\n## {section}\n")
    rows = re.findall(r"^\| (`cad/[^|]*)", text.partition("\n## ")[0], re.MULTILINE)
    return re.findall(r"`(cad/[^`]+)`", "".join(rows))


def test_tensorboard_and_log_show_what_moved():
    result = run([*COMMON, *CAD], nranks=2)
    (folder,) = (result.dump_folder / "tb").iterdir()
    names = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {"cad_steps.jsonl"}
    figures = read_scalars(folder)
    own = {tag for tag in figures if tag.startswith("cad/")}
    tags = documented("Metrics")
    assert own == {tag for tag in tags if not tag.startswith(OF_OTHER_JOBS)}
    assert {len(figures[tag]) for tag in own} == {3}
    assert max(figures["cad/sent/max(MB)"]) > 0
    assert max(figures["cad/exchange/host(s)"]) > 0
    assert 0 < max(figures["cad/exchange/exposed(%)"]) < 100
    # a plan a step, and no speeds: the busiest rank's load is the imbalance
    for step, when in product(range(3), ("before", "after")):
        loads = np.array(cad_steps(result)[step][f"loads_{when}"])
        imbalance = figures[f"cad/imbalance/{when}"][step]
        assert loads.max() / loads.mean() == pytest.approx(imbalance, abs=1e-3)
    assert result.logs[0].count("cad: imbalance ") == 3
    assert len(re.findall(r"exposed wait [\d.]+% of the step", result.logs[0])) == 3


def test_every_tag_is_documented():
    assert set(scalars_of(FIGURES)) == set(documented("Metrics"))


class Titan:
    """What torchtitan's metrics do: every fifth step is logged."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def should_log(self, step: int) -> bool:
        return step % 5 == 0

    def log(self, step: int, *losses: float, extra_metrics: dict[str, float]) -> None:
        self.done += [f"step {step}", extra_metrics["cad/exchange/host(s)"]]

    def log_validation(self, *_: object) -> None:
        self.done.append("validation")

    def close(self) -> None:
        self.done.append("closed")


class Metrics(CadMetrics, Titan):
    """CAD's metrics before those of torchtitan."""

    def __init__(self):
        super().__init__()
        self.time_last_log = 0.0
        self.ntokens_since_last_log = 0
        self.parallel_dims = SimpleNamespace(non_data_parallel_size=1)
        self.begin(writes_steps=False, folder="")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The process's session, of two ranks; without figures."""
    session = SimpleNamespace(
        statistics=SimpleNamespace(drain=dict),
        engine=SimpleNamespace(clock=Mock(reset=lambda: (0.0, 0.0))),
        device=torch.device("cpu"),
        confirm_exchanges=lambda: None,
    )
    monkeypatch.setattr(report_metrics, "current_session", lambda: session)
    return session


def test_a_loss_computed_after_a_failed_exchange_is_not_logged(session):
    """A transport's device has noted, unseen by the host so far, that rows of a peer did not come."""
    late = PeerError("rank 1 did not send its rows in time")
    session.engine.transport = SimpleNamespace(prepare=Mock(side_effect=late))
    session.confirm_exchanges = partial(CadSession.confirm_exchanges, session)
    metrics = Metrics()
    with refusal(error=PeerError):
        metrics.log(1, 1.0, 1.0, 1.0)
    with refusal(error=PeerError):
        metrics.log_validation(1.0, 1)
    assert metrics.done == []


@pytest.mark.parametrize(("validated", "steps"), [(None, 4), (8, 2)])
def test_figures_after_a_resume_are_those_of_the_steps_since_its_start(
    session, validated, steps
):
    """Step 7 is the first of the process, step 8 is validated, and every fifth is logged, after 12 seconds.

    What is exchanged until the validation ends does not count either.
    """
    reset = session.engine.clock.reset = Mock(return_value=(8.0, 4.0))
    metrics = Metrics()
    for step in range(7, 16):
        if metrics.should_log(step):
            metrics.log(step, 1.0, 1.0, 1.0)
        if step == validated:
            metrics.log_validation(1.0, step)
    expected = ["step 10", 12.0 / steps, "step 15", 12.0 / 5]
    assert [done for done in metrics.done if done != "validation"] == expected
    assert reset.call_count == 2 + (validated is not None)


def test_a_signal_does_not_close_in_the_middle_of_a_steps_log(monkeypatch, session):
    """The thread that obeys a signal waits for the step's line, and nothing is logged after it."""
    writing = threading.Event()
    go_on = threading.Event()

    def log_slowly(titan, *losses, extra_metrics):
        writing.set()
        assert go_on.wait(60)
        titan.done.append("written")

    monkeypatch.setattr(Titan, "log", log_slowly)
    metrics = Metrics()
    with ThreadPoolExecutor(2) as pool:
        logged = pool.submit(metrics.log, 1, 1.0, 1.0, 1.0)
        assert writing.wait(60)
        closed = pool.submit(metrics.close)
        with pytest.raises(TimeoutError):
            closed.result(0.2)
        go_on.set()
        logged.result()
        closed.result()
    metrics.log(2, 1.0, 1.0, 1.0)
    metrics.close()
    assert metrics.done == ["written", "closed"]


# Traces --------------------------------------------------------------------------------------------------------------

PROFILED = (
    "--profiling.enable_profiling --profiling.profile_freq=2 "
    "--profiling.profiler_warmup=0 --profiling.profiler_active=1"
)
"""Traces of every second step."""


def without_numbers(names: Iterable[str]) -> set[str]:
    return {re.sub(r"\d+", "N", name) for name in names}


@matrix
def test_phases_and_nano_batches_are_in_traces():
    words = f"cad halves {PROFILED} --training.steps=2"
    job = run([*COMMON, *options(words)])
    (path,) = job.dump_folder.rglob("rank0_trace.json")
    begins = defaultdict[str, list[float]](list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "user_annotation":
            begins[event["name"]].append(event["ts"])
    assert without_numbers(documented("Traces")) <= without_numbers(begins)

    first, second = (
        sorted(chain(*(begins[name] for name in begins if name.endswith(nano_batch))))
        for nano_batch in ("nano_batch_0", "nano_batch_1")
    )
    assert len(first) == len(second)
    # While nano-batch 0's rows are on their way, nano-batch 1's linear work is done.
    sent = min(begins["cad/exchange forward rows"])
    come = min(begins["cad/wait forward rows"])
    assert any(sent < begin < come for begin in second)
