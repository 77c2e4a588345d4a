"""When backward gets a plan of its own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.profiles import LLAMA, linear, make_profile
from torchtitan_cad.planning import PlanCosts, PlannerConfig, TokenLayout, make_pair, make_plan, validate_plan

# One long document, many short ones, and both: forward work is in the long ones, backward's (by rows) everywhere.
LAYOUT = TokenLayout.from_segments(
    [
        [(0, 0, 16384)],
        [(i, 0, 512) for i in range(1, 33)],
        [(50, 0, 8192), *((i, 0, 1024) for i in range(51, 59))],
        [(60, 0, 4096)],
    ]
)


def costs(fixed: float, margin: float = 0.02) -> PlanCosts:
    """Backward takes 2.5 times as long as forward a tile, and ``fixed`` milliseconds a row on top."""
    profile = make_profile(forward=linear(0.001), backward=linear(0.0025, fixed))
    return PlanCosts(profile.cost_model("forward", LLAMA), profile.cost_model("backward", LLAMA), margin)


def backward_imbalance(tasks: np.ndarray, prices: PlanCosts) -> float:
    assert prices.backward is not None
    loads = np.zeros(LAYOUT.num_ranks)
    np.add.at(loads, tasks["server"], prices.backward.cost(tasks))
    home = make_plan(LAYOUT, LLAMA, PlannerConfig(planner="home")).tasks
    return float(loads.max() / (prices.backward.cost(home).sum() / LAYOUT.num_ranks))


def test_a_plan_of_its_own_where_costs_differ_in_shape() -> None:
    prices = costs(fixed=0.1)
    pair = make_pair(LAYOUT, LLAMA, costs=prices)
    assert pair.separate
    validate_plan(pair.forward)
    validate_plan(pair.backward)
    assert pair.forward.fingerprint() == make_plan(LAYOUT, LLAMA, cost=prices.forward).fingerprint()
    own, followed = (backward_imbalance(plan.tasks, prices) for plan in (pair.backward, pair.forward))
    assert pair.backward.stats.max_over_mean == pytest.approx(own)
    assert own <= 1.05
    assert followed > own + prices.margin


def test_the_forward_plan_serves_both_where_costs_are_proportional() -> None:
    prices = costs(fixed=0.0)
    pair = make_pair(LAYOUT, LLAMA, costs=prices)
    assert not pair.separate
    assert np.array_equal(pair.backward.tasks, pair.forward.tasks)
    assert pair.backward.stats.max_over_mean == pytest.approx(backward_imbalance(pair.forward.tasks, prices))
    assert pair.backward.stats.max_over_mean == pytest.approx(pair.forward.stats.max_over_mean, abs=1e-6)


def test_the_margin_decides() -> None:
    wins = make_pair(LAYOUT, LLAMA, costs=costs(fixed=0.1, margin=0.0))
    followed = backward_imbalance(wins.forward.tasks, costs(fixed=0.1))
    gain = followed - wins.backward.stats.max_over_mean
    assert make_pair(LAYOUT, LLAMA, costs=costs(fixed=0.1, margin=gain * 0.99)).separate
    assert not make_pair(LAYOUT, LLAMA, costs=costs(fixed=0.1, margin=gain * 1.01)).separate
    assert not make_pair(LAYOUT, LLAMA, costs=costs(fixed=0.1, margin=float("inf"))).separate


def test_without_a_cost_of_backward_there_is_one_plan() -> None:
    for prices in (None, PlanCosts(costs(0.1).forward)):
        pair = make_pair(LAYOUT, LLAMA, costs=prices)
        assert pair.backward is pair.forward
        assert not pair.separate
        assert pair.fingerprint() == pair.forward.fingerprint()


def test_the_fingerprint_covers_both_plans() -> None:
    one, other = (make_pair(LAYOUT, LLAMA, costs=costs(fixed)) for fixed in (0.1, 0.2))
    assert one.separate
    assert other.separate
    assert one.forward.fingerprint() == other.forward.fingerprint()
    assert one.backward.fingerprint() != other.backward.fingerprint()
    assert len({one.fingerprint(), other.fingerprint(), one.forward.fingerprint(), one.backward.fingerprint()}) == 4
    assert make_pair(LAYOUT, LLAMA, costs=costs(0.1)).fingerprint() == one.fingerprint()


def test_bytes_of_backward() -> None:
    """Per token, bf16: dO, Q and dQ with 4-byte log-sum-exp and delta a head; K, V, dK and dV."""
    prices = LLAMA.for_backward()
    assert prices.query_bytes == 3 * 32 * 128 * 2 + 2 * 32 * 4
    assert prices.kv_bytes == 4 * 8 * 128 * 2
    pair = make_pair(LAYOUT, LLAMA, costs=costs(fixed=0.1))
    stats = pair.backward.stats
    assert stats.total_bytes == stats.query_rows_moved * prices.query_bytes + stats.kv_rows_moved * prices.kv_bytes
