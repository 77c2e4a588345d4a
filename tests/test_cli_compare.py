# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad compare``: its arithmetic on made-up records, its command line, and once the whole."""

import dataclasses
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.lib.jobs.compositions import TOLERANCE
from tests.lib.jobs.harness import tokenizer_folder
from tests.lib.processes import run_processes, values
from tests.lib.refusals import refusal
from torchtitan_cad.integration.config import Cad
from torchtitan_cad.integration.loading.documents import DocumentRule
from torchtitan_cad.integration.torchtitan_v0_2.cpu import enable_cpu
from torchtitan_cad.tools import compare
from torchtitan_cad.tools.main import main

enable_cpu()

from torchtitan_cad.tools.compare import comparison, measured  # noqa: E402
from torchtitan_cad.tools.compare.comparison import Comparison, Runs  # noqa: E402
from torchtitan_cad.tools.simulated_job import read_simulated_job  # noqa: E402

JOB = Path(__file__).parents[1] / "train_configs" / "llama3_debug_cpu.toml"
LINEAR = 2.0
ATTENTION = [(1.0, 3.0), (2.0, 2.0), (5.0, 1.0)]
"""seconds of two ranks without CAD, by step; with it, half of the sum each"""


def write_run(folder, *, balanced, slowdown, **changes):
    folder.mkdir()
    for rank in range(2):
        lines = []
        for number, works in enumerate(ATTENTION):
            mean = sum(works) / 2
            own = mean if balanced else works[rank]
            slowest = mean if balanced else max(works)
            step = {
                "step": number + 1,
                "seconds": (LINEAR + slowest) * slowdown,
                "busy": LINEAR + own,
                "attention": own,
                "waiting": 0.0,
                "tokens": 100,
                "loss": -1.0 if rank == 0 else 8.0 - number + 0.25 * balanced,
                "gradient_norm": 1.0,
                "rows": [[60, 40]],
                "imbalance_before": max(works) / mean if balanced else None,
                "imbalance_after": 1.0 if balanced else None,
                "bytes_per_rank_mean": 1000.0 if balanced else None,
            }
            lines.append(json.dumps(step | changes) + "\n")
        (folder / f"rank{rank}.jsonl").write_text("".join(lines))
    return folder


def compared(folder, warmup=0, **changes):
    runs = []
    for mode, balanced in (("off", False), ("on", True)):
        # the median is of an undisturbed run
        folders = [
            write_run(
                folder / f"{mode}{number}",
                balanced=balanced,
                slowdown=slowdown,
                **changes,
            )
            for number, slowdown in enumerate([1.0, 1.0, 7.0])
        ]
        runs.append(Runs.read(folders, 2, warmup))
    return Comparison(*runs)


UNTIMED = {"busy": None, "attention": None}


def test_speed_up_is_that_of_the_work(tmp_path):
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
    counts = [figures[key] for key in ("ranks", "rounds", "steps")]
    assert counts == [2, 3, 3]


@pytest.mark.parametrize("known", [True, False])
def test_the_prediction_is_the_simulations_of_the_same_documents(tmp_path, known):
    """One rank has a row of one document, the other one of eight; the shares of the work are measured, or a GPU's."""
    measured_runs = compared(tmp_path, **({} if known else UNTIMED))

    def with_rows(rows):
        off = dataclasses.replace(measured_runs.off, rows=[rows] * 3)
        on = dataclasses.replace(measured_runs.on, rows=[rows] * 3)
        return Comparison(off, on)

    result = with_rows([[[16384]], [[2048] * 8]])
    job = read_simulated_job(
        [f"--job.config_file={JOB}", "--training.seq_len=16384"], 2
    )
    pairs = 16384 * 16385 // 2 + 8 * (2048 * 2049 // 2)
    flops = 3 * job.inputs.model.flops(2 * 16384, [pairs]) / 2
    of_rank = result.rank_flops(job.inputs)["off"]
    assert of_rank * result.off.step_seconds.sum() == pytest.approx(flops)
    predicted = result.predicted(job)
    if known:  # 14 of 26 parts are attention, of which the longer row's rank has 1.7 or so times the mean
        assert 1.3 < predicted["overall"] < 1.5
        no_seconds = float("nan") * result.off.attention
        untimed = dataclasses.replace(result.off, attention=no_seconds)
        assert Comparison(untimed, result.on).predicted(job) == pytest.approx(predicted)
        assert sum(untimed.parts()["attention"]) == 0
    assert predicted["reordering_alone"] == pytest.approx(1)  # each rank has one row
    balanced = with_rows([[[16384]], [[16384]]]).predicted(job)
    assert balanced["overall"] == pytest.approx(1, rel=0.05)


