# SPDX-License-Identifier: BSD-3-Clause
"""The run of `python -m bench.gpu`: what becomes of parts that go wrong, and its verdicts.

`make bench-gpu-dry` runs all of them on CPU stand-ins.
"""

import copy
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import attention, goals, layer, report, results, session
from bench.gpu.parts import PARTS, RUN_S, RUNS, Part, expected_seconds
from bench.gpu.process import ROOT, run_part
from tests.lib.refusals import refusal
from tests.lib.waiting import eventually


def fake(function, *arguments, **fields):
    return replace(
        Part(function, "a fake", f"tests.bench.fake_parts:{function}", 60, arguments),
        **fields,
    )


def test_every_file_of_tests_is_a_part():
    files = {
        f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")
    }
    tests = [part for part in PARTS if part.name.startswith("test-")]
    assert files == {part.arguments[0] for part in tests}


def outcome_of(name, *arguments, **fields):
    return run_part(fake(name, *arguments, **fields), "cpu", 60, None)


def test_what_a_part_measured_before_it_failed_is_kept():
    outcomes = {name: outcome_of(name) for name in ("good", "bad", "crash", "unable")}
    assert {
        name: (outcome.status, outcome.why, outcome.figures)
        for name, outcome in outcomes.items()
    } == {
        "good": ("done", "", {"figure": ["cpu"]}),
        "bad": ("failed", "RuntimeError: it went wrong", {"figure": 1}),
        "crash": ("failed", "killed by signal 11 (SIGSEGV)", {"figure": 1}),
        "unable": ("skipped", "there is no such thing here", {}),
    }
    assert "Traceback" in outcomes["bad"].output
    assert "fake_parts.py" in outcomes["crash"].output  # where
    assert str(ROOT) not in outcomes["crash"].output
    without = outcome_of("good", needs=("no_such_module",))
    assert without.status == "skipped"
    assert without.why.startswith("no_such_module cannot be imported")
    too_old = "TypeError('only 0-dimensional arrays can be converted')"
    assert outcome_of("interpreted", too_old).status == "skipped"
    assert outcome_of("interpreted", "out of bounds").status == "failed"


@pytest.mark.matrix
def test_a_part_that_hangs_is_ended_with_all_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    begin = time.monotonic()
    outcome = run_part(fake("hang", str(pid_file)), "cpu", 3, None)
    assert time.monotonic() - begin < 30
    assert outcome.status == "timed out"
    assert outcome.why.endswith(" 3 s; in tests/test_of_something.py::test_that_hangs")
    assert outcome.figures == {"figure": 1}
    assert "in hang" in outcome.output  # where it hung
    assert eventually(lambda: not is_running(int(pid_file.read_text())))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def quick_environment(monkeypatch):
    monkeypatch.setattr(session, "ENVIRONMENT", fake("good", name="environment"))
    monkeypatch.setattr(results, "source_hash", lambda: "0")


def run_session(folder, parts, resume=False, seconds=600):
    silent = session.Session(folder, "cpu", None, seconds, report=lambda line: None)
    good = silent.run(parts, resume)
    return good, {result["part"]: result for result in results.read(folder)}


def test_a_run_can_be_resumed(tmp_path, quick_environment, monkeypatch):
    bad = fake("bad", name="first")
    second = fake("good", name="second")
    monkeypatch.setattr(report, "PARTS", (bad, second))
    good, parts = run_session(tmp_path, [bad, second])
    assert not good
    assert (parts["first"]["status"], parts["second"]["status"]) == ("failed", "done")
    text = (tmp_path / results.PAGE).read_text()
    assert "| 1 | first | failed |" in text
    assert "RuntimeError: it went wrong" in text

    mended = fake("good", "again", name="first")
    good, parts = run_session(tmp_path, [mended], resume=True)
    assert good
    assert parts["first"]["figures"] == {"figure": ["cpu", "again"]}
    assert parts["second"]["status"] == "done", "what was not asked for is kept"
    good, _ = run_session(tmp_path, [bad], resume=True)
    assert good, "it was done before"
    monkeypatch.setattr(results, "source_hash", lambda: "1")
    good, _ = run_session(tmp_path, [bad], resume=True)
    assert not good, "other sources"


