# SPDX-License-Identifier: BSD-3-Clause
"""`torchtitan-cad report`, whatever became of a run; and `torchtitan-cad profile`, with plans by what it measured."""

import dataclasses
import json
import os
from pathlib import Path

import matplotlib.image
import pytest

from tests.lib.profiles import linear, make_profile
from tests.lib.refusals import refusal
from torchtitan_cad.integration.report.steps_file import (
    STEPS_NAME,
    new_steps_file,
    to_json,
)
from torchtitan_cad.planning import AttentionShape, Plan, Profile, validate_plan
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
SECOND = {
    **FIRST,
    "step": 2,
    "imbalance_before": 1.5,
    "tasks_moved": 2,
    "plan_seconds": 0.004,
    "loss": float("nan"),
}
THIRD = {
    **FIRST,
    "step": 3,
    "imbalance_before": 2.0,
    "plan_seconds": 0.002,
    "loss": 7.5,
}


def write(folder: Path, *rows: dict) -> Path:
    steps_file = new_steps_file(folder)
    for row in rows:
        steps_file.append(to_json(row))
    return steps_file.path


@pytest.mark.parametrize(
    "end", ["", '{"step": 4, "loss'], ids=["whole", "cut by a kill"]
)
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
    assert printed[-1] == f"wrote cad_summary.json and imbalance.png in {path.parent}"


@pytest.mark.parametrize("ranks", [1, 16, 200])
@pytest.mark.parametrize("steps", [1, 100])
def test_picture(tmp_path: Path, ranks: int, steps: int) -> None:
    ranked = {
        "ranked_before": [2.0] + [1.0] * (ranks - 1),
        "ranked_after": [1.0] * ranks,
    }
    write(tmp_path, *({**FIRST, **ranked, "step": step} for step in range(steps)))
    assert main(["report", str(tmp_path)]) == 0
    assert matplotlib.image.imread(tmp_path / "imbalance.png").shape[:2] == (480, 1200)


def test_the_newest_run_is_taken_and_a_later_one_overwrites_nothing(
    tmp_path: Path,
) -> None:
    """torchtitan names a run's folder by the minute, so two may get the same."""
    first, second = (
        write(tmp_path / "20261122-0622", {**FIRST, "loss": loss})
        for loss in (1.0, 2.0)
    )
    assert second.parent.name == "20261122-0622-2"
    os.utime(first, ns=(0, 0))
    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(first.parent)]) == 0
    summaries = [
        json.loads((path.parent / "cad_summary.json").read_text())
        for path in (first, second)
    ]
    assert [summary["loss_last"] for summary in summaries] == [1.0, 2.0]


def test_traces_get_the_names_that_tensorboard_looks_for(tmp_path: Path) -> None:
    write(tmp_path / "tb" / "now", FIRST)
    trace = tmp_path / "profile_traces" / "iteration_4" / "rank3_trace.json"
    trace.parent.mkdir(parents=True)
    trace.write_text("{}")
    for _ in range(2):
        assert main(["report", str(tmp_path)]) == 0
    assert {path.name for path in trace.parent.iterdir()} == {
        trace.name,
        "rank3.pt.trace.json",
    }
    assert trace.with_name("rank3.pt.trace.json").samefile(trace)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        '{"step": 1',
        "[1]\n",
        '{"step": 1}\n',
        "no JSON\n",
    ],
)
def test_what_cannot_be_reported_is_one_line(
    tmp_path: Path, content: str | None, refused
) -> None:
    if content is not None:
        (tmp_path / STEPS_NAME).write_text(content)
    refused("report", str(tmp_path))


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs a device that is always full"
)
def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    steps_file = new_steps_file(tmp_path)
    steps_file.append(to_json(FIRST))
    path, steps_file.path = steps_file.path, Path("/dev/full")
    with refusal(error=OSError):
        steps_file.append(to_json(SECOND))
    steps_file.path = path
    steps_file.append(to_json(SECOND))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["loss"], second["step"], second["loss"]) == (8.0, 2, None)