def test_documents_of_rows_end_with_the_end_of_sequence():
    tokens = torch.tensor([[5, 0, 5, 5, 0, 5], [5, 5, 5, 5, 5, 0]])
    assert DocumentRule(0).lengths({"input": tokens}) == [[2, 3, 1], [6]]


@pytest.mark.parametrize("same", [True, False])
def test_other_documents_without_cad_are_said(same, tmp_path):
    figures = compared(tmp_path, same_documents=same).report()
    assert figures["same_documents"] is same
    beside = {
        "places": "CPU cores",
        "predicted_speedup": None,
        "model_flops_per_second_and_rank": {"off": 1e12, "on": 2e12},
        "peak_flops": 4e12,
    }
    text = compare.text(figures | beside)
    assert "1,000.0 -> 2,000.0 GFLOP/s a rank" in text
    assert "0.250 -> 0.500" in text
    assert ("without CAD attention ends at other places" in text) is not same


def test_first_steps_are_left_out(tmp_path):
    figures = compared(tmp_path, warmup=2).report()
    assert figures["seconds_per_step"] == {"off": [7.0], "on": [5.0]}
    with refusal():
        Runs.read([tmp_path / "off0"], 2, 3)


PREDICTED = {"least": 1.0, "overall": 1.2, "most": 1.4, "reordering_alone": 1.1}
OF_TWO_LENGTHS = {"rows": [[60, 40], [60]]}
"""Rows that cannot be simulated."""


@pytest.mark.parametrize(
    ("changes", "predicted"), [({}, PREDICTED), (UNTIMED, None), (OF_TWO_LENGTHS, None)]
)
def test_figures_that_are_not_known_are_null_in_json(
    changes, predicted, tmp_path, monkeypatch, capsys
):
    result = compared(tmp_path, **changes)
    monkeypatch.setattr(comparison, "run", lambda *args, **options: result)
    if changes is not OF_TWO_LENGTHS:
        monkeypatch.setattr(Comparison, "predicted", lambda *args: predicted)
    compare.run(JOB, nproc=2, output=tmp_path)
    text = (tmp_path / "compare.json").read_text()
    figures = json.loads(text, parse_constant=pytest.fail)
    is_timed = changes is not UNTIMED
    assert figures["predicted_speedup"] == predicted
    assert (figures["attention_share"] is not None) == is_timed
    printed = capsys.readouterr().out
    assert ("predicted" in printed) == (predicted is not None)
    assert ("of the work" in printed) == is_timed


@pytest.mark.parametrize(
    ("schedule", "without"),
    [("CADInterleaved1F1B", "Interleaved1F1B"), ("CAD1F1B", "1F1B"), ("1F1B", None)],
)
def test_schedules_in_ticks_have_a_counterpart_without_cad(schedule, without):
    parallelism = SimpleNamespace(pipeline_parallel_schedule=schedule)
    off, on = comparison.switches_of(SimpleNamespace(parallelism=parallelism))
    assert on == "--parallelism.cad"
    switch, *others = off.split()
    assert switch == "--parallelism.no-cad"
    option = f"--parallelism.pipeline_parallel_schedule={without}"
    assert others == ([option] if without else [])


