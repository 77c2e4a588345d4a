# SPDX-License-Identifier: BSD-3-Clause
"""Pairs and model FLOPs of attention, against counting one by one."""

import numpy as np
import pytest

from torchtitan_cad.planning import AttentionShape, TokenLayout
from torchtitan_cad.planning.intervals import causal_pairs
from torchtitan_cad.planning.model.kind import AttentionKind
from torchtitan_cad.planning.model.work import attention_flops, layout_pairs


def counted(begin, end, window):
    return sum(min(query + 1, window or end) for query in range(begin, end))


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_are_those_below_the_diagonal(window):
    """Queries that have attended do not count again."""
    queries = np.arange(30)
    wanted = [counted(0, count, window) for count in queries]
    assert causal_pairs(queries, window).tolist() == wanted
    ranks = [[(0, 0, 9)], [(1, 0, 12)], [(0, 9, 3)]]
    later = TokenLayout.from_segments(ranks, [False, False, True])
    assert layout_pairs(later, window) == counted(9, 12, window)


def test_a_pair_has_two_products_forward_and_four_backward():
    shape = AttentionShape(4, 2, 16, 2, value_dim=8)
    kinds = [
        AttentionKind("full", 3, shape),
        AttentionKind("chunked", 2, shape, block=64),
    ]
    of_pair = 3 * 4 * (2 * 16 + 2 * 8)
    assert attention_flops(kinds, [10.0, 1.0]) == of_pair * (3 * 10 + 2)
