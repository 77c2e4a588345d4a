# SPDX-License-Identifier: BSD-3-Clause
"""The run of `python -m bench.gpu`: what becomes of parts that go wrong, and its verdicts.

`make bench-gpu-dry` runs all of them on CPU stand-ins.
"""

import json
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import attention, goals, layer, report, results, session
from bench.gpu.parts import PARTS, RUN_S, RUNS, Part, expected_seconds
from bench.gpu.process import ROOT, run_part
from tests.lib.refusals import refusal


def fake(function: str, *arguments: str, **fields: Any) -> Part:
    return replace(
        Part(function, "a fake", f"tests.bench.fake_parts:{function}", 60, arguments),
        **fields,
    )


def test_every_file_of_tests_is_a_part():
    files = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py")
    }
    assert files == {
        part.arguments[0] for part in PARTS if part.name.startswith("test-")
    }


def test_what_a_part_measured_before_it_failed_is_kept():
    outcomes = {
        name: run_part(fake(name), "cpu", 60, None)
        for name in ("good", "bad", "crash", "unable")
    }
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
    outcome = run_part(fake("good", needs=("no_such_module",)), "cpu", 60, None)
    assert (outcome.status, outcome.why.split(":")[0]) == (
        "skipped",
        "no_such_module cannot be imported",
    )
    too_old = "TypeError('only 0-dimensional arrays can be converted')"
    for message, status in ((too_old, "skipped"), ("out of bounds", "failed")):
        assert run_part(fake("interpreted", message), "cpu", 60, None).status == status


@pytest.mark.matrix
def test_a_part_that_hangs_is_ended_with_all_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    begin = time.monotonic()
    outcome = run_part(fake("hang", str(pid_file)), "cpu", 3, None)
    assert time.monotonic() - begin < 30
    assert outcome.status == "timed out"
    assert (
        outcome.why == "ended after 3 s; in tests/test_of_something.py::test_that_hangs"
    )
    assert outcome.figures == {"figure": 1}
    assert "in hang" in outcome.output  # where it hung
    deadline = time.monotonic() + 60
    while is_running(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def quick_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ENVIRONMENT", fake("good", name="environment"))
    monkeypatch.setattr(results, "source_hash", lambda: "0")


def run_session(
    folder: Path, parts: list[Part], resume: bool = False, seconds: float = 600
) -> tuple[bool, dict]:
    lines: list[str] = []
    good = session.Session(folder, "cpu", None, seconds, lines.append).run(
        parts, resume
    )
    return good, {result["part"]: result for result in results.read(folder)}


def test_a_run_can_be_resumed(tmp_path, quick_environment, monkeypatch):
    first, second = fake("bad", name="first"), fake("good", name="second")
    monkeypatch.setattr(report, "PARTS", (first, second))
    good, parts = run_session(tmp_path, [first, second])
    assert not good
    assert [parts[name]["status"] for name in ("first", "second")] == ["failed", "done"]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("cpu-environment.json", "cpu-first.json", "cpu-second.json", results.PAGE)
    }
    text = (tmp_path / results.PAGE).read_text()
    assert "| 1 | first | failed |" in text
    assert "RuntimeError: it went wrong" in text

    good, parts = run_session(
        tmp_path, [fake("good", "again", name="first")], resume=True
    )
    assert good
    assert parts["first"]["figures"] == {"figure": ["cpu", "again"]}
    assert parts["second"]["status"] == "done", "what was not asked for is kept"
    good, parts = run_session(tmp_path, [fake("bad", name="first")], resume=True)
    assert good, "it was done before"
    monkeypatch.setattr(results, "source_hash", lambda: "1")
    good, parts = run_session(tmp_path, [fake("bad", name="first")], resume=True)
    assert not good, "other sources"
    assert (parts["first"]["sources"], parts["second"]["sources"]) == ("1", "0")


def result_of(part: str, sources: str, date: str, **changes: Any) -> dict[str, Any]:
    identity = {
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "python": "3.12",
        "commit": "c",
        "clean": True,
    }
    outcome = {
        "status": "done",
        "why": "",
        "seconds": 1.0,
        "figures": {},
        "output": "",
        "command": "python",
    }
    return {
        "part": part,
        "date": date,
        **identity,
        "sources": sources,
        "dry_run": False,
        **outcome,
        **changes,
    }


def test_what_is_no_result_is_left_alone(tmp_path):
    """Also a result that has figures, by one of the same part that was skipped; and NaN is null."""
    for number, text in enumerate(("[]", "{}", "3", '{"part": "x"}', "{")):
        (tmp_path / f"other-{number}.json").write_text(text)
    results.write(
        tmp_path,
        result_of(
            "layer", "s", "2026-01-01T00:00", figures={"times": [1.0, float("nan")]}
        ),
    )
    results.write(
        tmp_path, result_of("layer", "s", "2026-01-02T00:00", status="skipped")
    )
    (result,) = results.read(tmp_path)
    assert (result["status"], result["figures"]) == ("done", {"times": [1.0, None]})
    json.loads((tmp_path / "h200-layer.json").read_text(), parse_constant=pytest.fail)
    assert report.page([result]).startswith("# Results on one GPU")


