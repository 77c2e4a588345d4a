"""The pipeline bench: 1F1B is timed right, and the pool comes near the ideal."""

from pathlib import Path

import pytest

from bench import pipeline
from bench.record import read_records
from bench.workloads import TOKENS_PER_RANK, spanning_layout
from torchtitan_cad.simulation.streams import one_f_one_b


def test_one_f_one_b_of_equal_microbatches() -> None:
    assert one_f_one_b(4, [1.0] * 8, [2.0] * 8) == (8 + 3) * 3


@pytest.mark.matrix
def test_results_are_written(tmp_path: Path) -> None:
    options = pipeline.Options(rounds=(1,), workloads=("uniform",), seeds=(11,), output=tmp_path / "out.json")
    pipeline.main(options)
    figures = {r["schedule"]: r for r in read_records(options.output)}
    pool = figures["CAD1F1B"]
    assert pool["over_ideal"] <= 1.05
    assert 1 < pool["worst_tick_max_over_mean"] <= 1.05
    assert pool["makespan"] < figures["1F1B + CAD"]["makespan"] < figures["1F1B"]["makespan"]


@pytest.mark.parametrize("microbatches", [4, pytest.param(8, marks=pytest.mark.matrix)])
def test_a_ten_times_heavier_microbatch_delays_the_step_by_its_share_of_the_pool(microbatches: int) -> None:
    pp = dp = 4
    tokens = dp * TOKENS_PER_RANK
    light, heavy = (spanning_layout(lengths, dp) for lengths in ([4096] * (tokens // 4096), [49152, 49152, 32768]))
    even = pipeline.Step([light] * microbatches, pp, dp, tolerance=0.02)
    uneven = pipeline.Step([light, heavy, *[light] * (microbatches - 2)], pp, dp, tolerance=0.02)
    light_work, heavy_work = (float(even.loads(layout, "home").sum()) for layout in (light, heavy))
    assert 10 <= heavy_work / light_work < 11
    share = (heavy_work - light_work) * pp * (1 + pipeline.BACKWARD_ATTENTION) / (pp * dp)
    delays = {
        schedule: pipeline.simulate(uneven, schedule).makespan - pipeline.simulate(even, schedule).makespan
        for schedule in pipeline.SCHEDULES
    }
    assert delays["CAD1F1B"] <= 1.05 * share
    assert delays["1F1B"] > delays["1F1B + CAD"] > 2 * share
