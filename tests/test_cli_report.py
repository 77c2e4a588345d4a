# SPDX-License-Identifier: BSD-3-Clause
"""`torchtitan-cad report`, whatever became of a run; and `torchtitan-cad profile`, with plans by what it measured."""

import dataclasses
import json
import os
from pathlib import Path

import matplotlib.image
import pytest

from tests.lib.plans import written_plan
from tests.lib.profiles import linear, make_profile
from torchtitan_cad.integration.report.steps_file import (
    STEPS_NAME,
    StepsFile,
    new_path,
)
from torchtitan_cad.planning import AttentionShape, Profile
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.profile import report

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


def write(folder: Path, *rows: dict) -> Path:
    path = new_path(str(folder))
    steps_file = StepsFile(lambda: path, "report")
    for row in rows:
        steps_file.append(row)
    return path


def summary_beside(path: Path) -> dict:
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
    assert printed[-1] == f"wrote cad_summary.json and imbalance.png in {path.parent}"


def test_picture_of_many_ranks(tmp_path):
    ranked = {"ranked_before": [2.0] + [1.0] * 199, "ranked_after": [1.0] * 200}
    write(tmp_path, *(FIRST | ranked | {"step": step} for step in range(100)))
    assert main(["report", str(tmp_path)]) == 0
    assert matplotlib.image.imread(tmp_path / "imbalance.png").shape[:2] == (480, 800)


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
    assert not (tmp_path / "imbalance.png").exists()


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


SMALL = "--num-heads 4 --num-kv-heads 2 --head-dim 16 --device cpu --repeats 2"
GRID = "--q-lengths 64 128 --kv-lengths 128 256 640"
LAYOUT = {
    "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype_bytes": 4},
    "ranks": [
        [{"doc": 0, "start": 0, "length": 8192}],
        [{"doc": 1, "start": 0, "length": 3000}],
        [],
    ],
}


def test_from_measuring_to_a_plan(tmp_path, capsys, monkeypatch):
    # short calls: what they take is not asked
    monkeypatch.setattr("torchtitan_cad.tools.profiling.CPU_ROWS", 1024)
    output = tmp_path / "profile.json"
    assert main(["profile", f"--output={output}", *SMALL.split(), *GRID.split()]) == 0
    profile = Profile.read(output)
    assert (profile.kernel, profile.dtype, profile.repeats) == ("cpu", "float32", 2)
    assert (profile.q_lengths, profile.kv_lengths) == ((64, 128), (128, 256, 640))
    printed = capsys.readouterr().out
    assert report(profile) in printed
    assert printed.count("FLOP/s") == printed.count("saturated from") == 2

    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps(LAYOUT))
    plan_file = tmp_path / "plan.json"
    options = [f"--profile={output}", f"--output={plan_file}", "--validate"]
    assert main(["plan", str(layout), *options]) == 0
    cost = profile.cost_model("forward", AttentionShape(**LAYOUT["attention"]))
    plan = written_plan(plan_file.read_text(), cost)
    loads = cost.cost(plan.tasks)
    assert plan.stats.loads.sum() == loads.sum()
    assert plan.stats.max_over_mean < plan.stats.max_over_mean_before
    # Half the measured heads: the whole document takes half the sum of the measured rows.
    measured = profile.cost_model("forward", AttentionShape(4, 2, 16, 4))
    whole = measured.prefix_cost(8192)[-1]
    assert plan.stats.loads_before[0] == pytest.approx(whole / 2, rel=1e-6)


def test_the_table_shows_where_throughput_saturates():
    """In the artificial profile tasks below 512 queries take a tenth longer."""
    table = report(make_profile(forward=linear(0.001))).splitlines()
    operations = 4 * 128 * 128 * 128 * 32 / 1e-6 / 1e12
    assert table[5].split()[2:] == [f"{operations:.1f}"] * 3
    assert table[6].split() == ["saturated", "from", "512", "512", "512"]


def test_mistakes_are_found_before_measuring(tmp_path, refused):
    output = tmp_path / "profile.json"
    for mistake in (
        "--kv-lengths=256",
        "--repeats=0",
        "--kernel=warp",
        "--kernel=varlen",
    ):
        refused("profile", f"--output={output}", *SMALL.split(), mistake)
    assert not output.exists()


def test_noisy_cells_are_marked(tmp_path, monkeypatch, capsys):
    spread = ((0.0, 0.1, 0.0), (0.0, 0.9, 0.0), (0.0, 0.0, 0.0))
    noisy = dataclasses.replace(make_profile(), forward_spread=spread)
    monkeypatch.setattr(
        "torchtitan_cad.tools.profiling.measure_profile", lambda *_, **__: noisy
    )
    output = f"--output={tmp_path / 'profile.json'}"
    assert main(["profile", output, *SMALL.split(), *GRID.split()]) == 0
    captured = capsys.readouterr()
    warning = captured.err.splitlines()[-1]
    assert "warning: 1 of 6 cells, marked by ?, stayed noisy; " in warning
    assert warning.endswith("measure again, with --repeats 4")
    assert "?" in captured.out
