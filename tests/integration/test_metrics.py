# SPDX-License-Identifier: BSD-3-Clause
"""Figures of a run: TensorBoard, the log line and the steps file."""

import functools
import re
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.jobs.compositions import CAD, COMMON
from tests.lib.jobs.harness import REPOSITORY, read_scalars, run
from tests.lib.refusals import refusal
from torchtitan_cad.integration.report import metrics as report_metrics
from torchtitan_cad.integration.report.metrics import CadMetrics, scalars_of
from torchtitan_cad.integration.session import CadSession
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.exchange import ExchangeClock
from torchtitan_cad.runtime.transport.base import Routes

OTHER_JOBS = {
    "cad/placement/total(%)",
    "cad/placement/worst(%)",
    "cad/hosts/sent(MB)",
    "cad/hosts/link(Gbit_s)",
    "cad/servers/share(%)",
}
"""Tags of jobs with placement, on several hosts, and with joined servers."""
FIGURES: dict[str, Any] = {
    "exchange_seconds": 0.1,
    "exposed_percent": 2.0,
    "imbalance_before": 1.5,
    "imbalance_after": 1.0,
    "bytes_per_rank_mean": 1e6,
    "bytes_per_rank_max": 2e6,
    "bytes_copied": 3e6,
    "tasks": 5.0,
    "tasks_moved": 2.0,
    "plan_seconds": 0.01,
    "tolerance": 0.02,
    "placed_total": 0.8,
    "placed_worst": 0.4,
    "bytes_between_hosts": 4e6,
    "link_between_hosts": 0.05,
    "served_share": 0.3,
    "mfu_percent": 40.0,
}


def documented_tags() -> set[str]:
    """First column of the table of docs/operations.md."""
    table = (
        (REPOSITORY / "docs" / "operations.md")
        .read_text()
        .split("## Metrics")[1]
        .split("## Traces")[0]
    )
    rows = [
        line.split("|")[1] for line in table.splitlines() if line.startswith("| `cad/")
    ]
    return {tag for row in rows for tag in re.findall(r"`([^`]+)`", row)}


def general(tags: Any) -> set[str]:
    return {
        re.sub(r"rank\d+$", "rank<N>", tag) for tag in tags if tag.startswith("cad/")
    }


def test_tensorboard_and_log_show_what_moved():
    result = run([*COMMON, *CAD], nranks=2)
    (folder,) = (result.dump_folder / "tb").iterdir()
    names = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {"cad_steps.jsonl"}
    figures = read_scalars(folder)
    assert general(figures) == documented_tags() - OTHER_JOBS
    for tag in (tag for tag in figures if tag.startswith("cad/")):
        assert len(figures[tag]) == 3, tag
    assert all(
        a <= b
        for a, b in zip(
            figures["cad/imbalance/after"], figures["cad/imbalance/before"], strict=True
        )
    )
    assert max(figures["cad/sent/max(MB)"]) > 0
    assert max(figures["cad/exchange/host(s)"]) > 0
    assert max(figures["cad/exchange/exposed(%)"]) > 0
    assert all(0 <= share < 100 for share in figures["cad/exchange/exposed(%)"])
    # a plan a step, and no speeds: the busiest rank's load is the imbalance
    for when in (
        "before",
        "after",
    ):
        loads = list(
            zip(
                *(figures[f"cad/load/{when}/rank{rank}"] for rank in range(2)),
                strict=True,
            )
        )
        assert [sum(load) for load in loads] == pytest.approx([2.0] * 3)
        assert [max(load) for load in loads] == pytest.approx(
            figures[f"cad/imbalance/{when}"], abs=1e-3
        )
    assert result.logs[0].count("cad: imbalance ") == 3
    assert len(re.findall(r"exposed wait [\d.]+% of the step", result.logs[0])) == 3


@pytest.mark.parametrize("num_ranks", [2, 16, 17])
def test_every_tag_is_documented(num_ranks):
    loads = {"loads_before": [2] * num_ranks, "loads_after": [2] * num_ranks}
    ranks = list(range(0, 4 * num_ranks, 4))
    scalars = scalars_of(FIGURES | loads, ranks)
    per_rank = {f"cad/load/{when}/rank<N>" for when in ("before", "after")}
    assert general(scalars) == documented_tags() - (
        per_rank if num_ranks > 16 else set()
    )
    if num_ranks <= 16:
        assert scalars[f"cad/load/after/rank{ranks[-1]}"] == 1.0


