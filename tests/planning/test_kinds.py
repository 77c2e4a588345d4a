# SPDX-License-Identifier: BSD-3-Clause
"""Kinds of attention: every pair that a kind's mask allows is computed once, and no other."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA, cases
from tests.lib.reference import causal_mask, check_bound, check_json, pair_counts
from tests.lib.refusals import refusal
from tests.lib.shapes import rank_positions
from tests.lib.steps import TIMES, fingerprints
from tests.lib.tables import check_plan
from tests.planning.test_properties import SHARES, some_attend
from torchtitan_cad.planning import (
    PlannerConfig,
    TokenLayout,
    make_plan,
    place_and_plan,
    plan_step,
)
from torchtitan_cad.planning.model.kind import AttentionKind, attention_work


def kind_of(block, window, layers=1):
    name = "chunked" if block else "window" if window else "full"
    return AttentionKind(name, layers, replace(LLAMA, window=window), block)


FULL = kind_of(None, None)


def test_attention_of_kinds_weighs_by_their_layers():
    """A document of 1024 tokens has 36 tiles; in blocks of 512, 20; in windows of 129, 15."""
    kinds = [FULL, kind_of(512, None, layers=2), kind_of(None, 129, layers=3)]
    long = [1024]
    short = [128] * 8
    mean = (36 + 2 * 20 + 3 * 15) / 6
    assert attention_work([long], kinds, 128) == pytest.approx(mean)
    assert attention_work([short], kinds, 128) == 8
    assert attention_work([short, long], [FULL], 128) == 44


kinds = st.one_of(
    st.just(FULL),
    st.integers(1, 40).map(lambda block: kind_of(block, None)),
    st.integers(1, 40).map(lambda window: kind_of(None, window)),
)


def check_pairs(plan, batch, kind, columns):
    """Count every pair of a document's tokens, known by their ranks and rows, and compare with the kind's mask."""
    place = np.empty(batch.num_tokens, dtype=np.int64)
    """of the given layout's tokens among those of the plan's, which are by its own documents"""
    for rank in range(batch.num_ranks):
        place[rank_positions(batch, rank)] = rank_positions(plan.layout, rank)
    counts = pair_counts(plan.layout, plan.tasks, plan.shape.window)
    doc = np.repeat(batch.docs, batch.doc_lengths)
    position = np.arange(len(doc)) - np.repeat(
        batch.doc_offsets[:-1], batch.doc_lengths
    )
    mask = causal_mask(batch)
    if kind.shape.window is not None:
        mask &= position[:, None] - position < kind.shape.window
    if kind.block is not None:
        block = (columns[doc] + position) // kind.block
        mask &= block[:, None] == block
    np.testing.assert_array_equal(counts[np.ix_(place, place)], mask)


@given(case=cases, kind=kinds, share=SHARES)
def test_every_pair_of_the_mask_once(case, kind, share):
    small = case.small(5, 40)
    layout = some_attend(small.layout(), share, case.seed)
    layout = TokenLayout.from_arrays(  # ids that columns can be looked up by
        layout.num_ranks,
        layout.seg_rank,
        layout.doc_index(layout.seg_doc),
        layout.seg_start,
        layout.seg_length,
        layout.seg_attends,
    )
    rng = np.random.default_rng(case.seed)
    columns = rng.integers(0, 100, size=len(layout.docs))
    plan = make_plan(kind.layout(layout, columns), kind.shape, small.config)
    check_plan(plan)
    check_pairs(plan, layout, kind, columns)
    check_bound(plan)
    check_json(plan)


TWO_RANKS = TokenLayout.from_segments(
    [[(0, 0, 2048)], [(doc, 0, 500) for doc in range(1, 5)] + [(5, 0, 48)]]
)
"""Documents of two rows of 2,048 tokens; where they begin."""
COLUMNS = np.array([0, 0, 500, 1000, 1500, 2000])


@pytest.mark.parametrize(("layers", "is_placed"), [((99, 1), True), ((1, 99), False)])
def test_homes_are_those_of_the_kinds_with_more_layers(layers, is_placed):
    """A long document, which full attention divides, has chunks that need no other rank's rows at home."""
    full = kind_of(None, None, layers[0])
    chunked = kind_of(512, None, layers[1])
    config = PlannerConfig(tolerance=0.15, min_shard=4, tile=4)
    (placed,) = plan_step([[TWO_RANKS]], [full, chunked], config, columns=COLUMNS)
    (first,), (second,) = placed.plans
    assert (first.layout is not TWO_RANKS) == is_placed
    assert first.moves_rows
    assert second.moves_rows == is_placed


@settings(max_examples=settings.default.max_examples // 2)
@given(case=cases, window=st.integers(1, 5000))
def test_windows_move_their_keys_alone(case, window):
    layout = case.layout()
    kind = kind_of(None, window)
    plan = make_plan(layout, kind.shape, case.config)
    check_plan(plan)
    assert plan.config.planner == "home"
    assert plan.stats.query_rows_moved == 0
    starts = len(plan.tasks) - len(np.unique(plan.tasks["doc"]))
    assert plan.stats.kv_rows_moved <= starts * (window - 1)
    placed = place_and_plan(layout, kind.shape, case.config)
    step = plan_step([[layout]], [kind], case.config, TIMES, place=False)
    assert [placed.fingerprint()] == fingerprints(step) == [plan.fingerprint()]


def test_mistakes_in_kinds_are_named():
    for wrong in (
        {"name": "chunked"},
        {"block": 8},
        {"layers": 0},
        {"scale": np.nan},
        {"name": "window"},
    ):
        with refusal():
            replace(FULL, **wrong)
