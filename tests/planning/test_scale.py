"""Limits of layouts, and how planning grows with the ranks that share one document."""

import time

import pytest

from tests.planning.layouts import LLAMA
from tests.sets import params
from torchtitan_cad.planning import (
    CostModel,
    PlannerConfig,
    ProfileCost,
    TokenLayout,
    make_plan,
    validate_plan,
    warm_up,
)
from torchtitan_cad.planning.model.layout import MAX_RANKS, MAX_TOKENS


def one_document(num_ranks: int, tokens_per_rank: int) -> TokenLayout:
    return TokenLayout.from_segments([[(0, r * tokens_per_rank, tokens_per_rank)] for r in range(num_ranks)])


@pytest.mark.parametrize(("num_ranks", "tokens"), [(1, 10**12), (8, 10**12), (8, 10**9), (1, 2**61)])
def test_the_tokens_of_a_layout_are_limited(num_ranks: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"more than (the )?{MAX_TOKENS}.*plan fewer tokens"):
        one_document(num_ranks, tokens)


def test_the_ranks_of_a_layout_are_limited() -> None:
    assert TokenLayout.from_segments([[]] * MAX_RANKS).num_ranks == MAX_RANKS
    with pytest.raises(ValueError, match=f"at most {MAX_RANKS}, got {MAX_RANKS + 1}"):
        TokenLayout.from_segments([[]] * (MAX_RANKS + 1))


@pytest.mark.parametrize("planner", ["home", "greedy", "local_search"])
@pytest.mark.parametrize("num_ranks", params([1, 8], [1]))
def test_the_longest_layout_is_planned(planner: str, num_ranks: int) -> None:
    """Its work still fits int64, bounds and statistics included."""
    layout = TokenLayout.from_segments([[(0, 0, MAX_TOKENS)], *([[]] * (num_ranks - 1))])
    plan = make_plan(layout, LLAMA, PlannerConfig(planner=planner))
    stats = plan.stats
    rows = MAX_TOKENS // 128
    assert stats.loads.sum() == rows * (rows + 1) // 2
    assert planner == "home" or stats.max_over_mean <= stats.guaranteed_over_mean
    assert 0 <= stats.lower_bound_bytes <= stats.total_bytes or planner == "home"
    with pytest.raises(ValueError, match=r"rank 0 (sends|computes on) .* rows, more than"):
        plan.exchange(0)
    with pytest.raises(ValueError, match="validate a plan of fewer tokens or ranks"):
        validate_plan(plan)


@pytest.mark.parametrize(
    ("config", "cost", "message"),
    [
        (PlannerConfig(min_shard=1), None, "1000000000 rows of tiles of 1, more than .*: set min_shard and tile"),
        (
            PlannerConfig(),
            ProfileCost(128, (1, 2), (10**12, 2 * 10**12)),
            "cost more than .*: plan shorter documents, or measure",
        ),
    ],
)
def test_work_that_cannot_be_counted_is_refused(config: PlannerConfig, cost: CostModel | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(one_document(8, 125_000_000), LLAMA, config, cost)


def test_needs_do_not_grow_with_pairs_of_ranks() -> None:
    """Each rank needs the keys of all before it: n^2 / 2 pairs, but n intervals."""
    layout = one_document(2000, 128)
    plan = make_plan(layout, LLAMA, PlannerConfig(planner="home"))
    assert len(plan.key_needs.start) == 2000
    assert plan.rows_in[1].tolist() == [128 * r for r in range(2000)]
    table = plan.exchange(1000)
    assert table.keys.send_counts.tolist() == [0] * 1001 + [128] * 999
    assert table.keys.put_offsets.tolist() == [0] * 1001 + [128_000] * 999
    assert table.keys.recv_counts.tolist() == [128] * 1000 + [0] * 1000
    assert table.keys.return_offsets.tolist() == [128 * max(0, 999 - r) for r in range(1000)] + [0] * 1000


def seconds(num_ranks: int) -> float:
    """Processor time of a plan and its figures; the least of three, as other processes only add to it."""
    layout, least = one_document(num_ranks, 32_768), float("inf")
    for _ in range(3):
        begin = time.process_time()
        stats = make_plan(layout, LLAMA).stats
        least = min(least, time.process_time() - begin)
        assert stats.max_over_mean <= stats.guaranteed_over_mean
    return least


@pytest.mark.parametrize(
    ("few", "many"), [(256, 1024), pytest.param(512, 4096, marks=pytest.mark.slow)], ids=["1024", "4096"]
)
def test_time_grows_less_than_quadratically_with_the_ranks_of_a_document(few: int, many: int) -> None:
    warm_up()
    assert seconds(many) <= 2 * (many / few) ** 1.3 * max(0.05, seconds(few))