class Titan:
    """What torchtitan's metrics do: every fifth step is logged."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.host_seconds: list[float] = []

    def should_log(self, step: int) -> bool:
        return step % 5 == 0

    def log(self, step: int, *losses: float, extra_metrics: dict[str, float]) -> None:
        self.done.append(f"step {step}")
        self.host_seconds.append(extra_metrics["cad/exchange/host(s)"])

    def log_validation(self, *_: object) -> None:
        self.done.append("validation")

    def close(self) -> None:
        self.done.append("closed")


class Metrics(CadMetrics, Titan):
    """CAD's metrics before those of torchtitan, in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.time_last_log = folder, 0.0
        self.begin(writes_steps=True)

    def run_folder(self) -> str:
        return str(self.folder)


@pytest.fixture
def use_session(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a session of two ranks the process's, with some figures."""

    def use(figures: Callable[[], dict], **engine: Any) -> Any:
        session = types.SimpleNamespace(
            statistics=types.SimpleNamespace(drain=figures),
            engine=types.SimpleNamespace(**({"clock": ExchangeClock()} | engine)),
            device=torch.device("cpu"),
            ranks=[0, 1],
            link_between_hosts=0.05,
            confirm_exchanges=lambda: None,
        )
        monkeypatch.setattr(report_metrics, "current_session", lambda: session)
        return session

    return use


def test_validation_does_not_count_as_exchange_of_the_next_steps(tmp_path, use_session):
    clock = use_session(dict).engine.clock
    with clock.measure("waiting"):
        pass
    assert clock.waiting > 0
    Metrics(tmp_path).log_validation(1.0, 5)
    assert clock.reset() == (0.0, 0.0)


class LateTransport:
    """A transport whose device has noted, unseen by the host so far, that rows of a peer did not come."""

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        raise PeerError("rank 1 did not send its rows in time")


def test_a_loss_computed_after_a_failed_exchange_is_not_logged(tmp_path, use_session):
    session, metrics = use_session(dict, transport=LateTransport()), Metrics(tmp_path)
    session.confirm_exchanges = functools.partial(CadSession.confirm_exchanges, session)
    with refusal(error=PeerError):
        metrics.log(1, 1.0, 1.0, 1.0)
    with refusal(error=PeerError):
        metrics.log_validation(1.0, 1)
    assert metrics.done == []


class Clock(ExchangeClock):
    """A clock that has measured 12 seconds since the last reset."""

    def reset(self) -> tuple[float, float]:
        return 8.0, 4.0


@pytest.mark.parametrize(("validated", "steps"), [(None, 4), (8, 2)])
def test_figures_after_a_resume_are_those_of_the_steps_since_its_start(
    tmp_path, use_session, validated, steps
):
    """Step 7 is the first of the process, step 8 is validated, and every fifth is logged."""
    use_session(dict, clock=Clock())
    metrics = Metrics(tmp_path)
    for step in range(7, 16):
        if metrics.should_log(step):
            metrics.log(step, 1.0, 1.0, 1.0)
        if step == validated:
            metrics.log_validation(1.0, step)
    assert metrics.host_seconds == pytest.approx([12.0 / steps, 12.0 / 5])


def test_a_signal_does_not_close_in_the_middle_of_a_steps_log(tmp_path, use_session):
    """The thread that obeys a signal waits for the step's line, and nothing is logged after it."""
    writing, go_on = threading.Event(), threading.Event()

    class SlowMetrics(Metrics):
        def run_folder(self) -> str:
            self.done.append("begin")
            writing.set()
            assert go_on.wait(60)
            self.done.append("end")
            return super().run_folder()

    ranked = {
        f"{name}_{when}": [1.5, 0.5]
        for name in ("ranked", "loads")
        for when in ("before", "after")
    }
    use_session(lambda: FIGURES | ranked)
    metrics = SlowMetrics(tmp_path)
    log = threading.Thread(target=metrics.log, args=(1, 1.0, 1.0, 1.0))
    log.start()
    assert writing.wait(60)
    close = threading.Thread(target=metrics.close)
    close.start()
    close.join(0.2)
    assert metrics.done == ["step 1", "begin"]
    go_on.set()
    log.join()
    close.join()
    metrics.log(2, 1.0, 1.0, 1.0)
    metrics.close()
    assert metrics.done == ["step 1", "begin", "end", "closed"]
