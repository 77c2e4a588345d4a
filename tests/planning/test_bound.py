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
    config = PlannerConfig(min_shard=cost.granularity)
    check_bounds(Plan.from_tasks(layout, LLAMA, config, tasks, cost))
    plan = Plan.from_tasks(layout, shape, PlannerConfig(tile=1, min_shard=1), tasks)
    check_bounds(plan)
    stats = plan.stats
    bounds = lower_bounds(layout, shape, stats.loads)
    assert bounds.total <= stats.total_bytes
    assert bounds.rank <= stats.max_rank_bytes
    assert bounds.forced <= stats.bytes_out.max()


class Exhaustive:
    """All assignments of all (query, key) pairs of a few documents to ranks: every plan there is."""

    def __init__(self, lengths: tuple[int, ...], num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.tokens: list[tuple[int, int]] = []
        pairs: list[tuple[int, int]] = []
        for doc, length in enumerate(lengths):
            first = len(self.tokens)
            self.tokens += [(doc, position) for position in range(length)]
            pairs += [
                (first + q, first + k) for q in range(length) for k in range(q + 1)
            ]
        self.num_pairs = len(pairs)
        assignments = itertools.product(range(num_ranks), repeat=len(pairs))
        server_of_pair = np.array(list(assignments), dtype=np.int8)
        ranks = np.arange(num_ranks)
        is_served = server_of_pair[:, :, None] == ranks
        self.loads = is_served.sum(axis=1)
        # [plans, tokens, ranks] whether the rank uses the token as a query, as a key.
        size = (len(server_of_pair), len(self.tokens), num_ranks)
        self.queries = np.zeros(size, dtype=bool)
        self.keys = np.zeros(size, dtype=bool)
        for pair, (query, key) in enumerate(pairs):
            self.queries[:, query] |= is_served[:, pair]
            self.keys[:, key] |= is_served[:, pair]

    def traffic(
        self, home: np.ndarray, shape: AttentionShape
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bytes in and out [plans, ranks] of every plan when token i lives on rank home[i]."""
        volume = self.queries * shape.query_bytes + self.keys * shape.kv_bytes
        volume[:, np.arange(len(home)), home] = 0
        of_tokens = volume.sum(axis=2)
        is_home = home[:, None] == np.arange(self.num_ranks)
        return volume.sum(axis=1), of_tokens @ is_home

    def layout(self, home: np.ndarray, rng: np.random.Generator) -> TokenLayout:
        ranks: list[list[tuple[int, int, int]]] = [[] for _ in range(self.num_ranks)]
        for i in rng.permutation(len(home)).tolist():
            ranks[int(home[i])].append((*self.tokens[i], 1))
        return TokenLayout.from_segments(ranks)


CASES = [((4,), 2), ((3, 2), 3), ((5,), 2), ((4,), 3), ((3,), 4), ((2, 2, 2), 3)]
CASES += [((3, 3), 2), ((1, 4), 2)]


@pytest.mark.parametrize("heads", params([(32, 8), (8, 8), (64, 4)], [(32, 8)]))
@pytest.mark.parametrize("case", params(CASES, CASES[:2]), ids=str)
def test_below_the_optimum_of_small_cases(case, heads):
    """The least bytes of all plans within every limit, for all homes of the tokens, or 25 of them at random.

    Where the bounds are positive they come within a few percent of the optimum for some homes and limit.
    """
    lengths, num_ranks = case
    every = Exhaustive(lengths, num_ranks)
    shape = shape_of(heads, 64)
    rng = np.random.default_rng(0)
    homes = itertools.product(range(num_ranks), repeat=len(every.tokens))
    closest = np.full(3, np.inf)
    even = -(-every.num_pairs // num_ranks)
    for home in rng.permutation(np.array(list(homes)))[:25]:
        layout = every.layout(home, rng)
        bytes_in, bytes_out = every.traffic(home, shape)
        limits = [[most] * num_ranks for most in range(even, every.num_pairs + 1)]
        limits += rng.integers(0, every.num_pairs + 1, size=(5, num_ranks)).tolist()
        for limit in limits:
            possible = (every.loads <= limit).all(axis=1)
            if not possible.any():
                continue
            into = bytes_in[possible]
            out = bytes_out[possible]
            least_total = into.sum(axis=1).min()
            least_of_rank = np.maximum(into, out).max(axis=1).min()
            best = np.array([least_total, least_of_rank, out.max(axis=1).min()])
            bounds = np.array(lower_bounds(layout, shape, np.array(limit)))
            assert (bounds <= best).all(), (layout.segments(), limit, bounds, best)
            ratio = np.where(bounds > 0, best / np.maximum(bounds, 1), np.inf)
            closest = np.minimum(closest, ratio)
    assert (closest < 1.15).all()


def test_one_document_on_one_rank():
    """A helper must compute F foreign pairs of a document it holds nothing of: 2 sqrt(c_q c_kv F) bytes."""
    layout = TokenLayout.from_segments([[(0, 0, 1000)], []])
    pairs = 1000 * 1001 // 2
    foreign = pairs - 300_000
    ideal = 2 * np.sqrt(LLAMA.query_bytes * LLAMA.kv_bytes * foreign)
    assert lower_bounds(layout, LLAMA, 300_000) == pytest.approx((ideal,) * 3, rel=1e-6)
    assert lower_bounds(layout, LLAMA, pairs) == (0, 0, 0)


def test_a_query_has_no_more_keys_than_its_document():
    """Where the ideal rectangle is wider than the document, its rows are as wide as the document."""
    layout = TokenLayout.from_segments([[(i, 0, 10) for i in range(1000)], []])
    pairs = 55_000
    limit = 30_000
    queries = (pairs - limit) // 10  # against the same 10 keys
    ideal = queries * LLAMA.query_bytes + 10 * LLAMA.kv_bytes
    assert lower_bounds(layout, LLAMA, limit).total == int(ideal * (1 - 1e-9))


def test_homes_of_one_document_share_what_they_must_send():
    """One document over two ranks, six without tokens: the two send all that the six import, one of them half of it."""
    half = 16384
    layout = TokenLayout.from_segments([[(0, 0, half)], [(0, half, half)], *[[]] * 6])
    pairs = half * (2 * half + 1)
    bounds = lower_bounds(layout, LLAMA, -(-pairs // 8))
    ideal = 6 * 2 * np.sqrt(LLAMA.query_bytes * LLAMA.kv_bytes * pairs / 8)
    assert bounds.rank == pytest.approx(ideal / 2, rel=0.01)
    assert bounds.forced < bounds.rank
