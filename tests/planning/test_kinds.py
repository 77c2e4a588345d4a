# SPDX-License-Identifier: BSD-3-Clause
"""Kinds of attention: every pair that a kind's mask allows is computed once, and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA, cases
from tests.lib.reference import check_bounds, check_exchanges, check_json
from tests.lib.refusals import refusal
from tests.planning.test_place_step import TIMES, seconds
from tests.planning.test_properties import SHARES, some_attend
from torchtitan_cad.planning import (
    Plan,
    PlanError,
    PlannerConfig,
    TileAreaCost,
    TokenLayout,
    make_plan,
    place_and_plan,
    plan_step,
    validate_plan,
)
from torchtitan_cad.planning.exchange.traffic import Moved
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts
from torchtitan_cad.planning.model.cost import WindowCost, cost_model
from torchtitan_cad.planning.model.kind import (
    AttentionKind,
    attention_work,
    chunked_layout,
)
from torchtitan_cad.planning.model.tasks import make_tasks
from torchtitan_cad.planning.plan import moved_by


def kind_of(block: int | None, window: int | None) -> AttentionKind:
    name = "chunked" if block else "window" if window else "full"
    return AttentionKind(name, 1, replace(LLAMA, window=window), block)


def test_attention_of_kinds_weighs_by_their_layers():
    """A document of 1024 tokens has 36 tiles; in blocks of 512, 20; in windows of 129, 15."""
    shape, layers = LLAMA, (1, 2, 3)
    blocks_and_windows = (None, None), (512, None), (None, 129)
    model = [
        replace(kind_of(*each), layers=count)
        for each, count in zip(blocks_and_windows, layers, strict=True)
    ]
    assert model[0].shape == shape
    long, short = [1024], [128] * 8
    assert attention_work([long], model, 128) == pytest.approx(
        (36 + 2 * 20 + 3 * 15) / 6
    )
    assert attention_work([short], model, 128) == 8
    assert attention_work([short, long], model[:1], 128) == 44


kinds = st.one_of(
    st.just(kind_of(None, None)),
    st.integers(1, 40).map(lambda block: kind_of(block, None)),
    st.integers(1, 40).map(lambda window: kind_of(None, window)),
)


def columns_of(layout: TokenLayout, seed: int) -> np.ndarray:
    """A column of each document's first token, by document id."""
    return np.random.default_rng(seed).integers(
        0, 100, size=int(layout.docs.max(initial=0)) + 1
    )


def check_pairs(
    plan: Plan, given: TokenLayout, kind: AttentionKind, columns: np.ndarray
) -> None:
    """Count every pair of a document's tokens, known by their ranks and rows, and compare with the kind's mask."""
    kernel_window, ours = (
        plan.shape.window or plan.layout.num_tokens,
        np.empty(given.num_tokens, dtype=np.int64),
    )
    assert (given.tokens_per_rank == plan.layout.tokens_per_rank).all()
    for rank in range(given.num_ranks):
        ours[plan.layout.rank_positions(rank)] = given.rank_positions(rank)
    attends = np.zeros(given.num_tokens, dtype=bool)
    attends[
        np.concatenate(
            [
                given.rank_positions(rank, queries=True)
                for rank in range(given.num_ranks)
            ]
        )
    ] = True
    base = plan.layout.doc_offsets[plan.layout.doc_index(plan.tasks["doc"])]
    first = ours[base + plan.tasks["q_start"]]
    for doc, begin, end in zip(
        given.docs, given.doc_offsets[:-1], given.doc_offsets[1:], strict=True
    ):
        counts = np.zeros((end - begin, end - begin), dtype=int)
        mine = (begin <= first) & (first < end)
        for task, offset in zip(plan.tasks[mine], base[mine], strict=True):
            queries, keys = (
                np.arange(task["q_start"], task["q_end"]),
                np.arange(task["kv_start"], task["kv_end"]),
            )
            ahead = queries[:, None] - keys
            here = np.ix_(ours[offset + queries] - begin, ours[offset + keys] - begin)
            counts[here] += (ahead >= 0) & (ahead < kernel_window)
        position = np.arange(end - begin)
        ahead = position[:, None] - position
        mask = (
            (ahead >= 0)
            & (ahead < (kind.shape.window or len(ahead) + 1))
            & attends[begin:end, None]
        )
        if kind.block is not None:
            block = (columns[doc] + position) // kind.block
            mask &= block[:, None] == block
        np.testing.assert_array_equal(counts, mask)


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
    columns = columns_of(layout, case.seed)
    plan = make_plan(kind.layout(layout, columns), kind.shape, small.config)
    validate_plan(plan)
    check_pairs(plan, layout, kind, columns)
    check_bounds(plan)
    check_exchanges(plan)
    check_json(plan)


