# SPDX-License-Identifier: BSD-3-Clause
"""Rows distributed anew over ranks and microbatches."""

import numpy as np
import pytest

from torchtitan_cad.tools.simulation.row_orders import equal_work, row_orders


@pytest.mark.parametrize(
    ("ranks", "microbatches", "rows"),
    [(1, 1, 1), (4, 1, 1), (2, 3, 2), (8, 4, 1), (1, 4, 2)],
)
def test_every_row_once(ranks, microbatches, rows):
    work = np.random.default_rng(ranks).lognormal(
        sigma=2, size=ranks * microbatches * rows
    )
    for order in row_orders(work, ranks, microbatches):
        assert order.shape == (ranks, microbatches, rows)
        assert sorted(order.ravel()) == list(range(len(work)))


def test_what_is_equal():
    work = np.array([9.0, 1, 1, 9, 8, 2, 2, 8])
    everything, ranks_meet, ranks_do_not = (
        work[order].sum(axis=2) for order in row_orders(work, 2, 2)
    )
    # in each microbatch
    assert sorted(map(tuple, ranks_meet.T)) == [(3, 3), (17, 17)]
    for even in (everything, ranks_do_not):
        assert np.array_equal(even, np.full((2, 2), 10.0))


def test_swaps_mend_what_is_dealt_by_size():
    work = np.array([11.0, 9, 7, 7, 6, 6])  # 11, 7, 6 and 9, 7, 6 by size alone
    assert sorted(work[equal_work(work, np.arange(6), 2)].sum(axis=1)) == [23, 23]
