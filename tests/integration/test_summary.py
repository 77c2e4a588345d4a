"""The run summary: files, values, text, picture; whole at any moment, and bounded."""

import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from torchtitan_cad.integration.report import picture
from torchtitan_cad.integration.report.picture import Pace, draw
from torchtitan_cad.integration.report.statistics import StepStatistics
from torchtitan_cad.integration.report.summary import MOST_SPANS, RunSummary, replace_file
from torchtitan_cad.planning import AttentionShape, PlannerConfig, TokenLayout, make_plan

FIRST = {
    "step": 1,
    "imbalance_before": 2.5,
    "imbalance_after": 1.0,
    "ranked_before": [2.5, 0.5, 0.5, 0.5],
    "ranked_after": np.array([1.0, 1.0, 1.0, 1.0]),
    "bytes_per_rank_mean": 3.0e6,
    "bytes_per_rank_max": np.float64(6.0e6),
    "tasks_moved": 3,
    "plan_seconds": 0.002,
    "exchange_seconds": 0.1,
    "exposed_percent": 2.0,
    "loss": torch.tensor(8.0),
    "note": "kept",
}
SECOND = {
    "step": 2,
    "imbalance_before": 1.0,
    "imbalance_after": 1.1,
    "ranked_before": [1.0, 1.0, 1.0, 1.0],
    "ranked_after": torch.tensor([1.1, 1.0, 1.0, 0.9]),
    "bytes_per_rank_mean": 1.0e6,
    "bytes_per_rank_max": 2.0e6,
    "tasks_moved": 2,
    "plan_seconds": 0.004,
    "exchange_seconds": 0.3,
    "exposed_percent": 4.0,
    "loss": 7.5,
}


def figures(step: int, ranks: int = 2, **others: object) -> dict:
    ranked = {"ranked_before": [2.0] + [1.0] * (ranks - 1), "ranked_after": [1.0] * ranks}
    return {"step": step, "imbalance_before": 2.0, "imbalance_after": 1.0, **ranked, **others}


def read_steps(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "cad_steps.jsonl").read_text().splitlines()]


def read_summary(folder: Path) -> dict:
    return json.loads((folder / "cad_summary.json").read_text())