def test_one_gpu_cannot_be_compared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    with refusal(remedy="CUDA_VISIBLE_DEVICES"):
        compare._places(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert compare._places(2) == (2, "NVIDIA H200")
    with refusal("--nproc", 3, remedy="at most 2"):
        compare._places(3)


def test_sigterm_ends_a_comparison_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), comparison._exit_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def record_a_step(group, records):
    """Record a step whose documents take 1,000 s to note, in a rank with 8 that share the tokens of rows."""
    from torchtitan.train import Trainer

    now = [0.0]

    def slow_rows(rule, batch):
        now[0] += 1000.0
        return [[1]]

    def train_step(trainer):
        batch = {"input": torch.ones((1, 8), dtype=torch.int64)}
        Trainer.forward_backward_step(trainer, input_dict=batch)
        batch.clear()
        trainer.ntokens_seen += 4096
        trainer.metrics_processor.log(trainer.step, 8.0, 8.5, 1.5)

    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: 0.0)
    measured.time = clock
    DocumentRule.lengths = slow_rows
    Trainer.forward_backward_step = lambda *_, **__: None
    Trainer.train_step = train_step
    measured._record_steps(
        records,
        on_cpu=True,
        before_step=lambda step: None,
        seconds_of_waits=lambda: None,
    )
    trainer = SimpleNamespace(
        step=1,
        ntokens_seen=100,
        metrics_processor=SimpleNamespace(log=lambda *args: None),
        parallel_dims=SimpleNamespace(non_data_parallel_size=8),
        job_config=SimpleNamespace(cad=Cad(), parallelism=SimpleNamespace(cad=False)),
        model_args=SimpleNamespace(vocab_size=2048, attn_mask_type="causal"),
        tokenizer=SimpleNamespace(eos_id=0),
    )
    Trainer.train_step(trainer)


def test_tokens_of_ranks_add_up_to_the_global_batch(tmp_path):
    """All 2 x 4 context- and tensor-parallel ranks of a data-parallel coordinate count the same 4,096 labels."""
    records = tmp_path / "rank0.jsonl"
    values(run_processes(1, record_a_step, records))
    figures = json.loads(records.read_text())
    assert 8 * figures["tokens"] == 4096
    assert (figures["loss"], figures["gradient_norm"]) == (8.0, 1.5)
    assert figures["rows"] == [[1]]
    # What a comparison notes of a batch takes no time of a step.
    assert figures["seconds"] == 0.0


def test_mistakes_are_one_line(tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    refused("compare", "missing.toml")
    for mistake in ("--steps=3", "--rounds=0", "--nproc=1", "--nproc=1000000"):
        refused("compare", str(JOB), mistake)
    for output in ("\x00", str(JOB)):
        refused("compare", str(JOB), "--output", output)


@pytest.mark.slow
def test_a_job_is_compared(tmp_path):
    options = "--steps 3 --rounds 1 --warmup 0 --nproc 2 --training.seq_len=8192"
    assets = f"--model.hf_assets_path={tokenizer_folder()}"
    command = ["compare", str(JOB), f"--output={tmp_path}", *options.split(), assets]
    log = tmp_path / "off1" / "log.txt"
    assert main(command) == 0, log.read_text()[-2000:]
    figures = json.loads((tmp_path / "compare.json").read_text())
    assert figures["steps"] == 3
    assert figures["largest_relative_loss_difference"] < TOLERANCE
    assert figures["imbalance"]["before"] > figures["imbalance"]["after"]
    assert 0 < figures["attention_share"] < 1
    assert figures["predicted_speedup"]["overall"] > 1
    for mode in ("off", "on"):
        assert figures["model_flops_per_second_and_rank"][mode] > 0
        for seconds in figures["rank_seconds"][mode].values():
            assert min(seconds) > 0
