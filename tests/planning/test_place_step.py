# SPDX-License-Identifier: BSD-3-Clause
"""Homes over the microbatches of an optimizer step."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA
from tests.lib.refusals import refusal
from tests.lib.workloads import document_lengths, spanning_layout
from torchtitan_cad.planning import (
    AttentionKind,
    LayerTimes,
    Plan,
    PlannedMicrobatch,
    PlannerConfig,
    TokenLayout,
    make_plan,
    place_and_plan,
    plan_step,
    validate_plan,
)
from torchtitan_cad.planning.model.batch import BatchShape, nano_layouts
from torchtitan_cad.planning.pipeline.one_f_one_b import in_stages
from torchtitan_cad.planning.placement.fill import add_up
from torchtitan_cad.planning.placement.microbatch import stay_home
from torchtitan_cad.planning.plan import moved_by

FULL = [AttentionKind("full", 1, LLAMA)]


def one_by_one(
    layouts: list[TokenLayout], config: PlannerConfig | None = None
) -> list[tuple[Plan, Plan]]:
    """Place a step of microbatches of one layout by bytes; of each the plan, and the plan for the given homes."""
    step = plan_step([[layout] for layout in layouts], FULL, config)
    return [
        (microbatch.plans[0][0], microbatch.given_plans[0][0]) for microbatch in step
    ]


def rows(lengths: list[list[int]], first_id: int = 0) -> TokenLayout:
    """One list of document lengths per rank."""
    ids = itertools.count(first_id)
    return TokenLayout.from_segments(
        [[(next(ids), 0, length) for length in of_rank] for of_rank in lengths]
    )


def cut_at_rows(layout: TokenLayout, first_id: int) -> TokenLayout:
    """What a rank holds of a document becomes a document of its own."""
    count = len(layout.seg_rank)
    ids, zeros = np.arange(first_id, first_id + count), np.zeros(count, dtype=np.int64)
    return TokenLayout.from_arrays(
        layout.num_ranks, layout.seg_rank, ids, zeros, layout.seg_length
    )


def step_of(
    workload: str, ranks: int, microbatches: int, seed: int
) -> list[TokenLayout]:
    layouts: list[TokenLayout] = []
    for number in range(microbatches):
        spanning = spanning_layout(
            document_lengths(workload, ranks, 100 * seed + number), ranks
        )
        layouts.append(
            cut_at_rows(spanning, sum(len(layout.docs) for layout in layouts))
        )
    return layouts


def documents(layouts: list[TokenLayout]) -> list[tuple[int, int]]:
    return sorted(
        (doc, n)
        for each in layouts
        for doc, n in zip(each.docs, each.doc_lengths, strict=True)
    )


def check(given: list[TokenLayout], homes: list[TokenLayout]) -> None:
    """Documents are whole, each in one microbatch, and every rank has its tokens in every microbatch."""
    assert documents(given) == documents(homes)
    for before, after in zip(given, homes, strict=True):
        assert before.tokens_per_rank.tolist() == after.tokens_per_rank.tolist()


@st.composite
def steps(draw: st.DrawFn) -> list[TokenLayout]:
    """Microbatches of documents of any lengths, some longer than any rank's capacity, in rows of unequal lengths."""
    ranks, total = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    layouts, first_id = [], 0
    for _ in range(total):
        lengths = draw(st.lists(st.integers(1, 600), min_size=1, max_size=12))
        cuts = sorted(
            draw(
                st.lists(
                    st.integers(0, sum(lengths)), min_size=ranks - 1, max_size=ranks - 1
                )
            )
        )
        ends = np.cumsum(lengths)
        segments: list[list[tuple[int, int, int]]] = []
        for low, high in itertools.pairwise([0, *cuts, sum(lengths)]):
            held = [
                (max(low, end - n), min(high, end), end - n)
                for end, n in zip(ends.tolist(), lengths, strict=True)
            ]
            segments.append(
                [
                    (first_id + i, a - begin, b - a)
                    for i, (a, b, begin) in enumerate(held)
                    if a < b
                ]
            )
        layouts.append(TokenLayout.from_segments(segments))
        first_id += len(lengths)
    return layouts


