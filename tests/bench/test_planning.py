# SPDX-License-Identifier: BSD-3-Clause
"""The benches of planning and placement: results that can be read again, and checks that notice what is wrong."""

import json

import pytest

from bench import pipeline, placement, planner, tolerance
from bench.planner import slow_cases, wrong_cases
from bench.record import read_records
from tests.lib.workloads import workload_layout
from torchtitan_cad.planning import TokenLayout


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small run: 8 and 16 ranks, one workload, one seed, all planners."""
    folder = tmp_path_factory.mktemp("bench")
    options = planner.Options(
        ranks=(8, 16),
        workloads=("lognormal",),
        seeds=(11,),
        planners=tuple(planner.PLANNERS),
        output=folder / "results" / "planner.json",
        plot=folder / "plan.png",
        repeats=1,
        check=True,
    )
    assert planner.main(options) == 0
    return options


def test_results_can_be_read_again_and_a_plan_is_drawn(results):
    data = json.loads(results.output.read_text())
    assert {"date", "cpu", "python", "numpy", "numba", "command"} <= set(data)
    records = read_records(results.output)
    assert len(records) == 2 * len(planner.PLANNERS)
    last_row = planner.relative(records)[3]
    assert list(last_row.values()) == ["local_search", *["+0.0 %"] * 4]
    searched = [record for record in records if record["planner"] == "local_search"]
    for record in searched:
        assert 0 < record["bound_bytes"] <= record["total_bytes"]
        assert record["plan_ms"] > 0
    assert slow_cases(records, {16: 1e9}) == []
    (slow,) = slow_cases(records, {16: 0.0})
    assert slow.startswith("16 ranks,")
    totals = [row["total GB"] for row in planner.table(records)]
    assert searched[0]["total_bytes"] / 1e9 in totals
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
def test_checks_name_the_case(results, name, figure, factor, message):
    records = read_records(results.output)
    assert wrong_cases(records) == []
    wrong = next(record for record in records if record["planner"] == name)
    wrong[figure] *= factor
    problems = wrong_cases(records)
    assert any(message in problem for problem in problems)
    for problem in problems:
        assert problem.startswith("ranks 8, workload lognormal")


def test_what_is_dealt_is_counted_once():
    """There are 12 tokens: rank 0 gives 4 to rank 1 and gets 3 from rank 2, which gets 1 from rank 1."""
    layout = TokenLayout.from_segments([[(0, 0, 4)], [(1, 0, 4)], [(2, 0, 4)]])
    homes = TokenLayout.from_segments(
        [[(2, 0, 3)], [(0, 0, 4), (1, 0, 3)], [(1, 3, 1), (2, 3, 1)]]
    )
    assert placement.dealt(layout, homes) == (8 / 12, 4 * 16)
    assert placement.dealt(layout, layout) == (0.0, 0)


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_auto_tolerance_is_never_slower(nano_batches):
    layouts = [workload_layout("lognormal", 8, seed) for seed in (11, 12)]
    cases = [
        tolerance.measure(8, "lognormal", link, nano_batches, layouts)
        for link in (1e9, 50e9, 1e15)
    ]
    assert all(case["gain"] >= 0 for case in cases)
    assert cases[0]["bytes_saved"] > 0
    assert cases[0]["fixed_seconds"] > cases[2]["fixed_seconds"]
    assert cases[2]["tolerances"] == [0, 0]


@pytest.mark.parametrize(
    ("workload", "limit"), [("one big", 1.01), ("uniform", 1.01), ("lognormal", 1.1)]
)
def test_stock_pipelines_have_the_bubble_of_equal_microbatches(workload, limit):
    """Where whole documents can make them equal; the longest lognormal one has 2.7 times the attention of the mean."""
    step = pipeline.make_step(pipeline.Options(), workload, 8, seed=11)
    ideal = step.ideal(attention_waits=True)
    assert pipeline.simulate(step, "1F1B + CAD, placed") <= limit * ideal