@pytest.mark.matrix
@settings(max_examples=20)
@given(
    nano_batches=st.integers(1, 2),
    rows=st.integers(1, 2),
    ranks=st.integers(1, 3),
    microbatches=st.integers(1, 2),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=9),
    others=st.lists(kinds, min_size=1, max_size=2),
    times=st.sampled_from(
        [None, TIMES, replace(TIMES, bytes_per_second=1e12, exchange=0.0)]
    ),
)
def test_steps_of_several_kinds(
    nano_batches, rows, ranks, microbatches, lengths, others, times
):
    """Rows of 128 tokens, with documents of these lengths over and over again, cut at rows."""
    shape, config = (
        BatchShape(rows * microbatches, 128, rows),
        PlannerConfig(min_shard=32, tile=32),
    )
    size, every = shape.rows * shape.seq_len, [kind_of(None, None), *others]
    begins = np.cumsum(np.resize(lengths, 2000))
    starts = [
        np.union1d(begins - rank * size, np.arange(0, size, 128))
        for rank in range(ranks)
    ]
    starts = [each[(each >= 0) & (each < size)] for each in starts]
    columns = np.concatenate(starts) % shape.seq_len
    given = [
        nano_layouts(starts, shape, number, 1, nano_batches)
        for number in range(microbatches)
    ]
    steps = plan_step(given, every, config, times, columns=columns)
    again = plan_step(given, every, config, times, columns=columns)
    for placed, same in zip(steps, again, strict=True):
        for kind, plans, same_plans in zip(
            every, placed.plans, same.plans, strict=True
        ):
            assert [plan.fingerprint() for plan in plans] == [
                plan.fingerprint() for plan in same_plans
            ]
            for plan, home in zip(plans, placed.layouts, strict=True):
                validate_plan(plan)
                check_pairs(plan, home, kind, columns)
    stay = plan_step(given, every, config, times, columns=columns, place=False)
    if times is None:
        now, before = (
            np.sum(
                [
                    moved_by(*chain(*(placed.plans[kind] for placed in step)))
                    for kind in range(len(every))
                ],
                axis=0,
            )
            for step in (steps, stay)
        )
        assert (now == before).all() or Moved(*now).score(Moved(*before)) < 3
    else:
        now, before = (
            sum(seconds(step, times, 1, kind) for kind in range(len(every)))
            for step in (steps, stay)
        )
        assert now <= before


TWO_RANKS = [
    [
        TokenLayout.from_segments(
            [[(0, 0, 2048)], [(doc, 0, 500) for doc in range(1, 5)] + [(5, 0, 48)]]
        )
    ]
]
"""Documents of two rows of 2,048 tokens; where they begin."""
COLUMNS = np.array([0, 0, 500, 1000, 1500, 2000])


@pytest.mark.parametrize(("layers", "is_placed"), [((99, 1), True), ((1, 99), False)])
def test_homes_are_those_of_the_kinds_with_more_layers(layers, is_placed):
    """A long document, which full attention divides, has chunks that need no other rank's rows at home."""
    full, chunked = (
        AttentionKind("full", layers[0], LLAMA),
        AttentionKind("chunked", layers[1], LLAMA, 512),
    )
    config = PlannerConfig(tolerance=0.15, min_shard=4, tile=4)
    (placed,) = plan_step(TWO_RANKS, [full, chunked], config, columns=COLUMNS)
    (first,), (second,) = placed.plans
    assert (first.layout is not TWO_RANKS[0][0]) == is_placed
    assert first.moves_rows
    assert not placed.given_plans[1][0].moves_rows
    assert second.moves_rows == is_placed


