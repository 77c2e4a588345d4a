# SPDX-License-Identifier: BSD-3-Clause
"""Steps without CAD, with rows reordered, and with CAD; and rows dealt anew over ranks and microbatches."""

from dataclasses import replace

import numpy as np
import pytest

from torchtitan_cad.planning import AttentionShape, LayerTimes, PlannerConfig
from torchtitan_cad.planning.model.batch import BatchShape
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.outlook import Outlook, speedups
from torchtitan_cad.planning.pipeline.one_f_one_b import best_order, best_profile, in_stages
from torchtitan_cad.planning.placement.reorder import equal_work, row_orders

TIMES = LayerTimes(unit=1e-6, linear=1e-7, bytes_per_second=1e12, between_hosts=1e12, exchange=0.0, overlaps=False)
SHAPE = BatchShape(rows=2, seq_len=1024, rows_per_microbatch=1)
LONG, SHORT = np.array([0]), np.arange(0, 1024, 128)
"""Documents of a row."""


def outlook(cp: int = 1, stages: int = 1, nano_batches: int = 1, times: LayerTimes | None = TIMES) -> Outlook:
    kinds, config = [AttentionKind("full", 3, AttentionShape(4, 2, 32, 4))], PlannerConfig(tolerance=0.02)
    return Outlook(kinds, config, None, nano_batches, cp, stages, times, times is not None, 3)


def rows(*each: np.ndarray) -> np.ndarray:
    """Where the documents of a rank's rows begin."""
    return np.concatenate([number * SHAPE.seq_len + row for number, row in enumerate(each)])


@pytest.mark.parametrize("nano_batches", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
def test_rows_that_only_need_another_order(cp: int, nano_batches: int) -> None:
    starts, ahead = [rows(LONG, SHORT), rows(SHORT, LONG)], outlook(cp, nano_batches=nano_batches)
    plans = ahead.plan(starts, SHAPE, place=True)
    assert [[len(nanos) for nanos in kind] for kind in plans] == [[nano_batches] * 2]
    figures, count = ahead.without(starts, SHAPE, plans), 2 * nano_batches
    # A long row is 8 x 9 / 2 tiles, of which a short one has 8.
    assert figures["imbalance_before"] / count == pytest.approx(36 / 22)
    assert figures["imbalance_reordered"] / count == pytest.approx(1.0)
    assert figures["ranked_before"] / count == pytest.approx(np.repeat([36 / 22, 8 / 22], cp))
    assert figures["loads_before"] == pytest.approx([44 / cp] * 2 * cp)
    linear = 1e-7 * 1024 / cp
    assert figures["seconds_before"] == pytest.approx(3 * 2 * (linear + 36e-6 / cp))
    assert figures["seconds_reordered"] == pytest.approx(3 * (2 * linear + (36e-6 + 8e-6) / cp))
    if (cp, nano_batches) == (1, 1):
        assert figures["seconds_after"] == pytest.approx(figures["seconds_reordered"], rel=0.1)


def test_rows_of_which_no_order_is_even() -> None:
    starts, shape = [LONG, SHORT], BatchShape(1, 1024, 1)
    plans = outlook().plan(starts, shape, place=False)
    figures = outlook().without(starts, shape, plans)
    assert figures["imbalance_reordered"] == figures["imbalance_before"] == pytest.approx(36 / 22)
    assert figures["seconds_after"] < figures["seconds_before"]
    assert outlook(times=None).without(starts, shape, plans).keys().isdisjoint({"seconds_before", "seconds_after"})


def test_kinds_weigh_by_their_layers() -> None:
    """A long row has 36 tiles; in blocks of 512, 20; in windows of 129, 15. A short one has 8 in all of them."""
    shape = AttentionShape(4, 2, 32, 4)
    kinds = [
        AttentionKind("full", 1, shape),
        AttentionKind("chunked", 2, shape, 512),
        AttentionKind("window", 3, replace(shape, window=129)),
    ]
    ahead, starts = replace(outlook(), kinds=kinds), [LONG, SHORT]
    plans = ahead.plan(starts, BatchShape(1, 1024, 1), place=False)
    figures = ahead.without(starts, BatchShape(1, 1024, 1), plans)
    assert len(plans) == 3
    assert figures["loads_before"] == pytest.approx([(36 + 2 * 20 + 3 * 15) / 6, 8])
    assert not plans[2][0][0].moves_rows
    assert figures["seconds_after"] <= figures["seconds_before"]


def test_speedups() -> None:
    figures = {"seconds_before": 4.0, "seconds_reordered": 4.0, "seconds_after": 2.0}
    assert speedups(figures, 8.0) == {"speedup_reordered": 1.0, "speedup_after": pytest.approx(8 / 6)}
    assert speedups(figures, 3.0)["speedup_after"] == pytest.approx(2.0)  # no more than the layers' own
    assert speedups({}, 1.0) == {}


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (4, 9)])
def test_a_pipeline_likes_its_heavy_microbatches_together(stages: int, microbatches: int) -> None:
    assert in_stages(np.ones(microbatches), stages, 2.0) == pytest.approx(3 * (microbatches + stages - 1))
    documents = np.random.default_rng(stages).lognormal(sigma=2, size=4 * microbatches)
    work = documents.reshape(microbatches, -1).sum(axis=1)
    order, profile = best_order(work, stages, 0.3), best_profile(documents, microbatches, stages, 0.3)
    assert sorted(order) == list(range(microbatches))
    as_is, ordered, divided = (in_stages(each, stages, 0.3) for each in (work, work[order], profile))
    assert 0.99 * divided <= ordered <= as_is


@pytest.mark.parametrize(("ranks", "microbatches", "rows"), [(1, 1, 1), (4, 1, 1), (2, 3, 2), (8, 4, 1), (1, 4, 2)])
def test_every_row_once(ranks: int, microbatches: int, rows: int) -> None:
    work = np.random.default_rng(ranks).lognormal(sigma=2, size=ranks * microbatches * rows)
    for order in row_orders(work, ranks, microbatches):
        assert order.shape == (ranks, microbatches, rows)
        assert sorted(order.ravel()) == list(range(len(work)))


def test_what_is_equal() -> None:
    work = np.array([9.0, 1, 1, 9, 8, 2, 2, 8])
    everything, ranks_meet, ranks_do_not = (work[order].sum(axis=2) for order in row_orders(work, 2, 2))
    assert np.array_equal(everything, np.full((2, 2), 10.0))
    assert sorted(map(tuple, ranks_meet.T)) == [(3, 3), (17, 17)]  # in each microbatch
    assert ranks_do_not.sum(axis=1).tolist() == [20, 20]
    assert np.array_equal(ranks_do_not, np.full((2, 2), 10.0))


def test_swaps_mend_what_is_dealt_by_size() -> None:
    work = np.array([11.0, 9, 7, 7, 6, 6])  # 11, 7, 6 and 9, 7, 6 by size alone
    assert sorted(work[equal_work(work, np.arange(6), 2)].sum(axis=1)) == [23, 23]
