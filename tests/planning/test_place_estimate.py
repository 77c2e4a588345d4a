"""The estimate of placement: kept up to date by moves, it is that of the chunks as they then lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planning.layouts import LLAMA
from torchtitan_cad.planning.placement.chunks import Chunks, Ranks, deal_short, give, make_state
from torchtitan_cad.planning.placement.estimate import attach, detach, estimate, lay_out, restore, value
from torchtitan_cad.planning.placement.moves import ENTRIES, Dealing, Documents
from torchtitan_cad.planning.placement.scratch import INTO, OUT, QUERIES, ROOM, link, make_scratch, unlink
from torchtitan_cad.planning.placement.search import accept


@given(
    documents=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=1, max_size=4),
    num_ranks=st.integers(2, 5),
    data=st.data(),
)
def test_moves_keep_the_sums(documents: list[list[int]], num_ranks: int, data: st.DataObject) -> None:
    parts = [
        (doc, 128 * sum(lengths[:k]), 128 * lengths[k])
        for doc, lengths in enumerate(documents)
        for k in range(len(lengths))
    ]
    doc, start, length = np.array(parts, dtype=np.int64).T.copy()
    work = (length * (start + length / 2)).astype(np.float64)
    rank = st.integers(0, num_ranks - 1)
    homes = np.array([data.draw(rank) for _ in parts], dtype=np.int64)
    chunks, order = Chunks(doc, start, length, work, homes), np.arange(len(parts))
    load = np.bincount(homes, work, num_ranks)
    everywhere = np.full(num_ranks, 1.02 * load.mean())
    ranks = Ranks(np.full(num_ranks, 2**20), everywhere, np.ones(num_ranks))
    prices = np.array([LLAMA.query_bytes, LLAMA.kv_bytes, 1.0])
    scratch, fresh = make_scratch(num_ranks, len(parts)), make_scratch(num_ranks, len(parts))
    estimate(chunks, len(parts), order, load, ranks, prices, scratch)
    for _ in range(5):
        i, to = data.draw(st.integers(0, len(parts) - 1)), data.draw(rank)
        home = int(chunks.rank[i])
        if to == home:
            continue
        detach(chunks, i, -1, prices, scratch)
        unlink(scratch, i, home)
        link(scratch, i, to)
        chunks.rank[i] = to
        load[home] -= work[i]
        load[to] += work[i]
        attach(chunks, i, -1, home, to, ranks, load, prices, scratch)
        if data.draw(st.booleans()):  # back
            restore(home, to, scratch)
            unlink(scratch, i, to)
            link(scratch, i, home)
            chunks.rank[i] = home
            load[home] += work[i]
            load[to] -= work[i]
    fresh.sums[ROOM] = scratch.sums[ROOM]
    lay_out(chunks, len(parts), order, load, ranks, prices, fresh)
    assert value(ranks, load, scratch) == pytest.approx(value(ranks, load, fresh), rel=1e-9, abs=1e-3)
    for column in (INTO, OUT, QUERIES):
        assert scratch.figures[:, column] == pytest.approx(fresh.figures[:, column], rel=1e-9, abs=1.0)


@settings(max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=4),
    num_ranks=st.integers(2, 5),
    data=st.data(),
)
def test_the_search_keeps_tokens_loads_and_sums(
    documents: list[list[int]], num_ranks: int, data: st.DataObject
) -> None:
    """Chunks are split and joined, too: after it they cover the documents, and all figures are those of the chunks."""
    lengths = np.array([128 * sum(cells) for cells in documents])
    prefix = np.cumsum(np.arange(lengths.max() // 128 + 1)).astype(np.float64)  # work of so many tiles
    chunks = Chunks(*np.zeros((3, 64), dtype=np.int64), np.zeros(64), np.zeros(64, dtype=np.int64))
    count, room = 0, np.full(num_ranks, 128 * 200)
    state = make_state(num_ranks)
    state.left[:] = room
    mean = sum(prefix[length // 128] for length in lengths) / num_ranks
    ranks = Ranks(room, np.full(num_ranks, 1.02 * mean), np.ones(num_ranks))
    for doc, cells in enumerate(documents):
        start = 0
        for tokens in (128 * each for each in cells):
            rank, work = (
                data.draw(st.integers(0, num_ranks - 1)),
                prefix[(start + tokens) // 128] - prefix[start // 128],
            )
            for column, figure in zip(chunks, (doc, start, tokens, work, rank), strict=True):
                column[count] = figure
            give(state, ranks, rank, tokens, work)
            state.chunks[rank] += 1
            start, count = start + tokens, count + 1
    assume(count > 1)  # otherwise nothing is estimated
    order, scratch, none = np.zeros(64, dtype=np.int64), make_scratch(num_ranks, 64), np.zeros(0, dtype=np.int64)
    order[:count] = np.arange(count)
    units = np.array([128, 128, 256, 4096])
    long = Documents(lengths, np.zeros(len(lengths)), np.arange(len(lengths)), none, prefix, units, np.zeros(1))
    prices = np.array([LLAMA.query_bytes, LLAMA.kv_bytes, 1 / 128**2])
    weights = np.array([1e-9, 1e-9, 1e12])
    random = np.array([data.draw(st.integers(0, 2**20))])
    dealing = Dealing(long, ranks, state, chunks, scratch, prices)
    count = accept(dealing, count, order, weights, 60, random, np.zeros(ENTRIES, dtype=np.int64))
    order = np.lexsort((chunks.start[:count], chunks.doc[:count]))
    kept = [i for i in order.tolist() if chunks.rank[i] >= 0]
    for doc, length in enumerate(lengths.tolist()):
        mine = [i for i in kept if chunks.doc[i] == doc]
        assert [chunks.start[i] for i in mine] == [0, *np.cumsum([chunks.length[i] for i in mine])[:-1]]
        assert sum(chunks.length[i] for i in mine) == length
    rank, length = chunks.rank[kept], chunks.length[kept]
    assert (state.left == room - np.bincount(rank, length, num_ranks)).all()
    assert state.chunks.tolist() == np.bincount(rank, minlength=num_ranks).tolist()
    assert state.load == pytest.approx(np.bincount(rank, chunks.work[kept], num_ranks))
    fresh = make_scratch(num_ranks, 64)
    fresh.sums[ROOM] = scratch.sums[ROOM]
    lay_out(chunks, count, order, state.load, ranks, prices, fresh)
    total, worst = value(ranks, state.load, scratch)
    assert (total, worst) == pytest.approx(value(ranks, state.load, fresh), rel=1e-9, abs=1e-3)


@pytest.mark.parametrize(("evenly", "homes"), [(True, [0, 1, 0, 1]), (False, [1, 1, 0, 0])])
def test_short_documents_go_evenly_or_to_the_rank_of_least_time(evenly: bool, homes: list[int]) -> None:
    """Two ranks with as much room, the first of which has work of its own."""
    lengths, units = np.array([1024, 1024, 256, 256]), np.array([128, 128, 128, 128])
    prefix = np.cumsum(np.arange(9)).astype(np.float64)
    state, ranks = make_state(2), Ranks(np.full(2, 2048), np.full(2, 1e9), np.ones(2))
    give(state, ranks, 0, -2048, 1000.0)
    give(state, ranks, 1, -2048, 0.0)
    home = np.zeros(4, dtype=np.int64)
    deal_short(np.arange(4), lengths, prefix, units, 0.01, evenly, ranks, state, home)
    assert home.tolist() == homes
