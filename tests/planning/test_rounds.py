"""Cost models other than tile area, and capacities: balance, bytes and clear failure."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workloads import document_lengths, spanning_layout
from tests.planning.costs import concave_cost, noisy_cost
from tests.planning.layouts import LLAMA, Case, cases
from tests.sets import params
from torchtitan_cad import planning
from torchtitan_cad.planning import (
    CostModel,
    Plan,
    PlanError,
    PlannerConfig,
    TileAreaCost,
    TokenLayout,
    get_planner,
    make_plan,
    place,
    validate_plan,
)
from torchtitan_cad.planning.exchange.messages import RowBytes, buffer_bytes
from torchtitan_cad.planning.model.limits import load_limits, server_loads
from torchtitan_cad.planning.model.tasks import home_tasks, is_diagonal

MODELS: dict[str, CostModel] = {
    "overhead of 1": concave_cost(1),
    "overhead of 4": concave_cost(4),
    "noisy": noisy_cost(0),
}


def workload(name: str, num_ranks: int, seed: int = 11) -> TokenLayout:
    return spanning_layout(document_lengths(name, num_ranks, seed), num_ranks)


@pytest.mark.parametrize("num_ranks", params([8, 64], [8]))
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("name", ["lognormal", "one big", "uniform"])
def test_any_cost_model_is_balanced_for_the_bytes_of_tile_area(name: str, model: str, num_ranks: int) -> None:
    figures = []
    for seed in (11, 12, 13):
        layout = workload(name, num_ranks, seed)
        plan, in_tiles = make_plan(layout, LLAMA, cost=MODELS[model]), make_plan(layout, LLAMA)
        validate_plan(plan)
        assert plan.stats.max_over_mean <= 1.02
        if num_ranks == 64:
            assert (~is_diagonal(plan.tasks)).any()
            assert server_loads(in_tiles.tasks, MODELS[model], num_ranks).max() / plan.stats.mean_load > 1.02
        figures.append((plan.stats.total_bytes, plan.stats.max_rank_bytes))
        figures.append((-in_tiles.stats.total_bytes, -in_tiles.stats.max_rank_bytes))
    ours, theirs = np.sum(figures[::2], axis=0), -np.sum(figures[1::2], axis=0)
    assert (ours <= np.array([1.15, 1.2]) * theirs).all()


def small_cost(kind: str, seed: int, tile: int) -> CostModel:
    """Tables long enough for every drawn layout."""
    tiles = 60_000 // tile + 2
    return concave_cost(seed % 8, tiles, tile) if kind == "concave" else noisy_cost(seed, tiles, tile)


@given(case=cases, kind=st.sampled_from(["concave", "noisy"]), planner=st.sampled_from(["greedy", "tiling"]))
def test_guarantee_holds_for_any_cost_model(case: Case, kind: str, planner: str) -> None:
    case = dataclasses.replace(case, tile=64, min_shard=128 * (1 + case.seed % 2))
    layout, config = case.layout(), dataclasses.replace(case.config, planner=planner)
    cost = small_cost(kind, case.seed % 1000, config.cost_tile)
    plan = make_plan(layout, LLAMA, config, cost)
    validate_plan(plan)
    limits = load_limits(layout, config, cost, home_tasks(layout))
    assert (server_loads(plan.tasks, cost, layout.num_ranks) <= limits.guaranteed).all()
    assert plan.stats.lower_bound_bytes <= plan.stats.total_bytes


def capacities_of(plan: Plan, factor: float, kinds: str) -> dict[str, int]:
    """Options that allow ``factor`` times what the plan's worst rank receives."""
    queries, keys = (int(factor * most) for most in plan.rows_in.max(axis=1))
    options = {"q": {"max_recv_queries": queries}, "k": {"max_recv_keys": keys}}
    return {key: value for kind in kinds for key, value in options[kind].items()}


@given(
    case=cases,
    factor=st.sampled_from([0.0, 0.5, 0.7, 0.9]),
    kinds=st.sampled_from(["q", "k", "qk"]),
    planner=st.sampled_from(["greedy", "tiling", "tiling, no split_kv", "home"]),
)
def test_capacities_are_kept_or_the_planner_says_it_cannot(case: Case, factor: float, kinds: str, planner: str) -> None:
    layout = case.layout()
    config = dataclasses.replace(case.config, planner=planner.split(",")[0], split_kv="split" not in planner)
    options = capacities_of(make_plan(layout, LLAMA, config), factor, kinds)
    config = dataclasses.replace(config, **options)  # type: ignore[arg-type]
    try:
        plan = make_plan(layout, LLAMA, config)
    except ValueError:
        message = r"rank \d+ receives \d+ (query|key) rows, more than max_recv_(queries|keys) = \d+: no plan was found"
        with pytest.raises(ValueError, match=message):
            make_plan(layout, LLAMA, config)
        return
    validate_plan(plan)
    received = dict(zip(("max_recv_queries", "max_recv_keys"), plan.rows_in.max(axis=1).tolist(), strict=True))
    assert all(received[key] <= value for key, value in options.items())
    if planner != "home":
        assert (plan.stats.loads <= plan.stats.load_limits).all()
    if planner != "tiling":
        assert (plan.tasks["kv_start"] == 0).all()


