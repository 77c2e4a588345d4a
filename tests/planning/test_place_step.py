# SPDX-License-Identifier: BSD-3-Clause
"""Homes over the microbatches of an optimizer step, and over the nano-batches of a microbatch."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA, contiguous, lengths_summing_to
from tests.lib.refusals import refusal
from tests.lib.steps import TIMES, batch_of_rows, fingerprints, plans_of, seconds
from tests.lib.workloads import document_lengths, spanning_layout
from torchtitan_cad.planning import (
    AttentionKind,
    Plan,
    PlannedMicrobatch,
    PlannerConfig,
    TokenLayout,
    make_plan,
    place_and_plan,
    plan_step,
    validate_plan,
)
from torchtitan_cad.planning.arguments import holders
from torchtitan_cad.planning.model.batch import BatchShape
from torchtitan_cad.planning.pipeline.one_f_one_b import in_stages
from torchtitan_cad.planning.placement.fill import add_up
from torchtitan_cad.planning.placement.microbatch import (
    divide_documents,
    place_microbatch,
    stay_home,
)
from torchtitan_cad.planning.plan import moved_by

FULL = [AttentionKind("full", 1, LLAMA)]
SMALL = PlannerConfig(min_shard=64, tile=64)


def one_by_one(
    layouts: list[TokenLayout], config: PlannerConfig | None = None
) -> tuple[list[Plan], list[Plan]]:
    """Place a step of microbatches of one layout by bytes; plans, and plans for the given homes."""
    step = plan_step([[layout] for layout in layouts], FULL, config)
    return plans_of(step), [microbatch.given_plans[0][0] for microbatch in step]


def rows(lengths: list[list[int]], first_id: int = 0) -> TokenLayout:
    """One list of document lengths per rank."""
    ids = itertools.count(first_id)
    return TokenLayout.from_segments(
        [[(next(ids), 0, length) for length in of_rank] for of_rank in lengths]
    )


def documents(step: list[list[TokenLayout]]) -> list[tuple[int, int]]:
    """All documents with their lengths."""
    found = []
    for layout in holders(step):
        found += zip(layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True)
    return sorted(found)


def check_homes(
    loaded: list[list[TokenLayout]], homes: list[list[TokenLayout]]
) -> None:
    """The same documents, and on every rank as many tokens, and queries, of every nano-batch."""
    assert documents(loaded) == documents(homes)
    layouts = zip(chain(*loaded), chain(*homes), strict=True)
    for before, after in layouts:
        assert before.tokens_per_rank.tolist() == after.tokens_per_rank.tolist()
        assert before.queries_per_rank.tolist() == after.queries_per_rank.tolist()
    for nanos in homes:
        if not nanos[-1].seg_attends.all():
            check_halves(nanos[0], nanos[1])


def check_halves(earlier: TokenLayout, later: TokenLayout) -> None:
    """The later one holds the tokens of the earlier one first on every rank, as keys only."""
    for rank, segments in enumerate(later.segments()):
        attends = later.seg_attends[later.seg_rank == rank].tolist()
        assert attends == sorted(attends)
        assert segments[: attends.count(False)] == earlier.segments()[rank]


def check_bytes(plans: Sequence[Plan], given_plans: Sequence[Plan]) -> None:
    """Plans are those of the given homes, or move less."""
    before = moved_by(*given_plans)
    after = moved_by(*plans)
    assert after == before or after.score(before) < before.score(before)


@st.composite
def steps(draw: st.DrawFn) -> list[TokenLayout]:
    """Microbatches of documents of any lengths, some longer than any rank's capacity, in rows of unequal lengths."""
    ranks = draw(st.integers(1, 6))
    layouts = []
    for number in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 600), min_size=1, max_size=12))
        cut = st.integers(0, sum(lengths))
        cuts = draw(st.lists(cut, min_size=ranks - 1, max_size=ranks - 1))
        capacities = np.diff([0, *sorted(cuts), sum(lengths)]).tolist()
        segments = contiguous(lengths, capacities, first_id=100 * number)
        layouts.append(TokenLayout.from_segments(segments))
    return layouts


