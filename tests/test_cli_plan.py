# SPDX-License-Identifier: BSD-3-Clause
"""``torchtitan-cad plan``, and what all commands have in common."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchtitan_cad
from tests.lib.plans import written_plan
from tests.lib.validate import validate_plan
from torchtitan_cad.planning import PlannerConfig, make_plan
from torchtitan_cad.planning.serialize import layout_from_dict
from torchtitan_cad.tools.main import USER_ERROR, main, separate_overrides


def run_of(doc, length, start=0):
    return {"doc": doc, "start": start, "length": length}


ATTENTION = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
RANKS = [[run_of(0, 32768)], [run_of(1, 5000)], []]
SHELL = [
    sys.executable,
    "-c",
    "import sys; from torchtitan_cad.tools.main import main; sys.exit(main())",
]


def write_layout(folder, ranks=RANKS, **changes):
    path = folder / "layout.json"
    path.write_text(json.dumps({"attention": ATTENTION, "ranks": ranks, **changes}))
    return str(path)


@pytest.fixture
def layout_file(tmp_path):
    return write_layout(tmp_path)


@pytest.fixture
def plan(layout_file, tmp_path):
    """Plans the layout file with some options and reads what is written."""

    def run(*options):
        output = tmp_path / "plan.json"
        assert main(["plan", layout_file, *options, f"--output={output}"]) == 0
        found = written_plan(output.read_text())
        validate_plan(found)
        return found

    return run


def test_writes_the_plan_and_prints_its_figures(plan, capsys):
    found = plan("--tolerance=0.05")
    assert found.stats.max_over_mean <= 1.05
    printed = capsys.readouterr().out
    assert f"{found.stats.max_over_mean:.4f}" in printed
    assert found.fingerprint() in printed


def test_options_reach_the_planner(plan):
    options = (
        "--planner home --tolerance 0.05 --min-shard 256 --no-split-kv --tile 64 "
        "--ranks-per-node 2"
    )
    assert plan(*options.split()).config == PlannerConfig(
        planner="home",
        tolerance=0.05,
        min_shard=256,
        split_kv=False,
        tile=64,
        ranks_per_node=2,
    )


def test_bad_layouts_are_one_line(tmp_path, refused):
    """Files that hold no layout are in test_files.py."""
    run = run_of(0, 9)
    changes = [
        {"ranks": 3},
        {"ranks": [3]},
        {"ranks": [[{"doc": 0, "start": 0}]]},
        {"ranks": [[run | {"length": "9"}]]},
        {"ranks": [[run | {"attend": 1}]]},
        {"attention": None},
        {"attention": {"num_heads": 32}},
        {"attention": ATTENTION | {"bits": 8}},
        {"rank": []},
    ]
    for change in changes:
        refused("plan", write_layout(tmp_path, **change))
    without_attention = json.dumps({"ranks": RANKS})
    for text in ("{", "[]", without_attention, "[" * 100_000):
        (tmp_path / "layout.json").write_text(text)
        refused("plan", str(tmp_path / "layout.json"))


def test_mistakes_in_commands_are_one_line(layout_file, tmp_path, refused):
    (tmp_path / "job.toml").write_text("a = " + "[" * 100_000)
    for options in (
        "--output /no/such/directory/plan.json",
        "--tolerance two",
        "--tolerance -1",
        "--to 1",
    ):
        refused("plan", layout_file, *options.split())
    for words in ("", "fly", "plan", f"doctor job.toml --nproc {2**70}"):
        refused(*words.split())
    refused("simulate", str(tmp_path / "job.toml"))


def test_an_unknown_planner_is_told_the_known_ones(layout_file, capsys):
    """Benches register more, so that the line is not always the same."""
    assert main(["plan", layout_file, "--planner=magic"]) == USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "planner = 'magic': set one of " in line


def _without_progress(text):
    """A slow machine takes longer than a moment to load the planner, which is then announced."""
    lines = text.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"compiling"))


def test_console_script_into_a_closed_pipe(layout_file, plan, tmp_path):
    """It makes the plan that this process makes."""
    output = tmp_path / "of_script.json"
    with subprocess.Popen(
        [*SHELL, "plan", layout_file, "--place", f"--output={output}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert _without_progress(process.stderr.read()) == b""
    assert process.returncode == 0
    of_script = written_plan(output.read_text())
    assert of_script.fingerprint() == plan("--place").fingerprint()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
def test_a_full_disk_is_one_line(layout_file):
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [*SHELL, "plan", layout_file], stdout=full, stderr=subprocess.PIPE
        )
    assert found.returncode == 2
    assert _without_progress(found.stderr).count(b"\n") == 1
    assert b"No space left on device" in found.stderr


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchtitan-cad {torchtitan_cad.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("doctor a.toml --nproc 4", "doctor a.toml --nproc 4"),
        ("doctor a.toml --training.steps 5", "doctor -- a.toml --training.steps 5"),
        (
            "simulate a.toml --training.steps 5 --net 1 --tp 2",
            "simulate --net 1 --tp 2 -- a.toml --training.steps 5",
        ),
        (
            "simulate --ranks 8 a.toml --cad.tile=64",
            "simulate --ranks 8 -- a.toml --cad.tile=64",
        ),
        (
            "doctor a.toml --a.b 1 --ranks 4 --c.d 2",
            "doctor --ranks 4 -- a.toml --a.b 1 --c.d 2",
        ),
        ("doctor a.toml -- --training.steps 5", "doctor a.toml -- --training.steps 5"),
    ],
)
def test_arguments_of_the_job_may_stand_anywhere(typed, wanted):
    assert separate_overrides(typed.split()) == wanted.split()


def test_place_assigns_the_tokens_anew(plan, tmp_path, capsys):
    ranks = [[run_of(0, 8192, start=8192 * rank)] for rank in range(4)]
    for rank in range(4, 8):
        ranks.append([run_of(8 * rank + i, 1024) for i in range(8)])
    write_layout(tmp_path, ranks)
    placed = plan("--place")
    assert placed.layout.tokens_per_rank.tolist() == [8192] * 8
    layout = layout_from_dict({"ranks": ranks})
    before = make_plan(layout, placed.shape, placed.config).stats.max_rank_bytes
    assert placed.stats.max_rank_bytes < before
    printed = capsys.readouterr().out
    assert re.search(rf"worst rank bytes with them .* {before / 1e6:.4f} MB", printed)
