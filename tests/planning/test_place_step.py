# SPDX-License-Identifier: BSD-3-Clause
"""Homes over the microbatches of an optimizer step, and over the nano-batches of a microbatch."""

import itertools
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA, lengths_summing_to
from tests.lib.refusals import refusal
from tests.lib.steps import TIMES, batch_of_rows, fingerprints, plans_of, seconds
from tests.lib.tables import check_plan
from tests.lib.workloads import document_lengths, spanning_layout
from tests.planning.test_kinds import check_pairs, kinds
from torchtitan_cad.planning import (
    AttentionKind,
    PlannerConfig,
    TokenLayout,
    place_and_plan,
    plan_step,
)
from torchtitan_cad.planning.arguments import holders
from torchtitan_cad.planning.exchange.traffic import Moved
from torchtitan_cad.planning.model.batch import BatchShape
from torchtitan_cad.planning.pipeline.one_f_one_b import in_stages
from torchtitan_cad.planning.placement.fill import add_up
from torchtitan_cad.planning.placement.microbatch import divide_documents
from torchtitan_cad.planning.plan import moved_by

FULL = [AttentionKind("full", 1, LLAMA)]
SMALL = PlannerConfig(min_shard=32, tile=32)


def rows(lengths, first_id=0):
    """One list of document lengths per rank."""
    ids = itertools.count(first_id)
    return TokenLayout.from_segments(
        [[(next(ids), 0, length) for length in of_rank] for of_rank in lengths]
    )


def documents(step):
    """All documents with their lengths."""
    found = []
    for layout in holders(step):
        found += zip(layout.docs.tolist(), layout.doc_lengths.tolist(), strict=True)
    return sorted(found)


def check_homes(loaded, homes):
    """The same documents, and on every rank as many tokens, and queries, of every nano-batch."""
    assert documents(loaded) == documents(homes)
    layouts = zip(chain(*loaded), chain(*homes), strict=True)
    for before, after in layouts:
        assert before.tokens_per_rank.tolist() == after.tokens_per_rank.tolist()
        assert before.queries_per_rank.tolist() == after.queries_per_rank.tolist()
    for nanos in homes:
        for earlier, later in itertools.pairwise(nanos):
            if not later.seg_attends.all():
                check_halves(earlier, later)


def check_halves(earlier, later):
    """The later one holds the tokens of the earlier one first on every rank, as keys only."""
    for rank, segments in enumerate(later.segments()):
        attends = later.seg_attends[later.seg_rank == rank].tolist()
        assert attends == sorted(attends)
        assert segments[: attends.count(False)] == earlier.segments()[rank]


FORMS = [(1, 2), (2, 2), (2, 1)]
"""Nano-batches, and rows of every rank: one, halves of rows, and halves in the middle of rows."""


@settings(max_examples=settings.default.max_examples // 5)
@given(
    form=st.sampled_from(FORMS),
    ranks=st.integers(1, 3),
    microbatches=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=9),
    others=st.lists(kinds, max_size=1),
    times=st.sampled_from(
        [None, TIMES, replace(TIMES, bytes_per_second=1e12, exchange=0.0)]
    ),
    stages=st.integers(1, 2),
)
def test_every_form_of_microbatch(
    form, ranks, microbatches, lengths, others, times, stages
):
    nano_batches, rows_each = form
    shape = BatchShape(rows_each * microbatches, 128, rows_each)
    layouts, columns = batch_of_rows(lengths, ranks, shape, nano_batches)
    every = [*FULL, *others]

    def plan(place):
        return plan_step(
            layouts, every, SMALL, times, columns=columns, place=place, stages=stages
        )

    step = plan(place=True)
    check_homes(layouts, [microbatch.layouts for microbatch in step])
    again = plan(place=True)
    homes = [home for microbatch in step for home in microbatch.layouts]
    for number, kind in enumerate(every):
        assert fingerprints(step, number) == fingerprints(again, number)
        for planned, home in zip(plans_of(step, number), homes, strict=True):
            check_plan(planned)
            check_pairs(planned, home, kind, columns)
    stay = plan(place=False)
    numbers = range(len(every))
    if times is not None:
        after = sum(seconds(step, times, stages, kind=n) for n in numbers)
        assert after <= sum(seconds(stay, times, stages, kind=n) for n in numbers)
    elif stages == 1:
        after = np.sum([moved_by(*plans_of(step, n)) for n in numbers], axis=0)
        before = np.sum([moved_by(*plans_of(stay, n)) for n in numbers], axis=0)
        assert (after == before).all() or Moved(*after).score(Moved(*before)) < 3


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