@settings(max_examples=settings.default.max_examples // 5)
@given(layouts=steps())
def test_every_step(layouts):
    plans, given_plans = one_by_one(layouts, SMALL)
    check_homes([[layout] for layout in layouts], [[plan.layout] for plan in plans])
    check_bytes(plans, given_plans)
    for plan, given_plan, layout in zip(plans, given_plans, layouts, strict=True):
        validate_plan(plan)
        in_place = make_plan(layout, LLAMA, SMALL)
        assert given_plan.fingerprint() == in_place.fingerprint()
    again, _ = one_by_one(layouts, SMALL)
    assert [plan.fingerprint() for plan in again] == [
        plan.fingerprint() for plan in plans
    ]


KINDS = {
    "one": (1, 2),
    "halves of rows": (2, 2),
    "halves in the middle of rows": (2, 1),
}
"""Kinds of microbatches: nano-batches, and rows of every rank."""


def batch(
    kind: str, ranks: int, microbatches: int, lengths: list[int]
) -> list[list[TokenLayout]]:
    """Microbatches of rows of 256 tokens."""
    nano_batches, rows_each = KINDS[kind]
    shape = BatchShape(rows_each * microbatches, 256, rows_each)
    step, _ = batch_of_rows(lengths, ranks, shape, nano_batches)
    return step


document_lists = st.lists(st.integers(1, 300), min_size=1, max_size=9)


@settings(max_examples=settings.default.max_examples // 5)
@given(
    kind=st.sampled_from(list(KINDS)),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 3),
    lengths=document_lists,
    times=st.sampled_from(
        [None, TIMES, replace(TIMES, bytes_per_second=1e12, exchange=0.0)]
    ),
    stages=st.integers(1, 2),
)
def test_every_kind_of_microbatch(kind, ranks, microbatches, lengths, times, stages):
    given_step = batch(kind, ranks, microbatches, lengths)
    step = plan_step(given_step, FULL, SMALL, times, stages=stages)
    check_homes(given_step, [microbatch.layouts for microbatch in step])
    for plan in plans_of(step):
        validate_plan(plan)
    again = plan_step(given_step, FULL, SMALL, times, stages=stages)
    assert fingerprints(again) == fingerprints(step)
    if times is not None:
        home = [stay_home(nanos, LLAMA, SMALL) for nanos in given_step]
        assert seconds(step, times, stages) <= seconds(home, times, stages)


@settings(max_examples=10)
@given(
    ranks=st.integers(1, 12),
    lengths=document_lists,
    min_shard=st.sampled_from([1, 64, 128]),
)
def test_every_pair_of_nano_batches(ranks, lengths, min_shard):
    config = PlannerConfig(min_shard=min_shard)
    (halves,) = batch("halves in the middle of rows", ranks, 1, lengths)
    made = place_microbatch(halves, LLAMA, config)
    check_homes([halves], [made.layouts])
    check_bytes(made.plans[0], made.given_plans[0])
    for plan in made.plans[0]:
        validate_plan(plan)
        in_place = make_plan(plan.layout, LLAMA, config)
        assert plan.fingerprint() == in_place.fingerprint()
    again = place_microbatch(halves, LLAMA, config)
    assert fingerprints([again]) == fingerprints([made])


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=30), data=st.data())
def test_nano_batches_are_full_and_cut_one_document(lengths, data):
    capacity = data.draw(st.integers(0, sum(lengths)))
    begun = divide_documents(np.array(lengths), capacity)
    assert begun.sum() == capacity
    is_cut = (begun > 0) & (begun < lengths)
    assert is_cut.sum() <= 1
    assert (begun <= lengths).all()


def test_nano_batches_have_nearly_equal_attention():
    lengths = np.array(lengths_summing_to(np.random.default_rng(0), 2**18, 2000))
    begun = divide_documents(lengths, 2**17)
    earlier = (begun**2).sum()
    later = (lengths**2 - begun**2).sum()
    assert abs(earlier - later) < 0.02 * (earlier + later)


def test_documents_that_end_in_the_middle_of_rows_no_longer_do():
    """Rows of one document each, but for one of short ones: the later need not read keys of the earlier."""
    lengths = [4096] * 2 + [128] * 64
    halves, _ = batch_of_rows(lengths, 4, BatchShape(1, 4096, 1), 2)
    later = place_microbatch(halves[0], LLAMA, PlannerConfig()).layouts[1]
    assert later is not halves[0][1]
    keys_only = later.seg_doc[~later.seg_attends]
    assert not set(keys_only) & set(later.seg_doc[later.seg_attends])


