# SPDX-License-Identifier: BSD-3-Clause
"""What thousands of GPUs need: nothing is computed twice or in vain, and the figures stay what they were."""

import time

import numpy as np
import pytest

from tests.lib.sets import params
from tests.lib.simulation_cases import KINDS, inputs, step
from torchtitan_cad.planning.placement.fill import fill
from torchtitan_cad.tools.main import main
from torchtitan_cad.tools.simulation.baselines import _of_ranks, packed
from torchtitan_cad.tools.simulation.batches import Batch
from torchtitan_cad.tools.simulation.costs import Transfer
from torchtitan_cad.tools.simulation.search import Search
from torchtitan_cad.tools.simulation.streams import Streams


def slowest_of_row(costs, lengths, cp, window):
    """Return seconds of the slowest of a row's ranks, forward and backward: chunk by chunk and document by document."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    size = int(ends[-1]) // (2 * cp)
    found = []
    for forward in (True, False):
        ranks = np.zeros(cp)
        for chunk in range(2 * cp):
            rank = min(chunk, 2 * cp - 1 - chunk)
            for start, end in zip(starts, ends, strict=True):
                cuts = np.clip([chunk * size, (chunk + 1) * size], start, end) - start
                before, until = costs.document_seconds(cuts, forward, window)
                ranks[rank] += until - before
        found.append(ranks.max())
    return found


def test_all_rows_at_once_take_what_each_takes():
    """Also of layers with a window."""
    divided = step(cp=2, model=KINDS)
    for kind in divided.costs.kinds:
        of_ranks = _of_ranks(divided.costs, divided.batch, kind, 2)
        found = of_ranks.max(axis=2).T.tolist()
        for row, seconds in zip(divided.batch.rows, found, strict=True):
            lengths = kind.cut(row)
            wanted = slowest_of_row(divided.costs, lengths, 2, kind.shape.window)
            assert seconds == pytest.approx(wanted)


def test_ranks_that_share_rows_take_what_they_have_of_all_rows():
    """One rank has the long documents of the first row, the other one those of the second: together both are even."""
    long = 2048
    short = [128] * 16
    outer = np.array([long, *short, *short, long])
    inner = np.array([*short, long, long, *short])
    both = packed(step(batch=Batch((outer, inner), 4 * long), ranks=2, cp=2))
    assert both.parts.imbalance == pytest.approx(0, abs=1e-3 * both.parts.attention)
    assert both.max_over_mean == pytest.approx(1, abs=1e-3)
    one = packed(step(batch=Batch((outer,), 4 * long), ranks=2, cp=2))
    assert one.max_over_mean > 1.5


@pytest.mark.parametrize("system", ["packed", "reorder", "packing_cp"])
@pytest.mark.parametrize(
    "machines",
    params([{"fsdp": True}, {"memory": 1.6e9}, {"memory": 1e6}], [{"memory": 1.6e9}]),
    ids=str,
)
def test_what_is_not_tried_would_not_be_chosen(system, machines):
    """And not all is tried where something fits."""
    lines = []
    search = Search(inputs(batches=2, **machines), progress=lines.append)
    candidates = search.candidates(system)
    fastest = search.fastest(system, candidates)
    tried = [line for line in lines if line.startswith(f"{system}: batch 1 ")]
    every = [search.run(system, candidate) for candidate in candidates]
    fitting = [trial for trial in every if trial.fits]
    none = search.none(every)
    assert fastest == min(fitting, key=lambda trial: trial.seconds, default=none)
    assert (len(tried) < len(candidates)) == bool(fitting)


def test_waits_are_those_for_the_slowest_sender():
    rng = np.random.default_rng(0)
    for _ in range(20):
        sends = rng.random((6, 6)) < 0.3
        np.fill_diagonal(sends, False)
        seconds, network, ready = rng.random((3, 6))
        streams = Streams(6)
        streams.network = network
        start = np.maximum(network, ready)
        wanted = ready.copy()
        for rank in range(6):
            if sends[rank].any() or sends[:, rank].any():
                others = np.flatnonzero(sends[:, rank])
                ends = start[others] + np.maximum(seconds[rank], seconds[others])
                wanted[rank] = max([start[rank] + seconds[rank], *ends])
        found = streams.send(ready, Transfer(seconds, sends, 0.0))
        assert found.tolist() == wanted.tolist()


def test_documents_longer_than_a_rank_are_dealt_in_time_that_grows_with_them():
    """Each is dealt to a few of all ranks, of which none is sorted anew."""
    ranks = 4096
    room = 1000
    docs = np.arange(ranks // 2)
    lengths = np.full(ranks // 2, 2 * room)
    begin = time.process_time()
    (layout,) = fill(docs, lengths, [np.full(ranks, room)], together=1)
    assert time.process_time() - begin < 2
    assert layout.tokens_per_rank.tolist() == [room] * ranks


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_thousands_of_gpus(ranks, capsys):
    begin = time.process_time()
    assert main(["simulate", "--model=llama-8b", f"--ranks={ranks}"]) == 0
    assert time.process_time() - begin < ranks / 10
    printed = capsys.readouterr().out
    assert "batches: 2 (default)" in printed
    assert "cad's with a standard error of" in printed
