# SPDX-License-Identifier: BSD-3-Clause
"""Homes of two nano-batches: the same tokens, as many of each on every rank, documents whole where they fit."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA, lengths_summing_to
from torchtitan_cad.planning import PlannerConfig, TokenLayout, make_plan, validate_plan
from torchtitan_cad.planning.placement.microbatch import (
    divide_documents,
    place_microbatch,
)
from torchtitan_cad.planning.plan import moved_by


def rows_cut_in_the_middle(lengths: list[list[int]]) -> tuple[TokenLayout, TokenLayout]:
    """One row of documents per rank, all rows equally long."""
    earlier: list[list[tuple[int, int, int]]] = []
    every: list[list[tuple[int, int, int]]] = []
    attends: list[bool] = []
    doc = 0
    for row in lengths:
        ends, middle = np.cumsum(row), sum(row) // 2
        nano_batches: list[list[tuple[int, int, int]]] = [[], []]
        for length, end in zip(row, ends.tolist(), strict=True):
            begun = min(length, max(0, middle - (end - length)))
            nano_batches[0] += [(doc, 0, begun)] * (begun > 0)
            nano_batches[1] += [(doc, begun, length - begun)] * (begun < length)
            doc += 1
        earlier.append(nano_batches[0])
        every.append(nano_batches[0] + nano_batches[1])
        attends += [False] * len(nano_batches[0]) + [True] * len(nano_batches[1])
    return TokenLayout.from_segments(earlier), TokenLayout.from_segments(every, attends)


@settings(max_examples=10)
@given(
    num_ranks=st.integers(1, 12),
    tokens=st.integers(2, 2500),
    typical=st.floats(1, 3000),
    min_shard=st.sampled_from([1, 64, 128]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_pair_of_nano_batches(num_ranks, tokens, typical, min_shard, seed):
    rng = np.random.default_rng(seed)
    given_nano_batches = rows_cut_in_the_middle(
        [lengths_summing_to(rng, tokens, typical) for _ in range(num_ranks)]
    )
    config = PlannerConfig(min_shard=min_shard)
    made = place_microbatch(given_nano_batches, LLAMA, config)
    placed = tuple(made.layouts)
    for old, new in zip(given_nano_batches, placed, strict=True):
        assert new.tokens_per_rank.tolist() == old.tokens_per_rank.tolist()
        assert new.queries_per_rank.tolist() == old.queries_per_rank.tolist()
    earlier, every = placed
    assert every.docs.tolist() == given_nano_batches[1].docs.tolist()
    assert every.doc_lengths.tolist() == given_nano_batches[1].doc_lengths.tolist()
    for rank, segments in enumerate(every.segments()):
        mine = every.seg_attends[every.seg_rank == rank].tolist()
        assert mine == sorted(mine)
        assert [
            s for s, attends in zip(segments, mine, strict=True) if not attends
        ] == earlier.segments()[rank]
    plans, before = (
        [make_plan(layout, LLAMA, config) for layout in pair]
        for pair in (placed, given_nano_batches)
    )
    for plan, other, found, given_plan in zip(
        plans, before, *made.plans, *made.given_plans, strict=True
    ):
        validate_plan(plan)
        assert found.fingerprint() == plan.fingerprint()
        assert given_plan.fingerprint() == other.fingerprint()
    after, moved = moved_by(*plans), moved_by(*before)
    assert after == moved or after.score(moved) < moved.score(moved)
    again = place_microbatch(given_nano_batches, LLAMA, config)
    assert [layout.segments() for layout in again.layouts] == [
        layout.segments() for layout in placed
    ]


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=30), data=st.data())
def test_nano_batches_are_full_and_cut_one_document(lengths, data):
    capacity = data.draw(st.integers(0, sum(lengths)))
    begun = divide_documents(np.array(lengths), capacity)
    assert begun.sum() == capacity
    cut = (begun > 0) & (begun < lengths)
    assert cut.sum() <= 1
    assert (begun <= lengths).all()


def test_nano_batches_have_nearly_equal_attention():
    lengths = np.array(lengths_summing_to(np.random.default_rng(0), 2**18, 2000))
    begun = divide_documents(lengths, 2**17)
    earlier, later = (begun**2).sum(), (lengths**2 - begun**2).sum()
    assert abs(earlier - later) < 0.02 * (earlier + later)


def test_documents_that_end_in_the_middle_of_rows_no_longer_do():
    """Rows of one document each, but for one of short ones: the later need not read keys of the earlier."""
    rows = [[4096]] * 2 + [[128] * 32] * 2
    nano_batches = rows_cut_in_the_middle(rows)
    every = place_microbatch(nano_batches, LLAMA, PlannerConfig()).layouts[1]
    assert every is not nano_batches[1]
    keys_only = every.seg_doc[~every.seg_attends]
    assert not set(keys_only.tolist()) & set(every.seg_doc[every.seg_attends].tolist())
