"""The tolerance by time, against all tolerances and at the extremes of the link."""

from dataclasses import replace

import pytest

from bench.workloads import workload_layout
from tests.planning.layouts import LLAMA
from torchtitan_cad.planning import PlannerConfig, make_plan, validate_plan
from torchtitan_cad.planning.timed import TOLERANCES, LayerTimes, make_timed_plan

CONFIG = PlannerConfig()
LAYOUT = workload_layout("lognormal", 8, 11)
SLOW = LayerTimes(unit=1e-6, linear=0.02 / 32768, bytes_per_second=1e9, overlaps=False)
"""A tile in a microsecond: some 30 ms of attention a rank, and half a second for the exchange."""


@pytest.mark.parametrize("bytes_per_second", [1e9, 2e10, 2e11, 1e18])
@pytest.mark.parametrize("overlaps", [False, True])
def test_no_tolerance_is_faster_than_the_chosen_one(bytes_per_second: float, overlaps: bool) -> None:
    times = replace(SLOW, bytes_per_second=bytes_per_second, overlaps=overlaps)
    plan = make_timed_plan(LAYOUT, LLAMA, CONFIG, times)
    validate_plan(plan)
    every = [make_plan(LAYOUT, LLAMA, replace(CONFIG, tolerance=tolerance)) for tolerance in TOLERANCES]
    assert times.layer_seconds(plan) == min(map(times.layer_seconds, every))
    if bytes_per_second == 1e9 and not overlaps:
        assert plan.config.tolerance > CONFIG.tolerance, "an exposed exchange is worth imbalance"
    if bytes_per_second == 1e18:
        assert plan.stats.max_over_mean == min(each.stats.max_over_mean for each in every)


def test_a_layers_time_is_that_of_its_parts() -> None:
    plan = make_plan(LAYOUT, LLAMA, CONFIG)
    stats, row = plan.stats, LLAMA.num_heads * LLAMA.head_dim * LLAMA.dtype_bytes
    linear, attention = 0.02, SLOW.unit * int(stats.loads.max())
    # Forward Q, O, LSE and K, V; backward dO, Q, LSE, delta, dQ and K, V, dK, dV: four key heads to a query head's row.
    queries, keys = 5 * row + 3 * 4 * LLAMA.num_heads, 6 * row // 4
    out = plan.query_needs.rows_out() * queries + plan.key_needs.rows_out() * keys
    into = plan.query_needs.rows_in() * queries + plan.key_needs.rows_in() * keys
    seconds = max(out.max(), into.max()) / SLOW.bytes_per_second
    assert SLOW.exchange_seconds(plan) == pytest.approx(seconds)
    assert SLOW.layer_seconds(plan) == pytest.approx(linear + attention + seconds)
    half_hidden = replace(SLOW, overlaps=True, linear=seconds / 2 / 32768)
    hidden = seconds / 2 + SLOW.unit * stats.mean_load
    assert half_hidden.layer_seconds(plan) == pytest.approx(seconds / 2 + attention + seconds - hidden)


@pytest.mark.parametrize(("name", "value"), [("unit", 0.0), ("linear", -1.0), ("bytes_per_second", float("nan"))])
def test_bad_rates_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} = .*: set a positive finite number"):
        replace(SLOW, **{name: value})