def test_goals_are_judged_on_one_state_of_the_sources(tmp_path):
    """Tests that passed with other sources do not count, nor do other GPUs; the page shows them with their commit."""
    passed, failed = {"tests": {"passed": 3}}, {"tests": {"passed": 2, "failed": 1}}
    old = result_of(
        "test-kernels",
        "old",
        "2026-01-01T00:00",
        figures=passed,
        commit="before",
        clean=False,
    )
    new = result_of(
        "test-engine", "new", "2026-01-02T00:00", figures=failed, status="failed"
    )
    other = result_of(
        "test-streams",
        "new",
        "2026-01-01T00:00",
        figures=passed,
        gpu="NVIDIA H100 80GB HBM3",
    )
    for result in (old, new, other):
        results.write(tmp_path, result)
    found = results.read(tmp_path)
    assert {results.gpu_name(result) for result in found} == {"h200", "h100-80gb-hbm3"}
    text = report.page(found)
    assert "2 passed, 1 failed, 0 skipped" in text
    assert "5 passed" not in text
    assert "before with changes" in text
    assert results.done(found, old) == {"test-kernels"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository")
def test_results_of_another_machine_get_the_commit_whose_sources_they_have(tmp_path):
    with tempfile.TemporaryDirectory() as name:
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        subprocess.run(["tar", "x", "-C", name], input=archive, check=True)
        sources = results.source_hash(Path(name))
    measured, adopted = tmp_path / "measured", tmp_path / "adopted"
    measured.mkdir()
    with refusal():
        results.adopt(measured, "HEAD", adopted)
    results.write(
        measured, result_of("plain", sources, "2026-01-01T00:00", dry_run=True)
    )
    with refusal():
        results.adopt(measured, "HEAD", adopted)
    (measured / "cpu-plain.json").unlink()
    results.write(
        measured,
        result_of("layer", sources, "2026-01-01T00:00", commit="other", clean=False),
    )
    assert results.adopt(measured, "HEAD", adopted) == ["layer"]
    (result,) = results.read(adopted)
    head = subprocess.check_output(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, text=True
    ).strip()
    assert (result["commit"], result["clean"]) == (head, True)
    with refusal():
        results.adopt(measured, "no-such-commit", adopted)
    results.write(measured, result_of("plain", "of an edited tree", "2026-01-01T00:00"))
    with refusal():
        results.adopt(measured, "HEAD", adopted)


def test_what_does_not_fit_into_the_budget_is_skipped(tmp_path, quick_environment):
    """Either run does."""
    for run in RUNS:
        assert (
            expected_seconds([part for part in PARTS if part.run == run])
            <= RUN_S - session.RESERVE_S
        )
    parts = [
        fake("good", name="long", seconds=300),
        fake("good", name="short", seconds=10),
    ]
    good, outcomes = run_session(tmp_path, parts, seconds=100)
    assert good
    assert [outcomes[name]["status"] for name in ("long", "short")] == [
        "skipped",
        "done",
    ]
    assert outcomes["long"]["why"].startswith("no time: ")


def test_goals_are_judged_by_their_figures():
    """Every goal met, then each missed by itself, then measured in part, then not at all."""
    plans = [
        {"ranks": ranks, "pass": "forward", "planned_over_mean": 1.04}
        for ranks in (8, 64)
    ]
    shards = [
        {"shard": n, "forward_share": 0.96, "backward_share": 0.95}
        for n in (128, 256, 512, 1024, 2048)
    ]
    kernels = [{"name": name, "share": 0.81} for name in sorted(goals.KERNELS)] + [
        {"name": "pack", "share": 0.3}
    ]
    counts = {
        "launches": 40.0,
        "synchronisations": 0.0,
        "allocations": 0.0,
        "on_device": 40,
    }
    own = {"own_over_attention": 0.05, "own_microseconds": 700.0}
    modes = [{"mode": "stock"}, {"mode": "cad", "speed_up": 1.4, "ideal_speed_up": 1.5}]
    sharing = {
        "modes": modes,
        "transports": {"cad": "symm_mem, ..."},
        "multiprocessors": [[66, 66], [66, 66]],
    }
    figures: dict[str, dict[str, Any]] = {
        "environment": {"device": {"multiprocessors": 132}},
        "sharing": sharing,
        "test-engine": {"tests": {"passed": 3}},
        "attention": {"shards": shards},
        "bandwidth": {"kernels": kernels},
        "replay": {"plans": plans},
        "layer": {"counts": counts, "warnings": [], "device_allocations": 0, **own},
        "plain": {"over_stock": 1.01, "milliseconds": {"ours": 1.01, "stock": 1.0}},
    }
    assert set(attention.sizes_of("cuda").shards) == goals.SHARDS
    statuses = {part.name: "done" for part in PARTS}
    assert [v.status for v in goals.verdicts(figures, statuses)] == [goals.MET] * 8
    assert {v.status for v in goals.verdicts(figures, statuses, stand_ins=True)} == {
        goals.NOT_MEASURED
    }

    missed = [
        ("sharing", sharing | {"modes": [modes[0], modes[1] | {"speed_up": 1.29}]}),
        ("sharing", sharing | {"transports": {"cad": "collective; not symm_mem"}}),
        ("sharing", sharing | {"multiprocessors": [[66, 66], [132, 132]]}),
        ("attention", {"shards": [shards[0] | {"backward_share": 0.94}]}),
        ("bandwidth", {"kernels": [kernels[0] | {"share": 0.74}]}),
        ("replay", {"plans": [plans[0] | {"planned_over_mean": 1.09}]}),
        ("layer", figures["layer"] | {"counts": counts | {"allocations": 0.5}}),
        (
            "layer",
            figures["layer"] | {"warnings": ["called a synchronizing operation"]},
        ),
        ("layer", figures["layer"] | {"device_allocations": 1}),
        ("layer", figures["layer"] | {"own_over_attention": 0.07}),
        ("plain", {"over_stock": 1.03, "milliseconds": {"ours": 1.03, "stock": 1.0}}),
    ]
    in_part = [
        ("attention", {"shards": shards[1:]}),
        ("bandwidth", {"kernels": kernels[1:]}),
        ("replay", {"plans": plans[:1]}),
        ("layer", figures["layer"] | {"counts": counts | {"on_device": 0}}),
        ("layer", {"counts": counts, **own}),
    ]
    for verdict, cases in ((goals.NOT_MET, missed), (goals.NOT_MEASURED, in_part)):
        for name, value in cases:
            found = [
                v.status for v in goals.verdicts(figures | {name: value}, statuses)
            ]
            assert sorted(found) == [goals.MET] * 7 + [verdict], (name, value)
    unequal = goals.verdicts(figures, statuses | {"sharing": "failed"})[0]
    assert unequal.status == goals.NOT_MET, "it trained otherwise than stock"
    some = goals.verdicts(
        figures | {"test-engine": {"tests": {"passed": 3, "skipped": 1}}}, statuses
    )[1]
    assert some.status == goals.NOT_MEASURED
    hung = goals.verdicts(figures, statuses | {"test-engine": "timed out"})[1]
    assert hung.status == goals.NOT_MET
    assert (
        hung.figure == "3 passed, 0 failed, 0 skipped; failed or timed out: test-engine"
    )
    left = goals.verdicts(figures, statuses | {"test-engine": "skipped"})[1]
    assert left.status == goals.NOT_MEASURED
    assert left.figure == "in part: 3 passed, 0 failed, 0 skipped; not run: test-engine"
    nothing = goals.verdicts({}, {"test-engine": "skipped", "layer": "timed out"})
    assert [v.status for v in nothing] == [goals.NOT_MEASURED] * 8
    assert nothing[5].figure == "layer timed out"


def test_a_trace_is_counted_inside_its_layers():
    within = (
        "cudaLaunchKernel",
        "cuLaunchKernelEx",
        "cudaMemcpyAsync",
        "cudaMemcpy",
        "cudaStreamSynchronize",
    )
    within += ("cudaStreamWaitEvent", "cudaMalloc", "cudaHostAlloc", "aten::empty")
    trace = [
        layer.Event(name, False, begin, begin + 1)
        for begin, name in enumerate(within, 110)
    ]
    trace.append(layer.Event("layer", False, 100, 200))
    trace += [
        layer.Event("cudaDeviceSynchronize", False, 210, 220),
        layer.Event("cudaLaunchKernel", False, 90, 91),
    ]
    device = [
        ("before", 95, 99),
        ("layer", 101, 260),
        ("cad/attention", 101, 250),
        ("gemm", 112, 150),
        ("gemm", 151, 160),
    ]
    trace += [layer.Event(name, True, begin, end) for name, begin, end in device]
    assert layer.counts(trace) == {
        "launches": 3,
        "synchronisations": 2,
        "allocations": 2,
        "on_device": 2,
    }
    trace.append(layer.Event("flash_fwd_kernel", True, 300, 310))
    assert layer.attention_and_rest(trace) == (10.0, 47.0)
    assert layer.longest(trace[:-1], 1) == [
        {"kernel": "gemm", "per_layer": 2.0, "microseconds": 47.0}
    ]