@settings(max_examples=settings.default.max_examples // 5)
@given(layouts=steps())
def test_every_step(layouts):
    config = PlannerConfig(min_shard=64, tile=64)
    placed = one_by_one(layouts, config)
    check(layouts, [plan.layout for plan, _ in placed])
    for (plan, given_plan), layout in zip(placed, layouts, strict=True):
        assert (
            given_plan.fingerprint() == make_plan(layout, LLAMA, config).fingerprint()
        )
        validate_plan(plan)
    before = moved_by(*(given_plan for _, given_plan in placed))
    after = moved_by(*(plan for plan, _ in placed))
    assert after == before or after.score(before) < before.score(before)
    again = one_by_one(layouts, config)
    assert [plan.layout.segments() for plan, _ in again] == [
        plan.layout.segments() for plan, _ in placed
    ]


KINDS = {
    "one": (1, 2),
    "halves of rows": (2, 2),
    "halves in the middle of rows": (2, 1),
}
"""Kinds of microbatches: nano-batches, and rows of every rank."""
TIMES = LayerTimes(
    unit=1e-9,
    linear=1e-10,
    bytes_per_second=1e9,
    between_hosts=1e9,
    exchange=1e-6,
    overlaps=True,
)


def batch(
    kind: str, ranks: int, microbatches: int, lengths: list[int]
) -> list[list[TokenLayout]]:
    """Rows of 256 tokens for every rank, with documents of these lengths over and over again, cut at rows."""
    nano_batches, rows_each = KINDS[kind]
    of_rank = rows_each * microbatches * 256
    begins = np.cumsum(np.resize(lengths, 10_000))
    starts = [
        np.union1d(begins - rank * of_rank, np.arange(0, of_rank, 256))
        for rank in range(ranks)
    ]
    starts = [each[(each >= 0) & (each < of_rank)] for each in starts]
    shape = BatchShape(rows_each * microbatches, 256, rows_each)
    return [
        nano_layouts(starts, shape, number, 1, nano_batches)
        for number in range(microbatches)
    ]


def holders(step: list[list[TokenLayout]]) -> list[TokenLayout]:
    """The layouts that hold each token once: the later halves of rows hold the earlier ones, too."""
    return [
        layout
        for nanos in step
        for layout in (nanos if nanos[-1].seg_attends.all() else nanos[-1:])
    ]


@settings(max_examples=settings.default.max_examples // 5)
@given(
    kind=st.sampled_from(list(KINDS)),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=9),
    times=st.sampled_from(
        [None, TIMES, replace(TIMES, bytes_per_second=1e12, exchange=0.0)]
    ),
    stages=st.integers(1, 2),
)
def test_every_kind_of_microbatch(kind, ranks, microbatches, lengths, times, stages):
    given, config = (
        batch(kind, ranks, microbatches, lengths),
        PlannerConfig(min_shard=64, tile=64),
    )
    step = plan_step(given, FULL, config, times, stages=stages)
    homes = [microbatch.layouts for microbatch in step]
    assert documents(holders(given)) == documents(holders(homes))
    for before, after in zip(
        chain.from_iterable(given), chain.from_iterable(homes), strict=True
    ):
        assert before.tokens_per_rank.tolist() == after.tokens_per_rank.tolist()
        assert before.queries_per_rank.tolist() == after.queries_per_rank.tolist()
    for plan in plans_of(step):
        validate_plan(plan)
    for earlier, later in (nanos for nanos in homes if not nanos[-1].seg_attends.all()):
        keys_only = later.seg_length[~later.seg_attends].sum()
        assert keys_only == earlier.num_tokens
    again = plan_step(given, FULL, config, times, stages=stages)
    assert [plan.fingerprint() for plan in plans_of(again)] == [
        plan.fingerprint() for plan in plans_of(step)
    ]
    if times is not None:
        home = [stay_home(nanos, LLAMA, config) for nanos in given]
        assert seconds(step, times, stages) <= seconds(home, times, stages)


def plans_of(step: list[PlannedMicrobatch]) -> list[Plan]:
    """Plans of all nano-batches, for the first kind of attention."""
    return [plan for microbatch in step for plan in microbatch.plans[0]]


def seconds(
    step: list[PlannedMicrobatch], times: LayerTimes, stages: int, kind: int = 0
) -> float:
    plans = [microbatch.plans[kind] for microbatch in step]
    linear = sum(
        times.linear_seconds(plan.layout) for nanos in plans for plan in nanos
    ) / len(step)
    return in_stages(
        np.array([times.microbatch_seconds(nanos) for nanos in plans]) - linear,
        stages,
        linear,
    )


@pytest.mark.parametrize("times", [None, TIMES])
@pytest.mark.parametrize("ranks", [1, 4])
def test_stages_run_as_fast_as_with_microbatches_of_equal_work(ranks, times):
    given, first_id = list[list[TokenLayout]](), 0
    for length in (2048, 1024, 512, 256) * 2:
        given.append([rows([[length] * (8192 // length)] * ranks, first_id)])
        first_id += ranks * 8192 // length

    def over_equal(step: list[PlannedMicrobatch]) -> float:
        work = np.array([plan.stats.mean_load for plan in plans_of(step)])
        return in_stages(work, 4, work.mean()) / (2 * work.mean() * (len(work) + 3))

    assert over_equal(plan_step(given, FULL, times=times, place=False)) > 1.1
    step = plan_step(given, FULL, times=times, stages=4)
    assert over_equal(step) < 1.0
    # no copies
    assert ranks > 1 or all(
        (np.diff(plan.exchange(0).causal.q_rows) == 1).all() for plan in plans_of(step)
    )


def test_a_pipeline_fills_and_drains_by_light_microbatches():
    """No documents of other microbatches add up to these tokens."""
    lengths = [9600], [3210, 6390], [5000, 4600], [2500, 2530, 4570]
    given = [[rows([of_rank], first_id=10 * i)] for i, of_rank in enumerate(lengths)]
    step = plan_step(given, FULL, stages=4)
    assert [microbatch.layouts[0].docs[0] for microbatch in step] == [30, 0, 10, 20]
    assert [microbatch.given_plans[0][0].layout.docs[0] for microbatch in step] == [
        0,
        10,
        20,
        30,
    ]


@given(lengths=st.lists(st.integers(1, 30), max_size=9), total=st.integers(0, 100))
def test_add_up_finds_what_adds_up(lengths, total):
    chosen = add_up(lengths, total)
    sums = {
        sum(some)
        for n in range(len(lengths) + 1)
        for some in itertools.combinations(lengths, n)
    }
    assert (chosen is None) == (total not in sums)
    if chosen is not None:
        assert len(set(chosen)) == len(chosen)
        assert sum(lengths[i] for i in chosen) == total


@pytest.mark.parametrize(
    ("workload", "microbatches", "most"), [("lognormal", 4, 0.5), ("uniform", 16, 0.3)]
)
def test_moves_far_less_than_within_microbatches(workload, microbatches, most):
    layouts = step_of(workload, 8, microbatches, seed=3)
    alone = moved_by(*(place_and_plan(layout, LLAMA)[0] for layout in layouts))
    placed = one_by_one(layouts)
    check(layouts, [plan.layout for plan, _ in placed])
    together = moved_by(*(plan for plan, _ in placed))
    assert together.total < most * alone.total
    assert together.worst < most * alone.worst


def test_microbatches_of_equal_documents_move_nothing():
    """One long document, and as many tokens of short ones: apart, no rank has more work than another."""
    long, short = [4096], [512] * 8
    layouts = [rows([long, short]), rows([short, long], first_id=100)]
    placed = one_by_one(layouts)
    assert moved_by(*(given_plan for _, given_plan in placed)).total > 0
    assert moved_by(*(plan for plan, _ in placed)).total == 0
    assert sorted(plan.layout.doc_lengths.tolist() for plan, _ in placed) == [
        [512] * 16,
        [4096] * 2,
    ]


def test_documents_that_do_not_add_up_stay():
    layouts = [rows([[1000], [900]]), rows([[700], [801]], first_id=10)]
    placed = one_by_one(layouts, PlannerConfig(min_shard=64, tile=64))
    assert [plan.layout.docs.tolist() for plan, _ in placed] == [[0, 1], [10, 11]]


def test_refuses_what_is_no_step():
    one = rows([[100], [100]])
    with refusal():
        one_by_one([one, one])
    with refusal():
        one_by_one([one, rows([[100]], first_id=5)])
    with refusal():
        one_by_one([])
    other = rows([[100], [100]], first_id=5)
    with refusal():
        plan_step([[one], [other, rows([[100], [100]], first_id=9)]], FULL)
    for stages in (-1, 0, 1.5, True):
        with refusal("stages", stages):
            plan_step([[one], [other]], FULL, stages=stages)
    wrong: list[tuple[Any, str]] = [
        ([[1]], "layout"),
        ([one], "microbatch"),
        (None, "given"),
    ]
    for step, key in wrong:
        with refusal(key, "="):
            plan_step(step, FULL)
    of_kinds: list[tuple[Any, str]] = [
        ([], "kinds"),
        ([LLAMA], "kind"),
        ([AttentionKind("chunked", 1, LLAMA, 64)] * 2, "columns"),
    ]
    for kinds, key in of_kinds:
        with refusal(key, "="):
            plan_step([[one]], kinds)


@pytest.mark.parametrize(
    "times",
    [None, LayerTimes(1e-9, 1e-7, 1e9, 1e9, 1e-5, overlaps=False)],
    ids=["bytes", "times"],
)
@pytest.mark.parametrize("place", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_has_no_tokens_stays_home(times, place, stages):
    empty, some = TokenLayout.from_segments([[], []]), rows([[700], [801]])
    step = plan_step([[empty], [empty]], FULL, times=times, place=place, stages=stages)
    assert [plan.config.planner for plan in plans_of(step)] == ["home", "home"]
    assert all(plan.layout is empty for plan in plans_of(step))
    step = plan_step([[empty], [some]], FULL, times=times, place=place, stages=stages)
    assert sorted(
        int(plan.layout.tokens_per_rank.sum()) for plan in plans_of(step)
    ) == [0, 1501]
