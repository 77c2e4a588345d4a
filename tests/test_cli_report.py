# SPDX-License-Identifier: BSD-3-Clause
"""`torchtitan-cad report`, whatever became of a run."""

import json
import os
from pathlib import Path

import pytest

from torchtitan_cad.integration.report.steps_file import STEPS_NAME, StepsFile, new_path
from torchtitan_cad.tools.main import main

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
SECOND = FIRST | {
    "step": 2,
    "imbalance_before": 1.5,
    "tasks_moved": 2,
    "plan_seconds": 0.004,
    "loss": float("nan"),
}
THIRD = FIRST | {"step": 3, "imbalance_before": 2.0, "plan_seconds": 0.002, "loss": 7.5}


def write(folder, *rows):
    path = new_path(str(folder))
    steps_file = StepsFile(lambda: path, "report")
    for row in rows:
        steps_file.append(row)
    return path


def summary_beside(path):
    return json.loads((path.parent / "cad_summary.json").read_text())


def test_summary(tmp_path, capsys):
    """Of a file whose last line is cut."""
    path = write(tmp_path / "tb" / "now", FIRST, SECOND, THIRD)
    path.write_text(path.read_text() + '{"step": 4, "loss')
    assert main(["report", str(tmp_path)]) == 0
    wanted = {
        "steps": 3,
        "last_step": 3,
        "ranks": 4,
        "imbalance_before": 2.0,
        "tasks_moved": 8 / 3,
        "plan_seconds": 0.004,
        "loss_first": 8.0,
        "loss_last": 7.5,
    }
    found = summary_beside(path)
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)
    assert found["bytes_per_rank_max"] == FIRST["bytes_per_rank_max"]
    printed = capsys.readouterr().out.splitlines()
    headline = "Core attention disaggregation in a CAD group of 4 ranks"
    assert printed[0] == f"{headline}, logged steps: 3"
    assert [line.split()[-1] for line in printed[1:3]] == ["2.000", "1.000"]
    assert printed[-1] == f"wrote {path.parent / 'cad_summary.json'}"


def test_the_newest_run_is_taken_and_a_later_one_overwrites_nothing(tmp_path):
    """torchtitan names a run's folder by the minute, so two may get the same."""
    folder = tmp_path / "20261122-0622"
    first = write(folder, FIRST | {"loss": 1.0})
    second = write(folder, FIRST | {"loss": 2.0})
    assert second.parent.name == "20261122-0622-2"
    os.utime(first, ns=(0, 0))
    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(folder)]) == 0
    assert summary_beside(first)["loss_last"] == 1.0
    assert summary_beside(second)["loss_last"] == 2.0


def test_a_loss_that_is_not_finite_is_said(tmp_path, capsys):
    write(tmp_path, FIRST, SECOND)
    assert main(["report", str(tmp_path)]) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "last step" in x)
    assert line.endswith("not finite")


def test_figures_are_printed_where_nothing_can_be_written(tmp_path, capsys):
    (write(tmp_path, FIRST).parent / "cad_summary.json").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) > 3
    assert "cad_summary.json: this is a folder" in printed.err


@pytest.mark.parametrize(
    ("folder", "end"), [("profile_traces", ""), ("profiling/traces", ".gz")]
)
def test_traces_get_the_names_that_tensorboard_looks_for(folder, end, tmp_path):
    """Those of torchtitan 0.2.2 and of 0.3.0."""
    write(tmp_path / "tb" / "now", FIRST)
    folder = tmp_path / folder / "iteration_4"
    folder.mkdir(parents=True)
    trace = folder / f"rank3_trace.json{end}"
    trace.write_text("{}")
    for _ in range(2):
        assert main(["report", str(tmp_path)]) == 0
    (linked,) = set(folder.iterdir()) - {trace}
    assert linked.name == f"rank3.pt.trace.json{end}"
    assert linked.samefile(trace)


def test_what_cannot_be_reported_is_one_line(tmp_path, refused):
    refused("report", str(tmp_path))
    for content in ("", '{"step": 1', "[1]\n", '{"step": 1}\n', "no JSON\n"):
        (tmp_path / STEPS_NAME).write_text(content)
        refused("report", str(tmp_path))


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)
def test_a_full_disk_leaves_whole_lines(tmp_path, caplog):
    path = new_path(str(tmp_path))
    steps_file = StepsFile(lambda: path, "report")
    steps_file.append(FIRST)
    steps_file.path = Path("/dev/full")
    steps_file.append(SECOND)
    steps_file.append(SECOND)
    (warning,) = [line for line in caplog.records if line.levelname == "WARNING"]
    assert "tries again" in warning.message
    steps_file.path = path
    steps_file.append(SECOND)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["loss"], second["step"], second["loss"]) == (8.0, 2, None)
