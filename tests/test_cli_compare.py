# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad compare``: its arithmetic on made-up records, its command line, and once the whole."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.jobs.compositions import TOLERANCE
from tests.lib.jobs.harness import tokenizer_folder
from tests.lib.refusals import refusal
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.report.statistics import StepStatistics
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools import compare
from torchtitan_cad.tools.main import main

enable_cpu()

from torchtitan_cad.runtime.exchange import ExchangeClock  # noqa: E402
from torchtitan_cad.runtime.kernels.cpu import CpuKernel  # noqa: E402
from torchtitan_cad.tools.compare import comparison, measured  # noqa: E402
from torchtitan_cad.tools.compare.comparison import Comparison, Runs  # noqa: E402
from torchtitan_cad.tools.compare.measured import document_rows  # noqa: E402
from torchtitan_cad.tools.simulated_job import read_simulated_job  # noqa: E402

JOB = Path(__file__).parents[1] / "train_configs" / "llama3_debug_cpu.toml"
LINEAR = 2.0
ATTENTION = [(1.0, 3.0), (2.0, 2.0), (5.0, 1.0)]
"""seconds of two ranks without CAD, by step; with it, half of the sum each"""


def write_run(
    folder: Path, *, balanced: bool, slowdown: float = 1.0, **changes: Any
) -> Path:
    folder.mkdir()
    for rank in range(2):
        with (folder / f"rank{rank}.jsonl").open("w") as file:
            for number, works in enumerate(ATTENTION):
                own = sum(works) / 2 if balanced else works[rank]
                slowest = sum(works) / 2 if balanced else max(works)
                step = dict(
                    step=number + 1,
                    seconds=(LINEAR + slowest) * slowdown,
                    busy=LINEAR + own,
                    attention=own,
                    waiting=0.0,
                    tokens=100,
                    loss=-1.0 if rank == 0 else 8.0 - number + 0.25 * balanced,
                    gradient_norm=1.0,
                    rows=[[60, 40]],
                    imbalance_before=max(works) / (sum(works) / 2)
                    if balanced
                    else None,
                    imbalance_after=1.0 if balanced else None,
                    bytes_per_rank_mean=1000.0 if balanced else None,
                )
                file.write(json.dumps(step | changes) + "\n")
    return folder


def compared(tmp_path: Path, warmup: int = 0, **changes: Any) -> Comparison:
    tmp_path.mkdir(exist_ok=True)
    runs = []
    for mode, balanced in (("off", False), ("on", True)):
        folders = [
            write_run(
                tmp_path / f"{mode}{i}", balanced=balanced, slowdown=slowdown, **changes
            )
            # the median is of an undisturbed run
            for i, slowdown in enumerate([1.0, 1.0, 7.0])
        ]
        runs.append(Runs.read(folders, 2, warmup))
    return Comparison(*runs)


def test_speed_up_and_prediction_are_those_of_the_work(tmp_path: Path) -> None:
    figures = compared(tmp_path).report()
    slowest = [LINEAR + max(works) for works in ATTENTION]
    mean = [LINEAR + sum(works) / 2 for works in ATTENTION]
    assert figures["seconds_per_step"] == {"off": slowest, "on": mean}
    assert figures["speedup"]["overall"] == pytest.approx(sum(slowest) / sum(mean))
    assert figures["speedup"]["median"] == pytest.approx(5 / 4)
    assert figures["attention_share"] == pytest.approx(14 / 26)
    assert figures["tokens_per_second"]["off"] == pytest.approx(600 / sum(slowest))
    assert figures["largest_loss_difference"] == 0.25
    assert figures["largest_relative_loss_difference"] == pytest.approx(0.25 / 6)
    assert figures["rank_seconds"]["off"]["attention"] == pytest.approx([8 / 3, 2.0])
    assert (
        figures["ranks"],
        figures["rounds"],
        figures["steps"],
        figures["first_step"],
    ) == (2, 3, 3, 1)


@pytest.mark.parametrize("known", [True, False])
def test_the_prediction_is_the_simulations_of_the_same_documents(
    tmp_path: Path, known: bool
) -> None:
    """One rank has a row of one document, the other one of eight; the shares of the work are measured, or a GPU's."""
    rows = [[[16384]], [[2048] * 8]]
    result = compared(tmp_path, **({} if known else {"busy": None, "attention": None}))
    off, on = (
        dataclasses.replace(runs, rows=[rows] * 3) for runs in (result.off, result.on)
    )
    job = read_simulated_job(
        [f"--job.config_file={JOB}", "--training.seq_len=16384"], 2
    )
    pairs = 16384 * 16385 // 2 + 8 * (2048 * 2049 // 2)
    flops_of_step = job.model.flops(2 * 16384, [pairs])
    speeds = Comparison(off, on).rank_flops(job)
    assert speeds["off"] * off.step_seconds.sum() == pytest.approx(
        3 * flops_of_step / 2
    )
    predicted = Comparison(off, on).predicted(job)
    if known:  # 14 of 26 parts are attention, of which the longer row's rank has 1.7 or so times the mean
        assert 1.3 < predicted["overall"] < 1.5
        untimed = dataclasses.replace(off, attention=float("nan") * off.attention)
        assert Comparison(untimed, on).predicted(job) == pytest.approx(predicted)
        assert sum(untimed.parts()["attention"]) == 0
    assert predicted["reordering_alone"] == pytest.approx(1)  # each rank has one row
    balanced = [
        dataclasses.replace(runs, rows=[[[[16384]], [[16384]]]] * 3)
        for runs in (off, on)
    ]
    assert Comparison(*balanced).predicted(job)["overall"] == pytest.approx(1, rel=0.05)