SMALL = [
    "--num-heads",
    "4",
    "--num-kv-heads",
    "2",
    "--head-dim",
    "16",
    "--device",
    "cpu",
    "--repeats",
    "2",
]
GRID = ["--q-lengths", "64", "128", "--kv-lengths", "128", "256", "640"]
LAYOUT = {
    "attention": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype_bytes": 4},
    "ranks": [
        [{"doc": 0, "start": 0, "length": 8192}],
        [{"doc": 1, "start": 0, "length": 3000}],
        [],
    ],
}


def test_from_measuring_to_a_plan(tmp_path, capsys, monkeypatch) -> None:
    # short calls: what they take is not asked
    monkeypatch.setattr("torchtitan_cad.tools.profiling.CPU_ROWS", 1024)
    output = tmp_path / "profile.json"
    assert main(["profile", "--output", str(output), *SMALL, *GRID]) == 0
    profile = Profile.read(output)
    assert (profile.kernel, profile.dtype, profile.repeats) == ("cpu", "float32", 2)
    assert (profile.q_lengths, profile.kv_lengths) == ((64, 128), (128, 256, 640))
    printed = capsys.readouterr().out
    assert report(profile) in printed
    assert printed.count("FLOP/s") == printed.count("saturated from") == 2

    layout, plan_file = tmp_path / "layout.json", tmp_path / "plan.json"
    layout.write_text(json.dumps(LAYOUT))
    command = [
        "plan",
        str(layout),
        "--profile",
        str(output),
        "--output",
        str(plan_file),
        "--validate",
    ]
    assert main(command) == 0
    plan = Plan.from_json(plan_file.read_text())
    validate_plan(plan)
    loads = profile.cost_model("forward", plan.shape).cost(plan.tasks)
    assert plan.stats.loads.sum() == loads.sum()
    assert plan.stats.max_over_mean < plan.stats.max_over_mean_before
    # Half the measured heads: the whole document takes half the sum of the measured rows.
    whole = profile.cost_model("forward", AttentionShape(4, 2, 16, 4)).prefix_cost(
        8192
    )[-1]
    assert plan.stats.loads_before[0] == pytest.approx(whole / 2, rel=1e-6)


def test_the_table_shows_where_throughput_saturates() -> None:
    """In the artificial profile 64 queries take as long as 128, and tasks below 512 a tenth longer."""
    table = report(
        make_profile(forward=linear(0.001), backward=linear(0.002))
    ).splitlines()
    operations = 4 * 128 * 128 * 128 * 32 / 1e-6 / 1e12
    assert [float(cell) for cell in table[5].split()[2:]] == [round(operations, 1)] * 3
    assert [float(cell) for cell in table[3].split()[2:]] == [
        round(operations / 2.2, 1)
    ] * 3
    assert table[6].split() == ["saturated", "from", "512", "512", "512"]


@pytest.mark.parametrize(
    "options",
    [
        ["--kv-lengths", "256"],
        ["--repeats", "0"],
        ["--kernel", "warp"],
        ["--kernel", "varlen"],
    ],
)
def test_mistakes_are_found_before_measuring(
    options: list[str], tmp_path: Path, refused
) -> None:
    output = tmp_path / "profile.json"
    refused("profile", "--output", str(output), *SMALL, *options)
    assert not output.exists()


def test_noisy_cells_are_marked(tmp_path, monkeypatch, capsys) -> None:
    spread = ((0.0, 0.1, 0.0), (0.0, 0.9, 0.0), (0.0, 0.0, 0.0))
    noisy = dataclasses.replace(
        make_profile(), forward_spread=spread, backward_spread=spread
    )
    monkeypatch.setattr(
        "torchtitan_cad.tools.profiling.measure_profile", lambda *_: noisy
    )
    assert (
        main(["profile", "--output", str(tmp_path / "profile.json"), *SMALL, *GRID])
        == 0
    )
    captured = capsys.readouterr()
    warning = captured.err.splitlines()[-1]
    assert warning.startswith(
        "torchtitan-cad: warning: 1 of 6 cells, marked by ?, stayed noisy; "
    )
    assert warning.endswith("measure again, with --repeats 4")
    assert captured.out.count("?") == 2
    assert Profile.read(tmp_path / "profile.json") == noisy
