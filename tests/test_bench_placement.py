"""``bench/placement.py``."""

from pathlib import Path

import pytest

from bench.placement import Options, dealt, free_homes_bound, main, problems, run, table
from bench.record import read_records
from bench.workloads import SHAPE, workload_layout
from torchtitan_cad.planning import PlannerConfig, TokenLayout, make_plan, place


@pytest.mark.matrix
def test_records_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(ranks=(4,), workloads=("lognormal",), seeds=(11, 12), output=tmp_path / "placement.json")
    assert main(options) == 0
    records = read_records(options.output)
    assert [record["seed"] for record in records] == [11, 12]
    assert all(record["worst_ratio"] <= 1 for record in records)
    assert "lognormal" in capsys.readouterr().out
    assert [row["workload"] for row in table(records)] == ["lognormal", "all"]


def test_what_exceeds_a_limit_is_named() -> None:
    record = run(Options(ranks=(4,), workloads=("one big",), seeds=(11,)))[0]
    assert problems([record]) == []
    worse = {**record, "worst_ratio": 0.9, "max_over_mean": 9.0, "ranks": 8, "total_ratio": 1.0}
    found = problems([worse])
    assert len(found) == 4
    assert all(line.startswith("8 ranks") for line in found)


def test_what_is_dealt_is_counted_once() -> None:
    """There are 12 tokens: rank 0 gives 4 to rank 1 and gets 3 from rank 2, which gets 1 from rank 1."""
    given = TokenLayout.from_segments([[(0, 0, 4)], [(1, 0, 4)], [(2, 0, 4)]])
    homes = TokenLayout.from_segments([[(2, 0, 3)], [(0, 0, 4), (1, 0, 3)], [(1, 3, 1), (2, 3, 1)]])
    assert dealt(given, homes) == (8 / 12, 4 * 16)
    assert dealt(given, given) == (0.0, 0)


@pytest.mark.parametrize("tolerance", [0.02, 1.0])
@pytest.mark.parametrize("workload", ["lognormal", "one big", "uniform"])
def test_no_plan_is_below_the_bound(workload: str, tolerance: float) -> None:
    config = PlannerConfig(tolerance=tolerance)
    for seed in range(3):
        layout = workload_layout(workload, 8, seed)
        for homes in (layout, place(layout, SHAPE, config)):
            plan = make_plan(homes, SHAPE, config)
            assert free_homes_bound(plan) <= plan.stats.max_rank_bytes