def test_files_are_whole_after_every_step(tmp_path: Path) -> None:
    summary = RunSummary(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert summary.folder == folder
    summary.add(FIRST)
    assert read_summary(folder)["steps"] == 1
    assert read_steps(folder)[0]["note"] == "kept"
    summary.add(SECOND)
    assert [step["step"] for step in read_steps(folder)] == [1, 2]
    assert read_steps(folder)[1]["ranked_after"] == pytest.approx([1.1, 1.0, 1.0, 0.9])
    assert read_summary(folder) == pytest.approx(
        {
            "steps": 2,
            "last_step": 2,
            "ranks": 4,
            "imbalance_before": (2.5 + 1.0) / 2,
            "imbalance_after": (1.0 + 1.1) / 2,
            "imbalance_before_worst": 2.5,
            "imbalance_after_worst": 1.1,
            "bytes_per_rank_mean": 2.0e6,
            "bytes_per_rank_max": 4.0e6,
            "tasks_moved": 2.5,
            "plan_seconds": 0.003,
            "exchange_seconds": 0.2,
            "exposed_percent": 3.0,
            "loss_first": 8.0,
            "loss_last": 7.5,
        }
    )
    text = summary.text()
    for expected in (
        "2 logged steps on 4 ranks",
        "1.75 -> 1.05  (worst step 2.50 -> 1.10)",
        "2 MB, busiest rank 4 MB",
        "2.5",
        "3.0 ms",
        "200.0 ms",
        "3.0% of the time",
        "8.000 -> 7.500",
    ):
        assert expected in text


def test_what_is_not_measured_is_left_out(tmp_path: Path) -> None:
    summary = RunSummary(tmp_path)
    summary.add(figures(5))
    assert summary.text().count("\n") == 1
    assert read_summary(tmp_path)["loss_first"] is None


def test_diverged_loss_is_valid_json(tmp_path: Path) -> None:
    RunSummary(tmp_path).add({**FIRST, "loss": float("nan")})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for name in ("cad_steps.jsonl", "cad_summary.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)
    assert read_steps(tmp_path)[0]["loss"] is None


def test_a_slow_first_plan_does_not_count(tmp_path: Path) -> None:
    summary = RunSummary(tmp_path)
    for step, seconds in enumerate((10.0, 0.003, 0.001), start=1):
        summary.add(figures(step, plan_seconds=seconds))
    assert read_summary(tmp_path)["plan_seconds"] == 0.003


def test_a_later_run_overwrites_nothing(tmp_path: Path) -> None:
    """torchtitan names a run's folder by the minute, so two may get the same."""
    folders = []
    for loss in (1.0, 2.0, 3.0):
        summary = RunSummary(tmp_path / "20261122-0622")
        summary.add(figures(1, loss=loss))
        draw(summary)
        folders.append(summary.folder)
    assert [folder.name for folder in folders] == ["20261122-0622", "20261122-0622-2", "20261122-0622-3"]
    assert [read_summary(folder)["loss_last"] for folder in folders] == [1.0, 2.0, 3.0]
    assert all((folder / "imbalance.png").read_bytes().startswith(b"\x89PNG") for folder in folders)


def test_what_is_held_does_not_grow_with_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_cad.integration.report.summary.replace_file", lambda *_: None)
    summary = RunSummary(tmp_path)
    monkeypatch.setattr(summary, "_append_line", lambda *_: None)
    rng = np.random.default_rng(0)
    count = 5 * MOST_SPANS + 3
    values = rng.lognormal(size=count)
    for step, value in enumerate(values.tolist(), start=1):
        summary.add({**figures(step, plan_seconds=0.01), "imbalance_before": value})
    assert MOST_SPANS // 2 <= len(summary.spans) <= MOST_SPANS
    assert summary.spans[-1].last_step == count
    assert [span.last_step for span in summary.spans] == sorted({span.last_step for span in summary.spans})
    spreads = [span.figures["imbalance_before"] for span in summary.spans]
    assert sum(spread.count for spread in spreads) == count
    assert sum(spread.total for spread in spreads) == pytest.approx(values.sum())
    assert max(spread.high for spread in spreads) == values.max()
    assert summary.means()["imbalance_before"] == pytest.approx(values.mean())
    assert summary.means()["imbalance_before_worst"] == values.max()


@pytest.mark.parametrize("ranks", [1, 2, 16, 200])
def test_picture(tmp_path: Path, ranks: int) -> None:
    summary = RunSummary(tmp_path)
    for step in range(1, 4):
        summary.add(figures(step, ranks))
    pixels = draw(summary)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (480, 1200, 3)
    assert (tmp_path / "imbalance.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cad_steps.jsonl", "cad_summary.json", "imbalance.png"]


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def write_half(self: Path, content: bytes) -> None:
        with open(self, "wb") as file:
            file.write(content[:1])
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        with pytest.raises(OSError, match="no space"):
            replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_but_the_step_counts(tmp_path: Path) -> None:
    summary = RunSummary(tmp_path)
    summary.add(FIRST)
    steps_file, summary._steps_file = summary._steps_file, Path("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        summary.add(figures(2, 4))
    summary._steps_file = steps_file
    summary.add({**SECOND, "step": 3})
    assert [step["step"] for step in read_steps(tmp_path)] == [1, 3]
    assert read_summary(tmp_path)["steps"] == 3


def test_drawing_takes_at_most_a_hundredth_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(picture.time, "monotonic", lambda: now[0])
    pace = Pace()
    drawn: list[float] = []
    while now[0] < 100.0 + 36_000.0:
        if pace.due:
            now[0] += 0.5
            pace.drew(0.5)
            drawn.append(now[0] - 100.0)
        now[0] += 1.0
    assert drawn[0] == 0.5
    elapsed = np.array(drawn)
    assert (0.5 * np.arange(len(elapsed)) <= 0.01 * elapsed).all()
    assert len(drawn) < 100
    gaps = np.diff(elapsed)
    assert (gaps <= np.maximum(50.0, 0.1 * elapsed[:-1]) + 2.0).all()  # not much less often either


# Two microbatches: what is heavy in one is light in the other.
SHAPE = AttentionShape(4, 4, 8, 4)
LONG, SHORT = [(0, 0, 2048)], [(i, 0, 128) for i in range(1, 17)]


def planned(layouts: list[list], **config: object) -> types.SimpleNamespace:
    plans = [
        make_plan(TokenLayout.from_segments(layout), SHAPE, PlannerConfig(min_shard=128, **config))
        for layout in layouts
    ]
    return types.SimpleNamespace(plans=plans, homes=None, nano_batches=1, seconds=0.1, copied_bytes=[0] * len(plans))


def test_the_busiest_bar_is_the_imbalance_whoever_is_busiest() -> None:
    statistics = StepStatistics()
    statistics.add(planned([[LONG, SHORT], [SHORT, LONG]]))
    drained = statistics.drain()
    loads = np.array(drained["loads_before"])
    assert loads.max() / loads.mean() == pytest.approx(1.0)  # each rank has its turn
    assert drained["imbalance_before"] > 1.5
    for when in ("before", "after"):
        ranked = drained[f"ranked_{when}"]
        assert ranked[0] == pytest.approx(drained[f"imbalance_{when}"])
        assert sum(ranked) == pytest.approx(2.0)
        assert ranked == sorted(ranked, reverse=True)


def test_the_busiest_bar_counts_speeds() -> None:
    statistics = StepStatistics()
    statistics.add(planned([[LONG, SHORT]], rank_speeds=(1.0, 0.5)))
    drained = statistics.drain()
    for when in ("before", "after"):
        assert drained[f"ranked_{when}"][0] == pytest.approx(drained[f"imbalance_{when}"])


def test_no_work_is_balanced() -> None:
    statistics = StepStatistics()
    statistics.add(planned([[[], []]]))
    assert statistics.drain()["ranked_before"] == [1.0, 1.0]