def test_documents_of_rows_end_with_the_end_of_sequence() -> None:
    tokens = torch.tensor([[5, 0, 5, 5, 0, 5], [5, 5, 5, 5, 5, 0]])
    assert document_rows(DocumentRule(0), {"input": tokens}) == [[2, 3, 1], [6]]
    assert document_rows(DocumentRule(), {"input": tokens}) == [[6], [6]]


@pytest.mark.parametrize("same", [True, False])
def test_other_documents_without_cad_are_said(same: bool, tmp_path: Path) -> None:
    figures = compared(tmp_path, same_documents=same).report()
    assert figures["same_documents"] is same
    beside = {
        "places": "CPU cores",
        "predicted_speedup": None,
        "model_flops_per_second_and_rank": {"off": 1e12, "on": 2e12},
        "peak_flops": 4e12,
    }
    text = compare.text({**figures, **beside})
    assert "a rank, mfu 50.0%)" in text
    assert ("without CAD attention ends at other places" in text) is not same


def test_first_steps_are_left_out(tmp_path: Path) -> None:
    figures = compared(tmp_path, warmup=2).report()
    assert figures["seconds_per_step"] == {"off": [7.0], "on": [5.0]}
    assert figures["first_step"] == 3
    with refusal():
        Runs.read([tmp_path / "off0"], 2, 3)


@pytest.mark.parametrize("known", [True, False])
def test_figures_that_are_not_known_are_null_in_json(
    known: bool, tmp_path, monkeypatch, capsys
) -> None:
    result = compared(tmp_path, **({} if known else {"busy": None, "attention": None}))
    monkeypatch.setattr(comparison, "run", lambda *args, **options: result)
    predicted = (
        {"least": 1.0, "overall": 1.2, "most": 1.4, "reordering_alone": 1.1}
        if known
        else None
    )
    monkeypatch.setattr(Comparison, "predicted", lambda *args: predicted)
    compare.run(JOB, nproc=2, output=tmp_path)
    figures = json.loads(
        (tmp_path / "compare.json").read_text(), parse_constant=pytest.fail
    )
    assert (
        (figures["attention_share"] is None)
        == (figures["predicted_speedup"] is None)
        == (not known)
    )
    printed = capsys.readouterr().out
    assert ("predicted" in printed) == ("of the work" in printed) == known
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_of_ranks_add_up_to_the_global_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 2 x 4 context- and tensor-parallel ranks of a data-parallel coordinate count the same 4,096 labels."""
    from torchtitan.train import Trainer

    def train_step(trainer: Any) -> None:
        trainer.ntokens_seen += 4096
        trainer.metrics_processor.log(trainer.step, 8.0, 8.5, 1.5)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(Trainer, "forward_backward_step", Trainer.forward_backward_step)
    monkeypatch.setattr(StepStatistics, "drain", StepStatistics.drain)
    monkeypatch.setattr(ExchangeClock, "reset", ExchangeClock.reset)
    for name in ("forward", "backward"):
        monkeypatch.setattr(CpuKernel, name, getattr(CpuKernel, name))
    monkeypatch.setattr(measured.dist, "barrier", lambda: None)
    measured._record_steps(
        tmp_path / "rank0.jsonl",
        on_cpu=True,
        before_step=lambda step: None,
        seconds_of_waits=None,
    )
    processor, dims = (
        SimpleNamespace(log=lambda *args: None),
        SimpleNamespace(non_data_parallel_size=8),
    )
    Trainer.train_step(
        SimpleNamespace(
            step=1, ntokens_seen=100, metrics_processor=processor, parallel_dims=dims
        )
    )
    (record,) = (tmp_path / "rank0.jsonl").read_text().splitlines()
    figures = json.loads(record)
    assert 8 * figures["tokens"] == 4096
    assert (figures["loss"], figures["gradient_norm"]) == (8.0, 1.5)


@pytest.mark.parametrize(
    "args",
    [
        ["missing.toml"],
        [str(JOB), "--steps", "3"],
        [str(JOB), "--rounds", "0"],
        [str(JOB), "--nproc", "1"],
        [str(JOB), "--nproc", "1000000"],
        [str(JOB), "--output", "\x00"],
        [str(JOB), "--output", str(JOB)],
    ],
)
def test_mistakes_are_one_line(args: list[str], tmp_path, monkeypatch, refused) -> None:
    monkeypatch.chdir(tmp_path)
    refused("compare", *args)


@pytest.mark.slow
def test_a_job_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results"
    options = [
        "--steps",
        "3",
        "--rounds",
        "1",
        "--warmup",
        "0",
        "--nproc",
        "2",
        "--output",
        str(output),
    ]
    overrides = [
        f"--model.hf_assets_path={tokenizer_folder()}",
        "--training.seq_len=8192",
    ]
    assert main(["compare", str(JOB), *options, *overrides]) == 0, (
        output / "off1" / "log.txt"
    ).read_text()[-2000:]
    figures = json.loads((output / "compare.json").read_text())
    assert figures["steps"] == 3
    assert figures["largest_relative_loss_difference"] < TOLERANCE
    assert figures["imbalance"]["before"] > figures["imbalance"]["after"]
    assert 0 < figures["attention_share"] < 1
    assert figures["predicted_speedup"]["overall"] > 1
    for mode in ("off", "on"):
        assert figures["tokens_per_second"][mode] > 0
        assert figures["model_flops_per_second_and_rank"][mode] > 0
        assert all(
            seconds > 0
            for part in figures["rank_seconds"][mode].values()
            for seconds in part
        )
    assert (output / "compare.png").exists()
    assert "speed-up" in capsys.readouterr().out

    assert (
        main(["compare", str(JOB), *options, *overrides, "--training.seq_len=513x"])
        == 2
    )
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the run in" in error
    assert "513x" in error
