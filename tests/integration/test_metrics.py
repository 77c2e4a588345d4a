# SPDX-License-Identifier: BSD-3-Clause
"""Figures of a run: TensorBoard, the log line and the steps file."""

import functools
import re
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.jobs.compositions import CAD, COMMON
from tests.lib.jobs.harness import REPOSITORY, read_scalars, run
from torchtitan_cad.integration.report import metrics as report_metrics
from torchtitan_cad.integration.report.metrics import scalars_of
from torchtitan_cad.integration.session import CadSession
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.runtime.errors import PeerError
from torchtitan_cad.runtime.exchange import ExchangeClock
from torchtitan_cad.runtime.transport.base import Routes

enable_cpu()

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402

from torchtitan_cad.integration.torchtitan_v0_2 import metrics  # noqa: E402
from torchtitan_cad.integration.torchtitan_v0_2.metrics import CadMetricsProcessor  # noqa: E402

OTHER_JOBS = {
    f"cad/{tag}"
    for tag in (
        *(
            "placement/total(%)",
            "placement/worst(%)",
            "hosts/sent(MB)",
            "hosts/link(Gbit_s)",
            "servers/share(%)",
        ),
    )
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


def test_tensorboard_and_log_show_what_moved() -> None:
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
def test_every_tag_is_documented(num_ranks: int) -> None:
    loads = {"loads_before": [2] * num_ranks, "loads_after": [2] * num_ranks}
    ranks = list(range(0, 4 * num_ranks, 4))
    scalars = scalars_of(FIGURES | loads, ranks)
    per_rank = {f"cad/load/{when}/rank<N>" for when in ("before", "after")}
    assert general(scalars) == documented_tags() - (
        per_rank if num_ranks > 16 else set()
    )
    if num_ranks <= 16:
        assert scalars[f"cad/load/after/rank{ranks[-1]}"] == 1.0


def new_processor(
    monkeypatch: pytest.MonkeyPatch, dump_folder: Path
) -> CadMetricsProcessor:
    """One that has not been set up by torchtitan."""
    monkeypatch.setattr(MetricsProcessor, "__init__", lambda self, *_: None)
    monkeypatch.setattr(MetricsProcessor, "log_validation", lambda self, *_: None)
    monkeypatch.setattr(metrics.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(metrics, "_get_metrics_rank", lambda *_: 0)
    monkeypatch.setattr(CadMetricsProcessor, "logger", None, raising=False)
    processor = CadMetricsProcessor(None, None)  # type: ignore[arg-type]
    job = types.SimpleNamespace(dump_folder=str(dump_folder))
    section = types.SimpleNamespace(save_tb_folder="tb", log_freq=5)
    processor.job_config = types.SimpleNamespace(job=job, metrics=section)  # type: ignore[assignment]
    return processor


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(report_metrics.logger, "warning", warnings.append)
    (tmp_path / "file").touch()
    processor = new_processor(monkeypatch, tmp_path / "file")
    for step in range(3):
        processor._write_step({"step": step, **FIGURES})
    assert len(warnings) == 1
    assert "Not a directory" in warnings[0]


def test_validation_does_not_count_as_exchange_of_the_next_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, clock = new_processor(monkeypatch, tmp_path), ExchangeClock()
    engine = types.SimpleNamespace(clock=clock)
    session = types.SimpleNamespace(engine=engine, confirm_exchanges=lambda: None)
    monkeypatch.setattr(report_metrics, "current_session", lambda: session)
    with clock.measure("waiting"):
        pass
    assert clock.waiting > 0
    processor.log_validation(1.0, 5)
    assert clock.reset() == (0.0, 0.0)
    assert processor._last_step == 5


class LateTransport:
    """A transport whose device has noted, unseen by the host so far, that rows of a peer did not come."""

    def prepare(self, exchanges: Sequence[Routes]) -> None:
        raise PeerError("rank 1 did not send its rows in time")


def test_a_loss_computed_after_a_failed_exchange_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    engine = types.SimpleNamespace(clock=ExchangeClock(), transport=LateTransport())
    session: Any = types.SimpleNamespace(
        statistics=types.SimpleNamespace(drain=dict),
        engine=engine,
        device=torch.device("cpu"),
        ranks=[0],
    )
    session.confirm_exchanges = functools.partial(CadSession.confirm_exchanges, session)
    processor = new_processor(monkeypatch, tmp_path)
    monkeypatch.setattr(report_metrics, "current_session", lambda: session)
    monkeypatch.setattr(MetricsProcessor, "log", lambda *_, **__: said.append("step"))
    monkeypatch.setattr(
        MetricsProcessor, "log_validation", lambda *_, **__: said.append("validation")
    )
    processor.time_last_log = 0.0
    with pytest.raises(PeerError, match="rank 1 did not send"):
        processor.log(1, 1.0, 1.0, 1.0)
    with pytest.raises(PeerError, match="rank 1 did not send"):
        processor.log_validation(1.0, 1)
    assert said == []


class Clock(ExchangeClock):
    """A clock that has measured 12 seconds since the last reset."""

    def reset(self) -> tuple[float, float]:
        return 8.0, 4.0


def logged(processor: CadMetricsProcessor, step: int) -> None:
    """What torchtitan does at the end of a step."""
    if processor.should_log(step):
        processor.time_last_log = time.perf_counter() - 12.0
        processor.log(step, 1.0, 1.0, 1.0)


def test_figures_after_a_resume_are_those_of_the_steps_since_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 7 is the first of the process, step 8 is validated, and every fifth is logged."""
    seconds_of_a_step: list[float] = []

    def log(
        self: Any, step: int, *_: Any, extra_metrics: dict[str, float], **__: Any
    ) -> None:
        seconds_of_a_step.append(extra_metrics["cad/exchange/host(s)"])

    session = types.SimpleNamespace(
        statistics=types.SimpleNamespace(drain=dict),
        engine=types.SimpleNamespace(clock=Clock()),
        device=torch.device("cpu"),
        ranks=[0, 1],
        confirm_exchanges=lambda: None,
    )
    monkeypatch.setattr(report_metrics, "current_session", lambda: session)
    monkeypatch.setattr(MetricsProcessor, "log", log)
    for validated, steps in ((None, 4), (8, 2)):
        processor = new_processor(monkeypatch, tmp_path)
        for step in range(7, 16):
            logged(processor, step)
            if step == validated:
                processor.log_validation(1.0, step)
        assert seconds_of_a_step == pytest.approx([12.0 / steps, 12.0 / 5], rel=0.01)
        seconds_of_a_step.clear()


def test_a_signal_does_not_close_in_the_middle_of_a_steps_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that obeys a signal waits for the step's line, and nothing is logged after it."""
    writing, go_on, said = threading.Event(), threading.Event(), []

    def append(self: Any, figures: Any) -> None:
        said.append("begin")
        writing.set()
        assert go_on.wait(60)
        said.append("end")

    ranked = {
        f"{name}_{when}": [1.5, 0.5]
        for name in ("ranked", "loads")
        for when in ("before", "after")
    }
    session = types.SimpleNamespace(
        statistics=types.SimpleNamespace(drain=lambda: {**FIGURES, **ranked}),
        engine=types.SimpleNamespace(clock=ExchangeClock()),
        device=torch.device("cpu"),
        ranks=[0, 1],
        link_between_hosts=0.05,
        confirm_exchanges=lambda: None,
    )
    monkeypatch.setattr(report_metrics, "current_session", lambda: session)
    monkeypatch.setattr(report_metrics.LinesFile, "append", append)
    monkeypatch.setattr(
        MetricsProcessor,
        "log",
        lambda self, step, *_, **__: said.append(f"step {step}"),
    )
    monkeypatch.setattr(MetricsProcessor, "close", lambda self: said.append("closed"))
    processor = new_processor(monkeypatch, tmp_path)
    processor.time_last_log = 0.0
    log = threading.Thread(target=processor.log, args=(1, 1.0, 1.0, 1.0))
    log.start()
    assert writing.wait(60)
    close = threading.Thread(target=processor.close)
    close.start()
    close.join(0.2)
    assert said == ["step 1", "begin"]
    go_on.set()
    log.join()
    close.join()
    processor.log(2, 1.0, 1.0, 1.0)
    processor.close()
    assert said == ["step 1", "begin", "end", "closed"]