@pytest.mark.parametrize("times", [None, TIMES])
@pytest.mark.parametrize("ranks", [1, 4])
def test_stages_run_as_fast_as_with_microbatches_of_equal_work(ranks, times):
    given_step = []
    for number, length in enumerate((2048, 1024, 512, 256) * 2):
        lengths = [length] * (8192 // length)
        given_step.append([rows([lengths] * ranks, first_id=1000 * number)])

    def over_equal(step: list[PlannedMicrobatch]) -> float:
        work = np.array([plan.stats.mean_load for plan in plans_of(step)])
        equal = 2 * work.mean() * (len(work) + 3)
        return in_stages(work, 4, work.mean()) / equal

    assert over_equal(plan_step(given_step, FULL, times=times, place=False)) > 1.1
    step = plan_step(given_step, FULL, times=times, stages=4)
    assert over_equal(step) < 1.0
    if ranks == 1:  # no copies
        for plan in plans_of(step):
            assert (np.diff(plan.exchange(0).causal.q_rows) == 1).all()


def test_a_pipeline_fills_and_drains_by_light_microbatches():
    """No documents of other microbatches add up to these tokens."""
    lengths = [9600], [3210, 6390], [5000, 4600], [2500, 2530, 4570]
    given_step = [[rows([of_rank], 10 * i)] for i, of_rank in enumerate(lengths)]
    step = plan_step(given_step, FULL, stages=4)
    assert [plan.layout.docs[0] for plan in plans_of(step)] == [30, 0, 10, 20]
    given_plans = [microbatch.given_plans[0][0] for microbatch in step]
    assert [plan.layout.docs[0] for plan in given_plans] == [0, 10, 20, 30]


@given(lengths=st.lists(st.integers(1, 30), max_size=9), total=st.integers(0, 100))
def test_add_up_finds_what_adds_up(lengths, total):
    lengths.sort()
    chosen = add_up(lengths, total)
    sums = {0}
    for length in lengths:
        sums |= {length + other for other in sums}
    assert (chosen is None) == (total not in sums)
    if chosen is not None:
        assert len(set(chosen)) == len(chosen)
        assert sum(lengths[i] for i in chosen) == total


def test_add_up_of_many_equal_lengths_needs_little_memory():
    """Padding of end-of-document tokens is documents of one token: 33,000 sums of 33,000 bits would be 130 MB."""
    lengths = [1] * 33_000 + [7] * 1000
    tracemalloc.start()
    chosen = add_up(lengths, 33_333)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert chosen is not None
    assert sum(lengths[i] for i in chosen) == 33_333
    assert most_bytes < 2**23


@pytest.mark.parametrize(
    ("workload", "microbatches", "most"), [("lognormal", 4, 0.5), ("uniform", 16, 0.3)]
)
def test_moves_far_less_than_within_microbatches(workload, microbatches, most):
    layouts = []
    for number in range(microbatches):
        lengths = document_lengths(workload, 8, seed=300 + number)
        segments = spanning_layout(lengths, 8).segments()
        held = [[length for *_, length in of_rank] for of_rank in segments]
        layouts.append(rows(held, first_id=1000 * number))
    alone = moved_by(*(place_and_plan(layout, LLAMA)[0] for layout in layouts))
    plans, _ = one_by_one(layouts)
    together = moved_by(*plans)
    assert together.total < most * alone.total
    assert together.worst < most * alone.worst


def test_refuses_what_is_no_step():
    one = rows([[100], [100]])
    other = rows([[100], [100]], first_id=5)
    another = rows([[100], [100]], first_id=9)
    one_rank = rows([[100]], first_id=5)
    for step in ([[one], [one]], [[one], [one_rank]], [], [[one], [other, another]]):
        with refusal():
            plan_step(step, FULL)
    for stages in (-1, 0, 1.5, True):
        with refusal("stages", stages):
            plan_step([[one], [other]], FULL, stages=stages)
    for step, key in (([[1]], "layout"), ([one], "microbatch"), (None, "microbatches")):
        with refusal(key, "="):
            plan_step(step, FULL)
    chunked = [AttentionKind("chunked", 1, LLAMA, 64)] * 2
    for kinds, key in (([], "kinds"), ([LLAMA], "kind"), (chunked, "columns")):
        with refusal(key, "="):
            plan_step([[one]], kinds)


@pytest.mark.parametrize("times", [None, replace(TIMES, overlaps=False)])
@pytest.mark.parametrize("place", [True, False])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_has_no_tokens_stays_home(times, place, stages):
    empty = TokenLayout.from_segments([[], []])
    some = rows([[700], [801]])

    def plans(*layouts: TokenLayout) -> list[Plan]:
        step = [[layout] for layout in layouts]
        return plans_of(plan_step(step, FULL, times=times, place=place, stages=stages))

    for plan in plans(empty, empty):
        assert plan.config.planner == "home"
        assert plan.layout is empty
    tokens = [plan.layout.num_tokens for plan in plans(empty, some)]
    assert sorted(tokens) == [0, 1501]
