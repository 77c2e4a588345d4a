"""The greedy planner: balance, bytes and cuts on layouts worth looking at."""

import dataclasses

import numpy as np
import pytest

from tests.planning.layouts import LLAMA
from torchtitan_cad import planning
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    register_planner,
    validate_plan,
)
from torchtitan_cad.planning.planners import greedy


def make_plan(layout: TokenLayout, shape: AttentionShape, config: PlannerConfig | None = None) -> Plan:
    return planning.make_plan(layout, shape, dataclasses.replace(config or PlannerConfig(), planner="greedy"))


def test_one_document_on_one_of_many_ranks() -> None:
    """All ranks help. Moving F pairs to each of 7 helpers costs at least 2 sqrt(c_q c_kv F) bytes each."""
    plan = make_plan(TokenLayout.from_segments([[(0, 0, 65536)], *[[] for _ in range(7)]]), LLAMA)
    assert plan.stats.max_over_mean <= 1.02
    assert set(plan.tasks["server"].tolist()) == set(range(8))
    pairs = 65536**2 / 2 / 8
    ideal = 7 * 2 * np.sqrt(LLAMA.query_bytes * LLAMA.kv_bytes * pairs)
    assert ideal * 0.9 < plan.stats.lower_bound_bytes < plan.stats.total_bytes < 2.5 * ideal


def test_moved_range_has_the_shape_of_the_closed_form() -> None:
    """A document far longer than what must move gives the piece [a, b) with a / b = c_q / (c_q + c_kv)."""
    lengths = [40960, 20480, 20480]
    plan = make_plan(TokenLayout.from_segments([[(i, 0, n)] for i, n in enumerate(lengths)]), LLAMA)
    moved = plan.tasks[(plan.tasks["doc"] == 0) & (plan.tasks["server"] != 0)][0]
    assert 0 < moved["q_end"] < 40960
    ratio = LLAMA.query_bytes / (LLAMA.query_bytes + LLAMA.kv_bytes)
    assert moved["q_start"] / moved["q_end"] == pytest.approx(ratio, abs=0.02)


def test_late_queries_go_where_the_early_keys_are() -> None:
    """A document over two ranks: the first rank takes earlier queries of the second and only later keys."""
    plan = make_plan(TokenLayout.from_segments([[(0, 0, 16384)], [(0, 16384, 16384)]]), LLAMA)
    assert plan.stats.max_over_mean <= 1.02
    moved = plan.tasks[plan.tasks["server"] == 0][-1]
    needed_at_home = 16384  # the second rank reads the first rank's keys in any case
    assert plan.stats.kv_rows_moved - needed_at_home == moved["q_end"] - 16384
    assert moved["q_end"] < 32768


def test_just_inside_and_just_outside_the_tolerance() -> None:
    """1020 small documents over a mean of 1000 is within 2 %, 1021 is not."""

    def plan_with(most: int):
        counts = [most, 2000 - most]
        docs = iter(range(2000))
        return make_plan(TokenLayout.from_segments([[(next(docs), 0, 100) for _ in range(n)] for n in counts]), LLAMA)

    assert plan_with(1020).stats.tasks_moved == 0
    assert plan_with(1021).stats.tasks_moved == 1


def test_coarse_shards_reach_the_guarantee_and_no_more() -> None:
    """Three documents that may not be cut on two ranks: two against one is the best there is."""
    plan = make_plan(TokenLayout.from_segments([[(0, 0, 1), (1, 0, 1), (2, 0, 1)], []]), LLAMA)
    assert sorted(plan.stats.loads.tolist()) == [1, 2]


def test_item_table_grows() -> None:
    """One document cut into many more pieces than there were items."""
    plan = make_plan(TokenLayout.from_segments([[(0, 0, 60_000)], *[[] for _ in range(40)]]), LLAMA)
    validate_plan(plan)
    assert plan.stats.num_tasks >= 41


def test_compiled_code_is_the_python_code() -> None:
    """The searches by bisection, compiled, against trying every cut in Python."""
    rng = np.random.default_rng(0)
    prefix = np.arange(100) * np.arange(1, 101) // 2
    for _ in range(300):
        tile = int(rng.integers(1, 4))
        step = tile * int(rng.integers(1, 4))
        start, end = np.sort(rng.choice(np.arange(90 * tile), size=2, replace=False)).tolist()
        rules = np.array([tile, step, 5, 1])

        def cost(a: int, b: int, tile: int = tile) -> int:
            return int(prefix[-(-b // tile)] - prefix[a // tile])

        cuts = [c for c in range(start + 1, end) if c % step == 0]
        work = int(rng.integers(1, cost(start, end) + 1))
        starts = [a for a in [start, *cuts] if cost(a, end) >= work]
        ends = [b for b in [*cuts, end] if cost(start, b) >= work]
        best = [b for b in [*cuts, end] if b == end or cost(b * 5 // 6 // step * step, b) >= work]
        assert greedy._last_start(prefix, rules, start, end, work) == starts[-1]
        assert greedy._first_end(prefix, rules, start, end, work) == ends[0]
        assert greedy._best_end(prefix, rules, start, end, work) == best[0]


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'greedy' is already registered"):
        register_planner("greedy")(greedy.plan_greedy)
