"""The planner benchmark: results, a picture, and checks that notice what is wrong."""

import json
from pathlib import Path

import pytest

from bench import ablation, planner
from bench.planner_checks import slow_cases, wrong_cases
from bench.record import read_records


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> planner.Options:
    """A small run: 8 and 64 ranks, one workload, one seed, all planners."""
    folder = tmp_path_factory.mktemp("bench")
    options = planner.Options(
        ranks=(8, 64),
        workloads=("lognormal",),
        seeds=(11,),
        repeats=1,
        output=folder / "results" / "planner.json",
        plot=folder / "plan.png",
        check=True,
    )
    assert planner.main(options) == 0
    return options


def test_results_can_be_read_again(results: planner.Options) -> None:
    data = json.loads(results.output.read_text())
    assert {"date", "cpu", "python", "numpy", "numba", "command"} <= set(data)
    records = read_records(results.output)
    assert len(records) == 2 * len(planner.PLANNERS)
    ours = [r for r in records if r["planner"] == "local_search"]
    assert all(0 < r["bound_bytes"] <= r["total_bytes"] and r["plan_ms"] > 0 for r in ours)
    assert ours[0]["total_bytes"] / 1e9 in [row["total GB"] for row in planner.table(records)]


def test_a_plan_is_drawn(results: planner.Options) -> None:
    assert results.plot is not None
    assert results.plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "figure", "factor", "message"),
    [
        ("greedy", "max_over_mean", 2.0, "exceeds the guaranteed"),
        ("local_search", "total_bytes", 0.1, "is below bound_bytes"),
        ("local_search", "rank_bytes", 0.01, "is below forced_export_bytes"),
        ("local_search", "rank_bytes", 10, "of the greedy's"),
    ],
)
def test_checks_name_the_case(results: planner.Options, name: str, figure: str, factor: float, message: str) -> None:
    records = read_records(results.output)
    assert wrong_cases(records) == []
    wrong = next(r for r in records if r["planner"] == name)
    wrong[figure] *= factor
    problems = wrong_cases(records)
    assert any(message in problem for problem in problems)
    assert all(problem.startswith("ranks 8, workload lognormal") for problem in problems)


def test_time_limits(results: planner.Options) -> None:
    records = read_records(results.output)
    assert slow_cases(records, {64: 1e9}) == []
    (slow,) = slow_cases(records, {64: 0.0})
    assert slow.startswith("64 ranks, lognormal")


def test_failing_checks_are_exit_code_1(
    results: planner.Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = read_records(results.output)
    records[-1]["total_bytes"] = 1
    monkeypatch.setattr(planner, "run", lambda options: records)
    assert planner.main(planner.Options(output=tmp_path / "wrong.json", plot=None, check=True)) == 1
    assert "FAILED: ranks 64" in capsys.readouterr().err


def test_ablation(tmp_path: Path) -> None:
    """Every variant makes a plan of every layout; the whole planner is its own measure."""
    options = ablation.Options(ranks=(8,), seeds=(11,), repeats=1, output=tmp_path / "ablation.json")
    ablation.main(options)
    records = read_records(options.output)
    assert len(records) == 3 * len(ablation.VARIANTS)
    assert all(r["total_bytes"] >= r["rank_bytes"] > 0 for r in records)
    rows = ablation.table(records)
    assert len(rows) == len(ablation.VARIANTS)
    assert list(rows[-1].values())[:3] == ["all", "+0.0 %", "+0.0 %"]
