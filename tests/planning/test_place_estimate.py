"""The estimate of placement: kept up to date by moves, it is that of the chunks as they then lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.layouts import LLAMA
from torchtitan_cad.planning.placement.dealing import Chunks, Ranks
from torchtitan_cad.planning.placement.estimate import (
    ROOM,
    SCALE,
    Scratch,
    attach,
    detach,
    estimate,
    lay_out,
    link,
    unlink,
    value,
)


def make_scratch(num_ranks: int, count: int) -> Scratch:
    by_rank, by_chunk = np.zeros((4, num_ranks)), np.zeros((3, count))
    numbers = np.zeros((4, count), dtype=np.int64)
    return Scratch(*by_rank, np.zeros(num_ranks, dtype=np.int64), *by_chunk, *numbers, np.zeros(4))


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
    prices = np.array([LLAMA.query_bytes, LLAMA.kv_bytes, 1.0, 0.5])
    scratch, fresh = make_scratch(num_ranks, len(parts)), make_scratch(num_ranks, len(parts))
    estimate(chunks, len(parts), order, load, ranks, prices, scratch)
    for _ in range(5):
        i, to = data.draw(st.integers(0, len(parts) - 1)), data.draw(rank)
        home = int(chunks.rank[i])
        if to == home:
            continue
        detach(chunks, order, home, to, ranks, load, prices, scratch)
        unlink(scratch, i, home)
        link(scratch, i, to)
        chunks.rank[i] = to
        load[home] -= work[i]
        load[to] += work[i]
        attach(chunks, order, home, to, ranks, load, prices, scratch)
    for entry in (ROOM, SCALE):
        fresh.sums[entry] = scratch.sums[entry]
    lay_out(chunks, len(parts), order, load, ranks, prices, fresh)
    assert value(ranks, load, scratch) == pytest.approx(value(ranks, load, fresh), rel=1e-9, abs=1e-3)
    for kept, anew in ((scratch.into, fresh.into), (scratch.out, fresh.out)):
        assert kept == pytest.approx(anew, rel=1e-9, abs=1.0)
