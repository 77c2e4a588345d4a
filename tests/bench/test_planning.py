# SPDX-License-Identifier: BSD-3-Clause
"""The benches of planning and placement: results that can be read again, and checks that notice what is wrong."""

import json

import pytest

from bench import pipeline, placement, planner
from bench.planner import slow_cases, wrong_cases
from bench.record import read_records
from torchtitan_cad.planning import TokenLayout


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A small run: 8 ranks, one workload, one seed, two planners."""
    folder = tmp_path_factory.mktemp("bench")
    options = planner.Options(
        ranks=(8,),
        workloads=("lognormal",),
        seeds=(11,),
        planners=("greedy", "local_search"),
        output=folder / "results" / "planner.json",
        plot=None,
        repeats=1,
        check=True,
    )
    assert planner.main(options) == 0
    return options


def test_results_can_be_read_again(results):
    data = json.loads(results.output.read_text())
    assert {"date", "cpu", "python", "numpy", "numba", "command"} <= set(data)
    records = read_records(results.output)
    assert len(records) == 2
    last_row = planner.relative(records)[-1]
    assert list(last_row.values()) == [
        "local_search",
        *["+0.0 %"] * (len(last_row) - 1),
    ]
    searched = records[-1]
    assert 0 < searched["bound_bytes"] <= searched["total_bytes"]
    assert slow_cases(records, {8: 1e9}) == []
    (slow,) = slow_cases(records, {8: 0.0})
    assert slow.startswith("8 ranks,")
    assert planner.table(records)[-1]["total GB"] == searched["total_bytes"] / 1e9


@pytest.mark.parametrize(
    ("name", "figure", "factor", "message"),
    [
        ("greedy", "max_over_mean", 2.0, "exceeds the guaranteed"),
        ("local_search", "total_bytes", 0.1, "is below bound_bytes"),
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


@pytest.mark.parametrize(("workload", "limit"), [("uniform", 1.01), ("lognormal", 1.1)])
def test_stock_pipelines_have_the_bubble_of_equal_microbatches(workload, limit):
    """Where whole documents can make them equal; the longest lognormal one has 2.7 times the attention of the mean."""
    step = pipeline.make_step(pipeline.Options(), workload, 8, seed=11)
    ideal = step.ideal(attention_waits=True)
    assert pipeline.simulate(step, "1F1B + CAD, placed") <= limit * ideal
