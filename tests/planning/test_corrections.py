"""Rates that are corrected by the times of steps."""

import numpy as np
import pytest

from bench.workloads import workload_layout
from tests.planning.layouts import LLAMA
from torchtitan_cad.planning import Plan, PlannerConfig, make_plan
from torchtitan_cad.planning.corrections import FEWEST, STARTING, Corrections
from torchtitan_cad.planning.timed import LayerTimes

LAYERS = 4
CONSTANT_S = 2.0


def times(overlaps: bool) -> LayerTimes:
    return LayerTimes(4e-6, 1e-7, bytes_per_second=5e9, between_hosts=5e9, exchange=0.0, overlaps=overlaps)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Make plans of batches that differ, some at home."""
    layouts = [workload_layout("uniform", 4, seed) for seed in range(24)]
    planners = ["home" if number % 6 == 0 else "local_search" for number in range(24)]
    return [make_plan(each, LLAMA, PlannerConfig(planner=name)) for each, name in zip(layouts, planners, strict=True)]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("compute", "exchange"), [(1, 1), (2, 1), (1, 4), (0.5, 2), (1, 0.5)])
def test_factors_are_found_in_noise(plans: list[Plan], overlaps: bool, compute: float, exchange: float) -> None:
    """Steps scatter by 2 %; what is predicted with the corrected rates is what the next plans take."""
    measured, rng = times(overlaps), np.random.default_rng(5)
    real = measured.scaled(compute, exchange)

    def step_seconds(of: LayerTimes, plan: Plan) -> float:
        return LAYERS * (of.attention_seconds(plan) + of.exposed_seconds(plan))

    corrections = Corrections(measured, LAYERS)
    for _ in range(STARTING):
        corrections.add(100.0, plans[:1])
    for plan in plans:
        corrections.add((CONSTANT_S + step_seconds(real, plan)) * (1 + 0.02 * rng.standard_normal()), [plan])
    off, before = (
        np.std([step_seconds(real, plan) - step_seconds(of, plan) for plan in plans]) / CONSTANT_S
        for of in (corrections.times, measured)
    )
    assert off < 0.04
    assert off <= before + 0.02


def test_what_does_not_change_changes_nothing(plans: list[Plan]) -> None:
    """Equal batches tell nothing of the rates; neither do too few steps, nor those in which things compile."""
    corrections = Corrections(times(False), LAYERS)
    for number in range(STARTING + FEWEST - 1):
        corrections.add(100.0 if number < STARTING else 3.0 + number, plans[number : number + 1])
    assert corrections.times == times(False)
    corrections = Corrections(times(False), LAYERS)
    for number in range(40):
        corrections.add(5.0 + 0.1 * (number % 3), plans[1:3])
    assert corrections.times == times(False)