def result_of(part, sources="s", day=1, **changes):
    return {
        "part": part,
        "date": f"2026-01-0{day}T00:00",
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "python": "3.12",
        "commit": "c",
        "clean": True,
        "sources": sources,
        "dry_run": False,
        "status": "done",
        "why": "",
        "seconds": 1.0,
        "figures": {},
        "output": "",
        "command": "python",
        **changes,
    }


def test_a_result_is_kept_when_its_part_is_skipped_later(tmp_path):
    """Other files are left alone, and NaN is null."""
    for number, text in enumerate(("[]", "{}", '{"part": "x"}', "{")):
        (tmp_path / f"other-{number}.json").write_text(text)
    figures = {"times": [1.0, float("nan")]}
    results.write(tmp_path, result_of("layer", figures=figures))
    results.write(tmp_path, result_of("layer", day=2, status="skipped"))
    (result,) = results.read(tmp_path)
    assert result["status"] == "done"
    assert result["figures"] == {"times": [1.0, None]}


def test_goals_are_judged_on_one_state_of_the_sources(tmp_path):
    """Tests that passed with other sources do not count, nor do other GPUs; the page shows them with their commit."""
    passed = {"tests": {"passed": 3}}
    failed = {"tests": {"passed": 2, "failed": 1}}
    old = result_of("test-kernels", "old", figures=passed, commit="before")
    new = result_of("test-engine", "new", 2, figures=failed, status="failed")
    other = result_of("test-streams", "new", figures=passed, gpu="NVIDIA H100")
    for result in (old, new, other):
        results.write(tmp_path, result)
    found = results.read(tmp_path)
    text = report.page(found)
    assert "2 passed, 1 failed, 0 skipped" in text
    assert "before" in text
    assert results.done(found, old) == {"test-kernels"}


def test_results_of_another_machine_get_the_commit_whose_sources_they_have(tmp_path):
    archive = tmp_path / "archive.tar"
    subprocess.run(["git", "archive", "-o", archive, "HEAD"], cwd=ROOT, check=True)
    shutil.unpack_archive(archive, tmp_path / "sources")
    sources = results.source_hash(tmp_path / "sources")
    measured = tmp_path / "measured"
    adopted = tmp_path / "adopted"
    measured.mkdir()
    results.write(measured, result_of("layer", sources, commit="other", clean=False))
    assert results.adopt(measured, "HEAD", adopted) == ["layer"]
    (result,) = results.read(adopted)
    assert result["commit"] != "other"
    assert result["clean"]
    results.write(measured, result_of("plain", "of an edited tree"))
    with refusal():
        results.adopt(measured, "HEAD", adopted)


def test_what_does_not_fit_into_the_budget_is_skipped(tmp_path, quick_environment):
    """Either run does."""
    for run in RUNS:
        seconds = expected_seconds([part for part in PARTS if part.run == run])
        assert seconds <= RUN_S - session.RESERVE_S
    long = fake("good", name="long", seconds=300)
    short = fake("good", name="short", seconds=10)
    good, outcomes = run_session(tmp_path, [long, short], seconds=100)
    assert good
    assert outcomes["short"]["status"] == "done"
    assert outcomes["long"]["status"] == "skipped"
    assert outcomes["long"]["why"].startswith("no time: ")


