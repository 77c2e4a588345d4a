"""`torchtitan-cad report`: what it reads of a run, whatever became of it, and what it writes."""

import json
import os
from pathlib import Path

import matplotlib.image
import pytest

from torchtitan_cad.cli import main
from torchtitan_cad.integration.report.steps_file import STEPS_NAME, StepsFile

FIRST = {
    "step": 1,
    "imbalance_before": 2.5,
    "imbalance_after": 1.0,
    "ranked_before": [2.5, 0.5, 0.5, 0.5],
    "ranked_after": [1.0, 1.0, 1.0, 1.0],
    "bytes_per_rank_mean": 3.0e6,
    "bytes_per_rank_max": 6.0e6,
    "tasks_moved": 3,
    "plan_seconds": 10.0,
    "exchange_seconds": 0.1,
    "exposed_percent": 2.0,
    "loss": 8.0,
}
SECOND = {**FIRST, "step": 2, "imbalance_before": 1.5, "tasks_moved": 2, "plan_seconds": 0.004, "loss": float("nan")}
THIRD = {**FIRST, "step": 3, "imbalance_before": 2.0, "plan_seconds": 0.002, "loss": 7.5}


def write(folder: Path, *rows: dict) -> Path:
    steps_file = StepsFile(folder)
    for row in rows:
        steps_file.append(row)
    return steps_file.path


@pytest.mark.parametrize("end", ["", '{"step": 4, "loss'], ids=["whole", "cut by a kill"])
def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str) -> None:
    path = write(tmp_path / "tb" / "now", FIRST, SECOND, THIRD)
    path.write_text(path.read_text() + end)
    assert main(["report", str(tmp_path)]) == 0
    assert json.loads((path.parent / "cad_summary.json").read_text()) == pytest.approx(
        {
            "steps": 3,
            "last_step": 3,
            "ranks": 4,
            "imbalance_before": 2.0,
            "imbalance_after": 1.0,
            "bytes_per_rank_mean": 3.0e6,
            "bytes_per_rank_max": 6.0e6,
            "tasks_moved": 8 / 3,
            "exposed_percent": 2.0,
            "plan_seconds": 0.004,
            "exchange_seconds": 0.1,
            "loss_first": 8.0,
            "loss_last": 7.5,
        }
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Core attention disaggregation on 4 ranks, logged steps: 3"
    assert [line.split()[-1] for line in printed[1:3]] == ["2.000", "1.000"]
    assert not any("homes" in line for line in printed), "nothing was measured of it"
    assert printed[-1].endswith(str(path.parent))


@pytest.mark.parametrize("ranks", [1, 16, 200])
@pytest.mark.parametrize("steps", [1, 100])
def test_picture(tmp_path: Path, ranks: int, steps: int) -> None:
    ranked = {"ranked_before": [2.0] + [1.0] * (ranks - 1), "ranked_after": [1.0] * ranks}
    write(tmp_path, *({**FIRST, **ranked, "step": step} for step in range(steps)))
    assert main(["report", str(tmp_path)]) == 0
    assert matplotlib.image.imread(tmp_path / "imbalance.png").shape[:2] == (480, 1200)


def test_the_newest_run_is_taken_and_a_later_one_overwrites_nothing(tmp_path: Path) -> None:
    """torchtitan names a run's folder by the minute, so two may get the same."""
    first, second = (write(tmp_path / "20261122-0622", {**FIRST, "loss": loss}) for loss in (1.0, 2.0))
    assert second.parent.name == "20261122-0622-2"
    os.utime(first, ns=(0, 0))
    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(first.parent)]) == 0
    summaries = [json.loads((path.parent / "cad_summary.json").read_text()) for path in (first, second)]
    assert [summary["loss_last"] for summary in summaries] == [1.0, 2.0]


def test_traces_get_the_names_that_tensorboard_looks_for(tmp_path: Path) -> None:
    write(tmp_path / "tb" / "now", FIRST)
    trace = tmp_path / "profile_traces" / "iteration_4" / "rank3_trace.json"
    trace.parent.mkdir(parents=True)
    trace.write_text("{}")
    for _ in range(2):
        assert main(["report", str(tmp_path)]) == 0
    assert {path.name for path in trace.parent.iterdir()} == {trace.name, "rank3.pt.trace.json"}
    assert trace.with_name("rank3.pt.trace.json").samefile(trace)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, f"there is no {STEPS_NAME}"),
        ("", "no step has been logged yet"),
        ('{"step": 1', "no step has been logged yet"),
        ("[1]\n", "does not hold the figures of a run"),
        ('{"step": 1}\n', "does not hold the figures of a run"),
        ("no JSON\n", "does not hold the figures of a run"),
    ],
)
def test_what_cannot_be_reported_is_one_line(tmp_path: Path, content: str | None, message: str, refused) -> None:
    if content is not None:
        (tmp_path / STEPS_NAME).write_text(content)
    assert message in refused("report", str(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    steps_file = StepsFile(tmp_path)
    steps_file.append(FIRST)
    path, steps_file.path = steps_file.path, Path("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        steps_file.append(SECOND)
    steps_file.path = path
    steps_file.append(SECOND)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["loss"], second["step"], second["loss"]) == (8.0, 2, None)
