"""Placement in the simulation: what it changes, what it must not change, and what dealing tokens costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.placed_steps import simulate_step
from tests.simulation.cases import FAST, MODEL, cluster, documents
from torchtitan_cad.simulation import SYSTEMS, Costs, Rates, Settings, draw_batches, simulate
from torchtitan_cad.simulation.batches import Split
from torchtitan_cad.simulation.disaggregated import Disaggregated
from torchtitan_cad.simulation.step import Step


def disaggregated(lengths: Any, placement: Any, nano_batches: int = 1, cp: int = 1, **changes: Any) -> Disaggregated:
    """Rows of 4,096 tokens on 32 ranks, or of as many more as ``cp`` ranks share."""
    drawn = documents(lengths, row_tokens=4096 * cp, seed=changes.pop("seed", 0))
    costs = Costs(MODEL, cluster(ranks=32, ranks_per_node=1, **changes), Rates(), Settings(placement=placement))
    step = Step(costs, draw_batches(drawn)[0], 1, Split(1, 32, cp, 1))
    return Disaggregated(step, "local_search", nano_batches, "1F1B")


@pytest.mark.parametrize("nano_batches", [1, 2])
@pytest.mark.parametrize("net", [2e9, FAST])
def test_balanced_homes_are_not_slower_than_the_loaders_by_more_than_loads_and_bytes_may_grow(
    nano_batches: int, net: float
) -> None:
    """Loads by the tolerance, and bytes by what ``place`` pays for a better worst rank."""
    for seed in range(3):
        loader, balanced = (
            disaggregated((300, 1500, 16384), placement, nano_batches, 4, net=net, seed=seed)
            for placement in ("loader", "balanced")
        )
        tolerance = loader.step.costs.settings.planner.tolerance
        assert balanced.total() <= loader.total() * (1 + tolerance) * 1.1


def test_a_few_long_documents_are_faster_with_balanced_homes() -> None:
    loader, balanced = (disaggregated((300, 300, 300, 16384), placement, cp=4) for placement in ("loader", "balanced"))
    assert balanced.total() < loader.total()


@pytest.mark.parametrize("workload", ["whole", "one big"])
def test_a_step_with_balanced_homes_waits_less(workload: str) -> None:
    loader, balanced = (simulate_step(workload, 8, 11, 1, placement, 50e9) for placement in ("loader", "balanced"))
    assert balanced.exposed < 0.8 * loader.exposed
    assert loader.step - balanced.step == pytest.approx(loader.exposed - balanced.exposed, rel=0.1)


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_equal_documents_keep_their_homes(nano_batches: int) -> None:
    loader, balanced = (disaggregated((1024,), placement, nano_batches) for placement in ("loader", "balanced"))
    assert balanced.total() == loader.total()
    assert balanced.outcome().exchanged_bytes == 0


def test_the_report_has_placement_beside_cad_where_the_settings_leave_it_out() -> None:
    reports = {
        placement: simulate(MODEL, cluster(cp=1), documents(), Settings(nano_batches=1, placement=placement))
        for placement in ("loader", "balanced")
    }
    assert list(reports["loader"].systems) == list(SYSTEMS)
    assert [name for name in SYSTEMS if name != "cad_placed"] == list(reports["balanced"].systems)
    placed, chosen = reports["loader"].systems["cad_placed"], reports["balanced"].systems["cad"]
    assert placed.seconds == chosen.seconds
    assert reports["loader"].systems["greedy"].seconds == reports["balanced"].systems["greedy"].seconds


def test_many_layouts_are_placed_only_where_the_settings_ask_for_it() -> None:
    drawn = replace(documents(), batches=41)
    report = simulate(MODEL, cluster(cp=1), drawn, Settings(nano_batches=1))
    assert report.systems["cad_placed"].reason.startswith("41 layouts to place: give --placement balanced")