@given(case=cases, window=st.integers(1, 5000))
def test_windows_move_their_keys_alone(case, window):
    plan = make_plan(case.layout(), replace(LLAMA, window=window), case.config)
    validate_plan(plan)
    assert plan.config.planner == "home"
    assert plan.stats.query_rows_moved == 0
    starts = len(plan.tasks) - len(np.unique(plan.tasks["doc"]))
    assert plan.stats.kv_rows_moved <= starts * (window - 1)
    assert (plan.stats.loads == plan.stats.loads_before).all()
    placed, _ = place_and_plan(case.layout(), plan.shape, case.config)
    (step,) = plan_step(
        [[case.layout()]], [kind_of(None, window)], case.config, TIMES, place=False
    )
    assert placed.fingerprint() == step.plans[0][0].fingerprint() == plan.fingerprint()


@given(
    start=st.integers(0, 300),
    length=st.integers(1, 300),
    window=st.integers(1, 300),
    tile=st.sampled_from([1, 7]),
)
def test_windows_cost_the_tiles_that_they_touch(start, length, window, tile):
    end, first = start + length, max(0, start - window + 1)
    cost = cost_model(None, tile, window)
    assert cost_model(cost, tile, window) is cost
    task = make_tasks([0], start, end, first, end, 0)
    q, k = np.mgrid[
        start // tile * tile : -(-end // tile) * tile, 0 : -(-end // tile) * tile
    ]
    seen = (k <= q) & (k > q - window) & (k >= first // tile * tile)
    touched = np.unique(np.stack([q[seen] // tile, k[seen] // tile]), axis=1).shape[1]
    assert cost.cost(task).tolist() == [touched]
    assert cost.prefix_cost(end)[-1] == cost.cost(make_tasks([0], 0, end, 0, end, 0))[0]
    if tile == 1:
        assert touched == sum(min(q + 1, window) for q in range(start, end))
    area = TileAreaCost(tile)
    assert (
        WindowCost(area, 10**6).prefix_cost(end).tolist()
        == area.prefix_cost(end).tolist()
    )


LAYOUT = TokenLayout.from_segments([[(0, 0, 10)], [(0, 10, 6), (1, 0, 4)]])


@pytest.mark.parametrize(
    ("task", "wrong"),
    [
        (1, {"kv_start": 8}),
        (1, {"kv_start": 6}),
        (1, {"kv_end": 9, "q_start": 9}),
    ],
)
def test_wrong_windows_are_found(task, wrong):
    plan = make_plan(
        LAYOUT, replace(LLAMA, window=4), PlannerConfig(min_shard=4, tile=4)
    )
    for name, value in wrong.items():
        plan.tasks[name][task] = value
    with refusal(error=PlanError):
        validate_plan(plan)


def test_chunks_follow_the_row_and_keep_the_order_of_tokens():
    """Document 1 starts at column 5 of a row with blocks of 8: it is cut before its tokens 3 and 11."""
    layout = TokenLayout.from_segments([[(1, 0, 7), (0, 0, 5)], [(1, 7, 6)]])
    chunked = chunked_layout(layout, np.array([0, 5]), 8)
    assert chunked.segments() == [
        [(1, 0, 3), (2, 0, 4), (0, 0, 5)],
        [(2, 4, 4), (3, 0, 2)],
    ]
    assert chunked_layout(layout, np.array([0, 5]), 32) is layout


def test_what_a_layout_file_says_of_a_window_is_read_again():
    plan = make_plan(LAYOUT, replace(LLAMA, window=4))
    assert json.loads(plan.to_json())["attention"]["window"] == 4
    assert "window" not in json.loads(make_plan(LAYOUT, LLAMA).to_json())["attention"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "chunked"},
        {"block": 8},
        {"name": "chunked", "block": 0},
        {"layers": 0},
        {"name": "window"},
    ],
)
def test_mistakes_in_kinds_are_named(wrong):
    with refusal():
        AttentionKind(**{"name": "full", "layers": 2, "shape": LLAMA, **wrong})
