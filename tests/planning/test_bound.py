# SPDX-License-Identifier: BSD-3-Clause
"""The lower bounds: below every plan of every planner, below random plans, below the optimum of small cases."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.costs import models
from tests.lib.layouts import LLAMA, cases, shape_of, shapes
from tests.lib.plans import random_tasks
from tests.lib.reference import check_bounds
from tests.lib.sets import params
from torchtitan_cad.planning import (
    AttentionShape,
    Plan,
    PlannerConfig,
    TokenLayout,
)
from torchtitan_cad.planning.bound import lower_bounds


@given(case=cases, shape=shapes, seed=st.integers(0, 2**32 - 1), cost=models)
def test_below_random_plans(case, shape, seed, cost):
    """The limits are the loads that any cuts and servers lead to: of every rank by itself, and of the busiest.

    Under any cost model, too, whose tiles the cuts do not respect.
    """
    layout = case.small(4, 40).layout()
    tasks = random_tasks(np.random.default_rng(seed), layout)
    check_bounds(
        Plan.from_tasks(
            layout, LLAMA, PlannerConfig(min_shard=cost.granularity), tasks, cost
        )
    )
    plan = Plan.from_tasks(layout, shape, PlannerConfig(tile=1, min_shard=1), tasks)
    check_bounds(plan)
    bounds, stats = lower_bounds(layout, shape, plan.stats.loads), plan.stats
    assert (
        np.array(bounds)
        <= (stats.total_bytes, stats.max_rank_bytes, stats.bytes_out.max())
    ).all()


class Exhaustive:
    """All assignments of all (query, key) pairs of a few documents to ranks: every plan there is."""

    def __init__(self, lengths: tuple[int, ...], num_ranks: int) -> None:
        self.tokens = [
            (doc, p) for doc, length in enumerate(lengths) for p in range(length)
        ]
        index = {token: i for i, token in enumerate(self.tokens)}
        self.pairs = [
            (index[doc, q], index[doc, k])
            for doc, q in self.tokens
            for k in range(q + 1)
        ]
        self.num_ranks = num_ranks
        server = np.array(
            list(itertools.product(range(num_ranks), repeat=len(self.pairs))),
            dtype=np.int8,
        )
        self.loads = np.stack(
            [(server == s).sum(axis=1) for s in range(num_ranks)], axis=1
        )
        # [plans, tokens, ranks] whether the rank uses the token as a query, as a key.
        self.queries = np.zeros((len(server), len(self.tokens), num_ranks), dtype=bool)
        self.keys = np.zeros_like(self.queries)
        for i, (q, k) in enumerate(self.pairs):
            for s in range(num_ranks):
                self.queries[:, q, s] |= server[:, i] == s
                self.keys[:, k, s] |= server[:, i] == s

    def traffic(
        self, home: np.ndarray, shape: AttentionShape
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes in and out [plans, ranks] of every plan when token i lives on rank home[i]."""
        volume = self.queries * shape.query_bytes + self.keys * shape.kv_bytes
        volume[:, np.arange(len(home)), home] = 0
        out = np.stack(
            [volume[:, home == r].sum(axis=(1, 2)) for r in range(self.num_ranks)],
            axis=1,
        )
        return volume.sum(axis=1), out

    def layout(self, home: np.ndarray, rng: np.random.Generator) -> TokenLayout:
        ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_ranks)]
        for i in rng.permutation(len(home)).tolist():
            ranks[int(home[i])].append((*self.tokens[i], 1))
        return TokenLayout.from_segments(ranks)


@pytest.mark.parametrize("heads", params([(32, 8), (8, 8), (64, 4)], [(32, 8)]))
@pytest.mark.parametrize(
    ("lengths", "num_ranks"),
    [
        ((4,), 2),
        ((3, 2), 3),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in [
                ((5,), 2),
                ((4,), 3),
                ((3,), 4),
                ((2, 2, 2), 3),
                ((3, 3), 2),
                ((1, 4), 2),
            ]
        ),
    ],
)
def test_below_the_optimum_of_small_cases(lengths, num_ranks, heads):
    """The least bytes of all plans within every limit, for all homes of the tokens, or 25 of them at random.

    Where the bounds are positive they come within a few percent of the optimum for some homes and limit.
    """
    every, shape, rng = (
        Exhaustive(lengths, num_ranks),
        shape_of(heads, 64),
        np.random.default_rng(0),
    )
    homes = np.array(
        list(itertools.product(range(num_ranks), repeat=len(every.tokens)))
    )
    closest = np.full(3, np.inf)
    for home in rng.permutation(homes)[:25]:
        layout = every.layout(home, rng)
        bytes_in, bytes_out = every.traffic(home, shape)
        number = len(every.pairs)
        limits = [
            np.full(num_ranks, c) for c in range(-(-number // num_ranks), number + 1)
        ]
        limits += list(rng.integers(0, number + 1, size=(5, num_ranks)))
        for limit in limits:
            possible = (every.loads <= limit).all(axis=1)
            if not possible.any():
                continue
            into, out = bytes_in[possible], bytes_out[possible]
            each = into.sum(axis=1), np.maximum(into, out).max(axis=1), out.max(axis=1)
            best = np.array([of_plans.min() for of_plans in each])
            bounds = np.array(lower_bounds(layout, shape, limit))
            assert (bounds <= best).all(), (layout.segments(), limit, bounds, best)
            closest = np.minimum(
                closest, np.where(bounds > 0, best / np.maximum(bounds, 1), np.inf)
            )
    assert (closest < 1.15).all()


def test_one_document_on_one_rank():
    """A helper must compute F foreign pairs of a document it holds nothing of: 2 sqrt(c_q c_kv F) bytes."""
    layout = TokenLayout.from_segments([[(0, 0, 1000)], []])
    pairs = 1000 * 1001 // 2
    foreign = pairs - 300_000
    ideal = 2 * np.sqrt(LLAMA.query_bytes * LLAMA.kv_bytes * foreign)
    bounds = lower_bounds(layout, LLAMA, 300_000)
    assert bounds == pytest.approx((ideal, ideal, ideal), rel=1e-6)
    assert lower_bounds(layout, LLAMA, pairs) == (0, 0, 0)
    assert lower_bounds(TokenLayout.from_segments([[], []]), LLAMA, 15) == (0, 0, 0)


def test_a_query_has_no_more_keys_than_its_document():
    """Where the ideal rectangle is wider than the document, its rows are as wide as the document."""
    layout = TokenLayout.from_segments([[(i, 0, 10) for i in range(1000)], []])
    pairs, limit = 55_000, 30_000
    queries = (pairs - limit) // 10  # against the same 10 keys
    ideal = queries * LLAMA.query_bytes + 10 * LLAMA.kv_bytes
    assert lower_bounds(layout, LLAMA, limit).total == int(ideal * (1 - 1e-9))


def test_homes_of_one_document_share_what_they_must_send():
    """One document over two ranks, six without tokens: the two send all that the six import, one of them half of it."""
    half = 16384
    layout = TokenLayout.from_segments(
        [[(0, 0, half)], [(0, half, half)], *[[] for _ in range(6)]]
    )
    pairs = half * (2 * half + 1)
    bounds = lower_bounds(layout, LLAMA, -(-pairs // 8))
    ideal = 6 * 2 * np.sqrt(LLAMA.query_bytes * LLAMA.kv_bytes * pairs / 8)
    assert bounds.rank == pytest.approx(ideal / 2, rel=0.01)
    assert bounds.forced < bounds.rank
