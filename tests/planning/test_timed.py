# SPDX-License-Identifier: BSD-3-Clause
"""Plans by time: against all tolerances, at extremes of the link, and at home."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.lib.layouts import LLAMA
from tests.lib.refusals import refusal
from tests.lib.sets import params
from tests.lib.shapes import backward_shape
from tests.lib.workloads import workload_layout
from torchtitan_cad.planning import LayerTimes, PlannerConfig, TokenLayout, make_plan
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
    unit=1e-6,
    linear=0.02 / 32768,
    bytes_per_second=1e9,
    between_hosts=1e8,
    exchange=0.0,
    overlaps=False,
)
"""A tile in a microsecond: some 30 ms of attention a rank, and half a second for the exchange."""
PLAN = make_plan(LAYOUT, LLAMA, CONFIG)
BACKWARD = backward_shape(LLAMA)
QUERY_BYTES = LLAMA.query_bytes + BACKWARD.query_bytes
KEY_BYTES = LLAMA.kv_bytes + BACKWARD.kv_bytes


def fastest(times):
    (plan,) = plan_by_time([LAYOUT], LLAMA, CONFIG, times, place=False)
    return plan


def at_home(layout=LAYOUT):
    return stay_home([layout], LLAMA, CONFIG)[0]


def test_an_exchange_that_costs_nothing_is_worth_perfect_balance():
    configs = [replace(CONFIG, tolerance=tolerance) for tolerance in TOLERANCES]
    plans = [make_plan(LAYOUT, LLAMA, config) for config in configs]
    best = min(plan.stats.max_over_mean for plan in plans)
    fast_link = replace(SLOW, bytes_per_second=1e18)
    hidden = replace(SLOW, unit=1e-4, overlaps=True)
    for times in (fast_link, hidden):
        plan = fastest(times)
        assert plan.config.tolerance == 0.0
        assert plan.stats.max_over_mean == best


def test_an_exposed_exchange_is_worth_imbalance():
    times = replace(SLOW, bytes_per_second=5e10)
    plan = fastest(times)
    assert plan.config.tolerance > PLAN.config.tolerance
    assert plan.stats.total_bytes < PLAN.stats.total_bytes
    for other in (PLAN, at_home()):
        assert times.layer_seconds(plan) < times.layer_seconds(other)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    "bytes_per_second", params([1e6, 1e9, 2e10, 2e11, 1e18], [1e6, 2e11])
)
def test_no_plan_is_slower_than_home(bytes_per_second, overlaps):
    times = replace(SLOW, bytes_per_second=bytes_per_second, overlaps=overlaps)
    plan = fastest(times)
    if plan.config.planner != "home":
        most = (1 - LEAST_GAIN) * times.layer_seconds(at_home())
        assert times.layer_seconds(plan) < most
        assert overlaps or bytes_per_second > 1e6
    if bytes_per_second >= 2e11:
        assert times.layer_seconds(plan) <= 1.01 * times.layer_seconds(PLAN)


def rows_moved(plan):
    """Rows of queries and of keys [2, ranks], into and out of every rank."""
    return [
        np.stack([needs.rows_in, needs.rows_out])
        for needs in (plan.query_needs, plan.key_needs)
    ]


def test_a_layers_time_is_that_of_its_parts():
    times = replace(SLOW, exchange=0.001)
    linear = 0.02
    attention = times.unit * int(PLAN.stats.loads.max())
    # Forward Q, O, LSE and K, V; backward dO, Q, LSE, delta, dQ and K, V, dK, dV: four key heads to a query head's row.
    row = LLAMA.num_heads * LLAMA.head_dim * LLAMA.dtype_bytes
    assert 5 * row + 3 * 4 * LLAMA.num_heads == QUERY_BYTES
    assert 6 * row // 4 == KEY_BYTES
    query_rows, key_rows = rows_moved(PLAN)
    num_bytes = query_rows * QUERY_BYTES + key_rows * KEY_BYTES
    seconds = num_bytes.max() / times.bytes_per_second + 4 * times.exchange
    assert times.exchange_seconds(PLAN) == pytest.approx(seconds)
    assert times.layer_seconds(PLAN) == pytest.approx(linear + attention + seconds)
    half_hidden = replace(times, overlaps=True, linear=seconds / 2 / 32768)
    hidden = seconds / 2 + times.unit * PLAN.stats.mean_load
    wanted = seconds / 2 + attention + seconds - hidden
    assert half_hidden.layer_seconds(PLAN) == pytest.approx(wanted)


def test_kept_rows_travel_once():
    """The exchange of a plan whose rows fit is shorter by Q, K and V, which servers have kept for backward."""
    row = RowBytes.of(LLAMA)
    query_rows, key_rows = rows_moved(PLAN)
    resent = query_rows * QUERY_BYTES + key_rows * KEY_BYTES
    kept = resent - query_rows * row.forward_queries - key_rows * row.keys
    needed = PLAN.most_rows.kept_bytes(row)
    for kept_bytes, num_bytes in (
        (0, resent),
        (needed - 1, resent),
        (needed, kept),
        (math.inf, kept),
    ):
        seconds = replace(SLOW, kept_bytes=kept_bytes).exchange_seconds(PLAN)
        assert seconds == pytest.approx(num_bytes.max() / SLOW.bytes_per_second)


def test_halves_at_home_wait_for_each_other_only_at_their_end():
    """Either half has one long document, on different ranks."""
    halves = [
        TokenLayout.from_segments([[(0, 0, 32768)], [(1, 0, 128)]]),
        TokenLayout.from_segments([[(0, 0, 128)], [(1, 0, 32768)]]),
    ]
    first, second = (at_home(half) for half in halves)
    linear = sum(map(SLOW.linear_seconds, halves))
    attention = SLOW.unit * (first.stats.loads + second.stats.loads).max()
    both = SLOW.microbatch_seconds([first, second])
    assert both == pytest.approx(linear + attention)


def test_bytes_between_hosts_take_the_time_of_that_link():
    host = np.arange(8) // 4
    far_queries = PLAN.query_needs.rows_between(host)
    far_keys = PLAN.key_needs.rows_between(host)
    num_bytes = far_queries * QUERY_BYTES + far_keys * KEY_BYTES
    apart = replace(SLOW, bytes_per_second=1e15, hosts=tuple(host.tolist()))
    assert apart.exchange_seconds(PLAN) == pytest.approx(num_bytes.max() / 1e8)
    seconds = SLOW.exchange_seconds(PLAN)
    assert replace(SLOW, hosts=(0,) * 8).exchange_seconds(PLAN) == seconds
    alone = replace(SLOW, hosts=tuple(range(8)))
    assert alone.exchange_seconds(PLAN) == pytest.approx(10 * seconds)


def test_bad_rates_are_named():
    for name, value in (
        ("unit", 0.0),
        ("linear", -1.0),
        ("bytes_per_second", math.nan),
        ("kept_bytes", -1.0),
    ):
        with refusal(name, value):
            replace(SLOW, **{name: value})
