# SPDX-License-Identifier: BSD-3-Clause
"""Layouts, shapes, options and plans as values: what is accepted, what is rejected and how; limits, and growth."""

import dataclasses

import pytest

from tests.lib.layouts import LLAMA
from tests.lib.plans import written_plan
from tests.lib.refusals import refusal
from tests.lib.shapes import backward_shape
from tests.lib.validate import validate_plan
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
    make_plan,
)
from torchtitan_cad.planning.model.layout import MAX_RANKS, MAX_TOKENS, stack
from torchtitan_cad.planning.model.tasks import make_tasks

LAYOUT = TokenLayout.from_segments([[(0, 0, 4000)], [(1, 0, 500), (2, 0, 500)], []])
HOME = PlannerConfig(planner="home", min_shard=4, tile=4)


def test_bad_layouts():
    for ranks in (
        [[(0, 0, 5)], [(0, 4, 5)]],
        [[(0, 0, 5)], [(0, 6, 5)]],
        [[], [(2, 0, -4)]],
        [[(2, -1, 4)]],
        [],
        [[(0, 0)]],
        [[(0, 0, 2**70)]],
    ):
        with refusal():
            TokenLayout.from_segments(ranks)


def test_arrays_are_not_converted():
    arrays = {"num_ranks": 1, "rank": [0], "doc": [0], "start": [0], "length": [128]}
    assert TokenLayout.from_arrays(**arrays).num_tokens == 128
    for change in ({"length": [128.9]}, {"doc": [2**62]}, {"length": [1, 2]}):
        with refusal():
            TokenLayout.from_arrays(**arrays | change)


def test_empty_segments_hold_nothing():
    layout = TokenLayout.from_segments([[(0, 0, 4), (9, 0, 0), (0, 4, 0)], [(0, 2, 0)]])
    assert layout.docs.tolist() == [0]
    assert layout.segments() == [[(0, 0, 4)], []]
    assert stack([None, None], 2).segments() == [[], [], [], []]
    assert len(stack([layout, None, layout], 2).docs) == 2


def test_a_shared_part_of_keys_travels_once_and_values_as_they_are():
    """The shape of DeepSeek-V3 against the same heads with keys in full."""
    narrow = AttentionShape(128, 128, head_dim=192, dtype_bytes=2, value_dim=128)
    shared = dataclasses.replace(narrow, shared_dim=64)
    assert (narrow.kv_bytes, narrow.query_bytes) == (81920, 82432)
    assert (shared.kv_bytes, shared.query_bytes) == (65664, 82432)
    assert backward_shape(shared).kv_bytes == 2 * 65664
    assert backward_shape(narrow).query_bytes == 128 * 2 * (192 + 128 + 192) + 2 * 512
    assert written_plan(make_plan(LAYOUT, shared).to_json()).shape == shared
    for key, value in (("shared_dim", 192), ("value_dim", 0)):
        with refusal(key, value):
            dataclasses.replace(shared, **{key: value})


def test_bad_options():
    """Numbers that mean nothing are in test_hostile.py."""
    for key, value in (("split_kv", "yes"), ("planner", None)):
        with refusal(key, "="):
            PlannerConfig(**{key: value})


def test_fingerprint_depends_on_layout_and_tasks_only():
    segments = [[(0, 0, 4000)], [(2, 0, 500), (1, 0, 500)], []]
    other_order = TokenLayout.from_segments(segments)
    at_home = make_plan(LAYOUT, LLAMA, HOME).fingerprint()
    assert at_home != make_plan(LAYOUT, LLAMA).fingerprint()
    assert at_home != make_plan(other_order, LLAMA, HOME).fingerprint()
    same_tasks = dataclasses.replace(HOME, tolerance=0.5)
    assert at_home == make_plan(LAYOUT, LLAMA, same_tasks).fingerprint()


def test_fingerprint_is_stable_between_releases():
    """A change here is a change of the format: raise FINGERPRINT_VERSION."""
    layout = TokenLayout.from_segments([[(0, 0, 4)], []])
    assert make_plan(layout, LLAMA, HOME).fingerprint() == "1998413ba825bee8"


def test_tasks_must_fit_the_layout():
    for doc, server in ((9, 0), (0, 3)):
        tasks = make_tasks([doc], 0, 4, 0, 4, server)
        with refusal():
            Plan.from_tasks(LAYOUT, LLAMA, PlannerConfig(), tasks)


def one_document(num_ranks, tokens_per_rank):
    return TokenLayout.from_segments(
        [[(0, r * tokens_per_rank, tokens_per_rank)] for r in range(num_ranks)]
    )


def test_the_size_of_a_layout_is_limited():
    for num_ranks, tokens in ((1, 10**12), (8, 10**12), (8, 10**9), (1, 2**61)):
        with refusal():
            one_document(num_ranks, tokens)
    assert TokenLayout.from_segments([[]] * MAX_RANKS).num_ranks == MAX_RANKS
    with refusal():
        TokenLayout.from_segments([[]] * (MAX_RANKS + 1))


@pytest.mark.parametrize("planner", ["home", "local_search"])
def test_the_longest_layout_is_planned(planner):
    """Its work still fits int64, bounds and statistics included."""
    layout = TokenLayout.from_segments([[(0, 0, MAX_TOKENS)]])
    plan = make_plan(layout, LLAMA, PlannerConfig(planner=planner))
    stats = plan.stats
    rows = MAX_TOKENS // 128
    assert stats.loads.sum() == rows * (rows + 1) // 2
    assert 0 <= stats.lower_bound_bytes <= stats.total_bytes
    validate_plan(plan)
    with refusal():
        plan.exchange(0)


def test_work_that_cannot_be_counted_is_refused():
    layout = one_document(8, 125_000_000)
    with refusal():
        make_plan(layout, LLAMA, PlannerConfig(min_shard=1))


def test_one_document_on_many_ranks():
    """Each rank needs the keys of all before it: n^2 / 2 pairs."""
    layout = one_document(2000, 128)
    plan = make_plan(layout, LLAMA, PlannerConfig(planner="home"))
    assert plan.key_needs.rows_in.tolist() == [128 * r for r in range(2000)]
    assert plan.exchange(1000).keys.recv_counts.tolist() == [128] * 1000 + [0] * 1000