@pytest.mark.parametrize("times", [None, TIMES])
def test_stages_run_as_fast_as_with_microbatches_of_equal_work(times):
    given_step = []
    for number, length in enumerate((2048, 1024, 512, 256) * 2):
        lengths = [length] * (8192 // length)
        given_step.append([rows([lengths] * 4, first_id=1000 * number)])

    def over_equal(step):
        work = np.array([plan.stats.mean_load for plan in plans_of(step)])
        equal = 2 * work.mean() * (len(work) + 3)
        return in_stages(work, 4, work.mean()) / equal

    assert over_equal(plan_step(given_step, FULL, times=times, place=False)) > 1.1
    assert over_equal(plan_step(given_step, FULL, times=times, stages=4)) < 1.0


def test_a_pipeline_fills_and_drains_by_light_microbatches():
    """No documents of other microbatches add up to these tokens."""
    lengths = [9600], [3210, 6390], [5000, 4600], [2500, 2530, 4570]
    given_step = [[rows([of_rank], 10 * i)] for i, of_rank in enumerate(lengths)]
    step = plan_step(given_step, FULL, stages=4)
    first_docs = [plan.layout.docs[0] for plan in plans_of(step)]
    assert sorted(first_docs) == [0, 10, 20, 30]
    assert first_docs.index(0) in (1, 2)
    assert first_docs.index(30) in (0, 3)


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


def test_moves_far_less_than_within_microbatches():
    layouts = []
    for number in range(4):
        lengths = document_lengths("lognormal", 8, seed=300 + number)
        segments = spanning_layout(lengths, 8).segments()
        held = [[length for *_, length in of_rank] for of_rank in segments]
        layouts.append(rows(held, first_id=1000 * number))
    alone = moved_by(*(place_and_plan(layout, LLAMA) for layout in layouts))
    together = moved_by(*plans_of(plan_step([[layout] for layout in layouts], FULL)))
    assert together.total < 0.5 * alone.total
    assert together.worst < 0.5 * alone.worst


def test_refuses_what_is_no_step():
    one = rows([[100], [100]])
    other = rows([[100], [100]], first_id=5)
    another = rows([[100], [100]], first_id=9)
    one_rank = rows([[100]], first_id=5)
    for step in ([[one], [one]], [[one], [one_rank]], [], [[one], [other, another]]):
        with refusal():
            plan_step(step, FULL)
    with refusal("stages", 0):
        plan_step([[one]], FULL, stages=0)
    chunked = [AttentionKind("chunked", 1, LLAMA, 64)] * 2
    for kinds_of_model, key in (([], "kinds"), (chunked, "columns")):
        with refusal(key, "="):
            plan_step([[one]], kinds_of_model)


@pytest.mark.parametrize("times", [None, replace(TIMES, overlaps=False)])
@pytest.mark.parametrize("stages", [1, 2])
def test_what_has_no_tokens_stays_home(times, stages):
    empty = TokenLayout.from_segments([[], []])
    some = rows([[700], [801]])

    def plans(*layouts):
        step = [[layout] for layout in layouts]
        return plans_of(plan_step(step, FULL, times=times, stages=stages))

    for plan in plans(empty, empty):
        assert plan.layout is empty
    tokens = [plan.layout.num_tokens for plan in plans(empty, some)]
    assert sorted(tokens) == [0, 1501]
