"""Kinds of attention: every pair that a kind's mask allows is computed once, and no other."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.layouts import LLAMA, Case, cases
from tests.planning.reference import check_bounds, check_exchanges, check_json, local_tokens
from tests.planning.test_properties import SHARES, some_attend
from torchtitan_cad.planning import Plan, PlanError, PlannerConfig, TileAreaCost, TokenLayout, make_plan, validate_plan
from torchtitan_cad.planning.model.cost import WindowCost, cost_model
from torchtitan_cad.planning.model.kind import AttentionKind, chunked_layout
from torchtitan_cad.planning.model.tasks import make_tasks


def kind_of(block: int | None, window: int | None) -> AttentionKind:
    name = "chunked" if block else "window" if window else "full"
    return AttentionKind(name, 1, replace(LLAMA, window=window), block)


kinds = st.one_of(
    st.just(kind_of(None, None)),
    st.integers(1, 40).map(lambda block: kind_of(block, None)),
    st.integers(1, 40).map(lambda window: kind_of(None, window)),
)


def columns_of(layout: TokenLayout, seed: int) -> np.ndarray:
    """A column of each document's first token, by document id."""
    return np.random.default_rng(seed).integers(0, 100, size=int(layout.docs.max(initial=0)) + 1)


def check_pairs(plan: Plan, given: TokenLayout, kind: AttentionKind, columns: np.ndarray) -> None:
    """Count every pair of tokens, known by their ranks and rows, and compare with the kind's mask."""
    kernel_window = plan.shape.window or plan.layout.num_tokens
    ours = [token for tokens in local_tokens(given) for token in tokens]
    theirs = [token for tokens in local_tokens(plan.layout) for token in tokens]
    assert (given.tokens_per_rank == plan.layout.tokens_per_rank).all()
    index, counts = {token: i for i, token in enumerate(theirs)}, np.zeros((len(ours), len(ours)), dtype=int)
    for task in plan.tasks:
        doc, first, end, key, stop = (int(task[name]) for name in ("doc", "q_start", "q_end", "kv_start", "kv_end"))
        for q in range(first, end):
            for k in range(max(key, q - kernel_window + 1), min(stop, q + 1)):
                counts[index[doc, q], index[doc, k]] += 1
    doc, position = np.array(ours, dtype=np.int64).reshape(-1, 2).T
    ahead = position[:, None] - position
    mask = (doc[:, None] == doc) & (ahead >= 0) & (ahead < (kind.shape.window or len(ours) + 1))
    attends = np.concatenate([np.zeros(0, bool), np.repeat(given.seg_attends, given.seg_length)])
    mask &= attends[:, None]
    if kind.block is not None:
        block = (columns[doc] + position) // kind.block
        mask &= block[:, None] == block
    np.testing.assert_array_equal(counts, mask)


@given(case=cases, kind=kinds, share=SHARES)
def test_every_pair_of_the_mask_once(case: Case, kind: AttentionKind, share: float) -> None:
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


@given(case=cases, window=st.integers(1, 5000))
def test_windows_move_their_keys_alone(case: Case, window: int) -> None:
    plan = make_plan(case.layout(), replace(LLAMA, window=window), case.config)
    validate_plan(plan)
    assert plan.config.planner == "home"
    assert plan.stats.query_rows_moved == 0
    starts = len(plan.tasks) - len(np.unique(plan.tasks["doc"]))
    assert plan.stats.kv_rows_moved <= starts * (window - 1)
    assert (plan.stats.loads == plan.stats.loads_before).all()


@given(start=st.integers(0, 300), length=st.integers(1, 300), window=st.integers(1, 300), tile=st.sampled_from([1, 7]))
def test_windows_cost_the_tiles_that_they_touch(start: int, length: int, window: int, tile: int) -> None:
    end, first = start + length, max(0, start - window + 1)
    cost = cost_model(None, tile, window)
    assert cost_model(cost, tile, window) is cost
    task = make_tasks([0], start, end, first, end, 0)
    q, k = np.mgrid[start // tile * tile : -(-end // tile) * tile, 0 : -(-end // tile) * tile]
    seen = (k <= q) & (k > q - window) & (k >= first // tile * tile)
    touched = np.unique(np.stack([q[seen] // tile, k[seen] // tile]), axis=1).shape[1]
    assert cost.cost(task).tolist() == [touched]
    assert cost.prefix_cost(end)[-1] == cost.cost(make_tasks([0], 0, end, 0, end, 0))[0]
    if tile == 1:
        assert touched == sum(min(q + 1, window) for q in range(start, end))
    area = TileAreaCost(tile)
    assert WindowCost(area, 10**6).prefix_cost(end).tolist() == area.prefix_cost(end).tolist()


LAYOUT = TokenLayout.from_segments([[(0, 0, 10)], [(0, 10, 6), (1, 0, 4)]])


@pytest.mark.parametrize(
    ("task", "wrong", "message"),
    [
        (1, {"kv_start": 8}, r"no task covers keys \[7, 8\)"),
        (1, {"kv_start": 6}, r"covers keys \[6, 7\) a second time"),
        (1, {"kv_end": 9, "q_start": 9}, "a rectangle, which a window of 4 forbids"),
    ],
)
def test_wrong_windows_are_found(task: int, wrong: dict[str, int], message: str) -> None:
    plan = make_plan(LAYOUT, replace(LLAMA, window=4), PlannerConfig(min_shard=4, tile=4))
    for name, value in wrong.items():
        plan.tasks[name][task] = value
    with pytest.raises(PlanError, match=message):
        validate_plan(plan)


def test_chunks_follow_the_row_and_keep_the_order_of_tokens() -> None:
    """Document 1 starts at column 5 of a row with blocks of 8: it is cut before its tokens 3 and 11."""
    layout = TokenLayout.from_segments([[(1, 0, 7), (0, 0, 5)], [(1, 7, 6)]])
    chunked = chunked_layout(layout, np.array([0, 5]), 8)
    assert chunked.segments() == [[(1, 0, 3), (2, 0, 4), (0, 0, 5)], [(2, 4, 4), (3, 0, 2)]]
    assert chunked_layout(layout, np.array([0, 5]), 32) is layout


def test_what_a_layout_file_says_of_a_window_is_read_again() -> None:
    plan = make_plan(LAYOUT, replace(LLAMA, window=4))
    assert json.loads(plan.to_json())["attention"]["window"] == 4
    assert "window" not in json.loads(make_plan(LAYOUT, LLAMA).to_json())["attention"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "chunked"}, "kind.name = 'chunked' with block = None"),
        ({"block": 8}, "kind.name = 'full' with block = 8"),
        ({"name": "chunked", "block": 0}, "kind.block = 0"),
        ({"layers": 0}, "kind.layers = 0: set a positive integer"),
        ({"name": "window"}, "window = None"),
    ],
)
def test_mistakes_in_kinds_are_named(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionKind(**{"name": "full", "layers": 2, "shape": LLAMA, **wrong})
