# SPDX-License-Identifier: BSD-3-Clause
"""The lower bound: below every plan of every planner, below random plans, below the optimum of small cases."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.layouts import LLAMA, cases, shapes
from tests.lib.plans import random_tasks
from tests.lib.reference import check_bound
from torchtitan_cad.planning import Plan, PlannerConfig, TokenLayout
from torchtitan_cad.planning.bound import lower_bound


@given(
    case=cases, shape=shapes, seed=st.integers(0, 2**32 - 1), tile=st.integers(1, 24)
)
def test_below_random_plans(case, shape, seed, tile):
    """The limits are the loads that any cuts and servers lead to: of every rank by itself, and of the busiest.

    Of tiles, too, that the cuts do not respect.
    """
    layout = case.small(4, 40).layout()
    tasks = random_tasks(np.random.default_rng(seed), layout)
    config = PlannerConfig(min_shard=tile, tile=tile)
    check_bound(Plan.from_tasks(layout, LLAMA, config, tasks))
    plan = Plan.from_tasks(layout, shape, PlannerConfig(tile=1, min_shard=1), tasks)
    check_bound(plan)
    stats = plan.stats
    assert lower_bound(layout, shape, stats.loads) <= stats.total_bytes


@pytest.mark.parametrize(("length", "num_ranks"), [(4, 2), (3, 3)])
def test_below_the_optimum_of_small_cases(length, num_ranks):
    """The least bytes of all plans within every limit, for all homes of the tokens.

    A plan assigns every (query, key) pair of the document to a rank.
    """
    ranks = np.arange(num_ranks)
    query, key = np.tril_indices(length)
    plans = list(itertools.product(ranks, repeat=len(query)))
    is_served = np.array(plans)[:, :, None] == ranks
    loads = is_served.sum(axis=1)
    # [plans, tokens, ranks] bytes of the token as a query and as a key, where the rank uses it
    volume = np.zeros((len(plans), length, num_ranks), dtype=np.int64)
    for token in range(length):
        volume[:, token] += is_served[:, query == token].any(axis=1) * LLAMA.query_bytes
        volume[:, token] += is_served[:, key == token].any(axis=1) * LLAMA.kv_bytes
    for home in itertools.product(ranks, repeat=length):
        segments = [[] for _ in ranks]
        for token, rank in enumerate(home):
            segments[rank].append((0, token, 1))
        layout = TokenLayout.from_segments(segments)
        is_foreign = np.array(home)[:, None] != ranks
        num_bytes = (volume * is_foreign).sum(axis=(1, 2))
        for limit in range(1, loads.max() + 1):
            fits = (loads <= limit).all(axis=1)
            if fits.any():
                assert lower_bound(layout, LLAMA, limit) <= num_bytes[fits].min()


def test_one_document_on_one_rank():
    """A helper must compute F foreign pairs of a document it holds nothing of: 2 sqrt(c_q c_kv F) bytes."""
    layout = TokenLayout.from_segments([[(0, 0, 1000)], []])
    pairs = 1000 * 1001 // 2
    foreign = pairs - 300_000
    ideal = 2 * np.sqrt(LLAMA.query_bytes * LLAMA.kv_bytes * foreign)
    assert lower_bound(layout, LLAMA, 300_000) == pytest.approx(ideal, rel=1e-6)
    assert lower_bound(layout, LLAMA, pairs) == 0
