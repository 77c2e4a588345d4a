"""The estimate of placement: kept up to date by moves, it is that of the chunks as they then lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.planning.layouts import LLAMA
from torchtitan_cad.planning.placement.dealing import Chunks, Ranks, deal_short, give, make_state
from torchtitan_cad.planning.placement.estimate import attach, detach, estimate, lay_out, price_parts, restore, value
from torchtitan_cad.planning.placement.scratch import INTO, OUT, QUERIES, ROOM, link, make_scratch, unlink
from torchtitan_cad.planning.placement.search import Documents, _improve

parts_weights = st.sampled_from([0.0, 1.0])


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
    ranks = Ranks(np.full(num_ranks, 2**20), everywhere, np.ones(num_ranks), np.zeros(num_ranks, dtype=np.int64))
    prices = np.array([LLAMA.query_bytes, LLAMA.kv_bytes, 1.0, data.draw(parts_weights)])
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
    zero = np.zeros(num_ranks, dtype=np.int64)
    state = make_state(num_ranks)
    state.left[:] = room
    mean = sum(prefix[length // 128] for length in lengths) / num_ranks
    ranks = Ranks(room, np.full(num_ranks, 1.02 * mean), np.ones(num_ranks), zero)
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
    long = Documents(lengths, np.zeros(len(lengths)), np.arange(len(lengths)), none, prefix, units)
    prices = np.array([LLAMA.query_bytes, LLAMA.kv_bytes, 1 / 128**2, data.draw(parts_weights)])
    weights = np.array([1e-9, 1e-9, 1e12])
    random = np.array([data.draw(st.integers(0, 2**20))])
    count = _improve(long, 0.0, prices, ranks, state, chunks, count, order, scratch, weights, 60, random)
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


@pytest.mark.parametrize(("given_away", "left", "parts"), [(2.0, 0, 0), (2.25, 0, 0.25), (0, 1.0, 0), (0, 0.25, 0.125)])
def test_work_that_fills_no_room_costs_what_its_own_rectangle_does(
    given_away: float, left: float, parts: float
) -> None:
    """A quarter of a room takes half of the bytes of a whole one, a quarter too many; half of that where it is left."""
    room, prices = 1e6, np.array([16384.0, 4096.0, 0.5, 1.0])
    whole = 2 * np.sqrt(16384 * 4096 * room / 0.5)
    cost = price_parts(given_away * room, left * room, room, prices)
    assert cost == pytest.approx(parts * whole, abs=1e-6 * whole)


@pytest.mark.parametrize(("evenly", "homes"), [(True, [0, 1, 0, 1]), (False, [1, 1, 0, 0])])
def test_short_documents_go_evenly_or_to_the_rank_of_least_time(evenly: bool, homes: list[int]) -> None:
    """Two ranks with as much room, the first of which has work of its own."""
    lengths, units = np.array([1024, 1024, 256, 256]), np.array([128, 128, 128, 128])
    prefix = np.cumsum(np.arange(9)).astype(np.float64)
    state, ranks = make_state(2), Ranks(np.full(2, 2048), np.full(2, 1e9), np.ones(2), np.zeros(2, dtype=np.int64))
    give(state, ranks, 0, -2048, 1000.0)
    give(state, ranks, 1, -2048, 0.0)
    home = np.zeros(4, dtype=np.int64)
    deal_short(np.arange(4), lengths, prefix, units, 0.01, evenly, ranks, state, home)
    assert home.tolist() == homes
