# SPDX-License-Identifier: BSD-3-Clause
"""The search for homes: moves keep the figures up to date, and lower the objective."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA
from torchtitan_cad.planning.placement.chunks import (
    MOST_CHUNKS,
    Chunks,
    Work,
    assign,
    cut_documents,
    make_chunks,
)
from torchtitan_cad.planning.placement.estimate import Prices, estimate, estimate_rank
from torchtitan_cad.planning.placement.home_search import improve

GRID = 128


def work_of_documents(lengths: np.ndarray) -> Work:
    prefix = np.cumsum(np.arange(lengths.max() // GRID + 1)).astype(np.float64)
    return Work(tile=GRID, prefix=prefix, per_pair=1 / GRID**2, per_token=0.5)


def assigned(lengths: np.ndarray, work: Work, capacities: np.ndarray, longest: int):
    """Segments [4, n] of the documents, assigned."""
    segments = np.zeros((int(lengths.sum()) // GRID + len(capacities), 4), np.int64)
    bounds = np.array([GRID, 2 * GRID, longest * GRID])
    docs = np.arange(len(lengths))
    count = cut_documents(docs, lengths, work, bounds, np.inf, segments)
    order = np.arange(count)
    load = work.per_token * capacities
    scratch = np.zeros((2, len(capacities)), np.int64)
    count = assign(segments, order, count, work, GRID, capacities.copy(), load, scratch)
    segments = segments[:count].T
    return segments[:, np.lexsort((segments[2], segments[1]))]


@settings(max_examples=60)
@given(
    cells=st.lists(st.integers(4, 40), min_size=2, max_size=4),
    num_ranks=st.integers(2, 5),
    longest=st.integers(4, 20),
    seed=st.integers(0, 2**20),
)
def test_moves_keep_tokens_and_figures(cells, num_ranks, longest, seed):
    lengths = GRID * np.array(cells)
    work = work_of_documents(lengths)
    capacities = np.full(num_ranks, GRID * (3 * sum(cells) // (2 * num_ranks) + 1))
    segments = assigned(lengths, work, capacities, longest)
    assume((segments[0] >= 0).all())  # a rank takes MOST_CHUNKS at most
    assert np.bincount(segments[1], segments[3]).tolist() == lengths.tolist()
    prices = Prices(
        limit=1.02 * float(work.prefix[cells].sum()) / num_ranks,
        per_pair=work.per_pair,
        query_bytes=float(LLAMA.query_bytes),
        key_bytes=float(LLAMA.kv_bytes),
        typical=10.0,
        help=np.zeros(1),
        worst_weight=0.4,
        spare=0.4,
    )
    chunks = make_chunks(segments.copy(), capacities, work)
    before = estimate(make_chunks(segments.copy(), capacities, work), prices)
    scratch = np.zeros((2, 2, 3), dtype=np.int64)
    improve(chunks, work, prices, 0.0, 300, GRID, np.array([seed]), scratch)

    again = np.stack([chunks.rank, chunks.doc, chunks.start, chunks.length])
    ends = chunks.start + chunks.length
    is_first = chunks.start == 0
    assert (is_first[1:] | (chunks.start[1:] == ends[:-1])).all()
    assert np.bincount(chunks.doc, chunks.length).tolist() == lengths.tolist()
    assert (chunks.free >= 0).all()
    assert (chunks.num_held <= MOST_CHUNKS).all()
    check_figures(chunks, make_chunks(again, capacities, work), prices)
    assert estimate(chunks, prices) <= 1.01 * before  # the price of help changes


def check_figures(chunks: Chunks, anew: Chunks, prices: Prices) -> None:
    """The figures of moved chunks are those of the same chunks counted anew."""
    assert chunks.free.tolist() == anew.free.tolist()
    assert chunks.load == pytest.approx(anew.load)
    for rank in range(len(anew.num_held)):
        count = anew.num_held[rank]
        members = chunks.members[rank, : chunks.num_held[rank]]
        assert sorted(members) == sorted(anew.members[rank, :count])
        estimate_rank(anew, prices, rank)
    assert chunks.num_bytes == pytest.approx(anew.num_bytes)
    assert chunks.power == pytest.approx(anew.power)