SHARES = {"forward_share": 0.96, "backward_share": 0.95}
SHARED = {
    "modes": [
        {"mode": "stock"},
        {"mode": "cad", "speed_up": 1.4, "ideal_speed_up": 1.5},
    ],
    "transports": {"cad": "symm_mem, ..."},
    "multiprocessors": [[66, 66], [66, 66]],
}
ALL_MET = {
    "environment": {"device": {"multiprocessors": 132}},
    "sharing": SHARED,
    "sharing-compiled": copy.deepcopy(SHARED),
    "test-engine": {"tests": {"passed": 3}},
    "attention": {"shards": [{"shard": n, **SHARES} for n in sorted(goals.SHARDS)]},
    "bandwidth": {
        "kernels": [
            *({"name": name, "share": 0.81} for name in sorted(goals.KERNELS)),
            {"name": "pack", "share": 0.3},
        ]
    },
    "replay": {
        "plans": [
            {"ranks": ranks, "pass": "forward", "planned_over_mean": 1.04}
            for ranks in (8, 64)
        ]
    },
    "layer": {
        "counts": {
            "launches": 40.0,
            "synchronisations": 0.0,
            "allocations": 0.0,
            "on_device": 40,
        },
        "warnings": [],
        "device_allocations": 0,
        "own_over_attention": 0.05,
        "own_microseconds": 700.0,
    },
    "plain": {"over_stock": 1.01, "milliseconds": {"ours": 1.01, "stock": 1.0}},
}
MISSED = {
    "sharing.modes.1.speed_up": 1.29,
    "sharing-compiled.modes.1.speed_up": 1.29,
    "sharing.transports.cad": "collective; not symm_mem",
    "sharing.multiprocessors": [[66, 66], [132, 132]],
    "attention.shards.0.backward_share": 0.94,
    "bandwidth.kernels.0.share": 0.74,
    "replay.plans.0.planned_over_mean": 1.09,
    "layer.counts.allocations": 0.5,
    "layer.warnings": ["called a synchronizing operation"],
    "layer.device_allocations": 1,
    "layer.own_over_attention": 0.07,
    "plain.over_stock": 1.03,
}
IN_PART = {
    "attention.shards": ALL_MET["attention"]["shards"][1:],
    "bandwidth.kernels": ALL_MET["bandwidth"]["kernels"][1:],
    "layer.warnings": None,
}
STATUSES = {part.name: "done" for part in PARTS}


def changed_figures(path, value):
    figures = copy.deepcopy(ALL_MET)
    node = figures
    *parents, last = path.split(".")
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[last] = value
    return figures


def statuses_of(found):
    return sorted(verdict.status for verdict in found)


def test_goals_are_judged_by_their_figures():
    """Every goal met, then each missed by itself, then measured in part, then not at all."""
    assert set(attention.sizes_of("cuda").shards) == goals.SHARDS
    assert statuses_of(goals.verdicts(ALL_MET, STATUSES)) == [goals.MET] * 9
    stand_ins = goals.verdicts(ALL_MET, STATUSES, stand_ins=True)
    assert statuses_of(stand_ins) == [goals.NOT_MEASURED] * 9
    for status, changes in ((goals.NOT_MET, MISSED), (goals.NOT_MEASURED, IN_PART)):
        for path, value in changes.items():
            found = goals.verdicts(changed_figures(path, value), STATUSES)
            assert statuses_of(found) == [goals.MET] * 8 + [status], path


def test_parts_that_did_not_end_well_count():
    unequal = goals.verdicts(ALL_MET, STATUSES | {"sharing": "failed"})[0]
    assert unequal.status == goals.NOT_MET, "it trained otherwise than stock"
    for ended, status in (
        ("timed out", goals.NOT_MET),
        ("skipped", goals.NOT_MEASURED),
    ):
        tests = goals.verdicts(ALL_MET, STATUSES | {"test-engine": ended})[2]
        assert tests.status == status
        assert tests.figure.endswith(": test-engine")


HOST = """
layer 100 200
cudaLaunchKernel 110 111
cudaMemcpy 112 113
cudaMalloc 114 115
cudaStreamWaitEvent 116 117
cudaDeviceSynchronize 210 220
cudaLaunchKernel 90 91
"""
DEVICE = """
before 95 99
layer 101 260
cad/attention 101 250
gemm 112 150
gemm 151 160
"""
"""Names of events, and when they begin and end."""


def test_a_trace_is_counted_inside_its_layers():
    trace = []
    for text, on_device in ((HOST, False), (DEVICE, True)):
        for line in text.split("\n")[1:-1]:
            name, *span = line.split()
            trace.append(layer.Event(name, on_device, *map(int, span)))
    assert layer.counts(trace) == {
        "launches": 1,
        "synchronisations": 1,
        "allocations": 1,
        "on_device": 2,
    }
    (longest,) = layer.longest(trace, 1)
    assert (longest["kernel"], longest["microseconds"]) == ("gemm", 47.0)
    trace.append(layer.Event("flash_fwd_kernel", True, 300, 310))
    assert layer.attention_and_rest(trace) == (10.0, 47.0)
