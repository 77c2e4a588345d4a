# SPDX-License-Identifier: BSD-3-Clause
"""Files that commands read and write: every kind of file by every way to name one is a result or one line, at once."""

import json
import os
from pathlib import Path

import pytest

from tests.lib.refusals import refusal
from torchtitan_cad.demo.lengths import parse_lengths
from torchtitan_cad.integration.report.steps_file import STEPS_NAME
from torchtitan_cad.planning.files import MAX_BYTES, MAX_BYTES_OF_LINES
from torchtitan_cad.tools import main as cli
from torchtitan_cad.tools.main import main

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "layout.json"
STEP = {"step": 1, "ranked_before": [1.5, 0.5], "ranked_after": [1.0, 1.0]}
JOB = str(ROOT / "train_configs" / "llama3_debug_cpu.toml")
SIMULATED = "simulate --ranks=8 --model=llama-8b"


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def large(path):
    with path.open("wb") as file:
        file.truncate(max(MAX_BYTES, MAX_BYTES_OF_LINES) + 1)


def encoded(path):
    path.write_bytes(b"\xff\xfe{}\n")


def not_a_number(path):
    path.write_text("[NaN]\n")


every_kind = pytest.mark.parametrize(
    "make",
    [Path.mkdir, fifo, device, large, encoded, not_a_number],
    ids=lambda make: make.__name__,
)
READERS = {
    "layout": "plan {file}",
    "documents": f"{SIMULATED} --documents={{file}}",
    "steps": "report {file}",
}


@pytest.mark.parametrize("reader", READERS)
@every_kind
def test_kinds_of_files(reader, make, tmp_path, refused):
    path = tmp_path / (STEPS_NAME if reader == "steps" else "file.json")
    make(path)
    assert str(path) in refused(*READERS[reader].format(file=path).split())


@every_kind
def test_training_reads_by_the_same_reader(make, tmp_path):
    path = tmp_path / "file.json"
    make(path)
    with refusal(str(path)):
        parse_lengths(f"histogram:{path}")


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        fifo,
        device,
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("none/none"),
    ],
    ids=["folder", "pipe", "device", "loop", "broken link"],
)
@pytest.mark.parametrize(
    "command",
    [f"plan {EXAMPLE} --output", f"{SIMULATED} --output"],
    ids=lambda command: command.replace(f"{ROOT}/", ""),
)
def test_outputs_are_tried_before_the_work(command, make, tmp_path, refused):
    path = tmp_path / "output.json"
    make(path)
    before = sorted(tmp_path.iterdir())
    *words, option = command.split()
    assert f"{option} {path}: " in refused(*words, f"{option}={path}")
    assert sorted(tmp_path.iterdir()) == before


def test_what_was_there_stays_until_it_is_written(tmp_path, refused):
    output = tmp_path / "plan.json"
    output.write_text("before")
    refused("plan", str(EXAMPLE), f"--output={output}", "--planner=none")
    assert output.read_text() == "before"


def test_too_little_memory_is_one_line(monkeypatch, refused):
    def allocate(*_):
        raise MemoryError

    monkeypatch.setattr("torchtitan_cad.tools.plan.read_layout", allocate)
    refused("plan", str(EXAMPLE))


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "a\udcff"])
def test_names_are_shown_as_escapes(name, tmp_path, refused, capsys):
    path = tmp_path / f"{name}.json"
    for command in ("plan", "report", "doctor"):
        assert refused(command, str(path)).isprintable()
    assert refused(*SIMULATED.split(), f"--documents={path}").isprintable()
    path.write_text(EXAMPLE.read_text())
    assert main(["plan", str(path), f"--output={tmp_path / name}.plan"]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


NOT_RANKED = ([], [None, 1], "1234", {"a": 1}, [[1]])
BAD_LINES = {
    "step": ("1", [1], 1.5, True, 10**30, -1, None),
    "ranked_after": (*NOT_RANKED, [1e999, 1]),
    "bytes_per_rank_mean": [10**400],
    "imbalance_before": [[1, 2]],
    "plan_seconds": ["1"],
    "exposed_percent": [True],
    "loss": [{}],
}


@pytest.mark.parametrize("key", BAD_LINES)
def test_a_line_of_another_kind_is_named(key, tmp_path, refused):
    path = tmp_path / STEPS_NAME
    for value in BAD_LINES[key]:
        changed = json.dumps({**STEP, "step": 2, key: value})
        changed = changed.replace("Infinity", "1e999")
        path.write_text(f"{json.dumps(STEP)}\n\n{changed}\n")
        line = refused("report", str(tmp_path))
        assert str(path) in line
        assert key in line
    assert list(tmp_path.iterdir()) == [path]


def step(number, **changes):
    return json.dumps({**STEP, "step": number, "loss": float(number), **changes})


MOST = {"ranked_before": [1e30, -1e30], "imbalance_before": 1e30}
OF_THREE = {"ranked_before": [1.0] * 3, "ranked_after": [1.0] * 3}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (
            [step(1), step(2), step(3), "", step(2, loss=9.0)],
            {"steps": 2, "last_step": 2, "loss_last": 9.0},
        ),
        ([step(1, **MOST), step(2**53, **MOST)], {"imbalance_before": 1e30}),
        # the first is no longer of the run
        ([step(1), step(1, **OF_THREE)], {"ranks": 3}),
    ],
    ids=["resumed", "largest", "other ranks"],
)
def test_lines_are_summed_up(lines, wanted, tmp_path):
    path = tmp_path / STEPS_NAME
    path.write_text("".join(f"{line}\n" for line in lines))
    assert main(["report", str(path)]) == 0
    summary = json.loads((tmp_path / "cad_summary.json").read_text())
    assert {key: summary[key] for key in wanted} == wanted


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_ends_in_a_narrow_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1")
    assert main([command, "--help"]) == 0
    assert "torchtitan-cad" in capsys.readouterr().out
