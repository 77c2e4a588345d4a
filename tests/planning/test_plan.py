# SPDX-License-Identifier: BSD-3-Clause
"""Layouts, shapes, options and plans as values: what is accepted, what is rejected and how; limits, and growth."""

import dataclasses
import json
import time

import pytest

from tests.lib.layouts import LLAMA
from tests.lib.refusals import refusal
from tests.lib.sets import params
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlanError,
    PlannerConfig,
    ProfileCost,
    TileAreaCost,
    TokenLayout,
    make_plan,
    validate_plan,
)
from torchtitan_cad.planning.model.layout import MAX_RANKS, MAX_TOKENS
from torchtitan_cad.planning.model.tasks import make_tasks

LAYOUT = TokenLayout.from_segments([[(0, 0, 4000)], [(1, 0, 500), (2, 0, 500)], []])
SEGMENTS = [[(0, 0, 8), (0, 8, 8)], [(1, 0, 5), (2, 0, 3)]]
SOME_ATTEND = TokenLayout.from_segments(SEGMENTS, [False, True, True, False])
HOME = PlannerConfig(planner="home", min_shard=4, tile=4)


def test_views_of_a_layout():
    layout = TokenLayout.from_segments(
        [[(7, 2, 3), (4, 0, 5)], [], [(7, 0, 2), (7, 5, 1)]]
    )
    assert layout.num_ranks == 3
    assert layout.num_tokens == 11
    assert layout.tokens_per_rank.tolist() == [8, 0, 3]
    assert layout.docs.tolist() == [4, 7]
    assert layout.doc_lengths.tolist() == [5, 6]
    assert layout.doc_offsets.tolist() == [0, 5, 11]
    # Global positions: document 4 has 0..4, document 7 has 5..10.
    assert layout.rank_positions(0).tolist() == [7, 8, 9, 0, 1, 2, 3, 4]
    assert layout.rank_positions(2).tolist() == [5, 6, 10]
    assert layout.run_start.tolist() == [0, 5, 7, 10]
    assert layout.run_rank.tolist() == [0, 2, 0, 2]
    assert layout.run_row.tolist() == [3, 0, 0, 2]


@pytest.mark.parametrize(
    "ranks",
    [
        [[(0, 0, 5)], [(0, 4, 5)]],
        [[(0, 0, 5)], [(0, 6, 5)]],
        [[(3, 1, 5)]],
        [[], [(2, 0, -4)]],
        [[(2, -1, 4)]],
        [],
        [[(0, 0)]],
        [[(0, 0, 2**70)]],
    ],
)
def test_bad_layouts(ranks):
    with refusal():
        TokenLayout.from_segments(ranks)


@pytest.mark.parametrize(
    "change",
    [
        {"length": [128.9]},
        {"doc": [2**62]},
        {"attends": ["no"]},
        {"num_ranks": 2.0},
        {"rank": [1]},
        {"length": [1, 2]},
    ],
)
def test_arrays_are_not_converted(change):
    arrays = {
        "num_ranks": 1,
        "rank": [0],
        "doc": [0],
        "start": [0],
        "length": [128],
        "attends": [True],
    }
    assert TokenLayout.from_arrays(**arrays).num_tokens == 128
    with refusal():
        TokenLayout.from_arrays(**arrays | change)


def test_empty_segments_hold_nothing():
    layout = TokenLayout.from_segments([[(0, 0, 4), (9, 0, 0), (0, 4, 0)], [(0, 2, 0)]])
    assert layout.docs.tolist() == [0]
    assert layout.segments() == [[(0, 0, 4)], []]


def test_a_shared_part_of_keys_travels_once_and_values_as_they_are():
    """The shape of DeepSeek-V3 against the same heads with keys in full and values as wide as keys."""
    wide = AttentionShape(128, 128, head_dim=192, dtype_bytes=2)
    narrow = dataclasses.replace(wide, value_dim=128)
    shared = dataclasses.replace(narrow, shared_dim=64)
    assert [shape.kv_bytes for shape in (wide, narrow, shared)] == [98304, 81920, 65664]
    assert [shape.query_bytes for shape in (wide, narrow, shared)] == [
        98816,
        82432,
        82432,
    ]
    assert shared.for_backward().kv_bytes == 2 * 65664
    assert narrow.for_backward().query_bytes == 128 * 2 * (192 + 128 + 192) + 2 * 512
    plan = make_plan(TokenLayout.from_segments([[(0, 0, 900)], [(1, 0, 100)]]), shared)
    assert plan.moves_rows
    assert Plan.from_json(plan.to_json()).shape == shared
    for key, value in (("shared_dim", 192), ("value_dim", 0)):
        with refusal(key, value):
            dataclasses.replace(shared, **{key: value})


@pytest.mark.parametrize(
    "option",
    [
        {"split_kv": "yes"},
        {"planner": None},
        {"inter_node_weight": 0.5},
        {"rank_speeds": (1.0, 0.0)},
        {"rank_speeds": ("fast", 1.0)},
    ],
)
def test_bad_options(option):
    (key,) = option
    with refusal(key, "="):
        PlannerConfig(**option)


