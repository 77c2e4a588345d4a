"""What the end of a job adds to its traces: names of linear work on a row of their own, and a second file name."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from bench.trace import read_spans
from torchtitan_cad.integration.report import traces
from torchtitan_cad.integration.report.traces import CATEGORY, ROW, complete_traces

Event = dict[str, Any]


def event(name: str, begin: float, length: float, **args: int) -> Event:
    cat = "user_annotation" if name.startswith("cad/") else "cpu_op"
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "ts": begin, "dur": length, "args": args}


def operators(names: tuple[str, str], *times: float) -> list[Event]:
    return [event(f"torchtitan_cad::traced_{names[i % 2]}", time, 1) for i, time in enumerate(times)]


NODE = "autograd::engine::evaluate_function: MmBackward0"
TURN = [
    event("cad/turn 1", 0, 100),
    event("CompiledFunction", 1, 98, **{"Sequence number": 7}),
    *operators(("combine", "prepare"), 2, 10.125, 20, 40),
    event("CompiledFunctionBackward", 200, 90, **{"Sequence number": 7}),
    *operators(("prepare_backward", "combine_backward"), 210, 220, 230, 250),
]
REGION = [
    event("cad/post 3 pre 4.pong", 0, 10),
    event("aten::mm", 2, 3, **{"Sequence number": 5}),
    event(NODE, 20, 4.5, **{"Sequence number": 5}),
]
NAMED = {
    "turn": [
        ("cad/post 0 pre 1.ping", 3, 7.125),
        ("cad/post 0 pre 1.pong", 21, 19),
        ("cad/post 0 pre 1.pong backward", 211, 9),
        ("cad/post 0 pre 1.ping backward", 231, 19),
    ],
    "region": [("cad/post 3 pre 4.pong backward", 20, 4.5)],
}


def write(folder: Path, events: list[Event]) -> Path:
    """As torch.profiler does."""
    path = folder / "iteration_4" / "rank3_trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = ",\n".join(f"  {json.dumps(each)}" for each in events)
    path.write_text(f'{{\n  "schemaVersion": 1,\n  "traceEvents": [\n{written}\n  ],\n  "traceName": "rank3"\n}}')
    return path


def linear_events(path: Path) -> list[Event]:
    return [each for each in json.loads(path.read_text())["traceEvents"] if each.get("cat") == CATEGORY]


@pytest.mark.parametrize(("events", "named"), [(TURN, NAMED["turn"]), (REGION, NAMED["region"])], ids=NAMED.keys())
def test_linear_work_is_named_on_a_row_of_its_own(
    tmp_path: Path, events: list[Event], named: list[tuple[str, float, float]]
) -> None:
    path = write(tmp_path, events)
    before, spans = path.read_text(), read_spans(path)
    second = path.with_name("rank3.pt.trace.json")
    assert complete_traces(tmp_path, 3) == [second]
    assert second.samefile(path)
    added = linear_events(path)
    assert [(each["name"], each["ts"], each["dur"]) for each in added] == named
    assert {(each["ph"], each["pid"], each["tid"]) for each in added} == {("X", 7, ROW)}
    row, first, *rest = json.loads(path.read_text())["traceEvents"]
    assert row == {"ph": "M", "name": "thread_name", "pid": 7, "tid": ROW, "args": {"name": "linear work"}}
    assert first["name"] == "thread_sort_index"
    assert rest == [*added, *events], "the others are as they were"
    assert path.read_text().endswith(before[before.index('"traceEvents": [') + len('"traceEvents": [') :])
    assert read_spans(path) == spans, "bench.trace draws the same"
    assert {*path.parent.iterdir()} == {path, second}


def test_a_trace_is_completed_once(tmp_path: Path) -> None:
    path = write(tmp_path, TURN)
    complete_traces(tmp_path, 3)
    once = path.read_bytes()
    assert complete_traces(tmp_path, 3) == []
    path.with_name("rank3.pt.trace.json").unlink()  # as if the job had ended in between
    assert len(complete_traces(tmp_path, 3)) == 1
    assert path.read_bytes() == once


def test_other_ranks_and_missing_folders_are_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path, TURN)
    assert complete_traces(tmp_path, 4) == []
    assert complete_traces(tmp_path / "missing", 3) == []
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("events", [[], TURN[:1], REGION[:2]], ids=["nothing", "no graph", "no backward"])
def test_a_trace_without_such_work_is_as_it_was(tmp_path: Path, events: list[Event]) -> None:
    path = write(tmp_path, events)
    before = path.read_bytes()
    assert len(complete_traces(tmp_path, 3)) == 1
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["cut", "[1]", '{"traceEvents": 3}', "[" * 100_000, '{"traceEvents": [{"ph": "X"}]}']
)
def test_a_trace_that_cannot_be_read_is_left_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = write(tmp_path, TURN)
    path.write_text(path.read_text()[:-200] if content == "cut" else content)
    before = path.read_bytes()
    assert len(complete_traces(tmp_path, 3)) == 1
    assert path.read_bytes() == before
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{path}: names of linear work are missing" in record.message


def test_a_trace_that_cannot_be_written_is_left_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    path = write(tmp_path, TURN)
    before = path.read_bytes()
    assert len(complete_traces(tmp_path, 3)) == 1
    assert path.read_bytes() == before
    assert "no space left" in caplog.text
    assert not list(path.parent.glob("*.part"))


@pytest.mark.parametrize("failed", [False, True])
def test_the_end_of_a_job_is_not_delayed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path, TURN)
    if not failed:
        monkeypatch.setattr(traces, "MOST_BYTES", path.stat().st_size - 1)
    assert len(complete_traces(tmp_path, 3, failed=failed)) == 1
    assert not linear_events(path)
    assert caplog.text.count("has no name in 1 of 1 new traces") == (not failed)