@pytest.mark.parametrize("num_ranks", [16, 64])
@pytest.mark.parametrize("name", ["lognormal", "one big", "uniform"])
@pytest.mark.parametrize("kinds", ["q", "k"])
def test_seven_tenths_of_the_worst_rank(name: str, num_ranks: int, kinds: str) -> None:
    """What the worst rank receives can be spread: within the load limit, for a few more bytes."""
    for seed in (11, 12):
        layout = workload(name, num_ranks, seed)
        free = make_plan(layout, LLAMA)
        options = capacities_of(free, 0.7, kinds)
        plan = make_plan(layout, LLAMA, PlannerConfig(**options))  # type: ignore[arg-type]
        validate_plan(plan)
        assert (plan.stats.loads <= plan.stats.load_limits).all()
        assert plan.stats.total_bytes <= 1.3 * free.stats.total_bytes


def test_sufficient_capacities_change_nothing() -> None:
    layout = workload("lognormal", 16)
    free = make_plan(layout, LLAMA)
    options = capacities_of(free, 1.0, "qk")
    assert make_plan(layout, LLAMA, PlannerConfig(**options)).fingerprint() == free.fingerprint()  # type: ignore[arg-type]


def test_home_work_gives_keys_away_too() -> None:
    """A balanced document over two ranks: the second needs the first's 4096 keys, unless it sends queries there."""
    layout = TokenLayout.from_segments([[(0, 0, 4096), (1, 0, 5760)], [(0, 4096, 4096)]])
    config = PlannerConfig(tolerance=0.2)
    assert make_plan(layout, LLAMA, config).rows_in[1].tolist() == [0, 4096]
    plan = make_plan(layout, LLAMA, dataclasses.replace(config, max_recv_keys=3000))
    validate_plan(plan)
    assert plan.rows_in[1].max() <= 3000


def test_one_capacity_per_rank() -> None:
    layout = workload("lognormal", 8)
    free = make_plan(layout, LLAMA)
    allowed = free.rows_in[0].copy()
    worst = int(allowed.argmax())
    allowed += 1000
    allowed[worst] = 0.7 * free.rows_in[0][worst]
    plan = make_plan(layout, LLAMA, PlannerConfig(max_recv_queries=tuple(allowed.tolist())))
    assert (plan.rows_in[0] <= allowed).all()
    assert Plan.from_json(plan.to_json()).config == plan.config


def test_capacities_and_a_cost_model_and_speeds() -> None:
    layout, speeds = workload("lognormal", 16), tuple([1.0, 0.8] * 8)
    free = make_plan(layout, LLAMA, PlannerConfig(rank_speeds=speeds), MODELS["overhead of 4"])
    assert free.stats.max_over_mean <= 1.02
    config = PlannerConfig(rank_speeds=speeds, **capacities_of(free, 0.8, "k"))  # type: ignore[arg-type]
    plan = make_plan(layout, LLAMA, config, MODELS["overhead of 4"])
    validate_plan(plan)
    assert (plan.stats.loads <= plan.stats.load_limits).all()


@given(case=cases, share=st.sampled_from([0.0, 0.5, 0.8, 1.0]), planner=st.sampled_from(["greedy", "tiling", "home"]))
def test_receive_buffers_are_kept_or_change_nothing(case: Case, share: float, planner: str) -> None:
    """Buffers of a share of the largest message that the busiest rank would receive."""
    layout, config = case.layout(), dataclasses.replace(case.config, planner=planner)
    free, row_bytes = make_plan(layout, LLAMA, config), RowBytes.of(LLAMA, keep=False)
    received = row_bytes.received(*free.rows_in.max(axis=1).tolist())
    within = dataclasses.replace(config, buffer_bytes=max(1, int(share * max(received))))
    plan = make_plan(layout, LLAMA, within)
    assert plan.config == within
    if plan.fingerprint() == free.fingerprint():
        return
    validate_plan(plan)
    assert max(received) > within.buffer_bytes
    assert max(row_bytes.received(*plan.rows_in.max(axis=1).tolist())) <= within.buffer_bytes
    assert (plan.stats.loads <= plan.stats.load_limits).all()