def test_statistics_beside_those_of_the_exchange():
    """Others are counted token by token: reference.check_exchanges and check_guarantee."""
    stats = make_plan(LAYOUT, LLAMA).stats
    assert stats.loads_before.tolist() == [32 * 33 // 2, 2 * 4 * 5 // 2, 0]
    assert stats.max_over_mean == stats.loads.max() / stats.mean_load
    assert (stats.mean_rank_bytes, stats.total_bytes) == (
        stats.total_bytes / 3,
        stats.bytes_in.sum(),
    )
    assert stats.plan_seconds > 0
    assert (
        make_plan(TokenLayout.from_segments([[], []]), LLAMA).stats.max_over_mean == 1.0
    )


def test_fingerprint_depends_on_layout_and_tasks_only():
    plan = make_plan(LAYOUT, LLAMA)
    assert len(plan.fingerprint()) == 16
    assert plan.fingerprint() == make_plan(LAYOUT, LLAMA).fingerprint()
    assert plan.fingerprint() != make_plan(LAYOUT, LLAMA, HOME).fingerprint()
    other_order = TokenLayout.from_segments(
        [[(0, 0, 4000)], [(2, 0, 500), (1, 0, 500)], []]
    )
    assert (
        make_plan(LAYOUT, LLAMA, HOME).fingerprint()
        != make_plan(other_order, LLAMA, HOME).fingerprint()
    )


def test_fingerprint_is_stable_between_releases():
    """A change here is a change of the format: raise FINGERPRINT_VERSION."""
    layout = TokenLayout.from_segments([[(0, 0, 4)], []])
    assert make_plan(layout, LLAMA, HOME).fingerprint() == "1998413ba825bee8"


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": None},
        {"tasks": [{"doc": 0}]},
        {"stats": {}},
        {"config": {"speed": 1}},
        {"fingerprint": "0" * 16},
        {"ranks": [[]]},
    ],
)
def test_bad_json(change):
    data = json.loads(make_plan(LAYOUT, LLAMA).to_json())
    with refusal():
        Plan.from_json(json.dumps({**data, **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"layout": [[(0, 0, 8)]]},
        {"shape": None},
        {"config": 0.02},
        {"cost": 3},
    ],
)
def test_arguments_of_another_type(change):
    with refusal():
        make_plan(**({"layout": LAYOUT, "shape": LLAMA} | change))


def test_cost_model_must_fit_min_shard():
    with refusal("min_shard", "100"):
        make_plan(LAYOUT, LLAMA, PlannerConfig(min_shard=100), cost=TileAreaCost(128))


@pytest.mark.parametrize(
    ("doc", "server"),
    [(9, 0), (0, 3), (0, -1)],
)
def test_tasks_must_fit_the_layout(doc, server):
    with refusal():
        Plan.from_tasks(
            LAYOUT, LLAMA, PlannerConfig(), make_tasks([doc], 0, 4, 0, 4, server)
        )


@pytest.mark.parametrize(
    "attends",
    [
        [True, True, True, False],
        [False, True, False, False],
    ],
)
def test_tasks_of_other_queries_are_found(attends):
    layout = TokenLayout.from_segments(SEGMENTS, attends)
    with refusal(error=PlanError):
        validate_plan(
            Plan.from_tasks(
                layout, LLAMA, HOME, make_plan(SOME_ATTEND, LLAMA, HOME).tasks
            )
        )


def one_document(num_ranks: int, tokens_per_rank: int) -> TokenLayout:
    return TokenLayout.from_segments(
        [[(0, r * tokens_per_rank, tokens_per_rank)] for r in range(num_ranks)]
    )


@pytest.mark.parametrize(
    ("num_ranks", "tokens"), [(1, 10**12), (8, 10**12), (8, 10**9), (1, 2**61)]
)
def test_the_tokens_of_a_layout_are_limited(num_ranks, tokens):
    with refusal():
        one_document(num_ranks, tokens)


def test_the_ranks_of_a_layout_are_limited():
    assert TokenLayout.from_segments([[]] * MAX_RANKS).num_ranks == MAX_RANKS
    with refusal():
        TokenLayout.from_segments([[]] * (MAX_RANKS + 1))


@pytest.mark.parametrize("planner", ["home", "greedy", "local_search"])
@pytest.mark.parametrize("num_ranks", params([1, 8], [1]))
def test_the_longest_layout_is_planned(planner, num_ranks):
    """Its work still fits int64, bounds and statistics included."""
    layout = TokenLayout.from_segments(
        [[(0, 0, MAX_TOKENS)], *([[]] * (num_ranks - 1))]
    )
    plan = make_plan(layout, LLAMA, PlannerConfig(planner=planner))
    stats = plan.stats
    rows = MAX_TOKENS // 128
    assert stats.loads.sum() == rows * (rows + 1) // 2
    assert planner == "home" or stats.max_over_mean <= stats.guaranteed_over_mean
    assert 0 <= stats.lower_bound_bytes <= stats.total_bytes or planner == "home"
    with refusal():
        plan.exchange(0)
    with refusal():
        validate_plan(plan)


@pytest.mark.parametrize(
    ("config", "cost"),
    [
        (PlannerConfig(min_shard=1), None),
        (PlannerConfig(), ProfileCost(128, (1, 2), (10**12, 2 * 10**12))),
    ],
)
def test_work_that_cannot_be_counted_is_refused(config, cost):
    with refusal():
        make_plan(one_document(8, 125_000_000), LLAMA, config, cost)


def test_needs_do_not_grow_with_pairs_of_ranks():
    """Each rank needs the keys of all before it: n^2 / 2 pairs, but n intervals."""
    layout = one_document(2000, 128)
    plan = make_plan(layout, LLAMA, PlannerConfig(planner="home"))
    assert len(plan.key_needs.start) == 2000
    assert plan.rows_in[1].tolist() == [128 * r for r in range(2000)]
    assert plan.exchange(1000).keys.recv_counts.tolist() == [128] * 1000 + [0] * 1000


def seconds(num_ranks: int) -> float:
    """Processor time of a plan and its figures; the least of three, as other processes only add to it."""
    layout, least = one_document(num_ranks, 32_768), float("inf")
    for _ in range(3):
        begin = time.process_time()
        stats = make_plan(layout, LLAMA).stats
        least = min(least, time.process_time() - begin)
        assert stats.max_over_mean <= stats.guaranteed_over_mean
    return least
