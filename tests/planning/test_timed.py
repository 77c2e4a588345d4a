# SPDX-License-Identifier: BSD-3-Clause
"""Plans by time: against all tolerances, at extremes of the link, and at home."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.lib.layouts import LLAMA
from tests.lib.refusals import refusal
from tests.lib.workloads import workload_layout
from torchtitan_cad.planning import (
    LayerTimes,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
    place_and_plan,
    validate_plan,
)
from torchtitan_cad.planning.model.shape import RowBytes
from torchtitan_cad.planning.placement.microbatch import (
    LEAST_GAIN,
    TOLERANCES,
    plan_by_time,
    stay_home,
)

CONFIG = PlannerConfig()
LAYOUT = workload_layout("lognormal", 8, 11)
SLOW = LayerTimes(
    1e-6,
    0.02 / 32768,
    bytes_per_second=1e9,
    between_hosts=1e8,
    exchange=0.0,
    overlaps=False,
)
"""A tile in a microsecond: some 30 ms of attention a rank, and half a second for the exchange."""


def fastest(times: LayerTimes, layout: TokenLayout = LAYOUT, **options: bool) -> Plan:
    ((plan,),) = plan_by_time([layout], LLAMA, CONFIG, times, **options).plans
    return plan


def at_home(layout: TokenLayout = LAYOUT) -> Plan:
    return stay_home([layout], LLAMA, CONFIG).plans[0][0]


def test_an_exchange_that_costs_nothing_is_worth_perfect_balance():
    every = [
        make_plan(LAYOUT, LLAMA, replace(CONFIG, tolerance=tolerance))
        for tolerance in TOLERANCES
    ]
    for times in (
        replace(SLOW, bytes_per_second=1e18),
        replace(SLOW, unit=1e-4, overlaps=True),
    ):
        plan = fastest(times)
        assert plan.config.tolerance == 0.0
        assert plan.stats.max_over_mean == min(
            plan.stats.max_over_mean for plan in every
        )


def test_an_exposed_exchange_is_worth_imbalance():
    times = replace(SLOW, bytes_per_second=5e10)
    plan, fixed = fastest(times), make_plan(LAYOUT, LLAMA, CONFIG)
    assert plan.config.tolerance > fixed.config.tolerance
    assert plan.stats.total_bytes < fixed.stats.total_bytes
    assert times.layer_seconds(plan) < min(
        times.layer_seconds(fixed), times.layer_seconds(at_home())
    )
    validate_plan(plan)


@pytest.mark.parametrize("place", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("bytes_per_second", [1e6, 1e9, 2e10, 2e11, 1e18])
def test_no_plan_is_slower_than_home(bytes_per_second, overlaps, place):
    times = replace(SLOW, bytes_per_second=bytes_per_second, overlaps=overlaps)
    plan, home = fastest(times, place=place), at_home()
    if plan.config.planner != "home":
        assert times.layer_seconds(plan) < (1 - LEAST_GAIN) * times.layer_seconds(home)
    if bytes_per_second >= 2e11:
        fixed = (
            place_and_plan(LAYOUT, LLAMA, CONFIG)[0]
            if place
            else make_plan(LAYOUT, LLAMA, CONFIG)
        )
        assert times.layer_seconds(plan) <= 1.01 * times.layer_seconds(fixed)


def test_batches_stay_home_where_moving_does_not_gain():
    """A slow link, even batches, and attention that is little beside linear work keep every query at home."""
    short = [[(8 * rank + doc, 0, 4096) for doc in range(8)] for rank in range(1, 8)]
    uneven = TokenLayout.from_segments([[(0, 0, 32768)], *short])
    even = TokenLayout.from_segments([[(rank, 0, 32768)] for rank in range(8)])
    free = replace(SLOW, bytes_per_second=1e18)
    assert fastest(free, uneven).moves_rows
    for times, layout in (
        (replace(SLOW, bytes_per_second=1e6), uneven),
        (free, even),
        (replace(free, linear=1.0), uneven),
    ):
        plan = fastest(times, layout)
        assert plan.config.planner == "home"
        assert not plan.moves_rows


def test_a_layers_time_is_that_of_its_parts():
    times = replace(SLOW, exchange=0.001)
    plan = make_plan(LAYOUT, LLAMA, CONFIG)
    stats, row = plan.stats, LLAMA.num_heads * LLAMA.head_dim * LLAMA.dtype_bytes
    linear, attention = 0.02, times.unit * int(stats.loads.max())
    # Forward Q, O, LSE and K, V; backward dO, Q, LSE, delta, dQ and K, V, dK, dV: four key heads to a query head's row.
    queries, keys = 5 * row + 3 * 4 * LLAMA.num_heads, 6 * row // 4
    out = plan.query_needs.rows_out * queries + plan.key_needs.rows_out * keys
    into = plan.query_needs.rows_in * queries + plan.key_needs.rows_in * keys
    seconds = max(out.max(), into.max()) / times.bytes_per_second + 4 * times.exchange
    assert times.exchange_seconds(plan) == pytest.approx(seconds)
    assert times.layer_seconds(plan) == pytest.approx(linear + attention + seconds)
    half_hidden = replace(times, overlaps=True, linear=seconds / 2 / 32768)
    hidden = seconds / 2 + times.unit * stats.mean_load
    assert half_hidden.layer_seconds(plan) == pytest.approx(
        seconds / 2 + attention + seconds - hidden
    )


def test_kept_rows_travel_once():
    """The exchange of a plan whose rows fit is shorter by Q, K and V, which servers have kept for backward."""
    plan, row = make_plan(LAYOUT, LLAMA, CONFIG), RowBytes.of(LLAMA)
    query_rows = np.stack([plan.query_needs.rows_in, plan.query_needs.rows_out])
    key_rows = np.stack([plan.key_needs.rows_in, plan.key_needs.rows_out])
    backward = LLAMA.for_backward()
    query_bytes, key_bytes = (
        LLAMA.query_bytes + backward.query_bytes,
        LLAMA.kv_bytes + backward.kv_bytes,
    )
    resent = query_rows * query_bytes + key_rows * key_bytes
    kept = resent - query_rows * row.forward_queries - key_rows * row.keys
    needed = plan.most_rows.kept_bytes(row)
    for kept_bytes, num_bytes in (
        (0, resent),
        (needed - 1, resent),
        (needed, kept),
        (math.inf, kept),
    ):
        times = replace(SLOW, kept_bytes=kept_bytes)
        assert times.exchange_seconds(plan) == pytest.approx(
            num_bytes.max() / SLOW.bytes_per_second
        )


def test_halves_at_home_wait_for_each_other_only_at_their_end():
    """Either half has one long document, on different ranks."""
    halves = [
        TokenLayout.from_segments(
            [
                [(rank, 0, 32768)] if rank == busy else [(rank, 0, 128)]
                for rank in range(2)
            ]
        )
        for busy in range(2)
    ]
    plans = [at_home(half) for half in halves]
    (one, other), linear = (
        (plan.stats.loads for plan in plans),
        sum(map(SLOW.linear_seconds, halves)),
    )
    assert SLOW.microbatch_seconds(plans) == pytest.approx(
        linear + SLOW.unit * (one + other).max()
    )
    assert SLOW.microbatch_seconds(plans[:1]) == pytest.approx(
        SLOW.layer_seconds(plans[0])
    )
    config = replace(CONFIG, planner="home", rank_speeds=(0.5, 1.5))
    uneven = make_plan(halves[0], LLAMA, config)
    assert SLOW.microbatch_seconds([uneven]) == pytest.approx(
        SLOW.layer_seconds(uneven)
    )


def test_bytes_between_hosts_take_the_time_of_that_link():
    plan = make_plan(LAYOUT, LLAMA, CONFIG)
    host = np.arange(8) // 4
    apart = replace(SLOW, bytes_per_second=1e15, hosts=tuple(host.tolist()))
    outside = []
    for need in (plan.query_needs, plan.key_needs):
        outside.append(
            np.stack([need.rows_in, need.rows_out]) - np.stack(need.rows_inside(host))
        )
    backward = LLAMA.for_backward()
    row_bytes = (
        LLAMA.query_bytes + backward.query_bytes,
        LLAMA.kv_bytes + backward.kv_bytes,
    )
    num_bytes = sum(rows * each for rows, each in zip(outside, row_bytes, strict=True))
    assert apart.exchange_seconds(plan) == pytest.approx(num_bytes.max() / 1e8)
    assert replace(SLOW, hosts=(0,) * 8).exchange_seconds(
        plan
    ) == SLOW.exchange_seconds(plan)
    assert replace(SLOW, hosts=tuple(range(8))).exchange_seconds(plan) == pytest.approx(
        10 * SLOW.exchange_seconds(plan)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unit", 0.0),
        ("linear", -1.0),
        ("bytes_per_second", float("nan")),
        ("between_hosts", 0.0),
    ],
)
def test_bad_rates_are_named(name, value):
    with refusal():
        replace(SLOW, **{name: value})


@pytest.mark.parametrize("kept_bytes", [-1.0, float("nan")])
def test_bad_kept_bytes_are_named(kept_bytes):
    with refusal("kept_bytes", kept_bytes):
        replace(SLOW, kept_bytes=kept_bytes)