@pytest.mark.parametrize("limits", [{}, {"max_recv_keys": (100_000,) * 64}])
@pytest.mark.parametrize("placed", [False, True])
def test_a_plan_within_receive_buffers_is_found(limits: dict, placed: bool) -> None:
    """Of half nano-batches of documents up to 256K tokens over 64 ranks; capacities of the user are kept, too."""
    lengths = document_lengths("lognormal", 32, seed=18)
    layout, config = spanning_layout(lengths, 64), PlannerConfig(**limits)
    free = make_plan(layout, LLAMA, config)
    most, row_bytes = buffer_bytes(2.0, nano_batches=2), RowBytes.of(LLAMA, keep=False)
    assert max(row_bytes.received(*free.rows_in.max(axis=1).tolist())) > most
    within = dataclasses.replace(config, buffer_bytes=most)
    plan = make_plan(place(layout, LLAMA, within) if placed else layout, LLAMA, within)
    validate_plan(plan)
    assert max(row_bytes.received(*plan.rows_in.max(axis=1).tolist())) <= most
    assert plan.stats.total_bytes <= 1.1 * free.stats.total_bytes
    assert Plan.from_json(plan.to_json()).config == within


def test_receive_buffers_smaller_than_the_mean_message_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One document over 32 ranks: every rank needs most of its keys."""
    layout = TokenLayout.from_segments([[(0, rank * 8192, 8192)] for rank in range(32)])
    free, row_bytes = make_plan(layout, LLAMA), RowBytes.of(LLAMA, keep=False)
    mean = row_bytes.received(*free.rows_in.mean(axis=1).tolist())
    made: list[str] = []
    monkeypatch.setattr(planning.plan, "get_planner", lambda name: made.append(name) or get_planner(name))
    for share, times in ((0.9, 1), (1.1, 2)):
        made.clear()
        make_plan(layout, LLAMA, PlannerConfig(buffer_bytes=int(share * max(mean))))
        assert len(made) == times


@pytest.mark.parametrize("planner", ["home", "greedy", "tiling"])
def test_impossible(planner: str) -> None:
    """Three ranks cannot share one document without receiving anything."""
    layout = TokenLayout.from_segments([[(0, 0, 8192)], [(0, 8192, 100)], []])
    config = PlannerConfig(planner=planner, max_recv_queries=0, max_recv_keys=0)
    with pytest.raises(ValueError, match=r"rank \d+ receives .* no plan was found .* The nearest needs max_recv_quer"):
        make_plan(layout, LLAMA, config)


def test_validation_checks_capacities() -> None:
    plan = make_plan(workload("lognormal", 8), LLAMA)
    config = PlannerConfig(**capacities_of(plan, 0.9, "k"))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"rank \d receives \d+ key rows, more than max_recv_keys"):
        validate_plan(dataclasses.replace(plan, config=config))


@pytest.mark.parametrize("key", ["max_recv_queries", "max_recv_keys"])
@pytest.mark.parametrize("value", [-1, 1.5, "many", True, (1, -1), [None]])
def test_bad_capacities(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{key} = .*: set a number of tokens that is not negative, or one per rank"):
        PlannerConfig(**{key: value})  # type: ignore[arg-type]


def test_as_many_capacities_as_ranks() -> None:
    with pytest.raises(ValueError, match="max_recv_keys has 2 entries for 8 ranks: set one per rank, or one number"):
        make_plan(workload("lognormal", 8), LLAMA, PlannerConfig(max_recv_keys=(1, 2)))


def test_tile_area_takes_one_round() -> None:
    """Counting tiles by a table instead: another way to the same loads, by rounds."""
    layout = workload("lognormal", 64)
    plans = [make_plan(layout, LLAMA, cost=cost) for cost in (TileAreaCost(128), concave_cost(0))]
    assert plans[0].fingerprint() == make_plan(layout, LLAMA).fingerprint()
    assert plans[0].tasks.tolist() == plans[1].tasks.tolist()


def test_balance_before_bytes_where_rows_cost_most() -> None:
    """Rows that cost 100 times a tile must not be computed in parts: the greedy's whole rows are balanced better."""
    short = [[(i, 0, 1) for i in range(16 * rank - 14, 16 * rank + 2)] for rank in (1, 2)]
    layout, cost = TokenLayout.from_segments([[(0, 0, 8), (1, 0, 8)], *short]), concave_cost(100, tiles=10, tile=1)
    plans = [
        make_plan(layout, LLAMA, PlannerConfig(tolerance=0.0, min_shard=1, tile=1, planner=planner), cost)
        for planner in ("tiling", "greedy")
    ]
    assert plans[0].stats.max_over_mean <= plans[1].stats.max_over_mean < 1.03
