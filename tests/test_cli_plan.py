"""``torchtitan-cad plan``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_cad.cli import main
from torchtitan_cad.planning import Plan, validate_plan

LAYOUT = {
    "attention": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype_bytes": 2},
    "ranks": [[{"doc": 0, "start": 0, "length": 32768}], [{"doc": 1, "start": 0, "length": 5000}], []],
}


@pytest.fixture
def layout_file(tmp_path: Path) -> Path:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT))
    return path


def test_writes_the_plan_and_prints_its_figures(
    layout_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    assert main(["plan", str(layout_file), "--tolerance", "0.05", "--output", str(output), "--validate"]) == 0
    plan = Plan.from_json(output.read_text())
    validate_plan(plan)
    assert plan.config.tolerance == 0.05
    assert plan.stats.max_over_mean <= 1.05
    printed = capsys.readouterr().out
    assert f"{plan.stats.max_over_mean:.4f}" in printed
    assert plan.fingerprint() in printed


def test_options_reach_the_planner(layout_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    options = ["--planner", "home", "--min-shard", "256", "--no-split-kv", "--tile", "64", "--output", str(output)]
    assert main(["plan", str(layout_file), *options]) == 0
    config = Plan.from_json(output.read_text()).config
    assert (config.planner, config.min_shard, config.split_kv, config.tile) == ("home", 256, False, 64)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("{", [], "is not JSON"),
        ("[]", [], "missing key 'ranks'"),
        ({**LAYOUT, "ranks": 3}, [], "'ranks' must be a list"),
        ({**LAYOUT, "ranks": [3]}, [], "'ranks'[0] must be a list of segments"),
        ({**LAYOUT, "ranks": [[{"doc": 0, "start": 0}]]}, [], "'ranks'[0]: missing key 'length'"),
        ({**LAYOUT, "ranks": [[{"doc": 0, "start": 0, "length": "9"}]]}, [], "'length' must be an integer"),
        ({**LAYOUT, "ranks": [[{"doc": 0, "start": 5, "length": 9}]]}, [], "a document starts at position 0"),
        ({"ranks": LAYOUT["ranks"]}, [], "missing key 'attention'"),
        ({**LAYOUT, "attention": {"num_heads": 32}}, [], "missing key 'num_kv_heads'"),
        ({**LAYOUT, "attention": {**LAYOUT["attention"], "bits": 8}}, [], "unknown key 'bits'"),
        (LAYOUT, ["--tolerance", "-1"], "tolerance = -1.0"),
        (LAYOUT, ["--min-shard", "0"], "min_shard = 0"),
        (LAYOUT, ["--planner", "magic"], "--planner magic: choose one of greedy, home, tiling"),
        (LAYOUT, ["--output", "/no/such/directory/plan.json"], "No such file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    content: object, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layout.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["plan", str(path), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torchtitan-cad: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["fly"], ["plan"], ["plan", "x.json", "--tolerance", "two"]])
def test_usage_errors(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2


def test_console_script(layout_file: Path) -> None:
    program = "import sys; from torchtitan_cad.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "plan", str(layout_file)]
    assert "load max/mean" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    command[-1] += ".missing"
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
